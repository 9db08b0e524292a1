"""What a server has heard of its workers: who has left, and who has called join().

A scheduler that is started again learns it from here, and may repeat what the one before had said.
For one thread: the control thread.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any


class Marks:
    """The marks of one server.

    ``cleared``: number of joins whose marks have been cleared. ``joined``: ranks that have joined
    since. ``dropped``: lost workers, and the term since which the job goes on without each.
    """

    def __init__(self, workers: int, cleared: int = 0) -> None:
        """``workers``: number of worker processes in the job. ``cleared``: as WELCOME says."""
        self._workers = workers
        self.cleared = cleared
        self.joined: set[int] = set()
        self.dropped: dict[int, int] = {}
        self._left: dict[int, tuple[str, int]] = {}  # rank -> host, pid

    def leave(self, rank: int, host: str, pid: int) -> None:
        """LEFT."""
        self._left[rank] = (host, pid)

    def drop(self, rank: int, term: int) -> None:
        """TERM: the job goes on without a lost worker."""
        self.dropped[rank] = max(term, self.dropped.get(rank, 0))

    def join(self, rank: int, generation: int) -> bool:
        """JOINED; returns whether it is news."""
        if generation < self.cleared or rank in self.joined:
            return False
        self.joined.add(rank)
        return True

    def clear(self, generation: int) -> bool:
        """CLEAR; returns whether it is news."""
        if generation < self.cleared:
            return False
        self.cleared = generation + 1
        self.joined.clear()
        return True

    @property
    def all_left(self) -> bool:
        """Whether no worker can need this server any more."""
        return len({*self._left, *self.dropped}) == self._workers

    def report(self, failure: str, broken: Iterable[int]) -> dict[str, Any]:
        """AGAIN's fields.

        ``failure``: why the job has failed here, or "". ``broken``: ranks of workers whose
        connections have ended.
        """
        return {
            "size": self._workers,
            "failure": failure or None,
            "cleared": self.cleared,
            "state": {
                "joined": sorted(self.joined),
                "left": [[rank, host, pid] for rank, (host, pid) in sorted(self._left.items())],
                "dropped": sorted(self.dropped.items()),
                "broken": sorted(broken),
            },
        }
