"""RDMA transport; see ``endpoint.pyx``."""

from collections.abc import Sequence

from bpsx.transports.sockets.endpoint import GatedEndpoint

class RdmaEndpoint(GatedEndpoint):
    """Endpoint with one reliable RDMA connection per peer."""

    def __init__(
        self,
        *,
        heartbeat_interval: float,
        heartbeat_timeout: float,
        secret: bytes = b"",
        encrypt: bool = False,
        most_bytes: int = -1,
        depth: int = 512,
        sends: int = 128,
        inbox: int = ...,
        device: str = "",
        gid_index: int | None = None,
    ) -> None:
        """Create an endpoint that neither listens nor is connected.

        ``depth``: receive requests of each connection.
        ``sends``: length of each connection's send queue, in work requests.
        ``inbox``: bytes that each peer may have written and this end has not released.
        ``device``, ``gid_index``: see :func:`bpsx.transports.rdma.gid.choose`.
        The other arguments are :class:`~bpsx.transports.tcp.endpoint.TcpEndpoint`'s.

        Raises :class:`~bpsx.errors.TransportError`, also if the machine has no adapter.
        """
    @property
    def copied(self) -> int:
        """Bytes of bodies that this end copied into or out of registered memory.

        Bodies of less than 256 bytes do not count.
        """
    def bind(self, host: str, ports: Sequence[int] = ()) -> str:
        """As :meth:`GatedEndpoint.bind`; also raises if no adapter belongs to ``host``."""
    def lost(self) -> list[int]:
        """As :meth:`GatedEndpoint.lost`; also logs the known reasons."""
    def connect(self, peer: int, address: str) -> None:
        """Connect to the lane at ``host:port``, which becomes peer ``peer``.

        Raises :class:`~bpsx.errors.TransportError`.
        """
    def close(self) -> None:
        """Drop unsent messages and run every outstanding done callback. Idempotent."""
