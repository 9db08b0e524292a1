"""Threads that have their names in the operating system, too."""

from __future__ import annotations

import contextlib
import ctypes
import threading

_PR_SET_NAME = 15


class NamedThread(threading.Thread):
    """A thread whose name ``top -H``, ``ps -L`` and debuggers show: its first 15 characters.

    Python sets such names itself from 3.14 on.
    """

    def run(self) -> None:
        # A name helps people only; a libc or a sandbox without it is no reason to fail.
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).prctl(_PR_SET_NAME, self.name.encode(), 0, 0, 0)
        super().run()
