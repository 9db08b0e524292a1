"""Tracks which threads wait for push_pulls and since when, and which errors are still unraised."""

from __future__ import annotations

import sys
import time
from collections.abc import Collection
from threading import get_ident
from typing import Any

#: Ids of bpsx's own threads that begin push_pulls on behalf of others.
OURS: set[int] = set()
#: Seconds after which a thread that has not asked counts as busy with something else. A wait asks
#: five times a second.
RECENT = 3.0


class Waiters:
    """The waiting threads of one session. Thread-safe; each thread writes only its own entries."""

    def __init__(self) -> None:
        #: thread -> the handle that it waits for, once the wait has taken longer than a moment
        self.waits: dict[int, Any] = {}
        #: thread -> time of its last question, in seconds of the monotonic clock
        self.asked: dict[int, float] = {}
        #: Number of waits that ended with an exception before their push_pull did.
        self.abandoned_waits = 0
        #: Whether a framework's graph contains push_pulls. It proceeds without any thread asking.
        self.graphs = False
        #: Time from which everything under way is waited for, in ns of the monotonic clock; 0: not.
        self.everything_ns = 0
        #: Names that workers disagree about, until an error of that name is raised in the script.
        #: A name is added before its error can be raised.
        self.unraised_names: set[str] = set()

    def note(self, handle: Any) -> None:
        """Record that the calling thread waits for ``handle``."""
        me = get_ident()
        self.waits[me] = handle
        self.asked[me] = time.monotonic()

    def polls(self) -> None:
        """Record that the calling thread asks whether a push_pull has ended."""
        self.asked[get_ident()] = time.monotonic()

    def over(self, abandoned: bool = False) -> None:
        """Record that the calling thread's wait is over.

        ``abandoned``: the wait ended before the push_pull did.
        """
        self.abandoned_waits += abandoned
        self.waits.pop(get_ident(), None)

    def busy(self, threads: Collection[int]) -> bool:
        """Whether one of ``threads`` is alive and has not asked recently."""
        if self.everything_ns or self.graphs:
            return False
        since = time.monotonic() - RECENT
        return any(self.asked.get(t, 0.0) < since for t in alive(threads))

    def all_wait(self, threads: Collection[int]) -> bool:
        """Whether all living ``threads`` wait, and no graph proceeds without them."""
        return not self.graphs and all(t in self.waits for t in alive(threads))


def alive(threads: Collection[int]) -> list[int]:
    """Return those of ``threads`` that run Python code and are not bpsx's own."""
    frames = sys._current_frames()
    return [t for t in threads if t in frames and t not in OURS]
