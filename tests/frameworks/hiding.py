"""Preloaded library that hides one function of other libraries from dlsym()."""

from __future__ import annotations

import json
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


#: Imports a package, and forks a process for each script. dlsym() looks at HIDDEN when called.
_FORKS = """
import json, os, sys
{imports}
for hidden, script in json.loads({scripts!r}):
    sys.stdout.flush()
    if (pid := os.fork()) == 0:
        os.environ["HIDDEN"] = hidden
        exec(script, {{"__name__": "__main__"}})
        break
    if os.waitpid(pid, 0)[1]:
        sys.exit(f"{{hidden}}: the script has failed")
    print("end of script")
"""


def run(library: Path, hidden: str, script: str, **environment: str) -> list[str]:
    """Run the script with the ``hidden`` function missing; return the lines that it prints."""
    env = {**os.environ, **environment, "LD_PRELOAD": str(library), "HIDDEN": hidden}
    return _lines(script, env)


def run_all(
    library: Path, imports: str, scripts: list[tuple[str, str]], **environment: str
) -> list[list[str]]:
    """Do the same for several pairs of a function and a script; return the lines of each.

    All are forks of one process, which ``imports`` something before. The end of a script is not the
    end of Python.
    """
    env = {**os.environ, **environment, "LD_PRELOAD": str(library), "HIDDEN": ""}
    source = _FORKS.format(imports=imports, scripts=json.dumps(scripts))
    lines, found = _lines(source, env), []
    while lines:
        end = lines.index("end of script")
        found.append(lines[:end])
        del lines[: end + 1]
    return found


def _lines(script: str, env: dict[str, str]) -> list[str]:
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
