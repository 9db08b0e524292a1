"""The part of a job's membership that lets servers leave in good order while the job runs. Pure.

docs/internals/elastic-departures.md has the protocol. A server that has to end, as its machine will
be taken away, asks with DEPART. If others can take its keys over, the next term begins at once
without it, as after a death, and it gets GOODBYE. Otherwise it gets STAY and the reason, and may
leave as soon as that has changed.
"""

from __future__ import annotations

from typing import Any

from bpsx.scheduler.arrivals import Arriving
from bpsx.scheduler.gathering import Output
from bpsx.scheduler.roster import Node
from bpsx.scheduler.states import JobState, Presence


class Planned(Arriving):
    """The servers that want to leave the running job."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        # Servers that have asked to leave, in this order, and why.
        self._wishes: dict[bytes, str] = {}

    def depart(self, ident: bytes, m: dict[str, Any], now: float) -> list[Output]:
        """Handle DEPART: a server wants to leave. ``m``: why."""
        node = self.nodes.get(ident)
        if node is None or node.left or node.role != "server" or self.state is not JobState.RUNNING:
            return []
        self._wishes[ident] = m["why"]
        out = self._let_go(now)
        if ident in self._wishes:
            out.append((ident, {"type": "STAY", "text": self._why_kept(node)}))
        return out

    def _let_go(self, now: float) -> list[Output]:
        """Let servers leave that have asked for it, as far as the job can go on without them."""
        out: list[Output] = []
        for ident, why in list(self._wishes.items()):
            node = self.nodes[ident]
            if not node.left and self._why_kept(node):
                continue
            del self._wishes[ident]
            if not node.left:
                self._remove(node)
                out.append((ident, {"type": "GOODBYE"}))
                out += self._lose_server(node, f"{node} leaves the job: {why}", now)
                if self.losses and self.losses[-1].node is node:
                    self.losses[-1] = self.losses[-1]._replace(planned=True)
        return out

    def _why_kept(self, node: Node) -> str:
        """Return why the job needs a server that wants to leave, or ""."""
        if node.presence is Presence.COMING:  # it has no keys
            return ""
        if why := self._fixed_servers():
            return why
        if self._sender_left is not None:
            return f"{self._sender_left} has left in good order, perhaps with the only result"
        others = [n for n in self._roster.usable_servers() if n is not node]
        return "" if others else "no other server can take its keys over"

    def _admit(self, now: float) -> list[Output]:
        """See :class:`~bpsx.scheduler.arrivals.Arriving`. A newcomer may replace a server."""
        return super()._admit(now) + self._let_go(now)
