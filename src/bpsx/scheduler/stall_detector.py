"""Detects push_pulls that do not end, and whether the job can still go on. Pure.

A worker reports the tensors that it has pushed and not received back, and which of them its script
waits for, once they are up to a second old. A tensor that a worker has not reported counts as not
pushed there. One such case is a slow worker, and causes a warning. If *every* worker waits for a
tensor that another worker has not pushed, the job is deadlocked.

Reports are differences, and every structure here is updated by what changed. So a message costs
time in proportion to its length, whatever the number of workers and tensors.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import islice
from typing import Any

Key = tuple[str, int]
#: A warning about the same tensor is repeated after this many warning intervals.
REPEAT = 10
#: A worker must wait this many times longer while another of its threads that has used bpsx does
#: not wait.
PATIENCE = 10
_MOST_NAMED = 8


@dataclass(slots=True)
class _Wait:
    """One worker's push of a tensor. Times are of the hub's clock, in seconds."""

    round: int
    since: float
    waited: float | None  # start of the script's wait for it; None if the script does not wait
    full: bool = False  # all workers have been seen to push it


@dataclass(slots=True)
class _Pushed:
    """The workers that report a tensor.

    ``fresh``: those whose wait is not marked full.
    """

    ranks: set[int] = field(default_factory=set)
    fresh: list[int] = field(default_factory=list)
    candidates: list[int] | None = None  # heap with the ranks that lack it, and perhaps others


@dataclass(slots=True)
class _Worker:
    """One worker's reports."""

    waits: OrderedDict[Key, _Wait] = field(default_factory=OrderedDict)  # oldest first
    # Heap of (start of wait, key); may hold outdated items.
    vain: list[tuple[float, Key]] = field(default_factory=list)
    reported: float = 0.0
    busy: bool = False
    calls: int = 0  # push_pulls that its script has asked for
    warned: tuple[Key, int] | None = None
    warned_at: float = float("-inf")


