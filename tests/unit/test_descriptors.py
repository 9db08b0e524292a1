"""Threads with file descriptors of their own."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from pathlib import Path

import pytest

from bpsx.system.descriptors import can_have_own, with_own

pytestmark = pytest.mark.skipif(not can_have_own(), reason="Linux 5.9 or a sandbox lacks it")


@pytest.fixture()
def none_left() -> Iterator[None]:
    """No file can be opened any more."""
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    held = os.open(os.devnull, os.O_RDONLY)
    resource.setrlimit(resource.RLIMIT_NOFILE, (held, limit[1]))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, limit)
    os.close(held)


def test_files_can_be_opened_where_the_process_cannot(none_left: None) -> None:
    with pytest.raises(OSError, match="Too many open files"):
        os.pipe()
    assert with_own(lambda: Path(__file__).read_bytes())


def test_the_processs_own_files_stay_open(tmp_path: Path) -> None:
    with open(tmp_path / "file", "wb") as file:
        with pytest.raises(OSError, match="Bad file descriptor"):
            with_own(lambda: os.fstat(file.fileno()))
        file.write(b"still open")
    assert (tmp_path / "file").read_bytes() == b"still open"
