"""Shared memory between a worker and the lanes of its own machine; see ``endpoint.pyx``."""

from collections.abc import Sequence
from typing import Any

from bpsx.transports.base import Endpoint

class SharedEndpoint:
    """An endpoint of another transport, and shared memory for who is on the same machine.

    The contract is :class:`bpsx.transports.base.Endpoint`'s.
    """

    def __init__(
        self, inner: Endpoint, *, secret: bytes = b"", most_bytes: int = -1, slots: int = 64
    ) -> None:
        """``inner``: the other one, this one's from now on; ``secret`` alike on both ends;
        ``most_bytes`` that a body may have which arrives, -1 for no bound; ``slots``: how many
        workers a lane shares memory with, for others there is the other transport.
        """
    @property
    def address(self) -> str:
        """``host:port`` after :meth:`bind`, else empty."""
    @property
    def neighbours(self) -> int:
        """How many peers are reached through memory."""
    @property
    def wake_descriptor(self) -> int:
        """What :meth:`wake` writes to."""
    @property
    def refused(self) -> int:
        """Connections turned away because they did not know the secret."""
    @property
    def malformed(self) -> int:
        """Messages that made no sense."""
    def bind(self, host: str, ports: Sequence[int] = ()) -> str:
        """Listen as the other transport does, and for workers of this machine.

        Raises :class:`~bpsx.errors.TransportError`.
        """
    def join(self, job: int, rank: int) -> None:
        """The job's number, and the rank under which lanes shall know this endpoint."""
    def connect(self, peer: int, address: str) -> None:
        """Reach the lane at ``host:port`` as peer number ``peer``: through memory if it is here.

        Raises :class:`~bpsx.errors.TransportError`.
        """
    def watch(self) -> int:
        """Start to watch the connections; returns a descriptor that becomes readable when
        :meth:`lost` has news.
        """
    def lost(self) -> list[int]:
        """Peers whose connection has broken since the last call."""
    def abi(self) -> Any:
        """The data plane: a capsule, valid as long as this object."""
    def wake(self) -> None:
        """End a wait of the data plane. Any thread."""
    def close(self) -> None:
        """Drop what is unsent, run every outstanding done callback. Idempotent."""
