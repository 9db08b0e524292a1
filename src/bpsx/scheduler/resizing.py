"""Another size of partitions while the job runs: when, and from which push_pull on. Pure.

docs/internals/retuning.md has the protocol.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Sequence
from enum import Enum, auto

from bpsx.planning.link_rate import partition_size
from bpsx.system.transitions import Table

#: Seconds before the first change; before each other one, twice as many as before the last.
FIRST_WAIT = 60.0
#: Most changes to smaller partitions: each leaves records of keys behind. What seems to be a slow
#: link may be something else. That a link is fast is certain once it has been.
MOST_SHRINKS = 2
#: Reports of each worker that must agree.
REPORTS = 3
#: Least ratio of the two sizes, and of the rates before and after a link has become slow.
RATIO = 4
#: Least push_pulls of a tensor on each worker: one that is seldom used is not worth it.
LEAST_COUNT = 10
#: Push_pulls that may begin while the workers hear of the last count.
MARGIN = 8
#: Generations of successors are apart from those that workers count: see :func:`successor_of`.
_STRIDE = 1 << 24
#: A tensor: name and generation.
Key = tuple[str, int]


class ResizeState(Enum):
    """State of the present change."""

    IDLE = auto()  #: there is none
    COUNTING = auto()  #: workers say how many push_pulls of each tensor they have begun
    CLOSING = auto()  #: workers note the last counts


class ResizeEvent(Enum):
    """Event in the life of a change."""

    WANTED = auto()  #: the links carry much more or less
    COUNTED = auto()  #: the last COUNTS
    USELESS = auto()  #: no tensor would be cut otherwise
    HELD = auto()  #: the last TAKEN; all fit
    CALLED_OFF = auto()


RESIZE: Table[ResizeState, ResizeEvent] = Table(
    "a change of the partitions' size",
    {
        ResizeState.IDLE: {ResizeEvent.WANTED: ResizeState.COUNTING},
        ResizeState.COUNTING: {
            ResizeEvent.COUNTED: ResizeState.CLOSING,
            ResizeEvent.USELESS: ResizeState.IDLE,
            ResizeEvent.CALLED_OFF: ResizeState.IDLE,
        },
        ResizeState.CLOSING: {
            ResizeEvent.HELD: ResizeState.IDLE,
            ResizeEvent.CALLED_OFF: ResizeState.IDLE,
        },
    },
)


def successor_of(generation: int, number: int) -> int:
    """Return the generation of a tensor's successor in the change ``number``."""
    return original_of(generation) + number * _STRIDE


def original_of(generation: int) -> int:
    """Return the generation that a worker has counted, before any change."""
    return generation % _STRIDE


def change_of(generation: int) -> int:
    """Return the number of the change that has made a generation; 0: none has."""
    return generation // _STRIDE


def superseded(tensors: Iterable[Key], dropped: int) -> list[Key]:
    """Return the tensors that others have followed, or that a dropped change was to make.

    ``dropped``: its number.
    """
    latest: dict[Key, int] = {}
    found = list(tensors)
    for name, generation in found:
        if change_of(generation) != dropped or not dropped:
            first = name, original_of(generation)
            latest[first] = max(generation, latest.get(first, 0))
    return [(name, g) for name, g in found if latest.get((name, original_of(g))) != g]


