"""Callbacks for the end of this process, also where ``atexit`` does not run.

A forked child of :mod:`multiprocessing` ends with ``os._exit`` after its target has returned. Only
finalizers of :mod:`multiprocessing` run there.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable

_OURS = 10  # exit priority in multiprocessing: before it ends and joins this process's own children
_LAST = -100
_hooked_in = 0  # pid of the process in which the finalizers are registered
_status = 0


def in_child() -> bool:
    """Whether :mod:`multiprocessing` started this process, by any method."""
    process = sys.modules.get("multiprocessing.process")
    return process is not None and process.parent_process() is not None


def hook_child(leave: Callable[[], None]) -> None:
    """In a child of :mod:`multiprocessing`, call ``leave`` when its target has ended.

    In other processes, and after the first call in a process, it does nothing.
    """
    global _hooked_in, _status
    if _hooked_in == os.getpid() or not in_child():
        return
    from multiprocessing.util import Finalize

    _hooked_in, _status = os.getpid(), 0  # do not inherit the parent's status
    Finalize(None, leave, exitpriority=_OURS)
    Finalize(None, _end, exitpriority=_LAST)


def uncaught() -> BaseException | None:
    """The exception that ends this process; None without one, or for :class:`SystemExit`.

    For exit callbacks.
    """
    if (last := getattr(sys, "last_value", None)) is not None:
        return last  # type: ignore[no-any-return]
    if not in_child():
        return None
    error = sys.exc_info()[1]  # the finalizers run while it propagates
    return None if isinstance(error, SystemExit) else error


def end_child_with(status: int) -> None:
    """Make this multiprocessing child exit with ``status`` although its target succeeded."""
    global _status
    _status = status


def _end() -> None:
    if _status and sys.exc_info()[1] is None:
        for stream in (sys.stdout, sys.stderr):
            if stream is not None:
                stream.flush()
        os._exit(_status)
