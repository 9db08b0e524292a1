"""TCP through plain sockets; see ``endpoint.pyx``."""

from bpsx.transports.sockets.endpoint import GatedEndpoint

class TcpEndpoint(GatedEndpoint):
    """Connections over plain sockets."""

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
        """``send_buffer``: bytes of each connection, 0 for the system's own tuning, None for what
        suits loopback or a network, by its address; the heartbeat's times are in seconds, interval
        0 for none; ``most_bytes`` that a body may have which arrives, -1 for no bound; ``secret``
        alike on both ends; ``encrypt`` is refused; ``io_threads`` is ZeroMQ's.

        Raises :class:`~bpsx.errors.TransportError`.
        """
    def connect(self, peer: int, address: str) -> None:
        """Reach the lane at ``host:port`` as peer number ``peer``.

        Raises :class:`~bpsx.errors.TransportError`.
        """
    def close(self) -> None:
        """Drop what is unsent, run every outstanding done callback. Idempotent."""
