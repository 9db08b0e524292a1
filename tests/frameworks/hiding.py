"""A library to be loaded before others, by which a function of theirs seems not to be there."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

#: In front of libc's: finds everything but the function that is named in HIDDEN.
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
    """The library, compiled into ``folder``; skips the test where there is no C compiler."""
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
    """The lines that the script prints where that function is hidden."""
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
