"""TCP transport over plain sockets; see ``endpoint.pyx``."""

from bpsx.transports.sockets.endpoint import GatedEndpoint

class TcpEndpoint(GatedEndpoint):
    """Endpoint with one TCP connection per peer."""

    def __init__(
        self,
        *,
        send_buffer: int | None,
        heartbeat_interval: float,
        heartbeat_timeout: float,
        secret: bytes = b"",
        encrypt: bool = False,
        most_bytes: int = -1,
        io_threads: int = 0,
    ) -> None:
        """Create an endpoint that neither listens nor is connected.

        ``send_buffer``: bytes of each connection's send buffer; 0: the system tunes it; None: a
        size for loopback or for a network, by the peer's address.
        ``heartbeat_interval``, ``heartbeat_timeout``: seconds; interval 0 means no heartbeat.
        ``secret``: the job secret, the same on both ends.
        ``encrypt``: refused if true.
        ``most_bytes``: largest body accepted, in bytes; -1: no bound.
        ``io_threads``: unused; ZeroMQ's endpoint has the same argument.

        Raises :class:`~bpsx.errors.TransportError`.
        """
    def connect(self, peer: int, address: str) -> None:
        """Connect to the lane at ``host:port``, which becomes peer ``peer``.

        Raises :class:`~bpsx.errors.TransportError`.
        """
    def close(self) -> None:
        """Drop unsent messages and run every outstanding done callback. Idempotent."""
