"""Control plane of a transport: the methods that sessions and servers call from Python.

``abi.pxd`` has the data plane.

An endpoint is one end of the transport, owned by a worker process or by a lane. Its peers are
numbered: a worker's peers are lanes 0, 1, …; a lane's peers are workers, by rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

#: For :meth:`Endpoint.connect`: no other thread uses the endpoint.
ALONE: AbstractContextManager[Any] = nullcontext()
#: Seconds that a transport returns from :meth:`Endpoint.round_trip` if it cannot tell.
UNKNOWN_TRIP = 0.0005


_RANK_BITS = 16  # see :data:`bpsx.config.MOST_WORKERS`


def pass_number(rank: int, visit: int) -> int:
    """The number that a worker shows to lanes, once: its rank and its visit."""
    return rank | visit << _RANK_BITS


def rank_of(number: int) -> int:
    """The rank in a number of :func:`pass_number`."""
    return number & (1 << _RANK_BITS) - 1


def shortest_round_trips(endpoint: Endpoint, servers: Sequence[int]) -> dict[int, float]:
    """Return each server's shortest round trip. ``servers``: the server's number for each lane."""
    found: dict[int, float] = {}
    for lane, server in enumerate(servers):
        trip = endpoint.round_trip(lane)
        found[server] = min(trip, found.get(server, trip))
    return found


class Endpoint(Protocol):
    """Interface of every transport's endpoint.

    The data plane's ``drop`` ends the connection to one peer, :meth:`close` ends all.

    One thread at a time may call it, except where a method says otherwise.
    """

    address: str
    """``host:port`` after :meth:`bind`, else empty."""

    wake_descriptor: int
    """An eventfd: a write to it ends a wait, also from another process. -1 if there is none."""

    malformed: int
    """Messages that were dropped because they made no sense to the transport."""

    def bind(self, host: str, ports: Sequence[int] = ()) -> str:
        """Listen on ``host`` at the first free port of ``ports``, or at any free port if empty.

        Returns the address. Raises :class:`~bpsx.errors.TransportError`.
        """

    def join(self, job: int, rank: int, visit: int = 0) -> None:
        """Set the job's number and the rank under which lanes know this endpoint.

        ``visit``: below 2**16, differs from those of earlier endpoints of the same rank. A lane
        accepts each of them once, and each replaces those before it.

        Call it before :meth:`connect` and before the first message.
        """

    def connect(
        self, peer: int, address: str, undriven: AbstractContextManager[Any] = ALONE
    ) -> None:
        """Connect to the lane at ``address``, which becomes peer ``peer``.

        Another thread may drive the data plane meanwhile. ``undriven``: context in which none does;
        entered only for what needs that, and left before anything that may block.

        Raises :class:`~bpsx.errors.TransportError`.
        """

    def round_trip(self, peer: int) -> float:
        """Return the shortest known round trip to a lane, in seconds.

        0 if round trips do not limit how much the connection carries, or if there is none. Any
        thread may call it.
        """

    def fit_buffers(self, rate: float) -> None:
        """Fit what the transport buffers to links that carry ``rate`` bytes of tensors per second.

        Called when the job has measured them. A transport without such buffers does nothing. Any
        thread may call it.
        """

    def watch(self) -> int:
        """Start to watch the connections.

        Returns a descriptor that becomes readable when :meth:`lost` has something to return.
        """

    def lost(self) -> list[int]:
        """Return the peers whose connection broke since the last call; -1 for an unknown peer.

        A lane knows a worker since it has received the worker's first message, if not before. A
        peer is not reported after it was dropped (``drop`` in ``abi.pxd``).
        """

    def abi(self) -> Any:
        """Return a capsule named ``bpsx.Endpoint`` with the table of C functions.

        The capsule is valid as long as this object.
        """

    def wake(self) -> None:
        """End a wait of the data plane. Any thread may call it."""

    def close(self) -> None:
        """Drop unsent messages; every done callback has run when this returns.

        Idempotent. Call it after the driving thread has stopped.
        """
