"""A server's lane; see ``_engine.pyx``."""

from collections.abc import Callable
from typing import Any

class Lane:
    """One lane over one endpoint.

    :meth:`run` blocks until :meth:`stop`; the other methods may be called from any thread.
    """

    def __init__(
        self,
        endpoint: Any,
        *,
        job: int,
        workers: int,
        processes: int = 1,
        asynchronous: bool = False,
        fixed_order: bool = False,
        scheduled: bool = False,
        spin_us: float = 0,
        log: Callable[[str], object] = ...,
        watch: Any = None,
        secret: bytes = b"",
    ) -> None: ...
    def load(self, dtype: int) -> None:
        """Make sure that the kernels of a dtype code are there.

        Raises :class:`KeyError` for an unknown code.
        """
    def log(self, text: str) -> None:
        """Say something to people."""
    def prove(self, nonce: bytes) -> bytes:
        """The answer to a worker's greeting."""
    def keep(self, what: object) -> None:
        """Compiled code lives as long as its owner."""
    def break_with(self, why: Exception) -> None:
        """What :meth:`run` shall raise."""
    def run(self) -> None:
        """Work until stopped."""
    def gone(self, rank: int) -> None:
        """Worker ``rank`` has left the job in good order: rounds that lack it fail."""
    def joined(self, rank: int) -> None:
        """Worker ``rank`` has called join(): from now on rounds close without it."""
    def all_joined(self) -> None:
        """Everybody is back: whatever arrives after this call meets no mark of :meth:`joined`."""
    def stop(self) -> None:
        """Let :meth:`run` return."""
    def counters(self) -> dict[str, int]:
        """Rounds closed, bytes of results, messages, and what was refused."""
