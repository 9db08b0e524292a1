"""Who has called ``join()``, and when everybody is back. Pure: the hub's one thread owns it.

A worker that has joined pushes nothing more; the lanes close rounds without it. When all have joined, first the servers forget their
marks and say so, then the workers hear it: or a fast worker's next push could meet the mark of a slow one.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any


class Joins:
    """One gathering after another. ``joined`` are the ranks that have called ``join()`` in the present one, the last one last."""

    def __init__(self) -> None:
        self.joined: list[int] = []
        self.generation = 0
        self._awaited: set[bytes] = set()       # servers that have not forgotten their marks yet
        self._clearing = False
        self._last = -1

    def join(self, rank: int, live: Collection[int], servers: Iterable[bytes]) -> list[tuple[bytes, dict[str, Any]]]:
        """Worker ``rank`` joins; ``live`` are the workers still in the job. What the servers have to be told."""
        if rank in self.joined:
            return []
        self.joined.append(rank)
        if self._all_here(live):
            return self._clear(live, servers)
        return [(s, {"type": "JOINED", "rank": rank}) for s in servers]

    def left(self, live: Collection[int], servers: Iterable[bytes]) -> list[tuple[bytes, dict[str, Any]]]:
        """A worker is gone and the job goes on: perhaps it was the last one awaited."""
        return self._clear(live, servers) if live and self._all_here(live) else []

    def cleared(self, server: bytes, generation: int) -> int | None:
        """``server`` has forgotten its marks. The rank that joined last, once all servers have."""
        if not self._clearing or generation != self.generation:
            return None
        self._awaited.discard(server)
        if self._awaited:
            return None
        self.joined, self._clearing = [], False
        self.generation += 1
        return self._last

    def _all_here(self, live: Collection[int]) -> bool:
        return not self._clearing and set(live) <= set(self.joined)

    def _clear(self, live: Collection[int], servers: Iterable[bytes]) -> list[tuple[bytes, dict[str, Any]]]:
        self._clearing = True
        self._last = [rank for rank in self.joined if rank in live][-1]     # who died since is no root for anything
        self._awaited = set(servers)
        return [(s, {"type": "CLEAR", "generation": self.generation}) for s in sorted(self._awaited)]
