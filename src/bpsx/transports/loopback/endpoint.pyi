"""Endpoints within one process; see ``endpoint.pyx``."""

from typing import Any

class LoopbackEndpoint:
    """One end; :meth:`connect` joins it to another.

    All ends must be closed before any is dropped.
    """

    hold_done: bool
    """Whether done callbacks are held back. To be set before the first send."""

    def __init__(self) -> None: ...
    @property
    def wake_descriptor(self) -> int:
        """-1: nobody outside the process can wake it."""
    def abi(self) -> Any:
        """The data plane: a capsule, valid as long as this object."""
    def connect(self, peer: int, other: LoopbackEndpoint, as_peer: int) -> None:
        """Reach ``other`` as peer ``peer``, appearing there as ``as_peer``.

        Raises :class:`~bpsx.errors.TransportError`.
        """
    def disconnect(self, peer: int) -> None:
        """From now on ``peer`` cannot be reached."""
    def inject(self, peer: int, head: bytes, body: bytes | None = None) -> None:
        """Let a message arrive here, as if ``peer`` had sent it."""
    def sent(self, timeout: float = 0) -> tuple[int, bytes, bytes | None] | None:
        """The next message that has arrived here, as (peer, head, body); None if none came within
        ``timeout`` seconds.
        """
    def complete(self) -> int:
        """Run the done callbacks that were held back; returns how many."""
    def wake(self) -> None:
        """End a wait of the data plane. Any thread."""
    def close(self) -> None:
        """Drop what was not received and run what was held back. Idempotent."""
