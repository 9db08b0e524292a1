"""Transport within one process; see ``endpoint.pyx``."""

from collections.abc import Sequence
from typing import Any

class LoopbackEndpoint:
    """Endpoint that connects to others of the same process.

    The contract is :class:`bpsx.transports.base.Endpoint`'s. It takes the options that all
    transports get and needs none of them. All endpoints must be closed before any is dropped.
    """

    hold_done: bool
    """Whether done callbacks are held back. To be set before the first send."""

    def __init__(self, **options: Any) -> None: ...
    @property
    def address(self) -> str:
        """``loopback:N`` after :meth:`bind`, else empty."""
    @property
    def malformed(self) -> int:
        """0: no message comes from outside this process."""
    def bind(self, host: str, ports: Sequence[int] = ()) -> str:
        """Give this endpoint an address; ``host`` and ``ports`` mean nothing within a process."""
    def join(self, job: int, rank: int) -> None:
        """Set the job's number and the rank under which lanes know this endpoint."""
    def watch(self) -> int:
        """See :meth:`bpsx.transports.base.Endpoint.watch`."""
    def lost(self) -> list[int]:
        """Return the peers whose endpoint was closed since the last call."""
    @property
    def wake_descriptor(self) -> int:
        """-1: no other process can wake it."""
    def abi(self) -> Any:
        """Return the data plane as a capsule, valid as long as this object."""
    def connect(self, peer: int, address: str) -> None:
        """Connect to the endpoint bound to ``address``, which becomes peer ``peer``.

        Raises :class:`~bpsx.errors.TransportError` if there is none, or if it is of another job.
        """
    def link(self, peer: int, other: LoopbackEndpoint, as_peer: int) -> None:
        """Make ``other`` peer ``peer``; this endpoint becomes its peer ``as_peer``.

        Raises :class:`~bpsx.errors.TransportError`.
        """
    def disconnect(self, peer: int) -> None:
        """Make ``peer`` unreachable from now on."""
    def inject(self, peer: int, head: bytes, body: bytes | None = None) -> None:
        """Deliver a message here, as if ``peer`` had sent it."""
    def sent(self, timeout: float = 0) -> tuple[int, bytes, bytes | None] | None:
        """Return the next message that arrived here, as (peer, head, body).

        None if no message arrives within ``timeout`` seconds.
        """
    def complete(self) -> int:
        """Run the done callbacks that were held back; return how many."""
    def wake(self) -> None:
        """End a wait of the data plane. Any thread may call it."""
    def close(self) -> None:
        """Drop unread messages and run the callbacks that were held back. Idempotent."""
