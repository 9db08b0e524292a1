"""Terms: which servers were lost, where keys went, and how far each move has come. Pure.

docs/internals/elastic.md has the protocol. Owned by the hub's only thread; callers pass the time.

Registered tensors keep the places that they were given first. :meth:`Terms.resolve` says where such
a place is now; workers do the same with the moves that TERM tells them.

A lost server is *missed* if a sender had left the job in good order before the keys were at home
elsewhere: it may have held the only copy of a result, and the new lanes wait for its HAVES. Nothing
that was on such a server can be summed any more. That matters only to workers that still need it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from bpsx.planning.placement import MOST_SLOTS, Assignment, Moves, Placement, Yields
from bpsx.scheduler.changes import Changes
from bpsx.scheduler.states import HANDOVER, Handover, HandoverEvent

ELASTIC = "BPSX_ELASTIC"
#: Its values for jobs that go on without lost workers, and for those of them that then wait for
#: others.
SHRINK, REPLACE = "shrink", "replace"
#: Result of :func:`obstacle` if the only obstacle is that no server is left.
LAST = "it was the last server"
#: Seconds after the last MOVED for which leaving senders have to stay. A late worker reports a
#: push_pull once it is a second old, and reports once a second.
SETTLE_SECONDS = 3.0
#: The same, while some worker reports push_pulls under way.
LONGEST_SECONDS = 30.0


def obstacle(servers: int, fixed: str) -> str:
    """Return why a job cannot go on without one of its servers; empty if it can.

    ``servers``: number of the others. ``fixed``: what :func:`fixed_servers` has returned.
    """
    return fixed or ("" if servers else LAST)


def elastic_is_off(given: Collection[dict[str, Any]], machines: int) -> str:
    """Return why every death ends a job; empty if it survives some.

    ``given``, ``machines``: as in :func:`fixed_servers`.
    """
    chosen = {o.get(ELASTIC, "off") for o in given}
    if "off" in chosen:
        return f"{ELASTIC}=off"
    if "auto" in chosen and machines < 2:
        return f"the job has begun on one machine, and {ELASTIC} is not set to servers"
    return ""


def fixed_workers(given: Collection[Mapping[str, Any]]) -> str:
    """Return why a job cannot go on without a lost worker; empty if it can.

    ``given``: as in :func:`fixed_servers`.
    """
    if any(o.get(ELASTIC) not in (SHRINK, REPLACE) for o in given):
        return f"{ELASTIC} is neither {SHRINK} nor {REPLACE}"
    if is_asynchronous(given):
        return "the job is asynchronous"
    return ""


def is_asynchronous(given: Collection[Mapping[str, Any]]) -> bool:
    """Whether training is asynchronous. ``given``: nodes' options."""
    return any(o.get("BYTEPS_ENABLE_ASYNC") for o in given)


def fixed_servers(given: Collection[dict[str, Any]], machines: int) -> str:
    """Return why a job cannot change its servers; empty if it can.

    ``given``: nodes' options. ``machines``: number of machines with which the job has begun.
    """
    if why := elastic_is_off(given, machines):
        return why
    if any(o.get("DMLC_NUM_SERVER") == 1 and not o.get("BPSX_ELASTIC_WAIT") for o in given):
        return f"{LAST}, and BPSX_ELASTIC_WAIT=0"
    return ""


