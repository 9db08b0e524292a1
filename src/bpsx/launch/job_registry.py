"""Records of this user's jobs on this machine, for ``bpsx-run top`` and ``trace`` to find.

A record is a memory file (memfd) of the launcher with mode 0600, as it may hold the job's secret.
It disappears with the launcher, even with one that was killed. Other processes of this user read it
through ``/proc``.
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
_LINK = f"/memfd:{_NAME} (deleted)"  # the kernel's link for the descriptor of such a file


@dataclass(frozen=True)
class JobRecord:
    """A running job: the launcher's process, the scheduler's address, the job secret."""

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
    record = JobRecord(os.getpid(), address, port, secret, list(command), time.time())
    descriptor = os.memfd_create(_NAME)
    os.fchmod(descriptor, 0o600)
    with open(descriptor, "w", closefd=False) as file:
        json.dump(asdict(record), file)
    return descriptor


def remove(descriptor: int) -> None:
    """Remove a record."""
    os.close(descriptor)


def _records(process: Path) -> Iterator[JobRecord]:
    """The records that a process holds; none if it may not be inspected or has ended meanwhile."""
    with contextlib.suppress(OSError):
        if process.stat().st_uid != os.getuid():
            return
        for descriptor in (process / "fd").iterdir():
            with contextlib.suppress(OSError, ValueError, TypeError):
                if os.readlink(descriptor) == _LINK:
                    record = JobRecord(**json.loads(descriptor.read_text()))
                    # Skip copies of the descriptor in a child between fork and exec.
                    if record.pid == int(process.name):
                        yield record


def running() -> list[JobRecord]:
    """The jobs of this user's running ``bpsx-run``, oldest first."""
    found = [record for process in Path("/proc").glob("[0-9]*") for record in _records(process)]
    return sorted(found, key=lambda record: record.started)
