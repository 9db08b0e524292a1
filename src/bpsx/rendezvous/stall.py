"""Who waits for what: the hub's view of push_pulls that do not end. Pure.

A worker reports the tensors that it has pushed and that have not come back. A tensor that another worker does not report has not been pushed
there. One such case is a slow worker: a warning. If *every* worker waits for something that another one has not pushed, and has
done so for long, nobody can go on: that is what differing names look like.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

Key = tuple[str, int]


@dataclass
class _Wait:
    round: int
    seconds: float


class Stalls:
    """Reports by rank and what follows from them."""

    def __init__(self, warn_after: float, deadlock_after: float) -> None:
        self._warn_after = warn_after
        self._deadlock_after = deadlock_after
        self._by_rank: dict[int, dict[Key, _Wait]] = {}
        self._truncated: set[int] = set()
        self._warned: dict[Key, float] = {}

    def report(self, rank: int, tensors: Sequence[Sequence[Any]], more: bool) -> None:
        """Worker ``rank`` waits for ``tensors``: [name, generation, round, seconds]; ``more``: the list was cut."""
        self._by_rank[rank] = {(n, g): _Wait(r, s) for n, g, r, s in tensors}
        (self._truncated.add if more else self._truncated.discard)(rank)

    def waits(self, rank: int, warn_after: float | None = None) -> list[tuple[str, int, float]]:
        """What worker ``rank`` has waited for longer than a warning takes, the longest first: (tensor, round, seconds)."""
        limit = self._warn_after if warn_after is None else warn_after
        found = [(k[0], w.round, w.seconds) for k, w in list(self._by_rank.get(rank, {}).items()) if w.seconds >= limit]
        return sorted(found, key=lambda x: -x[2])

    def _lacking(self, key: Key, ranks: Sequence[int]) -> list[int]:
        """Workers that have not pushed ``key``, as far as one can know."""
        return [r for r in ranks if r not in self._truncated and key not in self._by_rank.get(r, {})]

    def warnings(self, ranks: Sequence[int], now: float) -> list[tuple[int, str]]:
        """(rank, text) for workers that should be told why they wait; each tensor once per warning interval."""
        out = []
        for rank in ranks:
            for key, wait in self._by_rank.get(rank, {}).items():
                lacking = self._lacking(key, ranks)
                if wait.seconds < self._warn_after or now - self._warned.get(key, -1e9) < self._warn_after:
                    continue
                self._warned[key] = now
                why = f"not pushed by {self._tell(lacking)}" if lacking else "pushed by all, its sum is not back yet"
                out.append((rank, f"tensor {key[0]!r} round {wait.round}: pushed {wait.seconds:.0f} s ago by worker {rank}, {why}"))
        return out

    def _tell(self, lacking: Sequence[int]) -> str:
        parts = []
        for rank in lacking[:8]:
            others = sorted(k[0] for k in self._by_rank.get(rank, {}))
            parts.append(f"worker {rank}" + (f" (which waits for {', '.join(map(repr, others[:3]))})" if others else ""))
        return ", ".join(parts) + (f" and {len(lacking) - 8} more" if len(lacking) > 8 else "")

    def deadlock(self, ranks: Sequence[int]) -> dict[int, list[Key]]:
        """What each worker waits for in vain, when every one of ``ranks`` has done so for long enough; else nothing."""
        stuck = {rank: [k for k, w in self._by_rank.get(rank, {}).items() if w.seconds >= self._deadlock_after and self._lacking(k, ranks)]
                 for rank in ranks}
        if len(ranks) < 2 or not all(stuck.values()):
            return {}
        for rank in ranks:
            self._by_rank[rank] = {}
        return stuck
