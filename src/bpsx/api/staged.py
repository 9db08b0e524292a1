"""A handle whose result is not yet where the caller looks for it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, Protocol

from bpsx.system.tracebacks import public_methods


class Handle(Protocol):
    """An operation under way. Thread-safe."""

    def done(self) -> bool:
        """Whether the operation has ended, well or not. Does not block."""

    def wait(self, timeout: float | None = None) -> Any:
        """The result, once the operation has ended. Raises what made it fail."""


@public_methods
class StagedHandle:
    """Handle of an operation after which ``copy`` has to copy the result into the ``output`` that
    the caller sees.

    The copy is made by the first :meth:`wait` to succeed; later ones return ``output`` as it is by
    then. Thread-safe.
    """

    def __init__(self, inner: Handle, copy: Callable[[], object], output: Any) -> None:
        self._inner, self._copy, self._output = inner, copy, output
        self._lock = threading.Lock()
        self._copied = False

    def done(self) -> bool:
        """Whether the transfer has ended, well or not; the output is complete after :meth:`wait`.

        Does not block.
        """
        return self._inner.done()

    def wait(self, timeout: float | None = None) -> Any:
        """Wait, complete the output and return it. Raises what made the transfer fail."""
        self._inner.wait(timeout)
        with self._lock:
            if not self._copied:
                self._copy()
                self._copied = True
        return self._output
