"""Base class of the endpoints that listen on a plain socket; see ``endpoint.pyx``."""

from collections.abc import Sequence
from typing import Any

class GatedEndpoint:
    """An endpoint without its connections, which a subclass provides.

    :class:`bpsx.transports.base.Endpoint` describes the interface.
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
        """Number of malformed messages; the connection of each was closed."""
    def bind(self, host: str, ports: Sequence[int] = ()) -> str:
        """Listen on ``host`` at the first free port of ``ports``, or at any free port if empty.

        Returns ``host:port``. Raises :class:`~bpsx.errors.TransportError`.
        """
    def join(self, job: int, rank: int) -> None:
        """Set the job's number and the rank under which lanes know this endpoint."""
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
