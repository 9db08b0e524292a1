"""A lane of a server; see ``_engine.pyx``."""

from collections.abc import Callable
from typing import Any

class Lane:
    """A lane over one endpoint.

    :meth:`run` blocks until :meth:`stop`. Any thread may call the other methods.
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
        """Load the kernels of a dtype code into this lane.

        Raises :class:`KeyError` for an unknown code.
        """
    def log(self, text: str) -> None:
        """Log a message to the user."""
    def prove(self, nonce: bytes) -> bytes:
        """Return the proof of the job secret for a worker's nonce."""
    def keep(self, what: object) -> None:
        """Keep the owner of compiled code alive as long as this lane."""
    def break_with(self, why: Exception) -> None:
        """Set the exception that :meth:`run` raises at its end."""
    def run(self) -> None:
        """Serve until stopped."""
    def gone(self, rank: int) -> None:
        """Worker ``rank`` has left the job in good order: rounds that lack it fail."""
    def joined(self, rank: int) -> None:
        """Worker ``rank`` has called join(): rounds now close without it."""
    def all_joined(self) -> None:
        """All workers are back: forget :meth:`joined` before any message that arrives later."""
    def stop(self) -> None:
        """Make :meth:`run` return."""
    def counters(self) -> dict[str, int]:
        """Return rounds closed, bytes of results, messages, and the messages refused."""