@dataclass
class Recovery:
    """Progress of the senders with one term. Times are of the hub's clock, in seconds.

    ``lost``: name of the lost server, or of the lost worker if ``shrinks``; with ``planned`` that
    worker has left in good order. ``to``: without a loss, names of the servers that get ``nbytes``
    of the keys of living ones. ``missed``: a sender had left before. ``awaited``: senders that have
    not sent MOVED, of ``senders``. ``partitions``, ``again``: sums over the other senders.
    """

    term: int
    lost: str
    begun: float
    missed: bool
    awaited: set[bytes]
    senders: int
    partitions: int = 0
    again: int = 0
    nbytes: int = 0
    seconds: float = 0.0
    to: str = ""
    shrinks: bool = False
    planned: bool = False

    def __str__(self) -> str:
        if self.planned:
            return (
                f"term {self.term}: {self.senders} workers go on without {self.lost}, which has"
                f" left in good order, and push {self.again} bytes again, {self.seconds:.3f} s"
                " after all had stopped for it"
            )
        if self.shrinks:
            return (
                f"term {self.term}: {self.senders} workers go on without {self.lost} and push"
                f" {self.again} bytes again, {self.seconds:.3f} s after its loss was noticed"
            )
        if self.to:
            return (
                f"term {self.term}: {self.senders} workers have moved {self.partitions} partitions"
                f" to {self.to}, {self.nbytes} bytes of the job's tensors, and push {self.again}"
                f" bytes again, {self.seconds:.3f} s after the term had begun"
            )
        return (
            f"term {self.term}: {self.senders} workers have moved {self.partitions} partitions"
            f" of {self.lost} and push {self.again} bytes again, {self.seconds:.3f} s after its"
            " loss was noticed"
        )


class EarlierTerm(NamedTuple):
    """A term that an earlier scheduler has begun.

    ``lost``: the lost server's name. ``yields``: slots that living lanes have yielded. ``to``:
    names of the servers that got these.
    """

    number: int
    lost: str
    moves: Moves
    missed: bool
    yields: Yields = []
    to: str = ""


