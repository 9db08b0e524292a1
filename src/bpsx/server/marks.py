"""A server's record of workers that left, called join(), entered late or were lost.

A restarted scheduler gets it in AGAIN. It may repeat messages that the earlier scheduler has sent.
For one thread: the control thread.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any


class Marks:
    """The marks of one server.

    ``cleared``: number of joins whose marks have been cleared. ``joined``: ranks that have joined
    since. ``dropped``: lost workers, and the term since which the job goes on without each.
    ``entered``: workers that have joined late, and the term from which each lives.
    """

    def __init__(
        self,
        size: int,
        workers: Iterable[int],
        cleared: int = 0,
        term: int = 0,
        dropped: Iterable[tuple[int, int]] = (),
    ) -> None:
        """``size``: number of worker processes with which the job has begun.

        ``workers``: ranks of all that have been in it. ``cleared``, ``term`` (the latest before
        this server began), ``dropped``: as WELCOME says.
        """
        self._born = term
        self._size, self._workers = size, set(workers)
        self.cleared = cleared
        self.joined: set[int] = set()
        self.dropped: dict[int, int] = dict(dropped)
        self.entered: dict[int, int] = {}
        self._left: dict[int, tuple[str, int]] = {}  # rank -> host, pid

    def leave(self, rank: int, host: str, pid: int) -> None:
        """Handle LEFT: record a worker's departure."""
        self._left[rank] = (host, pid)

    def enter(self, rank: int, term: int) -> None:
        """Handle CLEAR for a newcomer: record its entry, perhaps in the place of a lost worker."""
        self.dropped.pop(rank, None)
        self.entered[rank] = term
        self._workers.add(rank)

    def drop(self, rank: int, term: int) -> bool:
        """Handle TERM: record a lost worker without which the job goes on.

        Returns whether the loss is new. It is not if another worker has entered in its place since.
        """
        known = rank in self.dropped or rank in self.entered
        since = max(self.entered.get(rank, 0), self.dropped.get(rank, 0))
        if term <= (since if known else self._born):
            return False
        self.dropped[rank] = term
        return True

    def join(self, rank: int, generation: int) -> bool:
        """Handle JOINED: record a worker's call of join(). Returns whether it is new."""
        if generation < self.cleared or rank in self.joined:
            return False
        self.joined.add(rank)
        return True

    def clear(self, generation: int) -> bool:
        """Handle CLEAR: forget the calls of join(). Returns whether it is new."""
        if generation < self.cleared:
            return False
        self.cleared = generation + 1
        self.joined.clear()
        return True

    @property
    def all_left(self) -> bool:
        """Whether no worker can need this server any more."""
        return self.workers <= {*self._left}

    @property
    def workers(self) -> set[int]:
        """The ranks of the workers that are not lost."""
        return self._workers - set(self.dropped)

    def report(
        self,
        failure: str,
        broken: Iterable[int],
        heard: int,
        numbers: Mapping[str, Any],
        leaves: bool,
    ) -> dict[str, Any]:
        """Return the fields of AGAIN.

        ``failure``: why the job has failed here, or "". ``broken``: ranks of workers whose
        connections have ended. ``heard``: the latest term of which workers have told a lane.
        ``numbers``: ``slots`` and ``key``, as in a worker's AGAIN. ``leaves``: this server has
        asked to leave.
        """
        return {
            "size": self._size,
            "failure": failure or None,
            "cleared": self.cleared,
            "state": {
                "joined": sorted(self.joined),
                "left": [[rank, host, pid] for rank, (host, pid) in sorted(self._left.items())],
                "dropped": sorted(self.dropped.items()),
                "entered": sorted(self.entered.items()),
                "broken": sorted(broken),
                "heard": heard,
                "leaves": leaves,
                **numbers,
            },
        }
