"""Shared memory between a worker and the lanes of its machine; see ``endpoint.pyx``."""

from collections.abc import Sequence
from typing import Any

from bpsx.transports.base import Endpoint

class SharedEndpoint:
    """Endpoint that wraps another transport's and uses shared memory within a machine.

    :class:`bpsx.transports.base.Endpoint` describes the interface.
    """

    def __init__(
        self, inner: Endpoint, *, secret: bytes = b"", most_bytes: int = -1, slots: int = 64
    ) -> None:
        """Wrap the endpoint ``inner``, which then belongs to this one.

        ``secret``: the job secret, the same on both ends.
        ``most_bytes``: largest body accepted, in bytes; -1: no bound.
        ``slots``: number of workers with which a lane shares memory; others use ``inner``.
        """
    @property
    def address(self) -> str:
        """``host:port`` after :meth:`bind`, else empty."""
    @property
    def neighbours(self) -> int:
        """Number of peers reached through shared memory."""
    @property
    def wake_descriptor(self) -> int:
        """The eventfd that :meth:`wake` writes to."""
    @property
    def refused(self) -> int:
        """Number of connections refused because the peer did not know the job secret."""
    @property
    def malformed(self) -> int:
        """Number of malformed messages."""
    def bind(self, host: str, ports: Sequence[int] = ()) -> str:
        """Listen as ``inner`` does, and also for workers of this machine.

        Raises :class:`~bpsx.errors.TransportError`.
        """
    def join(self, job: int, rank: int) -> None:
        """Set the job's number and the rank under which lanes know this endpoint."""
    def connect(self, peer: int, address: str) -> None:
        """Connect to the lane at ``host:port`` as peer ``peer``, through memory if it is local.

        Raises :class:`~bpsx.errors.TransportError`.
        """
    def watch(self) -> int:
        """Start to watch the connections.

        Returns a descriptor that becomes readable when :meth:`lost` has something to return.
        """
    def lost(self) -> list[int]:
        """Return the peers whose connection broke since the last call. Any thread may call it."""
    def abi(self) -> Any:
        """Return the data plane as a capsule, valid as long as this object."""
    def wake(self) -> None:
        """End a wait of the data plane. Any thread may call it."""
    def close(self) -> None:
        """Drop unsent messages and run every outstanding done callback. Idempotent."""
