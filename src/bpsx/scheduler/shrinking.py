"""The part of a job's membership that goes on without lost workers. Pure.

docs/internals/elastic-workers.md has the protocol: the loss of a worker begins a term in which no
keys move. Lanes and workers decide alone which of its gradients count. Worker processes that sum
among themselves are lost together: docs/internals/elastic-machines.md.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from bpsx.scheduler.balancing import Balancing
from bpsx.scheduler.gathering import Output
from bpsx.scheduler.quorum import Quorum
from bpsx.scheduler.roster import Node, names
from bpsx.scheduler.states import JobState, Presence
from bpsx.scheduler.surviving import Loss, lost_message
from bpsx.scheduler.terms import ELASTIC, REPLACE, SHRINK, fixed_workers


class Shrinking(Balancing):
    """The workers that a job has lost, and goes on without."""

    _order: dict[int, None]

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        # Machine -> its root's connection, where only the root speaks to the servers.
        self._roots: dict[int, bytes] = {}
        self._done: set[bytes] = set()  # neighbours of lost workers that were about to leave
        self._quorum = Quorum()
        self._heard: dict[int, int] = {}  # worker -> the latest term that it has carried out

    @property
    def _dropped(self) -> dict[int, int]:
        """The lost workers without which the job goes on, and the term since which it does."""
        return self.terms.dropped if self.terms is not None else {}

    @property
    def _survives_workers(self) -> bool:
        """Whether the job is to survive the loss of a worker, as far as its options say."""
        return any(given.get(ELASTIC) in (SHRINK, REPLACE) for _, given in self._roster.kinds())

    # ---- machines, where their processes sum among themselves

    def _note_root(self, worker: Node) -> None:
        """Note a worker if it speaks for its machine."""
        if self.processes > 1 and self._speaks(worker):
            self._roots[worker.rank // self.processes] = worker.ident

    def _neighbours(self, node: Node) -> list[Node]:
        """The other live processes of a worker's machine."""
        live = self._roster.live
        return [live[r] for r in self._machine(node.rank) if r in live and r != node.rank]

    def _whole_machines(self, ranks: Iterable[int]) -> set[int]:
        """Return the ``ranks`` on machines all of whose processes are among ``ranks``."""
        found = {*ranks}
        return {rank for rank in found if found.issuperset(self._machine(rank))}

    def lives(self, rank: int) -> bool:
        """Whether a worker of this rank is in the job."""
        return rank in self._roster.live

    def _count_senders(self) -> int:
        """Number of live workers that speak to the servers."""
        return sum(self._speaks(worker) for worker in self._roster.live.values())

    # ---- the loss

    def _others(self, lost: Node | None) -> list[Node]:
        """The live workers that are not on the machine of ``lost``."""
        machine = self._machine(lost.rank) if lost is not None else ()
        return [w for rank, w in self._roster.live.items() if rank not in machine]

    def _fixed_workers(self, lost: Node | None = None) -> str:
        """Why the job cannot go on without the worker ``lost``, or without any; "" if it can."""
        why = fixed_workers([options for _, options in self._roster.kinds()])
        if why:
            return why
        if not self._others(lost):
            return "it was the last worker" if self.processes == 1 else "it was the last machine"
        if self._sender_left is not None:
            return f"{self._sender_left} has left, perhaps with the only result"
        return self._cut_off(lost)

    def _cut_off(self, lost: Node | None) -> str:
        """Why the job must not go on without ``lost``, which may live beyond a split, or ""."""
        more = self._machine(lost.rank) if lost is not None and lost.silent else ()
        if self._quorum.holds([w.rank for w in self._others(lost)], more):
            return ""
        return (
            "as many workers are silent as are left, or more, so this scheduler may be the one that"
            " is cut off; if they live, they may go on with another scheduler at this address"
        )

    def note_silence(self, ident: bytes) -> None:
        """Note that a node was silent for too long; :meth:`gone` removes it next."""
        node = self.nodes.get(ident)
        if node is not None and not node.left:
            node.silent = True

    def moved(self, ident: bytes, m: dict[str, Any], now: float) -> list[Output]:
        """Handle MOVED, as :meth:`Surviving.moved`."""
        out = super().moved(ident, m, now)
        node = self.nodes.get(ident)
        if self.state is JobState.RUNNING and self.terms is not None and node is not None:
            self._heard[node.rank] = m["term"]
            speak = [rank for rank, w in self._roster.live.items() if self._speaks(w)]
            if all(self._heard.get(rank, 0) >= self.terms.number for rank in speak):
                self._quorum.confirm(self._order)
        return out

    def _must_take_part(self, node: Node) -> bool:
        """Whether lanes wait for reports of ``node`` on its keys: even a leaver is then lost.

        If only ``node`` has a result, no other worker has committed the round.
        """
        return (
            self._survives_workers
            and self.terms is not None
            and self.terms.awaits(node.ident)
            and self._speaks(node)
        )

    def _lose_machine(self, node: Node, text: str, now: float) -> list[Output]:
        """Begin a term without ``node``, and without those that sum with it. Arguments as below."""
        neighbours = self._neighbours(node)
        out: list[Output] = []
        if node.silent:
            self._quorum.lose(self._machine(node.rank))
        if neighbours:
            more = names([str(neighbour) for neighbour in neighbours])
            text += f"; its machine leaves the job with it: {more}"
        for neighbour in neighbours:
            waits = neighbour.presence is Presence.LEAVING
            self._done |= {neighbour.ident} if waits else set()
            self._remove(neighbour)
            told = {"type": "GOODBYE"} if waits else lost_message(text, goes_on=True)
            out.append((neighbour.ident, told))
        return out + self._lose_workers([node, *neighbours], text, now)

    def _lose_workers(
        self, lost: Sequence[Node], text: str, now: float, planned: bool = False
    ) -> list[Output]:
        """Begin a term without ``lost``, one worker or those of a machine.

        ``text``: how the first of them ended. ``now``: when. ``planned``: it has asked to leave,
        and nothing is under way.
        """
        assert self.terms is not None
        out: list[Output] = []
        for arrival in list(self._arrivals.values()):
            out += self._drop(arrival, "a worker was lost before all had connected to it")
        workers = list(self._roster.live.values())
        ranks = sorted({rank for node in lost for rank in self._machine(node.rank)})
        senders = [w.ident for w in workers if self._speaks(w)]
        who = names([str(node) for node in lost])
        if self.processes > 1 and self.registry is not None:
            self.registry.forget(ranks)
        self.terms.drop(ranks, who, [node.ident for node in lost], senders, now, planned)
        self.terms.changes.ended(self.terms.number, text, now)
        self._quorum.change(self._order)
        why = text
        text += (
            f"; the job goes on with term {self.terms.number} and {len(workers)} of"
            f" {len(workers) + len(self._dropped)} workers"
        )
        for node in lost[1:]:
            more = f"{node} has left the job with {lost[0]}"
            self.losses.append(Loss(node, more, more, planned or node.ident in self._done))
        self.losses.append(Loss(lost[0], why, text, planned))
        message = self._new_term(
            [], text, dropped=ranks, living=len(senders), leaving=ranks if planned else []
        )
        self._share_again(now)
        told = [*workers, *self._roster.live_servers.values()]
        out += [(n.ident, message) for n in told]
        for node in lost:  # a root takes the marks along that it had to clear
            out += self._release(self._joins.lost(node.ident))
        return out + self._process_deferred()
