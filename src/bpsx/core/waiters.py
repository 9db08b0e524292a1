"""Which threads wait for push_pulls, and since when; and what the script has not been told yet."""

from __future__ import annotations

import sys
import time
from collections.abc import Collection
from threading import get_ident
from typing import Any

#: Threads of bpsx's own that begin push_pulls for others.
OURS: set[int] = set()
#: A thread that has not asked for so many seconds does something else. Waits ask five times a
#: second.
RECENT = 3.0


class Asking:
    """The threads of one session. Any thread may call it; each entry is written by its own
    thread.
    """

    def __init__(self) -> None:
        #: thread -> the handle in whose ``wait`` it is, once that has taken longer than a moment
        self.waits: dict[int, Any] = {}
        #: thread -> when it has asked last, in seconds of the monotonic clock
        self.asked: dict[int, float] = {}
        #: Waits that have ended by an exception before their push_pull.
        self.deserted = 0
        #: Whether a framework's graph has push_pulls: it goes on by itself.
        self.graphs = False
        #: Since when everything under way is waited for, in ns of the monotonic clock; 0: not.
        self.everything_ns = 0
        #: Names that workers disagree about, until an error of the name's is raised in the script.
        #: A name is put in before the error can be raised.
        self.unheard: set[str] = set()

    def note(self, handle: Any) -> None:
        """The calling thread waits for ``handle``."""
        me = get_ident()
        self.waits[me] = handle
        self.asked[me] = time.monotonic()

    def polls(self) -> None:
        """The calling thread asks whether something has ended."""
        self.asked[get_ident()] = time.monotonic()

    def over(self, deserted: bool = False) -> None:
        """The calling thread waits no more; ``deserted``: for something that has not ended."""
        self.deserted += deserted
        self.waits.pop(get_ident(), None)

    def busy(self, threads: Collection[int]) -> bool:
        """Whether one of ``threads`` is alive and has not asked for anything lately."""
        if self.everything_ns or self.graphs:
            return False
        since = time.monotonic() - RECENT
        return any(self.asked.get(t, 0.0) < since for t in alive(threads))

    def all_wait(self, threads: Collection[int]) -> bool:
        """Whether all of ``threads`` that are alive are waiting, and nothing goes on by itself."""
        return not self.graphs and all(t in self.waits for t in alive(threads))


def alive(threads: Collection[int]) -> list[int]:
    """Those that are running Python code of somebody else's."""
    frames = sys._current_frames()
    return [t for t in threads if t in frames and t not in OURS]
