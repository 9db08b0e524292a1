"""The descendants of this process, also those that have left its process groups or their parent.

The kernel makes this process the parent of its orphaned descendants, once :func:`adopt_orphans` has
asked for it. So they can be found, and killed, at any time.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import time
from pathlib import Path

_PR_SET_CHILD_SUBREAPER = 36
#: Seconds between two looks for processes that have been killed.
_LOOK = 0.01


def adopt_orphans() -> None:
    """Make this process the parent of descendants whose parent ends. See :func:`reap_orphans`."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def reap_orphans(child: int) -> None:
    """Reap orphans that have ended, but not ``child``, which must not have been reaped before."""
    while found := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT):
        if found.si_pid == child:
            return
        os.waitpid(found.si_pid, 0)


def running() -> set[int]:
    """Return the process ids of all descendants that have not ended.

    It may miss one whose parent ends meanwhile.
    """
    of: dict[int, list[int]] = {}
    ended = set()
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            state, parent = stat.read_bytes().rpartition(b")")[2].split()[:2]
            of.setdefault(int(parent), []).append(int(stat.parent.name))
            if state in (b"Z", b"X"):
                ended.add(int(stat.parent.name))
    found, new = set(), {os.getpid()}
    while new := {pid for parent in new for pid in of.get(parent, ())}:
        found |= new
    return found - ended


def kill_all() -> None:
    """Kill all descendants, and wait until they have ended.

    Does not wait for processes of other users, which it may not kill.
    """
    looks_without = 0
    while looks_without < 2:  # the parent of one that was missed has ended by the second look
        killed = sum(_kill(pid) for pid in running())
        looks_without = 0 if killed else looks_without + 1
        if killed:
            time.sleep(_LOOK)


def _kill(pid: int) -> bool:
    """Kill a process; returns whether it may still be there."""
    try:
        os.kill(pid, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        return False
    return True
