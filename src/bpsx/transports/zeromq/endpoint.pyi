"""TCP through ZeroMQ; see ``endpoint.pyx``."""

from collections.abc import Sequence
from typing import Any

class ZeroMQEndpoint:
    """One ROUTER socket with its peers. The contract is
    :class:`bpsx.transports.base.Endpoint`'s.
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
        """``send_buffer``: bytes of each connection, 0 for the system's own tuning, None for what
        suits loopback or a network, by its address; the heartbeat's times are in seconds, interval
        0 for none; ``most_bytes`` that a frame may have which arrives, -1 for no bound; ``secret``
        and ``encrypt`` alike on both ends.
        """

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
        """Messages dropped because their frames made no sense."""

    def bind(self, host: str, ports: Sequence[int] = ()) -> str:
        """Listen on ``host`` at a port that the system chooses.

        Raises :class:`~bpsx.errors.TransportError`.
        """

    def join(self, job: int, rank: int) -> None:
        """The job's number, and the rank under which lanes shall know this endpoint."""

    def connect(self, peer: int, address: str) -> None:
        """Reach the lane at ``host:port`` as peer number ``peer``.

        Raises :class:`~bpsx.errors.TransportError`.
        """

    def watch(self) -> int:
        """Start to watch the connections; returns a descriptor that becomes readable when
        :meth:`lost` has news.
        """

    def lost(self) -> list[int]:
        """Peers whose connection has broken since the last call, -1 for one that cannot be
        named.
        """

    def abi(self) -> Any:
        """The data plane: a capsule, valid as long as this object."""

    def wake(self) -> None:
        """End a wait of the data plane. Any thread."""

    def close(self) -> None:
        """Drop what is unsent, run every outstanding done callback. Idempotent."""
