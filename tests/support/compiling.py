"""Compile a Cython module for one test, as meson does: Cython, then the C compiler."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import os
import subprocess
import sys
import sysconfig
from pathlib import Path
from types import ModuleType

from support.places import ROOT


def build(source: Path, *flags: str) -> Path:
    """Compile ``source`` (.pyx) where it lies; return the extension module's path.

    ``flags``: for the C compiler. The source may cimport bpsx's .pxd files.
    """
    subprocess.run(
        [sys.executable, "-m", "cython", "-3", "-I", str(ROOT / "src"), str(source)], check=True
    )
    library = source.with_suffix(sysconfig.get_config_var("EXT_SUFFIX"))
    compiler = os.environ.get("CC", "cc").split()
    options = ["-O1", "-w", "-shared", "-fPIC", "-pthread", f"-I{sysconfig.get_path('include')}"]
    subprocess.run(
        [*compiler, *options, *flags, str(source.with_suffix(".c")), "-o", str(library)], check=True
    )
    return library


def load(name: str, library: Path) -> ModuleType:
    """Import an extension module under ``name``, whose last part is that of its source."""
    loader = importlib.machinery.ExtensionFileLoader(name, str(library))
    spec = importlib.util.spec_from_loader(name, loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module
