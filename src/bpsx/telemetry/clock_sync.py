"""Estimates the scheduler's clock on a node. Pure.

A node sends its own time, and the scheduler replies with its wall clock. That wall clock was read
at some moment of the round trip: the middle is the best guess, and half the round trip bounds the
error. Of a burst of round trips, the shortest counts. Bursts are repeated, since clocks drift;
between them, the offset is interpolated.
"""

from __future__ import annotations

from bisect import bisect
from dataclasses import dataclass

#: Most bursts kept. Further ones would be older than any record that is still to be written.
_MOST = 4096


@dataclass(frozen=True)
class Estimate:
    """One estimate: at ``at`` (own monotonic clock), the other clock was ahead by ``offset``.

    ``error``: bound of the offset's error. All in ns.
    """

    at: int
    offset: int
    error: int


class Clock:
    """Converts the node's monotonic times into the scheduler's wall-clock times.

    One thread may add estimates, any thread may read them.
    """

    def __init__(self) -> None:
        self._bursts: list[Estimate] = []
        self._best: Estimate | None = None

    def exchange(self, sent: int, theirs: int, received: int) -> None:
        """Add a round trip to the present burst. Times in ns.

        ``sent``, ``received``: own clock before and after; ``theirs``: the other clock in between.
        Impossible values are ignored.
        """
        if not 0 <= sent <= received:
            return
        middle = (sent + received) // 2
        found = Estimate(middle, theirs - middle, (received - sent + 1) // 2)
        if self._best is None or found.error < self._best.error:
            self._best = found

    def settle(self) -> None:
        """End the burst and keep its shortest round trip."""
        if self._best is not None and len(self._bursts) < _MOST:
            self._bursts.append(self._best)
        self._best = None

    @property
    def known(self) -> bool:
        """Whether any reply has come."""
        return bool(self._bursts or self._best)

    def estimates(self) -> list[Estimate]:
        """All estimates, ordered by time."""
        best = self._best
        return sorted(self._bursts + ([best] if best is not None else []), key=lambda e: e.at)

    @property
    def error_ns(self) -> int:
        """The largest error bound of the estimates; 0 without any."""
        return max((e.error for e in self.estimates()), default=0)


def offset_at(estimates: list[Estimate], at: int) -> int:
    """The offset at own time ``at``: interpolated between neighbours, or the nearest one's.

    ``estimates``: ordered by time, not empty.
    """
    i = bisect(estimates, at, key=lambda e: e.at)
    if i == 0 or i == len(estimates):
        return estimates[max(i - 1, 0)].offset
    a, b = estimates[i - 1], estimates[i]
    return a.offset + (b.offset - a.offset) * (at - a.at) // max(b.at - a.at, 1)
