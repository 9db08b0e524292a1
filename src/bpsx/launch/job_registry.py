"""A record of each job that ``bpsx-run --local`` runs for this user, so that ``bpsx-run top`` and
``trace`` find it.

The record is a file in the launcher's memory, mode 0600: it may hold the job's secret. It goes with
the launcher, even one that was killed. Others of this user read it through ``/proc``.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

_NAME = "bpsx-job"
_LINK = f"/memfd:{_NAME} (deleted)"  # how the kernel shows such a file's descriptor


@dataclass(frozen=True)
class Record:
    """A running job: the launcher's process, the scheduler's address, how to be let in."""

    pid: int
    address: str
    port: int
    secret: str
    command: list[str]
    started: float  # seconds since the epoch


def write(address: str, port: int, secret: str, command: Sequence[str]) -> int:
    """Record the job that this process runs; returns the descriptor, which :func:`remove` closes.

    Raises :class:`OSError`.
    """
    record = Record(os.getpid(), address, port, secret, list(command), time.time())
    descriptor = os.memfd_create(_NAME)
    os.fchmod(descriptor, 0o600)
    with open(descriptor, "w", closefd=False) as file:
        json.dump(asdict(record), file)
    return descriptor


def remove(descriptor: int) -> None:
    """Take a record away."""
    os.close(descriptor)


def _records(process: Path) -> Iterator[Record]:
    """The records that a process holds; none if it may not be looked at, or has ended meanwhile."""
    with contextlib.suppress(OSError):
        if process.stat().st_uid != os.getuid():
            return
        for descriptor in (process / "fd").iterdir():
            with contextlib.suppress(OSError, ValueError, TypeError):
                if os.readlink(descriptor) == _LINK:
                    record = Record(**json.loads(descriptor.read_text()))
                    # and not a copy in a child between fork and exec
                    if record.pid == int(process.name):
                        yield record


def running() -> list[Record]:
    """This user's local jobs, the oldest first."""
    found = [record for process in Path("/proc").glob("[0-9]*") for record in _records(process)]
    return sorted(found, key=lambda record: record.started)
