"""The end of a job: what MXNet's engine has been given, and has perhaps not begun, is finished first."""

from __future__ import annotations

import atexit
import logging
import os
import sys
import time

from bpsx import _adapter, api
from bpsx.mxnet import _pushes

log = logging.getLogger("bpsx.mxnet")
_LOOK = 0.2     # seconds; whether the job has failed in the meantime


def finish() -> None:
    """Wait for the engine, no longer than ``BPSX_SHUTDOWN_TIMEOUT``, and not at all if the job has failed. Does not raise."""
    if not _adapter.initialised():
        return
    session = _adapter.session()
    end = time.monotonic() + session.config.shutdown_timeout
    while _pushes.wait(_LOOK) and not session.failure:
        if time.monotonic() >= end:
            log.warning("left with operations that the engine has not finished in %g s (BPSX_SHUTDOWN_TIMEOUT)", session.config.shutdown_timeout)
            return


def shutdown() -> None:
    """As :func:`bpsx.shutdown`, after what MXNet's engine has been given."""
    finish()
    api.shutdown()


def suspend() -> None:
    """As :func:`bpsx.suspend`, after what MXNet's engine has been given."""
    finish()
    api.suspend()


# MXNet's own handler of forks waits for its engine with the GIL, which what has not begun yet needs.
os.register_at_fork(before=finish)


@atexit.register
def _at_exit() -> None:
    """A script that just ends; one that an exception ends has work undone."""
    if getattr(sys, "last_value", None) is None:
        finish()
