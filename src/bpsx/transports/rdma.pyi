"""RDMA; see ``rdma.pyx``."""

from typing import Any

class RdmaEndpoint:
    """Connections over RDMA. The contract is :class:`bpsx.transports.base.Endpoint`'s."""

    def __init__(
        self, *, heartbeat_interval: float, heartbeat_timeout: float, secret: bytes = b"", encrypt: bool = False, most_bytes: int = -1,
        depth: int = 512, sends: int = 128, inbox: int = ..., device: str = "", gid_index: int | None = None,
    ) -> None:
        """``depth``: receive requests of a connection; ``sends``: requests under way on it; ``inbox``: bytes that the other end can have written and
        that have not been read; ``device``, ``gid_index``: see :func:`bpsx.transports.gids.choose`; the others as
        :class:`~bpsx.transports.tcp.TcpEndpoint`'s. Raises :class:`~bpsx.errors.TransportError`, also where there is no adapter."""
    @property
    def address(self) -> str:
        """``host:port`` after :meth:`bind`, else empty."""
    @property
    def wake_descriptor(self) -> int:
        """What :meth:`wake` writes to."""
    @property
    def refused(self) -> int:
        """Connections turned away because they did not know the secret."""
    @property
    def malformed(self) -> int:
        """Messages that made no sense; their connections were closed."""
    @property
    def copied(self) -> int:
        """Bytes of messages' bodies that this end has copied, into registered memory or out of it; those of less than 256 bytes do not count."""
    def bind(self, host: str) -> str:
        """Listen on ``host`` at a port that the system chooses. Raises :class:`~bpsx.errors.TransportError`."""
    def join(self, job: int, rank: int) -> None:
        """The job's number, and the rank under which lanes shall know this endpoint."""
    def connect(self, peer: int, address: str) -> None:
        """Reach the lane at ``host:port`` as peer number ``peer``. Raises :class:`~bpsx.errors.TransportError`."""
    def watch(self) -> int:
        """Start to watch the connections; returns a descriptor that becomes readable when :meth:`lost` has news."""
    def lost(self) -> list[int]:
        """Peers whose connection has broken since the last call."""
    def abi(self) -> Any:
        """The data plane: a capsule, valid as long as this object."""
    def wake(self) -> None:
        """End a wait of the data plane. Any thread."""
    def close(self) -> None:
        """Drop what is unsent, run every outstanding done callback. Idempotent."""
