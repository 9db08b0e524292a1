"""The part of a job's membership that goes on without lost workers. Pure.

docs/internals/elastic-workers.md has the protocol: the loss of a worker begins a term in which no
keys move. Lanes and workers decide alone which of its gradients count.
"""

from __future__ import annotations

from bpsx.scheduler.balancing import Balancing
from bpsx.scheduler.gathering import Output
from bpsx.scheduler.roster import Node
from bpsx.scheduler.surviving import Loss
from bpsx.scheduler.terms import ELASTIC, REPLACE, SHRINK, fixed_workers


class Shrinking(Balancing):
    """The workers that a job has lost, and goes on without."""

    @property
    def _dropped(self) -> dict[int, int]:
        """The lost workers without which the job goes on, and the term since which it does."""
        return self.terms.dropped if self.terms is not None else {}

    @property
    def _survives_workers(self) -> bool:
        """Whether the job is to survive the loss of a worker, as far as its options say."""
        return any(given.get(ELASTIC) in (SHRINK, REPLACE) for _, given in self._roster.kinds())

    def _fixed_workers(self) -> str:
        """Why the job cannot go on without a worker; empty if it can."""
        why = fixed_workers([options for _, options in self._roster.kinds()])
        if why:
            return why
        if self.processes > 1:
            return f"{self.processes} processes of each machine sum among themselves"
        if not self._roster.live:
            return "it was the last worker"
        if self._sender_left is not None:
            return f"{self._sender_left} has left, perhaps with the only result"
        return ""

    def _must_take_part(self, node: Node) -> bool:
        """Whether lanes wait for what ``node`` says of its keys: then even a leaver is lost.

        If only it has a result, no other worker has committed the round.
        """
        return (
            self._survives_workers
            and self.terms is not None
            and self.terms.awaits(node.ident)
            and self._speaks(node)
        )

    def _lose_worker(
        self, node: Node, text: str, now: float, planned: bool = False
    ) -> list[Output]:
        """Begin a term without ``node``, which was lost at ``now``. ``text``: how it ended.

        ``planned``: it has asked to leave, and nothing is under way.
        """
        assert self.terms is not None
        out: list[Output] = []
        for arrival in list(self._arrivals.values()):
            out += self._drop(arrival, "a worker was lost before all had connected to it")
        workers = list(self._roster.live.values())
        senders = [w.ident for w in workers]
        self.terms.drop(node.rank, str(node), node.ident, senders, now, planned)
        why = text
        text += (
            f"; the job goes on with term {self.terms.number} and {len(workers)} of"
            f" {len(workers) + len(self._dropped)} workers"
        )
        self.losses.append(Loss(node, why, text, planned))
        leaving = [node.rank] if planned else []
        message = self._new_term(
            [], text, dropped=[node.rank], living=len(workers), leaving=leaving
        )
        self._share_again(now)
        told = [*workers, *self._roster.live_servers.values()]
        return out + [(n.ident, message) for n in told] + self._process_deferred_byes()
