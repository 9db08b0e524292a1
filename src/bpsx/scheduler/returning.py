"""Nodes of a running job that have come back to a scheduler that was started again. Pure.

docs/internals/elastic-scheduler.md says when they suffice to go on.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence
from typing import Any

from bpsx.scheduler.quorum import suffice
from bpsx.scheduler.reports import Report
from bpsx.scheduler.roster import names
from bpsx.scheduler.terms import fixed_workers, is_asynchronous

#: Seconds for which a server may stay away whose connections to a worker have ended, or a worker
#: whose connections to all servers have, after all other workers have come.
_BROKEN_SECONDS = 1.0


class Returning:
    """The reports of one job's nodes. Times are of the hub's clock, in seconds.

    ``wait``: for which the workers may stay away, from the first report on. ``grace``: for which
    servers may, from the last worker on. ``first``: number of servers with which the job began.
    """

    def __init__(self, now: float, wait: float, grace: float, first: int) -> None:
        self._deadline, self._grace, self._first = now + wait, grace, first
        self._met: float | None = None  # when all workers had come
        self.reports: dict[bytes, Report] = {}

    def add(self, report: Report) -> None:
        """A node has sent AGAIN, perhaps anew on another connection."""
        same = [
            ident
            for ident, other in self.reports.items()
            if (other.role, other.rank) == (report.role, report.rank)
        ]
        for ident in same:
            del self.reports[ident]
        self.reports[report.ident] = report

    def _whole(self, role: str) -> dict[int, Report]:
        """The reports of a role's nodes that have come whole, by rank."""
        found = (r for r in self.reports.values() if r.role == role and not r.parts)
        return {r.rank: r for r in sorted(found, key=lambda r: r.rank)}

    @property
    def dropped(self) -> set[int]:
        """The ranks of lost workers without which the job goes on, as some node has heard.

        A worker that has heard so of itself may be the only one.
        """
        found = {rank for rank, worker in self._whole("worker").items() if worker.lost}
        lost: dict[int, int] = {}
        entered: dict[int, int] = {}
        for server in self._whole("server").values():
            _note_latest(lost, server.dropped.items())
            _note_latest(entered, server.entered.items())
        for worker in self._whole("worker").values():
            for term in worker.terms:
                _note_latest(lost, ((rank, term.number) for rank in term.dropped))
                _note_latest(entered, ((rank, term.number) for rank in term.entered))
        return found | {rank for rank, term in lost.items() if term > entered.get(rank, 0)}

    @property
    def told_dropped(self) -> set[int]:
        """The ranks of lost workers, as the worker knows that has heard of most terms."""
        found: set[int] = set()
        for term in self.longest.terms if self.longest is not None else ():
            found = (found | set(term.dropped)) - set(term.entered)
        return found

    def unfinished_entry(self) -> tuple[int, list[int]]:
        """A term of which only servers have heard, in which workers were to enter, and those.

        (0, []): there is none, or no worker is back that could tell.
        """
        if self.longest is None:
            return 0, []
        terms = len(self.longest.terms)
        told = [item for r in self.servers.values() for item in r.entered.items()]
        ranks = sorted({rank for rank, term in told if term > terms})
        return (max(term for _, term in told), ranks) if ranks else (0, [])

    def _can_lose(self, absent: Sequence[int]) -> bool:
        """Whether the job can go on without the workers that have not come back.

        At most one scheduler can have as many as :func:`suffice`. The processes of a machine that
        sum among themselves count if all are back.
        """
        if not self.workers:
            return False
        torn, living = {self._sender(rank) for rank in absent}, self.order_of_entry()
        if self.asynchronous:
            living = [rank for rank in living if rank not in self.left]
        elif self.left or fixed_workers(self._options):
            return False
        return suffice({r for r in self.workers if self._sender(r) not in torn}, living)

    @property
    def _options(self) -> list[dict[str, Any]]:
        return [r.config for r in self.reports.values()]

    @property
    def asynchronous(self) -> bool:
        """Whether training is asynchronous."""
        return is_asynchronous(self._options)

    @property
    def ignored(self) -> set[int]:
        """The ranks of the workers without which the job goes on.

        In an asynchronous job, also those that a server takes for gone, whether they have left or
        not: it ignores what they send.
        """
        found = self.dropped
        for server in self._whole("server").values() if self.asynchronous else ():
            found = found | {*server.left}
        return found

    def _sender(self, rank: int) -> int:
        """The rank of the process that speaks to the servers for worker ``rank``."""
        options = next(iter(self.workers.values())).config
        processes = options["BYTEPS_LOCAL_SIZE"] if options["BPSX_LOCAL_REDUCE"] else 1
        return int(rank - rank % processes + processes - 1)

    def order_of_entry(self) -> list[int]:
        """The living workers in the order of entry, as far as the workers know that are back."""
        order = list(range(next(iter(self.reports.values())).size))
        for term in self.longest.terms if self.longest is not None else ():
            order = [rank for rank in order if rank not in term.dropped] + term.entered
        return order

    @property
    def workers(self) -> dict[int, Report]:
        """The workers that are back, by rank; not those without which the job goes on."""
        gone = self.ignored
        return {rank: r for rank, r in self._whole("worker").items() if rank not in gone}

    @property
    def servers(self) -> dict[int, Report]:
        """The servers that are back, by rank. Workers, if some are back, know all of them.

        Without those that have failed.
        """
        back, away, known = self._whole("server"), self._sent_away(), self.known_servers
        if self.longest is None:
            return back
        return {rank: r for rank, r in back.items() if _is_known(r, known) and rank not in away}

    def _sent_away(self) -> set[int]:
        """Servers that have failed: that was their end, not that of the job.

        A scheduler that was silent may have told them that the job has failed. Workers know better.
        """
        return {rank for rank, server in self._whole("server").items() if server.failure}

    def strangers(self) -> list[Report]:
        """Servers of which no worker has heard: they had not joined when the scheduler died."""
        if self.longest is None:
            return []
        known = self.known_servers
        return [r for r in self._whole("server").values() if not _is_known(r, known)]

    def failed_servers(self) -> list[Report]:
        """Servers of the job that have failed: it goes on without them."""
        if self.longest is None:
            return []
        back, away, known = self._whole("server"), self._sent_away(), self.known_servers
        return [r for rank, r in back.items() if _is_known(r, known) and rank in away]

    @property
    def known_servers(self) -> list[tuple[str, int, list[str]]]:
        """Host, pid and lanes of each server of which some worker has heard, by rank."""
        return max((r.servers for r in self.workers.values()), key=len, default=[])

    @property
    def left(self) -> dict[int, tuple[str, int]]:
        """Host and process id of each worker that has left the job in good order, by rank."""
        back = self.workers
        told = (item for server in self.servers.values() for item in server.left.items())
        return {rank: who for rank, who in told if rank not in back}

    def absent_workers(self) -> list[int]:
        """The ranks that should come and have neither come nor left."""
        size = max((report.size for report in self.reports.values()), default=0)
        there = {*self.workers, *self.left, *self.dropped, *self.unfinished_entry()[1]}
        late = self.order_of_entry() if self.reports else []
        return sorted({*range(size), *late} - there)

    @property
    def longest(self) -> Report | None:
        """The worker that has heard of most terms: no other one has heard of any more."""
        return max(self.workers.values(), key=lambda r: len(r.terms), default=None)

    def lost_servers(self) -> dict[int, int]:
        """The ranks of the servers that a term has replaced, and the number of that term."""
        longest, of = self.longest, self.lane_servers
        if longest is None:
            return {}
        moves = [(lane, term.number) for term in longest.terms for lane, _ in term.moves]
        return {of[lane]: number for lane, number in moves if lane < len(of)}

    @property
    def lane_servers(self) -> list[int]:
        """The server of each lane."""
        return [rank for rank, (_, _, lanes) in enumerate(self.known_servers) for _ in lanes]

    def unused_servers(self) -> set[int]:
        """The servers that came late and have not got any key: some worker may lack connections."""
        longest, of = self.longest, self.lane_servers
        if longest is None:
            return set()
        tellers = [*self.workers.values(), *self.servers.values()]
        used = {lane for r in tellers for lane, count in r.slots.items() if count}
        for term in longest.terms:
            used |= {lane for _, targets in term.moves for lane, _ in targets}
            used |= {lane for lane, _ in term.moves}
            used |= {to for lane, _, targets in term.yields for to, _ in targets if to != lane}
        late = range(self._first, len(self.known_servers))
        return {*late} - {of[lane] for lane in used if lane < len(of)}

    def absent_servers(self) -> list[int]:
        """The ranks of the servers that should come, but have not."""
        there = {*self.servers, *self.lost_servers()}
        return [rank for rank in range(len(self.known_servers)) if rank not in there]

    def complete(self, now: float, replaced: Collection[int] = ()) -> bool:
        """Whether the job can go on: all workers are back, and servers have had their time.

        It can also go on without workers that have had their time, if it may lose some. Those whose
        connections to a server have ended get as much as servers, and so do those in whose place
        another process wants to enter the job (``replaced``). If the connections to all servers
        have ended, that is the shorter time.
        """
        lost = self.absent_workers()
        if lost and not self._can_lose(lost):
            self._met = None
            return False
        self._met = now if self._met is None else self._met
        waits = max(self._wait_for_workers(lost, replaced, now), self._wait_for_servers())
        return now - self._met >= waits

    def _wait_for_workers(
        self, lost: Sequence[int], replaced: Collection[int], now: float
    ) -> float:
        """Seconds for which the workers ``lost`` may stay away, after all others have come."""
        if not lost or now >= self._deadline:
            return 0.0
        broken, senders = [{*r.broken} for r in self.servers.values()], map(self._sender, lost)
        if broken and set.intersection(*broken).issuperset(senders):
            return min(_BROKEN_SECONDS, self._grace)
        ended = set().union(*broken)
        explained = all(rank in replaced or self._sender(rank) in ended for rank in lost)
        return self._grace if explained else math.inf

    def _wait_for_servers(self) -> float:
        """Seconds for which absent servers may stay away, after all workers have come.

        A worker that was silent has lost its connections to servers that live.
        """
        away, longest = self._sent_away(), self.longest
        absent = [rank for rank in self.absent_servers() if rank not in away]
        if not absent or longest is None:
            return 0.0
        of = self.lane_servers
        senders = [w for rank, w in self.workers.items() if self._sender(rank) == rank]
        broken = [{of[i] for i in (*w.broken, *w.gone) if i < len(of)} for w in senders]
        gone = bool(broken) and set.intersection(*broken).issuperset(absent)
        return min(_BROKEN_SECONDS, self._grace) if gone else self._grace

    def late(self, now: float) -> bool:
        """Whether workers have stayed away for too long that the job needs."""
        lost = self.absent_workers()
        return now >= self._deadline and bool(lost) and not self._can_lose(lost)

    def missing(self) -> str:
        """The nodes that have not come, as text for messages."""
        return names(
            [f"worker {rank}" for rank in self.absent_workers()]
            + [f"server {rank}" for rank in self.absent_servers()]
        )


