"""The part of a job's membership that lets workers leave in good order while the job runs. Pure.

docs/internals/elastic-departures-workers.md has the protocol. A worker that has to end asks with
DEPART. All workers meet, and hear of it; they meet again at their next boundary, and the job goes
on without it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from bpsx.scheduler.gathering import Output
from bpsx.scheduler.meetings import Meeting, MeetingEvent
from bpsx.scheduler.roster import Node, names
from bpsx.scheduler.shrinking import Shrinking
from bpsx.scheduler.states import JobState, Presence


@dataclass
class Wish:
    """A worker's wish to leave. ``needs``: what it has called that needs all workers, or ""."""

    why: str
    needs: str


class Leaving(Shrinking):
    """The workers that want to leave the running job."""

    _meeting: Meeting
    _stopped: float | None
    _fresh: set[int]
    _order: dict[int, None]
    _newcomers: Mapping[bytes, Any]

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self._leavers: dict[bytes, Wish] = {}  # workers that have asked, in this order
        # They have left, but not got GOODBYE, as others may not know yet.
        self._parting: list[bytes] = []

    def depart(self, ident: bytes, m: dict[str, Any], now: float) -> list[Output]:
        """Handle DEPART of a server or a worker. ``m``: why, needs."""
        node = self.nodes.get(ident)
        if node is None or node.role != "worker":
            return super().depart(ident, m, now)
        if node.left or self.state is not JobState.RUNNING:
            return []
        if ident not in self._leavers:
            self.notes.append(f"{node} wants to leave the job: {m['why']}")
        self._leavers[ident] = Wish(m["why"], m["needs"])
        why, out = f"{node} on the same machine leaves it ({m['why']})", []
        for neighbour in self._neighbours(node):
            if self._leavers.setdefault(neighbour.ident, Wish(why, "")).why == why:
                out.append((neighbour.ident, {"type": "DEPART", "why": why}))
        if node in self._may_leave():
            return out
        why = self._why_needed() or "no other worker has got the model yet"
        return [*out, (ident, {"type": "STAY", "text": why})]

    def has_successor(self, node: Node) -> bool:
        """Whether another worker has joined in the place of ``node``."""
        return node.role == "worker" and self._roster.workers.get(node.rank) is not node

    def changes(self, now: float) -> dict[str, Any]:
        """Return the numbers of lost, departed and joined nodes, and the term; for observers.

        Any thread may call it. ``now``: time of the hub's clock.
        """
        losses, terms = list(self.losses), self.terms
        found = {
            # The last server is lost twice: when it ends, and when another replaces it.
            f"{role}s_{how}": len(
                {id(x.node) for x in losses if x.node.role == role and x.planned == planned}
            )
            for role in ("worker", "server")
            for how, planned in (("lost", False), ("left", True))
        }
        nodes, servers = list(self.nodes.values()), self.num_server
        late = [n for n in nodes if n.role == "server" and n.rank >= servers]
        return {
            **found,
            "workers_now": len(self._roster.live),
            "workers_joined": sum(len(term["entered"]) for term in list(self._history)),
            "servers_joined": sum(n.presence is not Presence.COMING for n in late),
            "term": terms.number if terms is not None else 0,
            "gap": terms.gap if terms is not None else 0.0,
            "again": terms.again if terms is not None else 0,
            "changes": terms.changes.view(now) if terms is not None else [],
        }

    @property
    def _wishing(self) -> list[Node]:
        """The live workers that want to leave."""
        self._leavers = {i: w for i, w in self._leavers.items() if not self.nodes[i].left}
        return [self.nodes[ident] for ident in self._leavers]

    @property
    def _all_leave(self) -> bool:
        """Whether the job is to end: all workers want to leave, and none joins to get the model."""
        wishing, live = self._wishing, len(self._roster.live)
        others = self._guests() if live == self.processes else self._newcomers
        return bool(wishing) and len(wishing) == live and not others

    def _why_needed(self) -> str:
        """Return why no worker may leave, or ""."""
        if self._all_leave:
            return ""
        if why := super()._fixed_workers():
            return why
        needs = [wish.needs for wish in self._leavers.values() if wish.needs]
        return f"{needs[0]} needs all workers" if needs else ""

    def _may_leave(self) -> list[Node]:
        """The workers that want to leave, as far as the others can go on without them.

        If none of the others has got the model, one stays to hand it over.
        """
        wishing = self._wishing
        if not wishing or self._why_needed():
            return []
        with_model = [rank for rank in self._order if rank not in self._fresh]
        if self._all_leave or {*with_model} - {node.rank for node in wishing}:
            return wishing
        wanted = {newcomer.node.rank for newcomer in self._newcomers.values()}
        last = min(with_model, key=lambda rank: rank in wanted, default=-1)
        staying = self._machine(last)
        return [node for node in wishing if node.rank not in staying]

    def _leave(self, now: float) -> list[Output] | None:
        """Let workers leave now that all have stopped, or announce it. None: none may leave.

        They leave at once if that has been announced in this meeting, if all leave, or if all wait
        for others to join already.
        """
        leaving = self._may_leave()
        if not leaving:
            return None
        if self._all_leave:
            return self._end(now)
        if not (self._meeting.announced or self._stopped is not None):
            return self._announce(leaving, now)
        for node in leaving:  # all of them first: lanes do not hear one that is about to leave
            self._remove(node)
            self._parting.append(node.ident)
        out: list[Output] = []
        machines: dict[int, list[Node]] = {}
        for node in leaving:
            machines.setdefault(node.rank // self.processes, []).append(node)
        for nodes in machines.values():
            text = f"{nodes[0]} leaves the job: {self._leavers.pop(nodes[0].ident).why}"
            out += self._lose_workers(nodes, text, now, planned=True)
            out += [out for node in nodes for out in self._after_leaving(node)]
        return out

    def _announce(self, leaving: list[Node], now: float) -> list[Output]:
        """Announce the leavers to all workers, which stop again at the next boundary."""
        assert self.terms is not None
        live = [w.ident for w in self._roster.live.values()]
        self._meeting.move(MeetingEvent.ANNOUNCED, live, now)
        text = (
            f"term {self.terms.skip()}: {names([str(node) for node in leaving])} will leave the"
            " job at the next boundary"
        )
        ranks = [node.rank for node in leaving]
        term = self._new_term([], text, met=True, leaving=ranks)
        return [(ident, term) for ident in live]

    def _end(self, now: float) -> list[Output]:
        """End the job: all workers leave, and nothing of theirs is under way."""
        self._meeting.move(MeetingEvent.ALL_MET, (), now)
        self.notes.append("all workers leave the job")
        out: list[Output] = []
        for node in list(self._roster.live.values()):
            out += self.bye(node.ident, {"failure": ""}, now)
        return out

    def tend(self, now: float) -> list[Output]:
        """See :class:`~bpsx.scheduler.arrivals.Arriving`."""
        out = super().tend(now)
        return out if self._keys_move() else out + self._farewells()

    def _farewells(self) -> list[Output]:
        """Let workers go of which the others know that they have left."""
        parting, self._parting = self._parting, []
        return [(ident, {"type": "GOODBYE"}) for ident in parting]

    def _guests(self) -> Mapping[bytes, Any]:
        """The newcomers whose places are vacant."""
        raise NotImplementedError

    def _remove(self, node: Node) -> None:
        """See :class:`~bpsx.scheduler.arrivals.Arriving`."""
        raise NotImplementedError

    def _after_leaving(self, node: Node) -> list[Output]:
        """Tell the others that a node has left."""
        raise NotImplementedError

    def bye(self, ident: bytes, m: dict[str, Any], now: float = 0.0) -> list[Output]:
        """See :class:`~bpsx.scheduler.membership.Membership`."""
        raise NotImplementedError