class Resizing:
    """The changes of a job.

    ``size``: bytes of partitions now. ``number``: of the latest change. ``awaited``: the
    connections of the workers that have yet to answer. ``news``: a worker has reported since the
    latest look. Times are of the hub's clock, in seconds.
    """

    def __init__(self, size: int, most: int, now: float, number: int = 0) -> None:
        """``most``: bytes of a partition where links are fast. ``number``: as far as known."""
        self.state = ResizeState.IDLE
        self.size, self.number = size, number
        self.awaited: set[bytes] = set()
        self.wanted = 0  # bytes of partitions after the present change
        self.shrank = False  # whether the latest change that holds has made them smaller
        self._most, self._wait, self._earliest = most, FIRST_WAIT, now + FIRST_WAIT
        self._began = now  # when the latest change was tried
        self._shrinks, self.news = 0, False
        self._peaks: dict[int, deque[float]] = {}
        # Largest peak of each worker since the latest change that holds.
        self._best: dict[int, float] = {}
        self._counts: dict[bytes, dict[Key, int]] = {}

    # ---- when

    def note_peak(self, worker: int, rate: float) -> None:
        """Note what a worker's link carries, in bytes per second."""
        self._peaks.setdefault(worker, deque(maxlen=REPORTS)).append(rate)
        self._best[worker] = max(rate, self._best.get(worker, 0.0))
        self.news = True

    def find(self, workers: Collection[int], now: float) -> int:
        """Return another size that all reports ask for; 0: there is none, or it is not time.

        ``workers``: all that are in the job. Of each turn of reports the slowest worker's counts.
        Looks only once after each report.
        """
        if not self.news:
            return 0
        self.news = False
        known = [self._peaks.get(worker, ()) for worker in workers]
        ready = all(len(peaks) == REPORTS for peaks in known) and now >= self._earliest
        if self.state is not ResizeState.IDLE or not ready:
            return 0
        sizes = [partition_size(rates, self._most) for rates in zip(*known, strict=True)]
        if max(sizes) * RATIO <= self.size:
            return max(sizes) if self._shrinks < MOST_SHRINKS and self._slowed(workers) else 0
        return min(sizes) if min(sizes) >= self.size * RATIO else 0

    def _slowed(self, workers: Collection[int]) -> bool:
        """Whether some worker's link carries much less than before."""
        return any(max(self._peaks[w]) * RATIO <= self._best[w] for w in workers)

    # ---- from which push_pull on

    def begin(self, size: int, workers: Collection[bytes], now: float) -> None:
        """Ask all workers for their counts. ``size``: of the partitions to come."""
        self._move(ResizeEvent.WANTED, workers)
        self.number += 1
        self.wanted, self._counts = size, {}
        self._began, self._earliest = now, now + self._wait
        self._peaks.clear()

    def count(self, worker: bytes, counts: dict[Key, int]) -> bool:
        """Note COUNTS; returns whether it was the last one."""
        if self.state is not ResizeState.COUNTING or worker not in self.awaited:
            return False
        self.awaited.discard(worker)
        self._counts[worker] = counts
        return not self.awaited

    def last_counts(self) -> dict[Key, int]:
        """Return the last count of each tensor that all workers use, as far as they have said.

        The further they are apart, the more may begin until all have heard of it.
        """
        told = list(self._counts.values())
        found: dict[Key, int] = {}
        for key in told[0] if told else ():
            counts = [mine.get(key, 0) for mine in told]
            if min(counts) >= LEAST_COUNT:
                found[key] = max(counts) + MARGIN + max(counts) - min(counts)
        return found

    def close(self, workers: Collection[bytes]) -> None:
        """Await that all workers note the last counts."""
        self._move(ResizeEvent.COUNTED, workers)

    def drop_useless(self) -> None:
        """End a change that would cut no tensor otherwise."""
        self._move(ResizeEvent.USELESS)

    def take(self, worker: bytes) -> bool:
        """Note a TAKEN that fits; returns whether it was the last one. The change then holds."""
        if self.state is not ResizeState.CLOSING or worker not in self.awaited:
            return False
        self.awaited.discard(worker)
        if self.awaited:
            return False
        self._move(ResizeEvent.HELD)
        self.shrank, self.size = self.wanted < self.size, self.wanted
        self._shrinks += self.shrank
        self._wait *= 2
        self._earliest = self._began + self._wait
        self._peaks.clear()  # also those that workers have told meanwhile
        self._best.clear()
        return True

    def call_off(self) -> bool:
        """Give the present change up; returns whether there was one."""
        if self.state is ResizeState.IDLE:
            return False
        self._move(ResizeEvent.CALLED_OFF)
        return True

    def _move(self, event: ResizeEvent, awaited: Collection[bytes] = ()) -> None:
        self.state = RESIZE.after(self.state, event)
        self.awaited = set(awaited)


def is_cut_otherwise(nbytes: int, sizes: Sequence[int]) -> bool:
    """Whether a tensor of ``nbytes`` has other partitions with each of these sizes."""
    return nbytes > min(sizes)
