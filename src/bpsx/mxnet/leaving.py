"""The end of a job and of a process: what MXNet's engine has been given is finished first, and what went wrong in it does not end with status 0."""

from __future__ import annotations

import atexit
import os
import sys

from bpsx import _adapter
from bpsx.mxnet import _pushes
from bpsx.mxnet.errors import in_short
from bpsx.mxnet.ops import told


def prepare() -> None:
    """Once."""
    _adapter.add_engine(_pushes.wait)
    # MXNet's own handler of forks waits for its engine with the GIL, which what has not begun yet needs.
    os.register_at_fork(before=_adapter.finish)
    atexit.register(_tell_unheard)


def _tell_unheard() -> None:
    """The session is closed already, so all exchanges have ended."""
    if told.is_set() or getattr(sys, "last_value", None) is not None:
        return
    if text := _pushes.unheard():
        print(f"bpsx: exit status 1, because an exchange has failed, and nobody had waited for its array: {in_short(text)}", file=sys.stderr)
        _adapter.set_exit_status(1)
