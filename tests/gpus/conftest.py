"""Compiles the pretend libraries once, or takes those of the environment variable
BPSX_TEST_PRETEND: an emulated processor is slow at compiling.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from gpus.pretend import build


@pytest.fixture(scope="session")
def pretend(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the pretend libcuda.so.1 and libnccl.so.2."""
    if built := os.environ.get("BPSX_TEST_PRETEND"):
        return Path(built)
    if not shutil.which("cc"):
        pytest.skip("no C compiler")
    return build(tmp_path_factory.mktemp("pretend"))
