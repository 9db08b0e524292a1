"""A clock that does not count the time in which its process was stopped."""

from __future__ import annotations

import time

#: Seconds between two readings that count at most: a tick of a control thread.
_LONGEST = 1.0


class AwakeClock:
    """Seconds in which this process ran, for one thread that reads them every second.

    A process that SIGSTOP, a debugger or a busy machine holds up hears nothing of the others, so it
    must not count that time against them. Of the time between two readings a second counts at most.
    """

    def __init__(self, patience: float) -> None:
        """``patience``: seconds for which the thread waits; they take two readings at least."""
        self._longest = min(_LONGEST, patience / 2)
        self._last = time.monotonic()
        self._counted = 0.0

    def now(self) -> float:
        """Return the seconds that have counted since this clock was made."""
        last, self._last = self._last, time.monotonic()
        self._counted += min(self._last - last, self._longest)
        return self._counted
