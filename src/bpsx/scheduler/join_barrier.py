"""The barrier of ``join()``, which opens when all workers have joined. Pure.

Owned by the hub's only thread. A worker that has joined pushes nothing more, and the lanes close
rounds without it. When all workers have joined, the servers first clear their marks of joined
workers and confirm it; only then do the workers get ALL_JOINED. Otherwise, a fast worker's next
push could meet the mark of a slow worker.

Where the processes of a machine sum among themselves, the machine's root keeps marks, too. Servers
then learn of the join once all processes of a machine have joined.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any


class Joins:
    """A sequence of barriers.

    ``joined``: ranks that have called ``join()`` for the present one, in this order.
    """

    def __init__(self) -> None:
        self.joined: dict[int, None] = {}
        self.generation = 0
        # Servers and roots that have not cleared their marks yet.
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
        """Worker ``rank`` joins; returns the messages to servers and roots.

        ``live``: ranks of the workers still in the job. ``roots``: machine -> the process that
        speaks for its ``processes`` workers, unless each worker speaks for itself.
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
        joined = {"type": "JOINED", "rank": rank, "generation": self.generation}
        return [(s, joined) for s in told]

    def clear(self, holders: Iterable[bytes], **more: Any) -> list[tuple[bytes, dict[str, Any]]]:
        """Let all ``holders`` count rounds from zero, as after a join. Nothing is under way.

        ``more``: further fields of their messages.
        """
        self._clearing, self._awaited = True, set(holders)
        clear = {"type": "CLEAR", "generation": self.generation, **more}
        return [(s, clear) for s in sorted(self._awaited)]

    def left(
        self, live: Collection[int], servers: Iterable[bytes], roots: Mapping[int, bytes]
    ) -> list[tuple[bytes, dict[str, Any]]]:
        """Stop awaiting a worker that is gone; clear the marks if all others have joined.

        Arguments as in :meth:`join`.
        """
        holders = [*servers, *roots.values()]
        return self._clear(live, holders) if live and self._all_here(live) else []

    def cleared(self, holder: bytes, generation: int) -> int | None:
        """``holder`` has cleared its marks; returns the last rank to join once all holders have."""
        if not self._clearing or generation != self.generation:
            return None
        self._awaited.discard(holder)
        return self.over()

    def over(self) -> int | None:
        """Return what :meth:`cleared` would, if no holder has to clear its marks.

        A job that has lost its last server, and waits for another, has no holders.
        """
        if not self._clearing or self._awaited:
            return None
        self.joined, self._clearing = {}, False
        self.generation += 1
        return self._last

    def lost(self, holder: bytes) -> int | None:
        """``holder`` is gone, and its marks with it; returns what :meth:`cleared` would."""
        return self.cleared(holder, self.generation) if holder in self._awaited else None

    def marks(self, processes: int) -> tuple[list[int], int]:
        """Return the servers' marks: the ranks that have joined, and the number of ended joins.

        A join whose marks are being cleared counts as ended. ``processes``: as in :meth:`join`.
        """
        if self._clearing:
            return [], self.generation + 1
        whole = [
            rank
            for rank in self.joined
            if all(
                r in self.joined
                for r in range(rank - rank % processes, rank - rank % processes + processes)
            )
        ]
        return whole, self.generation

    def _all_here(self, live: Collection[int]) -> bool:
        return (
            not self._clearing
            and len(live) <= len(self.joined)
            and all(rank in self.joined for rank in live)
        )

    def _clear(
        self, live: Collection[int], holders: Iterable[bytes]
    ) -> list[tuple[bytes, dict[str, Any]]]:
        # A worker that has died since cannot be the root of a broadcast.
        self._last = [rank for rank in self.joined if rank in live][-1]
        return self.clear(holders, entering=[], term=0)
