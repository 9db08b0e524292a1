"""The scheduler's clock, as well as a node can know it. Pure.

A node sends its own time, the scheduler answers with its wall clock, and the answer comes back
after a round trip. What the scheduler said was true at some moment within it; the middle is the
best guess, and half the round trip bounds the error. Of a burst of round trips the shortest counts.
Bursts are repeated, since clocks drift; in between, the offset is interpolated.
"""

from __future__ import annotations

from bisect import bisect
from dataclasses import dataclass

#: Bursts kept. More would be older than any record that is still to be written.
_MOST = 4096


@dataclass(frozen=True)
class Estimate:
    """At ``at`` (own monotonic clock) the other clock was ahead by ``offset``, give or take
    ``error``.

    All in ns.
    """

    at: int
    offset: int
    error: int


class Clock:
    """Turns own monotonic times into the scheduler's wall-clock times.

    One thread adds, any may ask.
    """

    def __init__(self) -> None:
        self._bursts: list[Estimate] = []
        self._best: Estimate | None = None

    def exchange(self, sent: int, theirs: int, received: int) -> None:
        """One round trip of the present burst: own clock before and after, the other's in between,
        ns.

        Nonsense is ignored.
        """
        if not 0 <= sent <= received:
            return
        middle = (sent + received) // 2
        found = Estimate(middle, theirs - middle, (received - sent + 1) // 2)
        if self._best is None or found.error < self._best.error:
            self._best = found

    def settle(self) -> None:
        """The burst is over: its shortest round trip counts."""
        if self._best is not None and len(self._bursts) < _MOST:
            self._bursts.append(self._best)
        self._best = None

    @property
    def known(self) -> bool:
        """Whether there has been any answer."""
        return bool(self._bursts or self._best)

    def estimates(self) -> list[Estimate]:
        """All that is known, in order of time."""
        best = self._best
        return sorted(self._bursts + ([best] if best is not None else []), key=lambda e: e.at)

    @property
    def error_ns(self) -> int:
        """The largest error bound of the estimates; 0 without any."""
        return max((e.error for e in self.estimates()), default=0)


def offset_at(estimates: list[Estimate], at: int) -> int:
    """The offset at own time ``at``: between the estimates next to it, or that of the nearest.

    ``estimates`` is in order of time, not empty.
    """
    i = bisect(estimates, at, key=lambda e: e.at)
    if i == 0 or i == len(estimates):
        return estimates[max(i - 1, 0)].offset
    a, b = estimates[i - 1], estimates[i]
    return a.offset + (b.offset - a.offset) * (at - a.at) // max(b.at - a.at, 1)
