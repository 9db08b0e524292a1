"""The part of a job's membership that replaces lost servers. Pure.

docs/internals/elastic.md has the protocol, ``terms.py`` the bookkeeping. A worker that speaks to
servers and leaves in good order takes results along that others may lack when a server dies:

* While keys move, such a worker's BYE waits until all have moved and late workers have had time to
  get what they lack, or until all workers that are left say BYE.
* If it has left before, the job goes on for workers that have all that they need. It fails as soon
  as one waits for something that was on the lost server.

An asynchronous job does not need workers that have left, nor those that have died.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from bpsx.errors import Status
from bpsx.planning.placement import Moves, Yields
from bpsx.scheduler.gathering import Gathering, Output
from bpsx.scheduler.join_barrier import Joins
from bpsx.scheduler.registry import Registry
from bpsx.scheduler.roster import Node, names
from bpsx.scheduler.stall_detector import Stalls
from bpsx.scheduler.states import Handover, JobState, Presence
from bpsx.scheduler.terms import LAST, LONGEST_SECONDS, Terms, fixed_servers, obstacle


class Loss(NamedTuple):
    """The loss of a server or worker that the job has survived.

    ``why``: how the node ended. ``text``: that, and what follows from it. ``planned``: it has asked
    to leave.
    """

    node: Node
    why: str
    text: str
    planned: bool = False


@dataclass
class Starvation:
    """The job has lost its last server and waits for another.

    ``text``: how the server ended. ``since``: when. ``reported``: time of the latest report.
    """

    node: Node
    text: str
    since: float
    reported: float


def left_message(node: Node) -> dict[str, Any]:
    """Return LEFT about a worker."""
    return {"type": "LEFT", "rank": node.rank, "host": node.host, "pid": node.pid}


def lost_message(
    text: str, status: int = Status.PEER_LOST, goes_on: bool = False
) -> dict[str, Any]:
    """Return LOST, which ends the job for a process.

    ``status``: with which push_pulls end. ``goes_on``: the job goes on without this process.
    """
    return {"type": "LOST", "text": text, "status": status, "goes_on": goes_on}


def term_message(
    number: int,
    moves: Moves,
    text: str,
    missed: bool,
    yields: Yields | None = None,
    dropped: Sequence[int] = (),
    living: int = 0,
    entered: Sequence[int] = (),
    met: bool = False,
    leaving: Sequence[int] = (),
) -> dict[str, Any]:
    """Return TERM.

    ``dropped``, ``entered``: ranks of workers that were lost or have joined. ``living``: number of
    workers then that speak to the servers. ``met``: it ends a meeting. ``leaving``: ranks of
    workers that leave in good order: at the next boundary, or now if they are among ``dropped``,
    too.
    """
    return {
        "type": "TERM",
        "term": number,
        "moves": moves,
        "text": text,
        "missed": missed,
        "yields": yields or [],
        "dropped": list(dropped),
        "entered": list(entered),
        "met": met,
        "living": living,
        "leaving": list(leaving),
    }


class Surviving(Gathering):
    """The servers that a job has lost.

    ``losses``: those that it has survived. ``blamed``: the node whose end was the first that it
    did not survive. ``starvation``: its last server is lost, and it waits ``elastic_wait`` seconds
    for another.
    """

    elastic_wait = 0.0
    machines = 0  # number of machines with which the job has begun
    #: No worker waits for another, so the job continues when one dies.
    asynchronous = False

    def __init__(
        self,
        num_worker: int,
        num_server: int,
        local_size: int,
        stall_warn: float,
        deadlock_after: float,
    ) -> None:
        super().__init__(num_worker, num_server, local_size)
        self.processes = 1  # workers per machine when only its root speaks to the servers, else 1
        self.registry: Registry | None = None
        self.terms: Terms | None = None
        self.losses: list[Loss] = []
        self.restored = 0  # number of losses that a scheduler before this one has reported
        self.blamed: Node | None = None
        self.starvation: Starvation | None = None
        self._now = 0.0  # time of the latest event that had one
        self._stalls = Stalls(stall_warn, deadlock_after)
        self._joins = Joins()
        self._sender_left: Node | None = None  # the first that left in good order
        self._history: list[dict[str, Any]] = []  # all TERMs
        #: The latest term of which some worker is known to have heard.
        self.confirmed = 0

    def _fail(self, text: str) -> list[Output]:
        """End the job as failed."""
        raise NotImplementedError

    def _release(self, last: int | None) -> list[Output]:
        """Send ALL_JOINED."""
        raise NotImplementedError

    def _process_deferred(self) -> list[Output]:
        """Process the deferred JOINs and BYEs for which nothing is outstanding any more."""
        raise NotImplementedError

    def _new_term(
        self, moves: Moves, text: str, missed: bool = False, **more: Any
    ) -> dict[str, Any]:
        """Return TERM about the term that has just begun. ``more``: as for :func:`term_message`."""
        assert self.terms is not None
        self._history.append(term_message(self.terms.number, moves, text, missed, **more))
        return self._history[-1]

    # ---- the loss

    def _fixed_servers(self, *more: dict[str, Any]) -> str:
        """Return why the job cannot change its servers, or "". ``more``: a newcomer's options."""
        return fixed_servers([*more, *self._given()], self.machines)

    def _given(self) -> list[dict[str, Any]]:
        return [n.config for n in self.nodes.values()]

    def _lose_server(self, node: Node, text: str, now: float) -> list[Output]:
        """Move a lost server's keys to the others, or end the job. ``text``: how it ended."""
        assert self.registry is not None and self.terms is not None
        servers = self._roster.usable_servers()
        why = obstacle(len(servers), self._fixed_servers())
        if why == LAST and self.elastic_wait and self._sender_left is None:
            return self._starve(node, text, now)
        if why:
            self.blamed = self.blamed or node
            return self._fail(f"{text}; the job cannot go on without it: {why}")
        return self._begin_term(node, text, now)

    def _starve(self, node: Node, text: str, now: float) -> list[Output]:
        """Wait for another server. The keys of the lost one stay where they are until then."""
        assert self.terms is not None
        self.starvation = Starvation(node, text, now, reported=now)
        self.terms.starve()
        more = f"{LAST}, and the job waits {self.elastic_wait:g} s for another (BPSX_ELASTIC_WAIT)"
        self.terms.changes.ended(0, text, now)
        self.losses.append(Loss(node, text, f"{text}; {more}"))
        out = self._tell_gone(self.terms.lanes_of(node.rank), f"{text}; {more}")
        return out + self._release(self._joins.lost(node.ident)) + self._process_deferred()

    def _tell_gone(self, lanes: Sequence[int], text: str) -> list[Output]:
        """Tell the workers that these lanes have ended. No term moves their keys, or not yet."""
        gone = {"type": "GONE", "lanes": list(lanes), "text": text}
        return [(w.ident, gone) for w in self._roster.live.values()]

    def _feed(self, now: float) -> list[Output]:
        """A server can be used: it gets the keys of the last one, if the job waits for that."""
        hunger, self.starvation = self.starvation, None
        if hunger is None or self.terms is None or self.terms.state is not Handover.STARVED:
            return []
        return self._begin_term(hunger.node, hunger.text, hunger.since)

    def _give_up_waiting(self) -> list[Output]:
        """End the job, because no server has come in time."""
        assert self.starvation is not None
        node, text = self.starvation.node, self.starvation.text
        self.starvation = None
        self.blamed = self.blamed or node
        return self._fail(
            f"{text}; the job cannot go on without it: {LAST}, and no other has joined within"
            f" {self.elastic_wait:g} s (BPSX_ELASTIC_WAIT)"
        )

    def _begin_term(self, node: Node, text: str, now: float) -> list[Output]:
        """Move the keys of ``node``, which was lost at ``now``, to the other servers."""
        assert self.terms is not None
        servers = self._roster.usable_servers()
        workers = list(self._roster.live.values())
        senders = [w.ident for w in workers if self._speaks(w)]
        missed = self._sender_left is not None
        moves = self.terms.lose(node.rank, str(node), senders, now, missed)
        self.terms.changes.ended(self.terms.number, text, now)
        heirs = names([str(s) for s in servers], 4)
        why = text
        text += f"; the job goes on with term {self.terms.number}: its keys go to {heirs}"
        if missed:
            text += f", but none of them can be summed any more, as {self._sender_left} has left"
        self.losses.append(Loss(node, why, text))
        term = self._new_term(moves, text, missed)
        told = [*workers, *self._roster.live_servers.values()]
        out: list[Output] = [(n.ident, term) for n in told]
        return out + self._release(self._joins.lost(node.ident)) + self._process_deferred()

    def _refusal(self, m: dict[str, Any]) -> str:
        """Return why a node may not join: a lost server learns that it has been replaced.

        A worker that says HELLO is a new process, which may have the pid of a lost one in its
        container.
        """
        return (self._replacement(m) if m["role"] == "server" else "") or super()._refusal(m)

    def _replacement(self, m: dict[str, Any]) -> str:
        """Tell the sender of HELLO or AGAIN ``m`` that it has been replaced, or return ""."""
        for lost, _, text, _ in self.losses:
            if (m["role"], m["host"], m["pid"], m["lanes"]) == (
                lost.role,
                lost.host,
                lost.pid,
                lost.lanes,
            ):
                fate = "has been replaced" if lost.role == "server" else "is not awaited any more"
                return f"this {lost.role} {fate}: {text}"
        return ""

    def _machine(self, rank: int) -> range:
        """The ranks of the workers that sum among themselves with ``rank``, which is one of them.

        The last one speaks to the servers.
        """
        first = rank - rank % self.processes
        return range(first, first + self.processes)

    def _speaks_rank(self, rank: int) -> bool:
        """Whether worker ``rank`` speaks to the servers."""
        return rank == self._machine(rank)[-1]

    def _speaks(self, node: Node) -> bool:
        """Whether a node is a worker that speaks to the servers."""
        return node.role == "worker" and self._speaks_rank(node.rank)

    # ---- the recovery

    def moved(self, ident: bytes, m: dict[str, Any], now: float) -> list[Output]:
        """Handle MOVED: a worker has given the keys of a term their new places.

        ``m``: term, partitions (moved ones that it had used), again (bytes that it pushes again).
        """
        node = self.nodes.get(ident)
        running = self.state is JobState.RUNNING
        if node is None or node.left or not running or self.terms is None:
            return []
        self.confirmed = max(self.confirmed, m["term"])
        needs = self.terms.moved(ident, m["term"], m["partitions"], m["again"], now)
        if needs:
            return self._fail_missed(node, needs, f"{m['again']} bytes that it had pushed there")
        self._stalls.restart(now)
        return self._process_deferred()

    def settle(self, now: float) -> list[Output]:
        """Let workers leave that had to stay for others, when it is time.

        To be called about once a second.
        """
        if self.terms is None or self.terms.state is not Handover.SETTLING:
            return []
        live = self._roster.live.values()
        staying = [w.rank for w in live if w.presence is Presence.LIVE]
        busy = any(self._stalls.under_way(rank) for rank in staying)
        needed = bool(self._roster.leaving) and not self.asynchronous
        self.terms.settle(now, busy, needed)
        return self._process_deferred()

    def _keys_move(self) -> bool:
        """Whether some workers have yet to move their keys, or wait for a server to take them.

        Until then the scheduler cannot tell which workers wait in vain.
        """
        return self.terms is not None and self.terms.state in (Handover.STARVED, Handover.MOVING)

    def _is_needed(self, node: Node) -> bool:
        """Whether a worker that wants to leave may hold results that others lack."""
        return (
            self.terms is not None and self.terms.unsettled and not node.cut and self._speaks(node)
        )

    # ---- workers that need what is lost

    def _note_leaving(self, node: Node) -> None:
        """Note that a node leaves; if it speaks to servers, its results leave with it.

        In an asynchronous job other workers keep the values that it has had.
        """
        if self.terms is None or not self._speaks(node):
            return
        if not self.asynchronous:
            self._sender_left = self._sender_left or node
        self.terms.left(node.ident, needed=not self.asynchronous)

    def _waits_for_missed(self, node: Node, now: float) -> list[Output]:
        """End the job if a worker reports a push_pull that a missed server was to sum.

        It has time if it may have got what is missed before: other partitions are under way, or it
        does not speak to servers itself.
        """
        terms, registry = self.terms, self.registry
        if terms is None or registry is None or not terms.any_missed:
            return []
        sender = self._roster.live.get(self._machine(node.rank)[-1])
        if sender is None or terms.awaits(sender.ident):  # its reports may be from before the loss
            return []
        for (name, generation), since in self._stalls.under_way(node.rank):
            places = registry.places(name, generation)
            missed = terms.missed(places)
            sure = len(missed) == len(places) and node is sender
            if missed and (sure or now - since >= LONGEST_SECONDS):
                return self._fail_missed(node, missed[0], registry.describe(name, generation))
        return []

    def _fail_missed(self, node: Node, server: str, what: str) -> list[Output]:
        """End the job: worker ``node`` waits for ``what``, which was on ``server``."""
        loss = next(loss for loss in self.losses if str(loss.node) == server)
        self.blamed = self.blamed or loss.node
        return self._fail(
            f"{loss.why}; the job cannot go on without it: {node} waits for {what},"
            f" and {self._sender_left} had left in good order, perhaps with the only result"
        )

    def _missed_text(self) -> str:
        """Return text to add to the failure of a worker that may have needed a missed server."""
        if self.terms is None or not self.terms.any_missed:
            return ""
        return f"; before, the job had lost {names([str(loss.node) for loss in self.losses])}"
