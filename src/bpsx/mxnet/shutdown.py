"""The end of a job and of a process, and forks: what MXNet's engine has been given is finished
first.
"""

from __future__ import annotations

import atexit
import os
import sys

from bpsx.mxnet import _pushes
from bpsx.mxnet.ops import end_job
from bpsx.plugin import adapter


def prepare() -> None:
    """Once."""
    atexit.register(_at_exit)  # first: what is registered last is done first
    adapter.add_engine(_pushes.wait)
    os.register_at_fork(before=_before_fork)


def _at_exit() -> None:
    """The session is closed already, so all exchanges have ended."""
    if getattr(sys, "last_value", None) is None:
        end_job()


def _before_fork() -> None:
    """MXNet's own handler of forks waits for its engine with the GIL, which what has not begun yet
    needs: so Ctrl-C waits, too.
    """
    while True:
        try:
            adapter.finish()
            return
        except BaseException as e:
            _pushes.raise_after_fork(type(e))
