"""Shortens tracebacks of errors that come through TensorFlow, and restores Ctrl-C.

TensorFlow looks for Ctrl-C only while it makes an exception of its own. It then raises a
:class:`RuntimeError` that reports both, with all frames in its text. bpsx turns this error into a
:class:`KeyboardInterrupt` where it leaves a verb of bpsx, and where Python shows it.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from types import TracebackType
from typing import Any, TypeVar

import tensorflow as tf

from bpsx.system.tracebacks import CUT, shorten

_Function = TypeVar("_Function", bound=Callable[..., Any])
_REPLACED = "REPLACED BY KeyboardInterrupt"


def was_interrupt(error: BaseException | None) -> bool:
    """Whether ``error`` stands for a :class:`KeyboardInterrupt`."""
    return isinstance(error, RuntimeError) and _REPLACED in str(error)


def public(function: _Function) -> _Function:
    """As :func:`bpsx.system.tracebacks.public`, also for TensorFlow's own errors."""

    @functools.wraps(function)
    def call(*args: Any, **more: Any) -> Any:
        try:
            return function(*args, **more)
        except (*CUT, tf.errors.OpError) as error:
            shorten(error)
            raise
        except RuntimeError as error:
            if not was_interrupt(error):
                raise
        try:
            raise KeyboardInterrupt
        except KeyboardInterrupt as interrupt:
            interrupt.__traceback__ = None  # a bare raise adds no frame of its own
            raise

    call.cuts = True  # type: ignore[attr-defined]
    return call  # type: ignore[return-value]


def show_interrupts() -> None:
    """Have :data:`sys.excepthook` show such an error as Ctrl-C; others go to the hook before it."""
    before = sys.excepthook

    def hook(
        kind: type[BaseException], error: BaseException, traceback: TracebackType | None
    ) -> Any:
        if not was_interrupt(error):
            return before(kind, error, traceback)
        shown = KeyboardInterrupt().with_traceback(traceback)
        shorten(shown)
        sys.last_type, sys.last_value, sys.last_traceback = (
            KeyboardInterrupt,
            shown,
            shown.__traceback__,
        )
        return before(KeyboardInterrupt, shown, shown.__traceback__)

    sys.excepthook = hook
