"""Nodes that came while the job was gathering, and then disappeared or were refused.

Pure; the hub passes the time in.

A process whose connection broke, or that was started again, comes back within moments. One that
does not has died, and the waiting nodes should learn so now instead of at the rendezvous deadline.
A node that was refused for its options has ended. The job waits for it in the same way, as it may
be started again with other options.
"""

from __future__ import annotations

from dataclasses import dataclass

from bpsx.scheduler.roster import Node
from bpsx.scheduler.states import PresenceEvent


@dataclass(eq=False)
class _Missed:
    """A missed node. ``since``: time of the first :meth:`Vanished.due` that saw it."""

    node: Node
    text: str
    since: float | None = None


class Vanished:
    """The missed nodes. Owned by one thread."""

    def __init__(self) -> None:
        self._missed: list[_Missed] = []

    def miss(self, node: Node, text: str) -> None:
        """A node is gone; ``text`` names it."""
        self._missed.append(_Missed(node, text))

    def turn_away(self, node: Node, text: str) -> None:
        """A node whose place is free was refused; ``text`` names it and gives the reason.

        Repeated tries count as one miss, whose clock keeps running. A server's repeated tries are
        recognized by its host, so several refused servers of one host count as one.
        """
        for one in self._in_place_of(node):
            if node.role == "worker" or one.node.host == node.host:
                one.node.go(PresenceEvent.TURNED_AWAY)
                one.text = text
                return
        node.go(PresenceEvent.TURNED_AWAY)
        self.miss(node, text)

    def back(self, node: Node, lacking: int) -> None:
        """Note that a node has come: it, or the node that it replaces, is no longer missed.

        ``lacking``: number of servers still missing.
        """
        same = self._in_place_of(node)
        # A worker's place is a single one, however many died in it. A server on another host than
        # the missed ones had not come yet, as long as servers are lacking.
        if node.role == "server":
            same = [m for m in same if m.node.host == node.host][:1] or same[
                : max(0, len(same) - lacking)
            ]
        for one in same:
            one.node.go(PresenceEvent.RETURNED)
            self._missed.remove(one)

    def _in_place_of(self, node: Node) -> list[_Missed]:
        """The missed nodes in whose place ``node`` may be: any server may take a server's."""
        role, rank = node.role, node.rank
        return [
            m
            for m in self._missed
            if m.node.role == role and (role == "server" or m.node.rank == rank)
        ]

    def due(self, now: float, grace: float) -> tuple[float, str] | None:
        """Return the time at which the first missed node counts as dead, and the text to send then.

        A node counts as dead ``grace`` seconds after the first call that saw it; ``now``: this
        call's time. Returns None if no node is missed.
        """
        for one in self._missed:
            one.since = now if one.since is None else one.since
        first = min(self._missed, key=lambda m: m.since or 0.0, default=None)
        if first is None or first.since is None:
            return None
        return (
            first.since + grace,
            f"{first.text}, and did not come back within {grace:g} s (BPSX_GATHER_GRACE) while the"
            " job was gathering",
        )
