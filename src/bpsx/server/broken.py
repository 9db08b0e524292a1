"""Connections to workers that broke, and whether the scheduler has a reason for each.

One thread: the control thread.
"""

from __future__ import annotations

import logging
import select
import time
from collections.abc import Sequence

from bpsx.transports.base import Endpoint

log = logging.getLogger("bpsx.connections")


class Broken:
    """Watches the endpoints of all lanes.

    A worker that leaves closes its connections, and a worker that dies loses its connection to the
    scheduler, so a loss counts only if the scheduler says nothing of that worker for ``patience``
    seconds.
    """

    def __init__(
        self, endpoints: Sequence[Endpoint], workers: Sequence[str], processes: int, patience: float
    ) -> None:
        """``workers``: their names by rank. ``processes`` of them share one connection to a
        lane.
        """
        self._endpoints, self._workers, self._processes, self._patience = (
            endpoints,
            workers,
            processes,
            patience,
        )
        self._left: set[int] = set()
        # by the number by which lanes know who sends
        self._lost: dict[int, tuple[float, str]] = {}
        self._epoll = select.epoll()
        for endpoint in endpoints:
            self._epoll.register(endpoint.watch(), select.EPOLLIN)
        #: Becomes readable when :meth:`look` has something to see.
        self.descriptor = self._epoll.fileno()

    def look(self) -> None:
        """Take note of connections that have broken since the last call."""
        for endpoint in self._endpoints:
            for peer in endpoint.lost():
                # who speaks for the processes of a machine
                rank = peer * self._processes + self._processes - 1
                if peer in self._left or peer in self._lost or not 0 <= rank < len(self._workers):
                    continue  # -1: a stranger, or a worker that has not said anything yet
                log.info(
                    "the connection of %s to the lane at %s is gone",
                    self._workers[rank],
                    endpoint.address,
                )
                self._lost[peer] = (
                    time.monotonic(),
                    (
                        f"{self._workers[rank]} is gone: its connection to the lane at"
                        f" {endpoint.address} broke"
                    ),
                )

    def left(self, rank: int) -> None:
        """Worker ``rank`` has left, as the scheduler says."""
        self._left.add(rank // self._processes)
        self._lost.pop(rank // self._processes, None)

    def verdict(self) -> str:
        """The loss that the scheduler should have explained by now; empty if there is none."""
        if not self._lost:
            return ""
        since, text = min(self._lost.values())
        late = time.monotonic() - since >= self._patience
        return (
            f"{text}, and the scheduler has said nothing of it for {self._patience:g} s"
            if late
            else ""
        )
