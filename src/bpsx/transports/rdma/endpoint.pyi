"""RDMA; see ``endpoint.pyx``."""

from collections.abc import Sequence

from bpsx.transports.sockets.endpoint import GatedEndpoint

class RdmaEndpoint(GatedEndpoint):
    """Connections over RDMA."""

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
        """``depth``: receive requests of a connection; ``sends``: requests under way on it;
        ``inbox``: bytes that the other end can have written and that have not been read;
        ``device``, ``gid_index``: see :func:`bpsx.transports.rdma.gid.choose`; the others as
        :class:`~bpsx.transports.tcp.endpoint.TcpEndpoint`'s.

        Raises :class:`~bpsx.errors.TransportError`, also where there is no adapter.
        """
    @property
    def copied(self) -> int:
        """Bytes of messages' bodies that this end has copied, into registered memory or out of it;
        those of less than 256 bytes do not count.
        """
    def bind(self, host: str, ports: Sequence[int] = ()) -> str:
        """As :meth:`GatedEndpoint.bind`; also raises where ``host`` has no adapter."""
    def lost(self) -> list[int]:
        """As :meth:`GatedEndpoint.lost`; what is known of the reasons is logged."""
    def connect(self, peer: int, address: str) -> None:
        """Reach the lane at ``host:port`` as peer number ``peer``.

        Raises :class:`~bpsx.errors.TransportError`.
        """
    def close(self) -> None:
        """Drop what is unsent, run every outstanding done callback. Idempotent."""
