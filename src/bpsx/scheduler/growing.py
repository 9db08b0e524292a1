"""The part of a job's membership that lets workers join while the job runs. Pure.

docs/internals/elastic-joins.md has the protocol. A newcomer waits in a queue. When all workers have
stopped at the same boundary, it connects to the lanes, the servers learn of it, and all go on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from bpsx.scheduler.arrivals import REPORT_EVERY
from bpsx.scheduler.gathering import Output
from bpsx.scheduler.leaving import Leaving
from bpsx.scheduler.meetings import Meeting, MeetingEvent, MeetingState
from bpsx.scheduler.messages import TERM_FIELDS
from bpsx.scheduler.roster import Node, names
from bpsx.scheduler.states import JobState
from bpsx.scheduler.terms import ELASTIC, REPLACE

#: Seconds in which newcomers have to connect to all lanes, while all workers wait.
CONNECT_SECONDS = 10.0
#: Texts for a newcomer's user: the event that the newcomer waits for.
_NEXT_BOUNDARY = "the running job, which lets workers in when all have reached a commit()"
_VACANCY = "a vacant place in the running job: it has as many workers as it may (BPSX_MAX_WORKERS)"


@dataclass
class Newcomer:
    """A worker that wants to enter. ``since``: when it came. ``welcomed``: it has WELCOME."""

    node: Node
    since: float = 0.0
    welcomed: bool = False


class Growing(Leaving):
    """The workers that join the running job.

    ``patience``: seconds that a meeting may last. ``silence``: seconds after which a dead worker is
    noticed at the latest.
    """

    patience, silence = 600.0, 40.0
    epoch: int

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self._meeting = Meeting()
        self._newcomers: dict[bytes, Newcomer] = {}
        # Events that came while newcomers enter; the job handles them afterwards.
        self._held: list[Callable[[], list[Output]]] = []
        self._order: dict[int, None] = {}  # numbers of the living workers, in the order of entry
        self.entered: dict[int, int] = {}  # workers that have joined late -> the term
        self._full = 0  # most workers that the job has had at a time
        # Newcomers that were refused or have entered, and that the launcher has yet to hear of.
        self.turned_away: list[Node] = []
        self.let_in: list[int] = []
        self._fresh: set[int] = set()  # entered workers that may not have got the model yet
        self._unsaid = False  # a worker was lost, and the scripts have not agreed on a moment
        # All workers have stopped, and wait for others, since then; and the latest report of that.
        self._stopped: float | None = None
        self._reported_at = -REPORT_EVERY
        self._paused: float | None = None  # all workers have stopped for newcomers since then

    # ---- the queue

    def _bars_worker(self, m: dict[str, Any]) -> str:
        """See :class:`~bpsx.scheduler.gathering.Gathering`."""
        why = self._fixed_workers()
        return f"only servers may join it now ({why})" if why else ""

    def _no_place(self, m: dict[str, Any]) -> str:
        """See :class:`~bpsx.scheduler.gathering.Gathering`. A lost worker's place is free again."""
        if self.state is not JobState.RUNNING or m.get("token"):
            return super()._no_place(m)
        for other in self._newcomers.values():
            if other.node.rank == m["rank"]:
                return f"{other.node} waits for the same place (DMLC_WORKER_ID)"
        if m["rank"] in self._roster.workers:  # lost, or perhaps dead already
            return self._differing_option(m)
        return super()._no_place(m)

    def _is_extra(self, m: dict[str, Any]) -> bool:
        """Whether HELLO ``m`` is of a worker that may join, but without which the job begins."""
        if self.state is not JobState.WAITING or m["role"] != "worker" or self._refusal(m):
            return False
        if m.get("token"):
            return self._roster.same(m) is None and self._lowest_absent() < 0
        return bool(m["rank"] >= self.num_worker * m["config"]["BYTEPS_LOCAL_SIZE"])

    def _arrive(self, ident: bytes, m: dict[str, Any]) -> list[Output]:
        """Let a node join; a worker waits until all others have stopped."""
        if m["role"] == "server":
            if self._meeting.state is MeetingState.CONNECTING:
                self._held.append(lambda: self.hello(ident, m))
                return [(ident, _status("the end of a meeting of the workers"))]
            return super()._arrive(ident, m)
        self._queue(ident, m)
        return [(ident, _status(self._lacks_to_enter(ident, m["rank"])))]

    def _lacks_to_enter(self, ident: bytes, rank: int) -> str:
        """Return what a newcomer waits for, as text for its log."""
        if there := self._roster.live.get(rank):
            return f"the end of {there}"
        if ident in self._guests():
            return _NEXT_BOUNDARY
        if rank < 0:
            return _VACANCY
        ours = {newcomer.node.rank for newcomer in self._newcomers.values()}
        missing = [f"worker {other}" for other in self._machine(rank) if other not in ours]
        return f"{names(missing)} on the same machine"

    def _queue(self, ident: bytes, m: dict[str, Any]) -> None:
        """Let a worker wait for the next meeting."""
        if ident not in self._newcomers:
            node = self._make_node(ident, m)
            self._newcomers[ident] = Newcomer(node, self._now)
            self.notes.append(f"{node} wants to join the job while it runs")

    def _forget_newcomer(self, ident: bytes, why: str) -> None:
        node = self._newcomers.pop(ident).node
        self._meeting.awaited.discard(ident)
        self.turned_away.append(node)
        self.notes.append(f"{node} does not join the running job: {why}")

    def _refuse_newcomers(self, why: str, some: Iterable[bytes] | None = None) -> list[Output]:
        """Send newcomers away. ``some``: these; None: all."""
        idents = list(self._newcomers if some is None else some)
        for ident in idents:
            self._forget_newcomer(ident, why)
        reason = f"the job is {self.state} and accepts no more nodes: {why}"
        return [(i, {"type": "REFUSED", "reason": reason, "over": True}) for i in idents]

    def expire(self, text: str) -> list[Output]:
        """See :class:`~bpsx.scheduler.gathering.Gathering`."""
        return super().expire(text) + self._refuse_newcomers(text)

    # ---- events that concern a meeting

    @property
    def _entering(self) -> bool:
        return self._meeting.state is MeetingState.ENTERING

    def said_at(self, ident: bytes, m: dict[str, Any]) -> list[Output]:
        """Handle AT: how many boundaries a worker has passed. ``m``: meeting, boundary."""
        self._meeting.answer(MeetingState.ASKING, ident, m)
        return []

    def here(self, ident: bytes, m: dict[str, Any]) -> list[Output]:
        """Handle HERE: a worker has stopped at the boundary. ``m``: meeting."""
        self._meeting.answer(MeetingState.GATHERING, ident, m)
        return []

    def ready(self, ident: bytes, m: dict[str, Any]) -> list[Output]:
        """Handle READY: a newcomer has connected to all lanes. ``m``: meeting."""
        self._meeting.answer(MeetingState.CONNECTING, ident, m)
        return []

    def hello(self, ident: bytes, m: dict[str, Any]) -> list[Output]:
        """See :class:`~bpsx.scheduler.gathering.Gathering`."""
        if self._entering:
            self._held.append(lambda: self.hello(ident, m))
            return [(ident, _status("the end of a meeting of the workers"))]
        if self._is_extra(m):
            self._queue(ident, m)
            return [(ident, _status(f"the job, which begins with {self.num_worker} workers"))]
        return super().hello(ident, m)

    def gone(self, ident: bytes, why: str, now: float = 0.0) -> list[Output]:
        """See :class:`~bpsx.scheduler.membership.Membership`."""
        if self._entering:
            self._held.append(lambda: self.gone(ident, why, now))
            # It is not awaited: what it had to clear is lost with it.
            return self._release(self._joins.lost(ident))
        if ident in self._newcomers:
            self._forget_newcomer(ident, why)
            return []
        return self._gone(ident, why, now)

    def bye(self, ident: bytes, m: dict[str, Any], now: float = 0.0) -> list[Output]:
        """See :class:`~bpsx.scheduler.membership.Membership`."""
        if self._entering:
            self._held.append(lambda: self.bye(ident, m, now))
            return self._release(self._joins.lost(ident))
        if ident in self._newcomers:
            self._forget_newcomer(ident, m["failure"])
            return [(ident, {"type": "GOODBYE"})]
        return self._bye(ident, m, now)

    def join(self, ident: bytes, generation: int | None = None) -> list[Output]:
        """See :class:`~bpsx.scheduler.membership.Membership`."""
        if self._entering:
            self._held.append(lambda: self.join(ident, generation))
            return []
        return self._join(ident, generation)

    def depart(self, ident: bytes, m: dict[str, Any], now: float) -> list[Output]:
        """See :class:`~bpsx.scheduler.leaving.Leaving`."""
        if self._entering:
            self._held.append(lambda: self.depart(ident, m, now))
            return []
        return super().depart(ident, m, now)

    def _join(self, ident: bytes, generation: int | None) -> list[Output]:
        """Handle JOIN."""
        raise NotImplementedError

    def _gone(self, ident: bytes, why: str, now: float) -> list[Output]:
        """Handle the end of a connection."""
        raise NotImplementedError

    def _bye(self, ident: bytes, m: dict[str, Any], now: float) -> list[Output]:
        """Handle BYE."""
        raise NotImplementedError

    def _may_balance(self, now: float) -> bool:
        """See :class:`~bpsx.scheduler.balancing.Balancing`.

        While workers enter, the next term's number is theirs: servers know it, and workers hear of
        it when all servers have answered. A move of keys would get that number, too.
        """
        return not self._entering and super()._may_balance(now)

    # ---- the course of a meeting

    def tend(self, now: float) -> list[Output]:
        """See :class:`~bpsx.scheduler.arrivals.Arriving`. Takes the meeting as far as it can go."""
        out = super().tend(now) if not self._entering else []
        if self.state is JobState.RUNNING:
            out += self._call(now) if self._meeting.state is MeetingState.IDLE else self._go_on(now)
        if self.state in (JobState.DONE, JobState.FAILED) and self._newcomers:
            out += self._refuse_newcomers(self.failure or "it is over")
        return out

    def _call(self, now: float) -> list[Output]:
        """Ask the workers to meet, if a newcomer waits and nothing forbids it."""
        if not (self._newcomers or self._unsaid or self._leavers):
            return []
        if (why := self._fixed_workers()) and not self._all_leave:
            self._unsaid = False
            return self._refuse_newcomers(why)
        out = self._refuse_unfit(now)
        if self._disturbed() or self._arrivals or self._must_settle():
            return out
        if not (self._guests() or self._unsaid or self._may_leave()):
            return out
        self._stopped = None
        self._meeting.move(MeetingEvent.CALLED, self._live_idents(), now)
        return out + self._to_all({"type": "SOON", "meeting": self._meeting.number})

    def _must_settle(self) -> bool:
        """Whether keys move, and the workers shall not meet before.

        After a loss they meet at once: each step until then is made with fewer gradients.
        """
        return self._keys_move() and (not self._unsaid or self.starvation is not None)

    def _guests(self) -> dict[bytes, Newcomer]:
        """Return the newcomers whose places are vacant. One that accepts any place gets one."""
        live = self._roster.live
        for newcomer in self._newcomers.values():
            if newcomer.node.rank < 0:
                wanted = {other.node.rank for other in self._newcomers.values()}
                vacant = (r for r in range(self.places) if r not in live and r not in wanted)
                newcomer.node.rank = next(vacant, -1)
        ranks = {ident: n.node.rank for ident, n in self._newcomers.items()}
        fit = self._whole_machines(r for r in ranks.values() if r >= 0 and r not in live)
        return {ident: self._newcomers[ident] for ident, rank in ranks.items() if rank in fit}

    def _refuse_unfit(self, now: float) -> list[Output]:
        """Refuse the newcomers that came before the job began, and whose options differ from it.

        Also refuse newcomers whose places belong to living workers.
        """
        out, guests = [], self._guests()
        for ident, n in list(guests.items()):
            if why := self._differing_option({"rank": n.node.rank, "config": n.node.config}):
                out += self._refuse_newcomers(why, [ident])
        late = [
            ident
            for ident, n in self._newcomers.items()
            if n.node.rank in self._roster.live and now - n.since >= self.silence
        ]
        why = "its place is taken: two processes have the same DMLC_WORKER_ID and BYTEPS_LOCAL_RANK"
        return out + self._refuse_newcomers(why, late)

    def _disturbed(self) -> str:
        """Return why the workers cannot meet now; "" if they can."""
        if self._joins.joined:
            return "workers are in join()"
        if (self._roster.leaving or self._sender_left is not None) and not self._all_leave:
            return "a worker leaves the job"
        return ""

    def _in_vain(self) -> str:
        """Return why this meeting has become useless; "" if it has not."""
        connecting = self._meeting.state is MeetingState.CONNECTING
        if connecting:
            of_use = any(newcomer.welcomed for newcomer in self._newcomers.values())
        else:
            of_use = bool(self._guests()) or self._unsaid or bool(self._may_leave())
        if not of_use:
            return "no worker waits to join or leave any more"
        if connecting and (self._keys_move() or self._arrivals):
            return "the job's servers change"
        welcomed = {n.node.rank for n in self._newcomers.values() if n.welcomed}
        if welcomed != self._whole_machines(welcomed):
            return "a process of a machine that was about to join is gone"
        return ""

    def _go_on(self, now: float) -> list[Output]:
        meeting = self._meeting
        if self._entering:
            return []
        if why := self._disturbed() or self._in_vain():
            return self._call_off(why, now)
        meeting.awaited &= {*self._live_idents(), *self._newcomers}
        if meeting.awaited:
            return self._look_at_the_clock(now)
        if meeting.state is MeetingState.ASKING:
            meeting.move(MeetingEvent.ALL_SAID, self._live_idents(), now)
            return self._name_boundary()
        if self._keys_move() or self._arrivals:
            return []
        if meeting.state is MeetingState.GATHERING:
            return self._all_here(now)
        return self._tell_servers(now)

    def _all_here(self, now: float) -> list[Output]:
        """All workers have stopped at the boundary."""
        if (out := self._leave(now)) is not None:
            return out
        guests = self._guests()
        if self._lacks_workers(len(guests)):
            return self._wait_for_workers(now)
        # The names come from a worker that may have been lost since.
        if guests and self._meeting.names:
            return self._welcome_newcomers(guests, now)
        return self._part_again(now)

    def _name_boundary(self) -> list[Output]:
        """Tell all workers where they meet. The oldest tells newcomers which names there are."""
        meeting = self._meeting
        meeting.guests = bool(self._guests() or self._newcomers) or self._lacks_workers(0)
        meet = {"type": "MEET", "meeting": meeting.number, "boundary": meeting.boundary}
        return [
            (w.ident, {**meet, "tells": meeting.guests and w.rank == next(iter(self._order))})
            for w in self._roster.live.values()
        ]

    def _lacks_workers(self, guests: int) -> bool:
        """Whether the job waits for more workers than ``guests`` before it goes on."""
        worker, living = self._roster.a_worker(), len(self._roster.live)
        replaces = worker is not None and worker.config.get(ELASTIC) == REPLACE
        staying = living - len(self._may_leave())
        return replaces and staying + guests < max(self.size, self._full)

    def _wait_for_workers(self, now: float) -> list[Output]:
        """Wait, with all workers stopped, for workers in the places of lost ones."""
        since = self._stopped = now if self._stopped is None else self._stopped
        left = since + self.elastic_wait - now
        lost = names([f"worker {rank}" for rank in sorted(self._dropped)])
        if left <= 0:
            self.blamed = self.blamed or self.losses[-1].node
            return self._fail(
                f"{self.losses[-1].why}; the job cannot go on without it: no other worker has"
                f" joined in the place of {lost} within {self.elastic_wait:g} s (BPSX_ELASTIC_WAIT)"
            )
        if now >= self._reported_at + REPORT_EVERY:
            self._reported_at = now
            self.notes.append(
                f"all workers have stopped, and wait for another in the place of {lost}, for"
                f" {left:.0f} s more (BPSX_ELASTIC_WAIT): start it as the lost one was"
            )
        return []

    def _look_at_the_clock(self, now: float) -> list[Output]:
        """Cancel a meeting that exceeds its time limit."""
        meeting, waited = self._meeting, now - self._meeting.since
        if meeting.state is MeetingState.CONNECTING and waited >= CONNECT_SECONDS:
            late = names([str(self._newcomers[ident].node) for ident in meeting.awaited])
            why = f"not connected after {CONNECT_SECONDS:g} s: {late}"
            out = self._refuse_newcomers(why, meeting.awaited)
            return [*self._call_off(why, now), *out]
        if meeting.state is MeetingState.CONNECTING or waited < self.patience:
            return []
        late = names([str(self.nodes[ident]) for ident in meeting.awaited])
        why = (
            f"after {waited:.0f} s not at a commit(): {late}; do all workers call it equally often?"
        )
        self._unsaid = False
        stay = [(ident, {"type": "STAY", "text": why}) for ident in self._leavers]
        self._leavers.clear()
        return [*self._call_off(why, now), *stay, *self._refuse_newcomers(why)]

    def _lose_workers(
        self, lost: Sequence[Node], text: str, now: float, planned: bool = False
    ) -> list[Output]:
        """See :class:`~bpsx.scheduler.shrinking.Shrinking`.

        The scripts have to agree on the moment at which they divide data and learning rates anew.
        SOON goes before TERM, with which a script may pass many boundaries at once.
        """
        self._unsaid = True
        self._fresh.difference_update(node.rank for node in lost)
        out = super()._lose_workers(lost, text, now, planned)
        return self._call_at_once(now) + out

    def _call_at_once(self, now: float) -> list[Output]:
        """Ask the workers to meet because of a loss, unless they meet already or cannot."""
        idle = self.state is JobState.RUNNING and self._meeting.state is MeetingState.IDLE
        return self._call(now) if idle and self._unsaid else []

    def _fixed_workers(self, lost: Node | None = None) -> str:
        """See :class:`~bpsx.scheduler.shrinking.Shrinking`."""
        others = {node.rank for node in self._others(lost)}
        if others and self._fresh.issuperset(others):
            return "no worker that is left has got the model"
        return super()._fixed_workers(lost)

    def synced(self, ident: bytes) -> list[Output]:
        """Handle SYNCED: a worker that has joined has got the model."""
        node = self.nodes.get(ident)
        if node is not None:
            self._fresh.discard(node.rank)
        return []

    def _part_again(self, now: float) -> list[Output]:
        """End a meeting without newcomers: scripts now see which workers were lost or have left.

        A term announces it, as another scheduler has to repeat it to workers that lack it.
        """
        assert self.terms is not None
        self._meeting.move(MeetingEvent.ALL_MET, (), now)
        self._unsaid = False
        number, live = self.terms.skip(), len(self._roster.live)
        text = f"term {number}: {live} workers have met, as others were lost or have left"
        return [*self._to_all(self._new_term([], text, met=True)), *self._replay()]

    def _call_off(self, why: str, now: float) -> list[Output]:
        """Let the workers go on; newcomers that connect wait for the next meeting."""
        self._meeting.move(MeetingEvent.CALLED_OFF, (), now)
        off = {"type": "OFF", "meeting": self._meeting.number, "text": why}
        self.notes.append(f"a meeting of the workers is off: {why}")
        told = [ident for ident, n in self._newcomers.items() if n.welcomed]
        for newcomer in self._newcomers.values():
            newcomer.welcomed = False
        return [*self._to_all(off), *((ident, off) for ident in told), *self._replay()]

    def _welcome_newcomers(self, guests: dict[bytes, Newcomer], now: float) -> list[Output]:
        """Let the newcomers connect to the lanes, now that all workers have stopped."""
        self._meeting.move(MeetingEvent.ALL_HERE, guests, now)
        self._paused = now
        servers = self._of("server")
        first = 0
        ended: list[int] = []
        for server in servers:
            ended += range(first, first + len(server.lanes)) if server.left else []
            first += len(server.lanes)
        welcome = {
            **self._welcome(),
            "servers": [[s.host, s.pid, s.lanes] for s in servers],
            "names": {"server": [str(s) for s in servers]},
            "meeting": self._meeting.number,
            "names_told": self._meeting.names,
            "living": list(self._order),
            "ended": ended,
            "terms": [[term[field] for field in TERM_FIELDS] for term in self._history],
            "joins": self._joins.generation,
            "epoch": self.epoch,
        }
        for newcomer in guests.values():
            newcomer.welcomed = True
        return [(ident, {**welcome, "rank": n.node.rank}) for ident, n in guests.items()]

    def _tell_servers(self, now: float) -> list[Output]:
        """Tell the servers of the newcomers, which have all connected to the lanes."""
        assert self.terms is not None
        self._meeting.move(MeetingEvent.ALL_READY, (), now)
        return self._clear(self.terms.number + 1)

    def _resume_entering(self, term: int, now: float) -> list[Output]:
        """Go on with an entry of which an earlier scheduler has told some servers."""
        self._meeting.move(MeetingEvent.TAKEN_OVER, (), now)
        self._paused = None
        return self._clear(term)

    def _clear(self, term: int) -> list[Output]:
        assert self.terms is not None
        nodes = [n.node for n in self._newcomers.values() if n.welcomed]
        self.terms.enter(term, [node.rank for node in nodes])
        entering = [[node.rank, str(node)] for node in nodes]
        servers = list(self._roster.live_servers)
        out = self._joins.clear(servers, entering=entering, term=term)
        return out + self._release(self._joins.over())

    def _let_in(self) -> list[Output]:
        """Let all workers go on with the newcomers, after the last server has cleared."""
        assert self.terms is not None
        self._meeting.move(MeetingEvent.ALL_CLEARED, (), self._now)
        # Processes of a machine get places next to each other.
        entering = [n.node for n in self._newcomers.values() if n.welcomed]
        newcomers = sorted(entering, key=lambda node: node.rank)
        for node in newcomers:
            del self._newcomers[node.ident]
            self._roster.enter(node)
            self._stalls.enter(node.rank)
            self._order[node.rank] = None
            self._note_root(node)
            self.entered[node.rank] = self.terms.number
            self.let_in.append(node.rank)
            self._fresh.add(node.rank)
        self._unsaid = False
        self._quorum.change(self._order)
        self._share_again(self._now)
        workers = list(self._roster.live.values())
        self._full = max(self._full, len(workers))
        text = (
            f"{names([str(n) for n in newcomers])} has joined: the job goes on with term"
            f" {self.terms.number} and {len(workers)} workers"
        )
        self.notes.append(text)
        paused = None if self._paused is None else self._now - self._paused
        self.terms.changes.joined(
            self.terms.number, names([str(n) for n in newcomers]), self._now, paused
        )
        term = self._new_term(
            [], text, entered=[n.rank for n in newcomers], living=self._count_senders(), met=True
        )
        told = [*workers, *self._roster.live_servers.values()]
        return [(n.ident, term) for n in told] + self._replay()

    def _replay(self) -> list[Output]:
        """Handle what has happened meanwhile."""
        held, self._held = self._held, []
        return [out for event in held for out in event()]

    def _live_idents(self) -> list[bytes]:
        return [w.ident for w in self._roster.live.values()]

    def _to_all(self, message: dict[str, Any]) -> list[Output]:
        return [(ident, message) for ident in self._live_idents()]


def _status(missing: str) -> dict[str, Any]:
    return {"type": "STATUS", "missing": missing, "here": ""}
