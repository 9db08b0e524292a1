"""Description of the machine that a figure was measured on, and the kernel's statistics of a
process.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import platform
from pathlib import Path
from typing import Any

_PACKAGES = ("bpsx", "numpy", "numba", "pyzmq", "torch")
_TICKS = os.sysconf("SC_CLK_TCK")


def describe() -> dict[str, Any]:
    """Return cores, CPU, kernel, versions and the present load average.

    A package that is not installed has the version None.
    """
    versions: dict[str, str | None] = {}
    for package in _PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            versions[package] = None
    return {
        "cores": len(os.sched_getaffinity(0)),
        "cpu": _cpu_model(),
        "kernel": platform.release(),
        "python": platform.python_version(),
        **versions,
        "load": round(os.getloadavg()[0], 2),
    }


def _cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith(("model name", "Model", "Hardware")):
            return line.partition(":")[2].strip()
    return platform.machine()


def cpu_seconds(pid: int) -> float:
    """Return the processor time in seconds that the threads of a process have used.

    It is in nanoseconds where the kernel has scheduler statistics, otherwise in its clock ticks,
    which are coarse for an idle process. Raises :class:`OSError` if the process is gone.
    """
    try:
        return sum(
            int(task.read_text().split()[0])
            for task in Path(f"/proc/{pid}/task").glob("*/schedstat")
        ) / 1e9 or _ticks(pid)
    except OSError:  # the kernel has no schedstat, or a thread ended meanwhile
        return _ticks(pid)


def count_threads(pid: int, prefix: str) -> int:
    """Return the number of a process's threads whose names begin with ``prefix``."""
    count = 0
    for task in Path(f"/proc/{pid}/task").glob("*/comm"):
        with contextlib.suppress(OSError):  # the thread has ended meanwhile
            count += task.read_text().startswith(prefix)
    return count


def _ticks(pid: int) -> float:
    # The second field is the program's name in brackets, which may contain blanks and brackets.
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS


def rss_bytes(pid: int) -> int:
    """Return the resident memory of a process in bytes. Raises :class:`OSError` if it is gone."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")
