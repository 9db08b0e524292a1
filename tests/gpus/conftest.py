"""Compiles the pretend libraries once."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from gpus.pretend import build


@pytest.fixture(scope="session")
def pretend(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the pretend libcuda.so.1 and libnccl.so.2."""
    if not shutil.which("cc"):
        pytest.skip("no C compiler")
    return build(tmp_path_factory.mktemp("pretend"))