class Terms:
    """The terms of one job.

    ``number``: the present term; 0 until a server or a worker is lost. ``finished``: recoveries
    that the hub has not logged yet. ``dropped``: lost workers without which the job goes on, and
    the term since which it does. ``gap``: seconds of the latest recovery. ``again``: bytes that
    have been pushed again, in all. ``changes``: the latest ones, for observers.
    """

    def __init__(self, placement: Placement) -> None:
        self.number = 0
        self.state = Handover.SETTLED
        self.finished: list[Recovery] = []
        self.dropped: dict[int, int] = {}
        self.gap, self.again = 0.0, 0
        self.changes = Changes()
        self._placement = placement
        # Lane -> its moves in order: term, number of slots that a move is about, and their targets.
        self._moves: dict[int, list[tuple[int, int, list[tuple[int, int]]]]] = {}
        self._open: list[Recovery] = []
        self._unsettled: dict[int, str] = {}  # lane lost since the keys were settled -> its server
        self._lossy = False  # a server or worker was lost since the keys were settled
        self._missed: dict[int, str] = {}  # lane of a missed server -> the server
        self._moved_at = self._latest = 0.0  # time of the last MOVED, and of the last event

    # ---- moves

    @property
    def servers(self) -> int:
        """Number of servers that have been in the job, and the rank of the next one."""
        return self._placement.servers

    def reserve(self, lanes: int) -> int:
        """Number the lanes of a server that joins the job; returns the first."""
        return self._placement.reserve(lanes)

    def lanes_of(self, server: int) -> list[int]:
        """The numbers of a server's lanes."""
        return self._placement.lanes_of(server)

    def admit(self, server: int, shares: Mapping[int, float]) -> None:
        """Let a server get keys; ``shares``: of each living server, by rank."""
        self._placement.admit(server, shares)

    def share(self, shares: Mapping[int, float]) -> None:
        """Change the shares of the living servers, by rank."""
        self._placement.share(shares)

    def starve(self) -> None:
        """The last server is lost. :meth:`lose` says so again, once another can replace it."""
        self.state = HANDOVER.after(self.state, HandoverEvent.LAST_SERVER_LOST)

    def lose(
        self, server: int, name: str, senders: Collection[bytes], now: float, missed: bool
    ) -> Moves:
        """Begin the next term, because ``server`` is lost; returns the moves of its lanes.

        ``name``: the server, as text. ``senders``: workers that will send MOVED. ``now``: when it
        was lost. ``missed``: a sender has left in good order before.
        """
        self.number += 1
        self._latest = now
        moves = self._placement.lose(server)
        for lane, targets in moves:
            self._moves.setdefault(lane, []).append((self.number, MOST_SLOTS, targets))
            self._unsettled[lane] = name
        self._lossy = True
        self.state = HANDOVER.after(self.state, HandoverEvent.SERVER_LOST)
        self._open.append(
            Recovery(self.number, name, now, missed, set(senders), senders=len(senders))
        )
        if missed:
            self._miss()
        return moves

    def skip(self) -> int:
        """Begin and end a term in which nothing happens; returns its number."""
        self.number += 1
        return self.number

    def drop(
        self,
        ranks: Iterable[int],
        name: str,
        senders: Iterable[bytes],
        others: Collection[bytes],
        now: float,
        planned: bool = False,
    ) -> None:
        """Begin the next term, because the workers ``ranks`` are lost.

        ``name``, ``senders``: the workers, as text and as senders of MOVED. ``others``: the workers
        that will send MOVED. ``now``: when they were lost. ``planned``: they leave in good order.
        """
        self.number += 1
        self._latest = now
        self.dropped.update(dict.fromkeys(ranks, self.number))
        for recovery in self._open:
            recovery.awaited.difference_update(senders)
        self._finish()
        self._lossy = True
        self.state = HANDOVER.after(self.state, HandoverEvent.WORKER_LOST)
        recovery = Recovery(self.number, name, now, False, set(others), senders=len(others))
        recovery.shrinks, recovery.planned = True, planned
        self._open.append(recovery)

    def enter(self, term: int, ranks: Iterable[int]) -> None:
        """Begin ``term``, because workers enter; no key moves."""
        self.number = term
        for rank in ranks:
            self.dropped.pop(rank, None)

    def balance(self) -> tuple[Yields, int]:
        """Choose keys that living servers yield to those that lack some; :meth:`give` follows.

        Returns the rules and the keys' bytes. No rules: none lacks any.
        """
        return self._placement.balance()

    def give(
        self, yields: Yields, nbytes: int, to: str, senders: Collection[bytes], now: float
    ) -> None:
        """Begin the next term, in which keys move by ``yields``; no others may move meanwhile.

        ``to``: the servers that get them. ``senders``, ``now``: as above.
        """
        self.number += 1
        self._latest = now
        for lane, limit, targets in yields:
            self._moves.setdefault(lane, []).append((self.number, limit, targets))
        self.state = HANDOVER.after(self.state, HandoverEvent.KEYS_YIELDED)
        recovery = Recovery(self.number, "", now, False, set(senders), senders=len(senders))
        recovery.to, recovery.nbytes = to, nbytes
        self._open.append(recovery)

    def _next(self, lane: int, slot: int, term: int) -> tuple[int, int] | None:
        """Return the place to which a slot moved from its lane by ``term``; None: it stayed."""
        for number, limit, targets in self._moves.get(lane, []):
            to, base = targets[slot % len(targets)]
            if number <= term and slot < limit and to != lane:
                return to, base + slot // len(targets)
        return None

    def _passed(self, lane: int, slot: int, term: int) -> Iterator[tuple[int, int]]:
        """The places that a partition has had up to ``term``, from the one that it was given."""
        place: tuple[int, int] | None = (lane, slot)
        while place is not None:
            yield place
            place = self._next(*place, term)

    def resolve(self, lane: int, slot: int, term: int | None = None) -> tuple[int, int]:
        """Return the lane and slot of a partition that was given ``lane`` and ``slot``.

        ``term``: the term about which is asked; None: the present one.
        """
        *_, now = self._passed(lane, slot, self.number if term is None else term)
        return now

    def restore(self, told: Sequence[EarlierTerm], moved: Mapping[bytes, int], now: float) -> None:
        """Go on from the terms that an earlier scheduler has begun.

        ``told``: each term from 1 on. ``moved``: the latest term to which each sender has moved.
        """
        if not told:
            return
        self.number, self._latest = told[-1].number, now
        # The keys of earlier terms may be settled, but those of the latest need not be.
        open_from = min([self.number, *(term + 1 for term in moved.values())])
        for term in told:
            self._restore_moves(term)
            lost = {lane: term.lost for lane, _ in term.moves}
            if term.missed:
                self._missed.update(lost)
            if term.number >= open_from:
                self._unsettled.update(lost)
        self._lossy = True
        self.state = HANDOVER.after(self.state, HandoverEvent.SERVER_LOST)
        last = told[-1]
        awaited = {sender for sender, term in moved.items() if term < self.number}
        if awaited:
            recovery = Recovery(
                self.number, last.lost, now, last.missed, awaited, senders=len(awaited)
            )
            recovery.to = last.to
            self._open.append(recovery)
        self._finish()

    def _restore_moves(self, term: EarlierTerm) -> None:
        for lane, targets in term.moves:
            self._moves.setdefault(lane, []).append((term.number, MOST_SLOTS, targets))
        for lane, limit, targets in term.yields:
            self._moves.setdefault(lane, []).append((term.number, limit, targets))

    # ---- progress

    @property
    def unsettled(self) -> bool:
        """Whether a sender that leaves may be needed by others."""
        return self.state is not Handover.SETTLED

    def awaits(self, sender: bytes) -> bool:
        """Whether ``sender`` has yet to send MOVED."""
        return any(sender in recovery.awaited for recovery in self._open)

    def moved(self, sender: bytes, term: int, partitions: int, again: int, now: float) -> str:
        """``sender`` has moved to ``term``, with these numbers of its partitions and bytes.

        Returns the missed server that it still needs something of, usually "".
        """
        needs, self._latest = "", now
        for recovery in self._open:
            if recovery.term == term and sender in recovery.awaited:
                recovery.partitions += partitions
                recovery.again += again
                needs = recovery.lost if recovery.missed and again else ""
            if recovery.term <= term:
                recovery.awaited.discard(sender)
        self._finish()
        return needs

    def _finish(self) -> None:
        for recovery in self._open:
            if not recovery.awaited:
                recovery.seconds = self._latest - recovery.begun
                self.finished.append(recovery)
                self.gap, self.again = recovery.seconds, self.again + recovery.again
                self.changes.went_on(recovery.term, recovery.seconds, recovery.again)
        self._open = [recovery for recovery in self._open if recovery.awaited]
        if self.state is Handover.MOVING and not self._open:
            self.state = HANDOVER.after(self.state, HandoverEvent.ALL_MOVED)
            self._moved_at = self._latest
            if not self._lossy:  # so no outcome is lost
                self.state = HANDOVER.after(self.state, HandoverEvent.TIME_OVER)

    def left(self, sender: bytes, needed: bool = True) -> None:
        """``sender`` is gone.

        If it may be ``needed``, and keys are not at home yet, their servers are missed.
        """
        if self.unsettled and needed:
            self._miss()
        for recovery in self._open:
            if sender in recovery.awaited:
                recovery.awaited.discard(sender)
                recovery.senders -= 1
        self._finish()

    def all_leave(self) -> None:
        """Stop settling: all remaining workers have said BYE, so they need no key any more."""
        if self.unsettled:
            self.state = HANDOVER.after(self.state, HandoverEvent.ALL_LEAVE)
            self._settled()

    def settle(self, now: float, busy: bool, needed: bool) -> None:
        """Let senders leave again, once others have had the time to get what they lack.

        ``busy``: some worker reports push_pulls under way. ``needed``: senders wait to leave, and
        may have what others lack.
        """
        passed = now - self._moved_at
        if self.state is not Handover.SETTLING or passed < SETTLE_SECONDS:
            return
        if busy and passed < LONGEST_SECONDS:
            return
        if busy and needed:
            self._miss()
        self.state = HANDOVER.after(self.state, HandoverEvent.TIME_OVER)
        self._settled()

    def _settled(self) -> None:
        self._unsettled.clear()
        self._lossy = False

    # ---- missed servers

    def _miss(self) -> None:
        self._missed.update(self._unsettled)

    @property
    def any_missed(self) -> bool:
        """Whether some server is missed."""
        return bool(self._missed)

    def missed(self, places: Iterable[Assignment]) -> list[str]:
        """The missed server of each partition that has one. ``places``: those of a tensor."""
        found = []
        for place in places:
            passed = self._passed(place.lane, place.slot, self.number)
            server = next((self._missed[lane] for lane, _ in passed if lane in self._missed), "")
            found += [server] if server else []
        return found
