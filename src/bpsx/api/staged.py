"""A handle whose result must still be copied to the caller's array."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, Protocol

from bpsx.system.tracebacks import public_methods


class Handle(Protocol):
    """An operation in flight. Thread-safe."""

    def done(self) -> bool:
        """Return whether the operation has ended, successfully or not, without blocking."""

    def wait(self, timeout: float | None = None) -> Any:
        """Return the result, once the operation has ended. Raises the error that made it fail."""


@public_methods
class StagedHandle:
    """Handle of an operation whose result ``copy`` has to copy into the caller's ``output``.

    The first successful :meth:`wait` makes the copy; later ones return ``output`` as it is by then.
    Thread-safe.
    """

    def __init__(self, inner: Handle, copy: Callable[[], object], output: Any) -> None:
        self._inner, self._copy, self._output = inner, copy, output
        self._lock = threading.Lock()
        self._copied = False

    def done(self) -> bool:
        """Return whether the transfer has ended, successfully or not, without blocking.

        The output is complete only after :meth:`wait`.
        """
        return self._inner.done()

    def wait(self, timeout: float | None = None) -> Any:
        """Wait, complete the output and return it. Raises the error that made the transfer fail."""
        self._inner.wait(timeout)
        with self._lock:
            if not self._copied:
                self._copy()
                self._copied = True
        return self._output
