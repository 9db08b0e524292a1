"""Who has called ``join()``, and when everybody is back. Pure: the hub's one thread owns it.

A worker that has joined pushes nothing more; the lanes close rounds without it. When all have
joined, first the servers forget their marks and say so, then the workers hear it: or a fast
worker's next push could meet the mark of a slow one.

Where the processes of a machine sum among themselves, the machine's root keeps marks, too, and the
servers are told once all of a machine have joined.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any


class Joins:
    """One gathering after another.

    ``joined`` are the ranks that have called ``join()`` in the present one, the last one last.
    """

    def __init__(self) -> None:
        self.joined: dict[int, None] = {}
        self.generation = 0
        # holders of marks that have not forgotten their marks yet
        self._awaited: set[bytes] = set()
        self._clearing = False
        self._last = -1

    def join(
        self,
        rank: int,
        live: Collection[int],
        servers: Sequence[bytes],
        roots: Mapping[int, bytes] | None = None,
        processes: int = 1,
    ) -> list[tuple[bytes, dict[str, Any]]]:
        """Worker ``rank`` joins; ``live`` are the workers still in the job.

        What servers and roots have to be told.

        ``roots``: machine -> who speaks for its ``processes`` workers, where that is not each for
        itself.
        """
        if rank in self.joined:
            return []
        self.joined[rank] = None
        if self._all_here(live):
            return self._clear(live, [*servers, *(roots or {}).values()])
        machine = rank // processes
        told = [roots[machine]] if roots and machine in roots else []
        if all(r in self.joined for r in range(machine * processes, (machine + 1) * processes)):
            told += servers
        return [(s, {"type": "JOINED", "rank": rank}) for s in told]

    def left(
        self, live: Collection[int], servers: Iterable[bytes]
    ) -> list[tuple[bytes, dict[str, Any]]]:
        """A worker of an asynchronous job is gone: perhaps it was the last one awaited."""
        return self._clear(live, servers) if live and self._all_here(live) else []

    def cleared(self, holder: bytes, generation: int) -> int | None:
        """``holder`` has forgotten its marks. The rank that joined last, once all have."""
        if not self._clearing or generation != self.generation:
            return None
        self._awaited.discard(holder)
        if self._awaited:
            return None
        self.joined, self._clearing = {}, False
        self.generation += 1
        return self._last

    def _all_here(self, live: Collection[int]) -> bool:
        return (
            not self._clearing
            and len(live) <= len(self.joined)
            and all(rank in self.joined for rank in live)
        )

    def _clear(
        self, live: Collection[int], holders: Iterable[bytes]
    ) -> list[tuple[bytes, dict[str, Any]]]:
        self._clearing = True
        # who died since is no root for anything
        self._last = [rank for rank in self.joined if rank in live][-1]
        self._awaited = set(holders)
        return [
            (s, {"type": "CLEAR", "generation": self.generation}) for s in sorted(self._awaited)
        ]
