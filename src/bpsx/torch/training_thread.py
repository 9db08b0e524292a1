"""Decides whether code that reads gradients may wait for them.

Only the training code may. A signal handler or another thread must not disturb it.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

import torch

_VARARGS = 0x04  # CO_VARARGS of a code object


class TrainingThread:
    """The training thread of one optimizer, if known, and whether it is waiting now."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._waits = False

    def is_here(self) -> None:
        """Record the calling thread as the training thread."""
        self._thread = threading.current_thread()

    @contextmanager
    def at_work(self) -> Iterator[None]:
        """Context in which the calling thread waits for gradients or updates weights."""
        self.is_here()
        before, self._waits = self._waits, True
        try:
            yield
        finally:
            self._waits = before

    def may_be_here(self) -> bool:
        """Return whether the calling code may be training code outside of :meth:`at_work`."""
        known = self._thread
        ours = known is None or known is threading.current_thread() or not known.is_alive()
        return ours and not self._waits

    def may_wait(self) -> bool:
        """Return whether the calling code may wait for gradients and change them.

        It may not during a backward pass. It may not in a signal handler either, which may have
        interrupted the training code at any point.
        """
        if not self.may_be_here() or torch._C._current_graph_task_id() >= 0:
            return False
        return not in_signal_handler()


def in_signal_handler() -> bool:
    """Return whether a signal handler written in Python is running on this thread.

    Such a handler has the interrupted frame among its arguments.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_back is not None and _is_given(frame, frame.f_back):
            return True
        frame = frame.f_back
    return False


def _is_given(frame: FrameType, interrupted: FrameType) -> bool:
    code = frame.f_code
    n = code.co_argcount
    names = code.co_varnames[:n]
    if code.co_flags & _VARARGS:
        n += code.co_kwonlyargcount
        names += code.co_varnames[n : n + 1]
    if not names:
        return False
    values = [frame.f_locals.get(name) for name in names]
    return any(
        v is interrupted or type(v) is tuple and any(w is interrupted for w in v) for v in values
    )
