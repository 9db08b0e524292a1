"""Preloaded library that hides one function of other libraries from dlsym()."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

#: Source of a dlsym() that overrides libc's and finds every function except the one in HIDDEN.
_SOURCE = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdlib.h>
#include <string.h>

void *dlsym(void *library, const char *name)
{
    static void *(*real)(void *, const char *);
    static const char *const versions[] = {"GLIBC_2.34", "GLIBC_2.17", "GLIBC_2.2.5"};
    for (int i = 0; !real && i < 3; i++)
        real = (void *(*)(void *, const char *))dlvsym(RTLD_NEXT, "dlsym", versions[i]);
    const char *hidden = getenv("HIDDEN");
    /* and dlerror() says so */
    return real(library, hidden && !strcmp(name, hidden) ? "nowhere to be found" : name);
}
"""


def made(folder: Path) -> Path:
    """Compile the library into ``folder`` and return its path; skip the test without ``cc``."""
    if shutil.which("cc") is None:
        pytest.skip("needs a C compiler, cc, to hide a function")
    (folder / "hides.c").write_text(_SOURCE)
    subprocess.run(
        ["cc", "-shared", "-fPIC", "-o", folder / "hides.so", folder / "hides.c", "-ldl"],
        check=True,
        timeout=60,
    )
    return folder / "hides.so"


def run(library: Path, hidden: str, script: str, **environment: str) -> list[str]:
    """Run the script with the ``hidden`` function missing; return the lines that it prints."""
    env = {**os.environ, **environment, "LD_PRELOAD": str(library), "HIDDEN": hidden}
    done = subprocess.run(
        [sys.executable, "-c", script],
        env=env,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout.splitlines()
