"""Counts what the processes of a job do: system calls, bytes on sockets, bytes copied."""

from __future__ import annotations

import os
import struct
import subprocess
from pathlib import Path
from typing import NamedTuple

_SOURCE = Path(__file__).with_suffix(".c")


class Counts(NamedTuple):
    """Of one process, since it began.

    ``copied``: bytes of copies of 4 KiB and more that the C library makes. Those of 1 MiB and more
    may be bpsx's own.
    """

    sent: int
    send_calls: int
    received: int
    receive_calls: int
    waits: int
    events: int
    copied: int

    def since(self, before: Counts) -> Counts:
        """Return these numbers less those of ``before``."""
        return Counts(*(now - then for now, then in zip(self, before, strict=True)))


def counting(folder: Path) -> dict[str, str]:
    """Compile what counts; return the variables with which processes count into ``folder``."""
    library = folder / "counting.so"
    compiler = os.environ.get("CC", "cc").split()
    flags = ["-O2", "-Wall", "-Werror", "-fno-builtin", "-shared", "-fPIC", "-ldl"]
    subprocess.run([*compiler, str(_SOURCE), "-o", str(library), *flags], check=True)
    counts = folder / "counts"
    counts.mkdir()
    paths = [str(_SOURCE.parent.parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {
        "LD_PRELOAD": str(library),
        "COUNTS": str(counts),
        "PYTHONPATH": os.pathsep.join(paths),  # for counted()
    }


def counted(pid: int) -> Counts:
    """Return what a process has counted so far. Called in a process of the same job."""
    data = (Path(os.environ["COUNTS"]) / str(pid)).read_bytes()
    return Counts(*struct.unpack(f"{len(Counts._fields)}Q", data))
