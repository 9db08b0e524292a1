"""File descriptors for work that must succeed although the process has used all of them up."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from typing import TypeVar

from bpsx.system.threads import NamedThread

#: The system call close_range, under its number on all processors, and CLOSE_RANGE_UNSHARE.
_CLOSE_RANGE, _UNSHARE = 436, 2
_Result = TypeVar("_Result")


def with_own(function: Callable[[], _Result]) -> _Result:
    """Call ``function`` in a thread with a table of file descriptors of its own; return its result.

    The table begins with the standard streams only, so the function can open files however many
    the process has open. The thread's files are closed at its end. Where Linux lacks
    that (see :func:`can_have_own`), the thread shares the process's descriptors.
    """
    results: list[_Result] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            _unshare()
            results.append(function())
        except BaseException as e:
            errors.append(e)

    thread = NamedThread(target=run, name="bpsx-own-files", daemon=True)
    thread.start()
    thread.join()
    if errors:
        raise errors[0]
    return results[0]


def _unshare() -> bool:
    most = 2**32 - 1
    call = ctypes.CDLL(None).syscall
    return bool(call(_CLOSE_RANGE, ctypes.c_uint(3), ctypes.c_uint(most), _UNSHARE) == 0)


@functools.cache
def can_have_own() -> bool:
    """Whether a thread can have its own table: Linux 5.9 and later, unless a sandbox forbids it."""
    found: list[bool] = []
    thread = NamedThread(target=lambda: found.append(_unshare()), name="bpsx-own-files")
    thread.start()
    thread.join()
    return found[0]