class Stalls:
    """The reports by rank, and the warnings and deadlocks that follow from them.

    ``warn_after``, ``deadlock_after``: seconds.
    """

    def __init__(self, warn_after: float, deadlock_after: float) -> None:
        self._warn_after = warn_after
        self._deadlock_after = deadlock_after
        self._workers: dict[int, _Worker] = {}  # workers neither gone nor in join()
        self._pushed: dict[Key, _Pushed] = {}
        # Number of workers that report a tensor -> tensors.
        self._by_count: dict[int, set[Key]] = {}
        self._stuck: set[int] = set()
        self._restarted = float("-inf")

    # ---- participants

    def enter(self, rank: int) -> None:
        """Add worker ``rank``."""
        self._workers.setdefault(rank, _Worker())

    def leave(self, rank: int) -> None:
        """Remove worker ``rank``: it has left, died, or called join()."""
        if rank not in self._workers:
            return
        for key in list(self._workers[rank].waits):
            self._remove(rank, key)
        del self._workers[rank]
        self._stuck.discard(rank)
        for key in list(self._by_count.get(len(self._workers), ())):
            self._fill(key)

    def clear(self) -> None:
        """Forget all reports: their push_pulls have all ended."""
        for worker in self._workers.values():
            worker.waits.clear()
            worker.vain.clear()
        self._pushed.clear()
        self._by_count.clear()
        self._stuck.clear()

    def restart(self, now: float) -> None:
        """Count waits for a deadlock from ``now`` on: nothing could end while a server was lost.

        Each worker is judged again by its next report.
        """
        self._restarted = now
        self._stuck.clear()

    # ---- reports

    def report(
        self,
        rank: int,
        new: Iterable[Sequence[Any]],
        over: Iterable[Sequence[Any]],
        now: float,
        busy: bool = False,
        calls: int = 0,
    ) -> None:
        """Record what has changed on worker ``rank``.

        ``new``: pushed tensors, oldest first: [name, generation, round, seconds since the push,
        seconds that the script has waited for it or -1]. ``over``: [name, generation] of those that
        have ended. ``busy``: whether a thread that has used bpsx is not waiting. ``calls``: number
        of push_pulls that the script has asked for since the job began or was reset.
        """
        worker = self._workers.get(rank)
        if worker is None:
            return
        worker.reported, worker.busy, worker.calls = now, busy, calls
        for name, generation in over:
            self._remove(rank, (name, generation))
        for name, generation, round_, seconds, waited in new:
            key = (name, generation)
            known = worker.waits.get(key)
            since = now - waited if waited >= 0 else None
            if known is not None and known.round == round_:
                known.waited = since
            else:
                self._remove(rank, key)
                known = worker.waits[key] = _Wait(round_, now - seconds, since)
                pushed = self._pushed.setdefault(key, _Pushed())
                pushed.fresh.append(rank)
                self._count(key, pushed, rank, True)
            if since is not None and not known.full:
                heappush(worker.vain, (since, key))
        self._look(rank)

    def _count(self, key: Key, pushed: _Pushed, rank: int, more: bool) -> None:
        """Record that a worker reports ``key``, or (not ``more``) no longer does."""
        before = len(pushed.ranks)
        if not more and pushed.candidates is not None:
            heappush(pushed.candidates, rank)
        (pushed.ranks.add if more else pushed.ranks.discard)(rank)
        self._by_count.get(before, set()).discard(key)
        if pushed.ranks:
            self._by_count.setdefault(len(pushed.ranks), set()).add(key)
        else:
            del self._pushed[key]
        if more and len(pushed.ranks) == len(self._workers):
            self._fill(key)

    def _remove(self, rank: int, key: Key) -> None:
        wait = self._workers[rank].waits.pop(key, None)
        if wait is None:
            return
        pushed = self._pushed[key]
        all_had = len(pushed.ranks) == len(self._workers)
        self._count(key, pushed, rank, False)
        if not all_had:
            return
        # A worker in the same round had pushed what the others wait for. A worker in an earlier
        # round had not; its report that this round was over had just not come yet.
        for other in pushed.ranks:
            theirs = self._workers[other].waits[key]
            if theirs.full and theirs.round != wait.round:
                theirs.full = False
                pushed.fresh.append(other)
                if theirs.waited is not None:
                    heappush(self._workers[other].vain, (theirs.waited, key))

    def _fill(self, key: Key) -> None:
        """Mark waits for ``key`` full, as all workers have pushed it.

        Such a wait is not in vain, even once some workers have the result.
        """
        fresh, self._pushed[key].fresh = self._pushed[key].fresh, []
        for rank in fresh:
            wait = self._workers[rank].waits.get(key) if rank in self._workers else None
            if wait is not None and not wait.full:
                wait.full = True
                if rank in self._stuck:
                    self._look(rank)

    def _look(self, rank: int) -> None:
        """Update whether the worker had waited in vain for long enough at its last report."""
        worker = self._workers[rank]
        while worker.vain:
            since, key = worker.vain[0]
            wait = worker.waits.get(key)
            if wait is not None and wait.waited == since and not wait.full:
                break
            heappop(worker.vain)
        patience = self._deadlock_after * (PATIENCE if worker.busy else 1)
        stuck = (
            bool(worker.vain)
            and worker.reported - max(worker.vain[0][0], self._restarted) >= patience
        )
        (self._stuck.add if stuck else self._stuck.discard)(rank)

    # ---- warnings and deadlocks

    def waits(self, rank: int, warn_after: float | None = None) -> list[tuple[str, int, float]]:
        """The oldest tensors that worker ``rank`` pushed over ``warn_after`` seconds ago.

        ``warn_after`` defaults to the warning interval. Returns at most 8 items (tensor, round,
        seconds). For any thread.
        """
        limit = self._warn_after if warn_after is None else warn_after
        worker = self._workers.get(rank)
        if worker is None:
            return []
        oldest = list(islice(worker.waits.items(), _MOST_NAMED))
        found = [(key[0], wait.round, worker.reported - wait.since) for key, wait in oldest]
        return [item for item in found if item[2] >= limit]

    def under_way(self, rank: int) -> list[tuple[Key, float]]:
        """The tensors that worker ``rank`` reports, and the time of each push."""
        worker = self._workers.get(rank)
        return [(key, wait.since) for key, wait in worker.waits.items()] if worker else []

    def warning(self, rank: int) -> str:
        """Return a warning for worker ``rank`` about its oldest tensor, usually empty.

        A worker gets a warning of a stall once, and again after :data:`REPEAT` intervals; of
        another stall after one interval at the earliest.
        """
        worker = self._workers.get(rank)
        if worker is None or not worker.waits:
            return ""
        key, wait = next(iter(worker.waits.items()))
        what, seconds = (key, wait.round), worker.reported - wait.since
        pause = self._warn_after * (REPEAT if what == worker.warned else 1)
        if seconds < self._warn_after or worker.reported - worker.warned_at < pause:
            return ""
        worker.warned, worker.warned_at = what, worker.reported
        more = f" and {len(worker.waits) - 1} more" if len(worker.waits) > 1 else ""
        late = "pushed by all workers, but its sum has not arrived yet"
        why = late if wait.full else self._who_lacks(key)
        title = f"tensor {key[0]!r} round {wait.round}{more}"
        return f"{title}: pushed {seconds:.0f} s ago by worker {rank}, {why}"

    def lacking(self, key: Key) -> list[int]:
        """The lowest ranks that have not pushed ``key``, which others have; at most 8."""
        pushed = self._pushed[key]
        if pushed.candidates is None:
            pushed.candidates = sorted(self._workers)
        lacking: list[int] = []
        while pushed.candidates and len(lacking) < _MOST_NAMED:
            rank = heappop(pushed.candidates)
            if rank in self._workers and rank not in pushed.ranks and rank not in lacking[-1:]:
                lacking.append(rank)
        for rank in lacking:
            heappush(pushed.candidates, rank)
        return lacking

    def _who_lacks(self, key: Key) -> str:
        """Text that names the workers that have not pushed ``key``, and the likely reason."""
        pushed, lacking = self._pushed[key], self.lacking(key)
        count = len(self._workers) - len(pushed.ranks)
        parts, waiting = [], False
        for rank in lacking:
            others = [name for name, _ in islice(self._workers[rank].waits, 3)]
            waiting = waiting or bool(others)
            more = len(self._workers[rank].waits) - len(others)
            listed = ", ".join(map(repr, others)) + (f" and {more} more" if more else "")
            parts.append(f"worker {rank}" + (f" (which waits for {listed})" if others else ""))
        text = "not pushed by " + ", ".join(parts)
        text += f" and {count - len(parts)} more" if count > len(parts) else ""
        if waiting:
            return text + "; do all workers use the same names, equally often?"
        return text + "; is that worker slow, or does its code skip this tensor (`if rank() == 0`)?"

    def deadlock(self) -> dict[int, list[Key]]:
        """The tensors that each worker has pushed in vain; empty unless all waited long enough."""
        if len(self._workers) < 2 or len(self._stuck) < len(self._workers):
            return {}
        return {
            rank: [key for key, wait in worker.waits.items() if not wait.full]
            for rank, worker in sorted(self._workers.items())
        }

    def out_of_step(self) -> str:
        """Text naming the workers with the fewest and the most push_pulls; empty if equal."""
        ordered = sorted(self._workers.items(), key=lambda item: item[1].calls)
        (least, first), (most, last) = ordered[0], ordered[-1]
        if first.calls == last.calls:
            return ""
        return (
            f"worker {most} has asked for {last.calls} push_pulls, worker {least} for {first.calls}"
        )
