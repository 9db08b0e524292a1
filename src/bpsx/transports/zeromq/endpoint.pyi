"""TCP transport through ZeroMQ; see ``endpoint.pyx``."""

from collections.abc import Sequence
from typing import Any

class ZeroMQEndpoint:
    """Endpoint with one ROUTER socket for all its peers.

    :class:`bpsx.transports.base.Endpoint` describes the interface.
    """

    def __init__(
        self,
        *,
        io_threads: int,
        send_buffer: int | None,
        heartbeat_interval: float,
        heartbeat_timeout: float,
        secret: bytes = b"",
        encrypt: bool = False,
        most_bytes: int = -1,
    ) -> None:
        """Create an endpoint that neither listens nor is connected.

        ``io_threads``: number of ZeroMQ's I/O threads.
        ``send_buffer``: bytes of each connection's send buffer; 0: the system tunes it; None: a
        size for loopback or for a network, by the peer's address.
        ``heartbeat_interval``, ``heartbeat_timeout``: seconds; interval 0 means no heartbeat.
        ``secret``, ``encrypt``: the job secret and the choice of encryption, the same on both ends.
        ``most_bytes``: largest frame accepted, in bytes; -1: no bound.
        """

    @property
    def address(self) -> str:
        """``host:port`` after :meth:`bind`, else empty."""

    @property
    def wake_descriptor(self) -> int:
        """The eventfd that :meth:`wake` writes to."""

    @property
    def refused(self) -> int:
        """Number of connections refused because the peer did not know the job secret."""

    @property
    def malformed(self) -> int:
        """Number of messages dropped because of malformed frames."""

    def bind(self, host: str, ports: Sequence[int] = ()) -> str:
        """Listen on ``host`` at the first free port of ``ports``, or at any free port if empty.

        Returns ``host:port``. Raises :class:`~bpsx.errors.TransportError`.
        """

    def join(self, job: int, rank: int) -> None:
        """Set the job's number and the rank under which lanes know this endpoint."""

    def connect(self, peer: int, address: str) -> None:
        """Connect to the lane at ``host:port``, which becomes peer ``peer``.

        Raises :class:`~bpsx.errors.TransportError`.
        """

    def watch(self) -> int:
        """Start to watch the connections.

        Returns a descriptor that becomes readable when :meth:`lost` has something to return.
        """

    def lost(self) -> list[int]:
        """Return the peers whose connection broke since the last call; -1 for an unknown peer."""

    def abi(self) -> Any:
        """Return the data plane as a capsule, valid as long as this object."""

    def wake(self) -> None:
        """End a wait of the data plane. Any thread may call it."""

    def close(self) -> None:
        """Drop unsent messages and run every outstanding done callback. Idempotent."""
