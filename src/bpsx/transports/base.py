"""The control plane of a transport: what sessions and servers call from Python.

The data plane is ``abi.pxd``.

An endpoint is one process's (or one server lane's) end of the transport, with numbered peers. A
worker connects to lanes 0, 1, …; a lane knows workers by rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol


class Endpoint(Protocol):
    """What every transport's endpoint provides. One thread at a time, except where said."""

    address: str
    """``host:port`` after :meth:`bind`, else empty."""

    wake_descriptor: int
    """An eventfd: who writes to it ends a wait, from another process, too. -1 if there is none."""

    malformed: int
    """Messages that were dropped because they made no sense to the transport."""

    def bind(self, host: str, ports: Sequence[int] = ()) -> str:
        """Listen on ``host`` at the first free one of ``ports``, else at any free
        port; returns the address. Raises :class:`~bpsx.errors.TransportError`."""

    def join(self, job: int, rank: int) -> None:
        """The job's number, and the rank under which lanes shall know this endpoint; before
        :meth:`connect` and the first message.
        """

    def connect(self, peer: int, address: str) -> None:
        """Reach the lane at ``address`` as peer ``peer``.

        Raises :class:`~bpsx.errors.TransportError`.
        """

    def watch(self) -> int:
        """Start to watch connections; returns a descriptor that becomes readable when :meth:`lost`
        has news.
        """

    def lost(self) -> list[int]:
        """Peers whose connection broke since the last call; -1 for one that cannot be named."""

    def abi(self) -> Any:
        """A capsule named ``bpsx.Endpoint`` with the C function table; valid as long as this
        object.
        """

    def wake(self) -> None:
        """End a wait of the data plane. Any thread."""

    def close(self) -> None:
        """Drop what is unsent; on return every done callback has run.

        Idempotent; after the driving thread has stopped.
        """