def _is_known(server: Report, known: Sequence[tuple[str, int, list[str]]]) -> bool:
    """Whether some worker has heard of a server. ``known``: those of which one has, by rank."""
    rank = server.rank
    return rank < len(known) and (server.host, server.pid, server.lanes) == known[rank]


def _note_latest(terms: dict[int, int], told: Iterable[tuple[int, int]]) -> None:
    """Note the latest term of each rank in ``terms``."""
    for rank, term in told:
        terms[rank] = max(term, terms.get(rank, 0))


def slots_given(tellers: Iterable[Report], longest: Report) -> dict[int, int]:
    """The number of slots of each lane that may have been given out, also to lost lanes' keys."""
    slots: dict[int, int] = {}
    for report in tellers:
        for lane, count in report.slots.items():
            slots[lane] = max(slots.get(lane, 0), count)
    for term in longest.terms:
        for lane, targets in term.moves:
            count = slots.get(lane, 0)
            for i, (target, base) in enumerate(targets):
                moved = len(range(i, count, len(targets)))
                slots[target] = max(slots.get(target, 0), base + moved)
        for lane, limit, targets in term.yields:
            slots[lane] = max(slots.get(lane, 0), limit)
            for i, (target, base) in enumerate(targets):
                moved = len(range(i, limit, len(targets)))
                if target != lane:
                    slots[target] = max(slots.get(target, 0), base + moved)
    return slots
