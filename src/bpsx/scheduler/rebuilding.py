"""A scheduler that takes over a running job from one that has died. Pure.

docs/internals/elastic-scheduler.md has the protocol. Nodes that introduce themselves again gather
apart from those that come for the first time; the first job that is complete runs.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping
from typing import Any

from bpsx.config import PARTITION_BYTES
from bpsx.scheduler.arrivals import Arrival, lanes_message
from bpsx.scheduler.gathering import Output
from bpsx.scheduler.growing import Newcomer
from bpsx.scheduler.meetings import MeetingState
from bpsx.scheduler.membership import Membership
from bpsx.scheduler.registry import RegisteredTensor
from bpsx.scheduler.reports import Report, Term, parse
from bpsx.scheduler.resizing import superseded
from bpsx.scheduler.returning import Returning, slots_given
from bpsx.scheduler.roster import Node, names
from bpsx.scheduler.states import JobEvent, JobState, PresenceEvent, Supply
from bpsx.scheduler.surviving import Loss, left_message, term_message
from bpsx.scheduler.terms import EarlierTerm
from bpsx.scheduler.tuning import PartitionTuning, restored_size, tunes_partitions

#: Reasons for which this scheduler refuses nodes that come back.
_SILENT = "this scheduler had lost its connections to all workers, and ends"
_ALONE = "this scheduler does not know yet whether the job goes on with it"
_STRANGER = "this server had not joined the job when its scheduler died: start it again"


class Rebuilding(Membership):
    """A job's state, which the nodes of a running job can restore.

    ``wait``, ``grace``: see :class:`~bpsx.scheduler.returning.Returning`.
    """

    def __init__(self, *given: Any, wait: float, grace: float, **named: Any) -> None:
        super().__init__(*given, **named)
        self._wait, self._grace = wait, grace
        self._jobs: dict[int, Returning] = {}
        self._hellos: dict[bytes, dict[str, Any]] = {}  # of nodes that gather

    # ---- nodes that come back

    def hello(self, ident: bytes, m: dict[str, Any]) -> list[Output]:
        """Handle a node's HELLO."""
        if self.state is JobState.WAITING and not self._is_extra(m):
            self._hellos[ident] = m
        return super().hello(ident, m)

    @property
    def rebuilds(self) -> bool:
        """Whether nodes of a running job wait for this scheduler."""
        return bool(self._jobs)

    def come_back(self, ident: bytes, m: dict[str, Any], now: float) -> list[Output]:
        """Handle AGAIN: a node introduces itself to another scheduler than before."""
        if self.unheard:
            self.lives_on = True
            return [_refuse(ident, _SILENT, over=False)]
        if self._may_be_alone(m):
            return [_refuse(ident, _ALONE, over=False)]
        if self.state is not JobState.WAITING:
            if self._has_left(m):
                return [(ident, {"type": "GOODBYE"})]
            return [_refuse(ident, self._too_late_again(m), over=True)]
        if why := self._unfit(m) or self._differs_again(m):
            return [_refuse(ident, why, over=False)]
        report = parse(ident, m)
        job = self._jobs.setdefault(
            m["job"], Returning(now, self._wait, self._grace, self.num_server)
        )
        job.add(report)
        return []

    def _has_left(self, m: dict[str, Any]) -> bool:
        """Whether the job goes on without the sender of AGAIN ``m``, as it had asked for."""
        if self.state is JobState.FAILED or m["job"] != self.job or not m["state"]["leaves"]:
            return False
        return m["role"] == "worker" or bool(self._replacement(m)) or self._roster.same(m) is None

    def _may_be_alone(self, m: dict[str, Any]) -> bool:
        """Whether this scheduler has lost nodes, and no worker confirms that the job goes on so.

        If it was silent or cut off, all of them live. It then loses the other workers, too. Until
        it does, or one confirms, no node may end: AGAIN ``m`` comes anew in a second.
        """
        return (
            self.state is JobState.RUNNING
            and m["job"] == self.job
            and self.terms is not None
            and self.terms.number > self.confirmed
        )

    def known(self, ident: bytes, m: dict[str, Any]) -> list[Output]:
        """Handle KNOWN: a worker's declarations, in parts."""
        for job in self._jobs.values():
            if ident in job.reports:
                job.reports[ident].add(m)
        return []

    def ended(self, ident: bytes, m: dict[str, Any]) -> list[Output]:
        """Handle ENDED: connections of a server to workers have ended since its AGAIN."""
        for job in self._jobs.values():
            if ident in job.reports:
                job.reports[ident].renew(m)
        return []

    def _differs_again(self, m: dict[str, Any]) -> str:
        for name, ours in (
            ("DMLC_NUM_WORKER", self.num_worker),
            ("DMLC_NUM_SERVER", self.num_server),
        ):
            if m["config"].get(name) != ours:
                return f"{name} is {m['config'].get(name)} in the job, {ours} on the scheduler"
        return ""

    def _too_late_again(self, m: dict[str, Any]) -> str:
        if self.state is JobState.FAILED:
            return f"the job has failed: {self.failure}"
        if m["job"] != self.job:
            return "another job has begun at the scheduler's address"
        if self.state is JobState.DONE:
            return "the job is over"
        if text := self._replacement(m):
            return text
        if m["role"] == "server" and self._roster.same(m) is None:
            return _STRANGER
        who = f"{m['role']} {m['rank']}"
        return f"this process has been replaced: the scheduler had lost its connection to {who}"

    def gone(self, ident: bytes, why: str, now: float = 0.0) -> list[Output]:
        """Remove a node whose connection has ended; its report, too, as it may send AGAIN anew."""
        self._hellos.pop(ident, None)
        for number, job in list(self._jobs.items()):
            job.reports.pop(ident, None)
            if not job.reports:
                del self._jobs[number]
        return super().gone(ident, why, now)

    def returned_text(self) -> str:
        """Return, for the log, the nodes of running jobs that are back or missing."""
        return "; ".join(
            f"back: {len(job.workers)} workers and {len(job.servers)} servers; missing:"
            f" {job.missing() or 'none'}"
            for job in self._jobs.values()
        )

    # ---- which job runs

    def rebuild(self, now: float) -> list[Output]:
        """Let a job go on whose nodes are back, and give up one that lacks workers for too long.

        To be called several times a second while :attr:`rebuilds`.
        """
        newcomers = {m["rank"] for m in self._hellos.values() if m["role"] == "worker"}
        newcomers |= {newcomer.node.rank for newcomer in self._newcomers.values()}
        for number, job in list(self._jobs.items()):
            if self.state is JobState.WAITING and job.complete(now, newcomers):
                del self._jobs[number]
                others, out = self._turn_away_others()
                out += self._restore(number, job, now)
                return out + [o for ident, m in others for o in self.hello(ident, m)]
            if job.late(now):
                text = (
                    f"{job.missing()} did not come back within {self._wait:g} s"
                    " (BPSX_SCHEDULER_WAIT) after the scheduler was started again"
                )
                del self._jobs[number]
                out = [_dismissed(r, text) for r in job.reports.values()]
                return out if self.nodes or self._jobs else out + super().expire(text)
        return []

    def _turn_away_others(self) -> tuple[list[tuple[bytes, dict[str, Any]]], list[Output]]:
        """Refuse the nodes of all other running jobs; returns the HELLOs of new nodes."""
        out = self._dismiss("another job has begun at the scheduler's address")
        for node in list(self.nodes.values()):
            self._roster.drop(node, PresenceEvent.WITHDREW)
        others, self._hellos = list(self._hellos.items()), {}
        return others, out

    def _dismiss(self, text: str) -> list[Output]:
        """Refuse the nodes that have come back."""
        idents = [ident for job in self._jobs.values() for ident in job.reports]
        self._jobs.clear()
        return [_refuse(ident, text, over=True) for ident in idents]

    def _start(self) -> list[Output]:
        return self._dismiss("another job has begun at the scheduler's address") + super()._start()

    def expire(self, text: str) -> list[Output]:
        """End the gathering because nodes are missing, which ``text`` names."""
        return self._dismiss(text) + super().expire(text)

    def abort(self, text: str) -> list[Output]:
        """End the job because the scheduler itself has to end."""
        return self._dismiss(text) + super().abort(text)

    # ---- the state that the nodes know

    def _restore(self, number: int, job: Returning, now: float) -> list[Output]:
        """Go on with a job: all that the nodes know, then all that has happened meanwhile."""
        self.job, longest, self._now = number, job.longest, now
        self.local_size = next(iter(job.reports.values())).size // self.num_worker
        replaced, absent = job.lost_servers(), job.absent_servers()
        servers = {rank: r for rank, r in job.servers.items() if rank not in replaced}
        back = [*job.workers.values(), *servers.values()]
        out = self._refuse_servers(job, replaced) + self._refuse_workers(job)
        resumed = {"type": "RESUMED", "term": len(longest.terms) if longest is not None else 0}
        known = self._fill_roster(job, longest, servers, replaced)
        if longest is None:  # all workers have left, and the servers have not heard that it is over
            self._move(JobEvent.REBUILT)
            self._move(JobEvent.EMPTY)
            for r in servers.values():
                out += [(r.ident, resumed), (r.ident, {"type": "END"})]
            return out
        self.confirmed = len(longest.terms)
        self._restore_tensors(job, longest, known, replaced, now)
        self._move(JobEvent.REBUILT)
        out += [(r.ident, resumed) for r in back]
        if failure := next((r.failure for r in back if r.failure), None):
            return out + self._fail(failure) + self._refuse_failed(job, replaced)
        out += self._send_lanes(job, known) + self._send_terms(job, longest)
        out += _finish_change(job)

        def catch_up() -> list[Output]:
            done = self._meet_anew([r.ident for r in job.workers.values()], now)
            done += self._skip_terms(job)
            done += self._lose_absent(job, [known[rank] for rank in absent], now)
            done += self._refuse_failed(job, replaced)
            done += self._drop_again(job, now)
            if self.state is JobState.RUNNING:
                done += self._send_errors(job) + self._send_left(job, servers)
                done += self._restore_joins(job, servers)
            for r in back:
                if r.bye is not None:
                    done += self.bye(r.ident, {"failure": r.bye}, now)
            return done

        term, ranks = job.unfinished_entry()
        if not ranks:
            return out + catch_up()
        self._held.append(catch_up)
        gone = [known[rank].ident for rank in absent]
        return out + self._finish_entry(job, term, ranks, gone, now)

    def _meet_anew(self, workers: list[bytes], now: float) -> list[Output]:
        """End the meeting of the scheduler before, if there was one; after a loss, call another.

        ``workers``: those that have come back.
        """
        out = [(ident, m) for ident, m in self._call_at_once(now) if ident in workers]
        if self._meeting.state is not MeetingState.IDLE:  # SOON ends the other meeting, too
            return out
        off = {"type": "OFF", "meeting": 0, "text": "the scheduler died"}
        return out + [(ident, off) for ident in workers]

    def _finish_entry(
        self, job: Returning, term: int, ranks: list[int], absent: list[bytes], now: float
    ) -> list[Output]:
        """Let workers enter of which some servers have heard, and no worker. They have ended.

        ``absent``: servers that have not come back.
        """
        assert self.terms is not None and job.longest is not None
        ghosts = [b"newcomer %d" % rank for rank in ranks]
        for ident, rank in zip(ghosts, ranks, strict=True):
            ghost = Node(ident, "worker", rank, "lost", 0, [], job.longest.config)
            self._newcomers[ident] = Newcomer(ghost, now, welcomed=True)
        why = "the scheduler died as it entered"
        self._held.append(lambda: [out for i in ghosts for out in self.gone(i, why, now)])
        self._joins.generation = max(r.joins for r in job.workers.values())
        out = self._resume_entering(term, now)
        for ident in absent:
            out += self._release(self._joins.lost(ident))
        return out

    @staticmethod
    def _refuse_servers(job: Returning, replaced: Mapping[int, int]) -> list[Output]:
        """Refuse the servers that the job goes on without. ``replaced``: rank -> term."""
        out = [
            _dismissed(r, f"this server has been replaced in term {replaced[r.rank]}")
            for r in [*job.servers.values(), *job.failed_servers()]
            if r.rank in replaced
        ]
        return out + [_dismissed(r, _STRANGER) for r in job.strangers()]

    def _refuse_failed(self, job: Returning, replaced: Mapping[int, int]) -> list[Output]:
        """Refuse the servers that have failed, once it is known what replaces them."""
        out = []
        for r in job.failed_servers():
            if r.rank not in replaced:
                who = {"role": r.role, "host": r.host, "pid": r.pid, "lanes": r.lanes}
                text = self._replacement(who) or f"the job has failed: {self.failure}"
                out.append(_refuse(r.ident, text, over=True))
        return out

    @staticmethod
    def _refuse_workers(job: Returning) -> list[Output]:
        """Refuse the workers that the job goes on without."""
        text = "this worker is not awaited any more: the job goes on without it"
        return [
            _dismissed(r, text)
            for r in job.reports.values()
            if r.role == "worker" and r.rank in job.ignored
        ]

    def _skip_terms(self, job: Returning) -> list[Output]:
        """Use up the numbers of terms of which only servers have heard, as a worker was lost.

        Lanes may have begun them, or ignore everything from earlier terms.
        """
        assert self.terms is not None
        known = [term for r in job.servers.values() for term in r.dropped.values()]
        known += [r.heard for r in job.servers.values()]
        out: list[Output] = []
        while self.terms.number < max(known, default=0):
            number = self.terms.skip()
            text = f"term {number}: the scheduler died while it told of a lost worker"
            term = self._new_term([], text)
            out += [(w.ident, term) for w in self._roster.live.values()]
        return out

    def _drop_again(self, job: Returning, now: float) -> list[Output]:
        """Begin a term without each worker of whose loss only servers have heard."""
        assert self.terms is not None
        out: list[Output] = []
        told = "a server knows that it was lost"
        never = "it did not come back after the scheduler's death"
        lost = [(rank, told) for rank in sorted(job.dropped - set(self.terms.dropped))]
        lost += [(rank, never) for rank in job.absent_workers()]
        for rank, why in lost:
            if self.state is not JobState.RUNNING:
                break
            if rank in self.terms.dropped:  # with another process of its machine
                continue
            node = self._roster.workers[rank]
            self._remove(node)
            out += self._lost(node, f"{node} is gone: {why}", now)
            if self.asynchronous:
                out += self._after_leaving(node)
        return out

    def _fill_roster(
        self,
        job: Returning,
        longest: Report | None,
        servers: dict[int, Report],
        replaced: Container[int],
    ) -> dict[int, Node]:
        """Make the roster: nodes that are back, have left, were replaced or are absent.

        Returns the servers, by rank.
        """
        options = (longest or next(iter(job.reports.values()))).config
        nodes = [
            Node(r.ident, r.role, r.rank, r.host, r.pid, r.lanes, r.config)
            for r in [*job.workers.values(), *servers.values()]
        ]
        departed = [
            Node(b"left %d" % rank, "worker", rank, host, pid, [], options)
            for rank, (host, pid) in job.left.items()
        ]
        told = job.told_dropped
        for rank in sorted({*told, *job.dropped, *job.absent_workers()}):
            # Its host and process id are not known any more.
            node = Node(b"dropped %d" % rank, "worker", rank, "lost", 0, [], options)
            nodes.append(node)
            departed += [node] if rank in told else []
        nodes += [node for node in departed if node not in nodes]
        for rank, (host, pid, lanes) in enumerate(job.known_servers):
            if rank not in servers:
                node = Node(b"absent %d" % rank, "server", rank, host, pid, lanes, options)
                nodes.append(node)
                departed += [node] if rank in replaced else []
        coming = job.unused_servers()
        known = {node.rank: node for node in nodes if node.role == "server"}
        for node in nodes:
            if not (node.role == "server" and node.rank in coming):
                self._roster.add(node)
        self._roster.start()
        for rank in sorted(coming):
            self._roster.arrive(known[rank])
        for node in departed:
            self._roster.leave(node)
        return known

    def _restore_tensors(
        self,
        job: Returning,
        longest: Report,
        known: dict[int, Node],
        replaced: Iterable[int],
        now: float,
    ) -> None:
        """Restore terms, placement and registry. ``known``: the servers, by rank."""
        workers = job.workers
        placement = self._arrange([known[rank] for rank in range(self.num_server)])
        for rank in {*job.left, *job.dropped, *job.told_dropped}:
            self._stalls.leave(rank)
            self._roots.pop(rank // self.processes, None)
        assert self.terms is not None and self.registry is not None
        self._restore_late(job, known)
        told = []
        for term in longest.terms:
            of = [known[job.lane_servers[lane]] for lane, _ in term.moves[:1]]
            if term.dropped:
                of = [Node(b"", "worker", rank, "lost", 0) for rank in term.dropped]
            self._restore_workers(term)
            to = "other servers" if term.yields else ""
            name = names([str(node) for node in of])
            told.append(EarlierTerm(term.number, name, term.moves, term.missed, term.yields, to))
            self.losses += [Loss(n, term.text, term.text, bool(term.leaving)) for n in of]
            if of or term.entered or term.yields:
                self.terms.changes.restored(
                    term.number, term.text, bool(term.entered), bool(term.yields)
                )
        self.terms.changes.joined(0, "another scheduler", now)
        self.restored = len(self.losses)
        self._history = [_message(term) for term in longest.terms]
        last = max((t.number for t in longest.terms if t.met), default=0)
        self._unsaid = any(t.dropped for t in longest.terms if t.number > last)
        self._fresh = {rank for rank, r in workers.items() if r.fresh}
        living = self._roster.live
        self._order = dict.fromkeys(r for r in job.order_of_entry() if r in living)
        self._quorum.confirm(self._order)
        senders = {r.ident: r.moved for r in workers.values() if self._speaks_rank(r.rank)}
        self.terms.restore(told, senders, now)
        departed = [rank for rank in job.left if self._speaks_rank(rank) and not self.asynchronous]
        self._sender_left = self._roster.workers[min(departed)] if departed else None
        self.epoch = max(r.epoch for r in workers.values())
        tensors = _merge([r for r in workers.values() if r.epoch == self.epoch])
        places = [
            (*self.terms.resolve(p.lane, p.slot), p.length)
            for tensor in tensors.values()
            for p in tensor.places
        ]
        yields = [rule for term in longest.terms for rule in term.yields]
        # A lost worker may have told only lanes of a tensor.
        tellers = [*workers.values(), *job.servers.values()]
        placement.restore(replaced, slots_given(tellers, longest), places, yields)
        if tunes_partitions(self._of("worker")[0].config, self.machines, self.asynchronous):
            size = max(workers.values(), key=lambda r: r.held).resized or restored_size(tensors)
            self._tuning = PartitionTuning(placement, PARTITION_BYTES, len(workers), size=size)
            self._resizing = self._tuning.resizing(now, max(r.change for r in workers.values()))
        self.registry.restore(tensors, max(r.key for r in tellers))
        for key in superseded(tensors, _dropped_change(job)):
            placement.retire(self.terms.resolve(p.lane, p.slot) for p in tensors[key].places)
        self.look_for_uneven(now)

    def _restore_workers(self, term: Term) -> None:
        """Note the workers that were lost or have entered in a term."""
        assert self.terms is not None
        for rank in term.dropped:
            self.terms.dropped[rank] = term.number
        for rank in term.entered:
            self.terms.dropped.pop(rank, None)
            self.entered[rank] = term.number
        if term.entered:
            self._full = max(self._full, term.living * self.processes)

    def _restore_late(self, job: Returning, known: dict[int, Node]) -> None:
        """Restore the servers that came after the job had begun.

        Those without keys may not be connected to all workers: they are coming again, until all
        workers have said CONNECTED once more.
        """
        assert self.terms is not None
        coming, shared = job.unused_servers(), [known[rank] for rank in range(self.num_server)]
        senders = {w.ident for w in self._roster.live.values() if self._speaks(w)}
        for rank in range(self.num_server, len(known)):
            first = self.terms.reserve(len(known[rank].lanes))
            if rank in coming:
                self._arrivals[rank] = Arrival(known[rank], first, set(senders))
            else:
                shared.append(known[rank])
                self.terms.admit(rank, self._shares(shared))

    # ---- what the nodes lack

    def _send_lanes(self, job: Returning, known: dict[int, Node]) -> list[Output]:
        """Tell senders of the servers that came late and of which they have not heard."""
        out: list[Output] = []
        for r in job.workers.values():
            if self._speaks_rank(r.rank):
                first = sum(len(lanes) for _, _, lanes in r.servers)
                for rank in range(len(r.servers), len(known)):
                    out.append((r.ident, lanes_message(known[rank], first)))
                    first += len(known[rank].lanes)
        return out

    def _send_terms(self, job: Returning, longest: Report) -> list[Output]:
        told = [
            (r.ident, term) for r in job.workers.values() for term in longest.terms[len(r.terms) :]
        ]
        # Servers have heard of lost servers from workers.
        told += [
            (s.ident, term)
            for s in self._roster.live_servers.values()
            for term in longest.terms
            if term.dropped
        ]
        return [(ident, _message(term)) for ident, term in told]

    def _lose_absent(self, job: Returning, absent: list[Node], now: float) -> list[Output]:
        """Handle the loss of the servers that have not come back, or have failed.

        If all are lost, keys move from each to the next, and the last one is replaced.
        """
        out: list[Output] = []
        failed = {r.rank: f"it had ended: {r.failure}" for r in job.failed_servers()}
        usable = self._roster.usable_servers()
        others = [node for node in absent if any(s not in absent for s in usable)]
        for node in others:
            self._remove(node)
        for node in absent:
            if not others:
                self._remove(node)
            if self.state is JobState.RUNNING:
                why = failed.get(node.rank, "it did not come back after the scheduler's death")
                out += self._lose_server(node, f"{node} is gone: {why}", now)
        return out

    def _send_errors(self, job: Returning) -> list[Output]:
        """Send RESET and FAILED to the workers that have not heard of them."""
        assert self.registry is not None
        workers, live = job.workers.values(), self._roster.live
        out: list[Output] = []
        status, text = next(r.reset for r in workers if r.epoch == self.epoch)
        behind = [live[r.rank] for r in workers if r.epoch < self.epoch]
        reset = {"type": "RESET", "epoch": self.epoch, "status": status, "text": text}
        out += self._tell_error(behind, reset)
        for (name, generation), tensor in self.registry.failed():
            failed = {
                "type": "FAILED",
                "tensors": [[name, generation]],
                "status": tensor.status,
                "text": tensor.failure,
            }
            lack = [
                live[r.rank]
                for r in workers
                if r.epoch == self.epoch
                and (known := r.known.get((name, generation))) is not None
                and not known.status
            ]
            out += self._tell_error(lack, failed)
        return out

    def _send_left(self, job: Returning, servers: dict[int, Report]) -> list[Output]:
        """Tell servers and neighbours of the workers that have left."""
        out: list[Output] = []
        for rank in job.left:
            left = left_message(self._roster.workers[rank])
            out += [(r.ident, left) for r in servers.values() if rank not in r.left]
            machine = self._machine(rank)
            out += [(w.ident, left) for r, w in self._roster.live.items() if r in machine]
        return out

    def _entries_after(self, terms: int) -> int:
        """Number of later terms in which workers have entered."""
        return sum(bool(term["entered"]) for term in self._history[terms:])

    def _restore_joins(self, job: Returning, servers: dict[int, Report]) -> list[Output]:
        """Resume join(): tell workers that it is over, or holders of marks the joined ranks."""
        workers, live = job.workers, self._roster.live
        # Each TERM with newcomers counts as a join, and may have been sent just now.
        joins = {r.ident: r.joins + self._entries_after(len(r.terms)) for r in workers.values()}
        generation = max(*joins.values(), self._joins.generation)
        self._joins.generation = generation
        last = next((r.last for r in workers.values() if r.joins == generation), -1)
        out: list[Output] = [
            (ident, {"type": "ALL_JOINED", "last": last})
            for ident, count in joins.items()
            if count < generation
        ]
        joined = [r.rank for r in workers.values() if joins[r.ident] == generation and r.joined]
        marked = {rank for r in servers.values() if r.cleared == generation for rank in r.marked}
        joined += [rank for rank in marked if rank in job.left]
        if self._roster.unheard:  # as in _join()
            self._deferred_joins.update((live[r].ident, generation) for r in joined if r in live)
            joined = [rank for rank in joined if rank not in live]
        for rank in joined:
            self._roster.join(self._roster.workers[rank])
            self._stalls.leave(rank)
        self._roster.left_unjoined = {
            rank: node
            for rank, node in self._roster.left_unjoined.items()
            if node.supply is Supply.PUSHING
        }
        for rank in joined:
            out += self._joins.join(rank, *self._present(), self._roots, self.processes)
        out += self._notify_unjoined() + self._release(self._joins.over())
        for rank in joined:
            if rank in live:
                out += self._send_adoptions(rank)
        return out


def _dropped_change(job: Returning) -> int:
    """The number of the latest change of the partitions' size if it does not hold; or 0."""
    number = max(r.change for r in job.workers.values())
    return number if number > max(r.held for r in job.workers.values()) else 0


def _finish_change(job: Returning) -> list[Output]:
    """Tell whether the latest change of the partitions' size holds: some worker may not know."""
    workers = job.workers.values()
    number = max(r.change for r in workers)
    kind = "DROP" if _dropped_change(job) else "HOLD"
    size = max(r.resized for r in workers if r.held == max(r.held for r in workers))
    return [(r.ident, {"type": kind, "number": number, "size": size}) for r in workers if number]


def _refuse(ident: bytes, reason: str, over: bool) -> Output:
    return ident, {"type": "REFUSED", "reason": reason, "over": over}


def _dismissed(report: Report, text: str) -> Output:
    """Return the message that ends a node without which the job goes on.

    GOODBYE for one that wants to leave, else REFUSED with ``text``.
    """
    if report.leaves:
        return report.ident, {"type": "GOODBYE"}
    return _refuse(report.ident, text, over=True)


def _message(t: Term) -> dict[str, Any]:
    return term_message(
        t.number,
        t.moves,
        t.text,
        t.missed,
        t.yields,
        t.dropped,
        t.living,
        t.entered,
        t.met,
        t.leaving,
    )


def _merge(workers: list[Report]) -> dict[tuple[str, int], RegisteredTensor]:
    """The declarations that some of ``workers`` know."""
    tensors: dict[tuple[str, int], RegisteredTensor] = {}
    for worker in workers:
        for name, known in worker.known.items():
            tensor = tensors.setdefault(
                name, RegisteredTensor(known.nbytes, known.dtype, known.shape, known.codec, {})
            )
            tensor.ranks[worker.rank] = None
            tensor.places = tensor.places or known.places
            if known.status and not tensor.status:
                tensor.status, tensor.failure = known.status, known.failure
    return tensors
