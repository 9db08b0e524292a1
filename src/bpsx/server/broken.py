"""Broken connections to workers, and whether the scheduler has explained each.

For one thread: the control thread.
"""

from __future__ import annotations

import logging
import select
from collections.abc import Mapping, Sequence

from bpsx.system.unexplained import Unexplained
from bpsx.transports.base import Endpoint

log = logging.getLogger("bpsx.connections")


class Broken:
    """Watcher of the endpoints of all lanes.

    A worker that leaves closes its connections, and a worker that dies loses its connection to the
    scheduler. A lost connection is therefore a failure only if the scheduler reports nothing about
    that worker for ``patience`` seconds, in which this process was awake.
    """

    def __init__(
        self,
        endpoints: Sequence[Endpoint],
        workers: Mapping[int, str],
        processes: int,
        patience: float,
    ) -> None:
        """``workers``: names by rank. ``processes``: workers that share a connection to a lane."""
        self._endpoints, self._workers, self._processes = endpoints, dict(workers), processes
        self._left: set[int] = set()
        self._patience = patience
        self._lost = Unexplained(patience)
        self._epoll = select.epoll()
        for endpoint in endpoints:
            self._epoll.register(endpoint.watch(), select.EPOLLIN)
        #: Descriptor that becomes readable when :meth:`look` has work.
        self.descriptor = self._epoll.fileno()

    def look(self) -> None:
        """Record the connections that broke since the last call."""
        for endpoint in self._endpoints:
            for peer in endpoint.lost():
                # The worker that speaks for the processes of its machine is the last of them.
                rank = peer * self._processes + self._processes - 1
                if peer in self._left or peer in self._lost or rank not in self._workers:
                    continue  # -1: a stranger, or a worker that has not sent anything yet
                log.info(
                    "the connection of %s to the lane at %s broke",
                    self._workers[rank],
                    endpoint.address,
                )
                self._lost.note(
                    peer,
                    f"{self._workers[rank]} is gone: its connection to the lane at"
                    f" {endpoint.address} broke",
                )

    @property
    def ranks(self) -> list[int]:
        """The ranks of the senders whose connections have ended without an explanation."""
        return [peer * self._processes + self._processes - 1 for peer in self._lost]

    def restart(self) -> None:
        """Give the scheduler the whole time again: there was none until now."""
        self._lost.restart(self._patience)

    def left(self, rank: int) -> None:
        """Record that worker ``rank`` has left, as the scheduler reports."""
        self._left.add(rank // self._processes)
        self._lost.explain(rank // self._processes)

    def came(self, rank: int, name: str) -> None:
        """Record that worker ``rank`` has entered the job, perhaps in the place of a lost one."""
        self._workers[rank] = name
        self._left.discard(rank // self._processes)
        self._lost.explain(rank // self._processes)

    def verdict(self) -> str:
        """Describe the loss that the scheduler should have explained by now; empty if none."""
        text = self._lost.verdict()
        silence = f"the scheduler has not reported it for {self._patience:g} s"
        return f"{text}, and {silence}" if text else ""
