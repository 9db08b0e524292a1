"""Finishes the operations of MXNet's engine before a job or a process ends, and before forks."""

from __future__ import annotations

import atexit
import os
import sys

from bpsx.mxnet import _pushes
from bpsx.mxnet.ops import end_job
from bpsx.plugin import adapter


def prepare() -> None:
    """Register the handlers; call it once."""
    atexit.register(_at_exit)  # registered first, so it runs last
    adapter.add_engine(_pushes.wait)
    os.register_at_fork(before=_before_fork)


def _at_exit() -> None:
    """Report a failed exchange at exit; the session is closed, so all exchanges have ended."""
    if getattr(sys, "last_value", None) is None:
        end_job()


def _before_fork() -> None:
    """Finish the engine's operations before a fork.

    MXNet's own fork handler waits for its engine with the GIL, which operations that have not begun
    need. So Ctrl-C waits, too.
    """
    while True:
        try:
            adapter.finish()
            return
        except BaseException as e:
            _pushes.raise_after_fork(type(e))
