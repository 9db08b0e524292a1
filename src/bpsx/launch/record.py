"""A record of each job that ``bpsx-run --local`` runs for this user, so that ``bpsx-run top`` and ``trace`` find it.

One file per job in the user's private runtime folder, mode 0600: it may hold the job's secret.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from bpsx.config import runtime_dir


@dataclass(frozen=True)
class Record:
    """A running job: the launcher's process, the scheduler's address, how to be let in."""

    pid: int
    born: int               # of the launcher, in the kernel's ticks: a pid alone may be somebody else's by now
    address: str
    port: int
    secret: str
    command: list[str]
    started: float          # seconds since the epoch


def _born(pid: int) -> int:
    """When a process was started, in ticks since boot; 0 if there is none."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[19])
    except (OSError, IndexError, ValueError):
        return 0


def folder() -> Path:
    """Where the records are; made if need be. Raises :class:`~bpsx.errors.ConfigError` if it cannot be trusted."""
    found = runtime_dir() / "jobs"
    found.mkdir(mode=0o700, exist_ok=True)
    return found


def write(address: str, port: int, secret: str, command: Sequence[str]) -> Path:
    """Record the job that this process runs; returns the file, which :func:`remove` takes away.

    Raises :class:`OSError` or :class:`~bpsx.errors.ConfigError`.
    """
    record = Record(os.getpid(), _born(os.getpid()), address, port, secret, list(command), time.time())
    path = folder() / f"{record.pid}.json"
    draft = path.with_suffix(".new")
    draft.unlink(missing_ok=True)       # of a launcher with our number that was killed
    with open(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600), "w") as file:
        json.dump(asdict(record), file)
    os.replace(draft, path)
    return path


def remove(path: Path) -> None:
    """Take a record away. Does not raise."""
    with contextlib.suppress(OSError):
        path.unlink()


def running() -> list[Record]:
    """This user's local jobs, the oldest first. Records of launchers that are gone are removed.

    Raises :class:`~bpsx.errors.ConfigError` if the runtime folder cannot be trusted.
    """
    found = []
    for path in folder().glob("*.json"):
        try:
            record = Record(**json.loads(path.read_text()))
            alive = bool(record.born) and _born(record.pid) == record.born
        except (OSError, ValueError, TypeError):
            alive = False
        if alive:
            found.append(record)
        else:
            remove(path)
    return sorted(found, key=lambda r: r.started)
