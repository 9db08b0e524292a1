"""Who waits for what: the hub's view of push_pulls that do not end. Pure.

A worker reports the tensors that it has pushed and that have not come back. A tensor that another worker does not report has not been pushed
there. One such case is a slow worker: a warning. If *every* worker waits for something that another one has not pushed, and has
done so for long, nobody can go on: that is what differing names look like.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

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

    def report(self, rank: int, tensors: Sequence[Sequence[object]], more: bool) -> None:
        """Worker ``rank`` waits for ``tensors``: [name, generation, round, seconds]; ``more``: the list was cut."""
        self._by_rank[rank] = {(str(n), int(g)): _Wait(int(r), float(s)) for n, g, r, s in tensors}  # type: ignore[call-overload]
        (self._truncated.add if more else self._truncated.discard)(rank)

    def _lacking(self, key: Key, ranks: Sequence[int]) -> list[int]:
        """Workers that have not pushed ``key``, as far as one can know."""
        return [r for r in ranks if r not in self._truncated and key not in self._by_rank.get(r, {})]

    def warnings(self, ranks: Sequence[int], now: float) -> list[tuple[int, str]]:
        """(rank, text) for workers that should be told why they wait; each tensor once per warning interval."""
        out = []
        for rank in ranks:
            for key, wait in self._by_rank.get(rank, {}).items():
                lacking = self._lacking(key, ranks)
                if wait.seconds < self._warn_after or not lacking or now - self._warned.get(key, -1e9) < self._warn_after:
                    continue
                self._warned[key] = now
                out.append((rank, f"tensor {key[0]!r} round {wait.round}: pushed {wait.seconds:.0f} s ago by worker {rank}, "
                                  f"not pushed by {self._tell(lacking)}"))
        return out

    def _tell(self, lacking: Sequence[int]) -> str:
        parts = []
        for rank in lacking[:8]:
            others = sorted(k[0] for k in self._by_rank.get(rank, {}))
            parts.append(f"worker {rank}" + (f" (which waits for {', '.join(map(repr, others[:3]))})" if others else ""))
        return ", ".join(parts) + (f" and {len(lacking) - 8} more" if len(lacking) > 8 else "")

    def deadlock(self, ranks: Sequence[int]) -> list[tuple[int, list[list[object]], str]]:
        """(rank, [[name, generation]], text) to fail, when every worker has waited in vain for long enough; else nothing."""
        stuck: dict[int, list[Key]] = {}
        for rank in ranks:
            stuck[rank] = [k for k, w in self._by_rank.get(rank, {}).items()
                           if w.seconds >= self._deadlock_after and self._lacking(k, ranks)]
        if len(ranks) < 2 or not all(stuck.values()):
            return []
        text = "; ".join(f"worker {r} waits for {', '.join(repr(k[0]) for k in keys[:4])}" for r, keys in stuck.items())
        for rank in ranks:
            self._by_rank[rank] = {}
        return [(rank, [[k[0], k[1]] for k in keys],
                 f"nobody can go on: {text}; each of these has not been pushed by another worker. Do all workers use the same names, "
                 "in code that all of them reach?") for rank, keys in stuck.items()]
