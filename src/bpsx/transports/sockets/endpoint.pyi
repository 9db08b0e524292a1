"""What the endpoints of our own transports have in common; see ``endpoint.pyx``."""

from collections.abc import Sequence
from typing import Any

class GatedEndpoint:
    """An endpoint but for its connections.

    The contract is :class:`bpsx.transports.base.Endpoint`'s.
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
        """Messages that made no sense; their connections were closed."""
    def bind(self, host: str, ports: Sequence[int] = ()) -> str:
        """Listen on ``host`` at a port that the system chooses.

        Raises :class:`~bpsx.errors.TransportError`.
        """
    def join(self, job: int, rank: int) -> None:
        """The job's number, and the rank under which lanes shall know this endpoint."""
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
