"""The part of a job's membership that lets servers join while the job runs. Pure.

docs/internals/elastic-servers.md has the states and messages. A server that comes late gets a new
rank and new lanes. The senders connect to it first; only then may it get keys.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from bpsx.scheduler.gathering import Output
from bpsx.scheduler.roster import Node, names
from bpsx.scheduler.states import JobState
from bpsx.scheduler.surviving import Surviving, left_message, lost_message
from bpsx.scheduler.terms import elastic_is_off, fixed_workers

#: Seconds in which all senders have to connect to a server that joins the job.
COMING_SECONDS = 30.0
#: Seconds between two reports of a job that waits for a server.
REPORT_EVERY = 10.0


@dataclass
class Arrival:
    """A server to which workers connect.

    ``first``: its first lane. ``awaited``: senders that have not said CONNECTED. ``since``: time of
    the first :meth:`Arriving.tend` that saw it.
    """

    node: Node
    first: int
    awaited: set[bytes]
    since: float | None = None

    @property
    def lanes(self) -> list[int]:
        """The numbers of its lanes."""
        return list(range(self.first, self.first + len(self.node.lanes)))


def lanes_message(node: Node, first: int) -> dict[str, Any]:
    """Return LANES about a server whose first lane is ``first``."""
    return {
        "type": "LANES",
        "server": node.rank,
        "name": str(node),
        "host": node.host,
        "pid": node.pid,
        "first": first,
        "lanes": node.lanes,
    }


class Arriving(Surviving):
    """The servers that join the running job. ``notes``: lines that the hub has not logged yet."""

    job: int

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.notes: list[str] = []
        self._arrivals: dict[int, Arrival] = {}  # by rank

    def _shares(self, nodes: Sequence[Node]) -> dict[int, float]:
        """The fraction of all bytes that each of these servers should sum, by rank."""
        raise NotImplementedError

    def _remove(self, node: Node) -> None:
        """Remove a node from all of the job's accounts."""
        raise NotImplementedError

    @property
    def servers_now(self) -> int:
        """Number of servers: those in the running job, else those with which it begins."""
        running = self.state is JobState.RUNNING
        return len(self._roster.live_servers) if running else self.num_server

    # ---- coming

    def _bars_server(self, m: dict[str, Any]) -> str:
        """See :class:`~bpsx.scheduler.gathering.Gathering`."""
        return self._fixed_servers(m["config"])

    def _welcome(self) -> dict[str, Any]:
        """The fields of WELCOME that every node gets."""
        replaceable = self.elastic_wait > 0 or self.num_server > 1
        kinds = [options for _, options in self._roster.kinds()]
        shrinks = not fixed_workers(kinds)
        return {
            "type": "WELCOME",
            "job": self.job,
            "workers": self.places // self.processes,  # senders: one per worker, or per machine
            "processes": self.processes,
            "again": self.again,
            "elastic": replaceable and not self._fixed_servers() or shrinks,
            "shrinks": shrinks,
            "may_lose_scheduler": self.may_lose_scheduler,
        }

    @property
    def may_lose_scheduler(self) -> bool:
        """Whether the running job would wait for another scheduler."""
        return not elastic_is_off(self._given(), self.machines)

    def _for_server(self, node: Node, first: int) -> dict[str, Any]:
        """The fields of WELCOME that only servers get. ``first``: number of its first lane."""
        assert self.terms is not None
        joined, joins = self._joins.marks(self.processes)
        workers, dropped = self._of("worker"), self.terms.dropped
        return {
            "rank": node.rank,
            "first": first,
            "size": self.size,
            # A server names a worker that it loses.
            "peers": [[w.rank, str(w)] for w in workers],
            "vacant": sorted({rank // self.processes for rank in self._never_taken()}),
            "left": [left_message(w) for w in workers if w.left and w.rank not in dropped],
            "joined": joined,
            "joins": joins,
            "term": self.terms.number,
            "dropped": sorted(dropped.items()),
        }

    def _never_taken(self) -> list[int]:
        """The places that no worker has had yet."""
        return [rank for rank in range(self.places) if rank not in self._roster.workers]

    def _arrive(self, ident: bytes, m: dict[str, Any]) -> list[Output]:
        """Let a server join: it gets WELCOME, and the senders connect to it."""
        assert self.terms is not None
        out: list[Output] = []
        for other in list(self._roster.live_servers.values()):
            if set(other.lanes) & set(m["lanes"]):  # its port is free again
                out += self.gone(other.ident, "another server has its address", self._now)
        if self.state is not JobState.RUNNING:
            return out
        rank = self.terms.servers
        node = Node(ident, "server", rank, m["host"], m["pid"], m["lanes"], m["config"])
        first = self.terms.reserve(len(node.lanes))
        senders = [w for w in self._roster.live.values() if self._speaks(w)]
        self._roster.arrive(node)
        self._arrivals[node.rank] = Arrival(node, first, {w.ident for w in senders})
        self.notes.append(f"{node} joins the running job; {len(senders)} workers connect to it")
        welcome = {**self._welcome(), **self._for_server(node, first)}
        lanes = lanes_message(node, first)
        return [*out, (ident, welcome), *((w.ident, lanes) for w in senders)]

    def gone(self, ident: bytes, why: str, now: float = 0.0) -> list[Output]:
        """See :class:`~bpsx.scheduler.membership.Membership`."""
        raise NotImplementedError

    def connected(self, ident: bytes, m: dict[str, Any], now: float) -> list[Output]:
        """Handle CONNECTED: a sender has connected to all lanes of a server that joins.

        ``m``: server, its rank; failure, why the sender could not connect, or "".
        """
        arrival, node = self._arrivals.get(m["server"]), self.nodes.get(ident)
        running = self.state is JobState.RUNNING
        if arrival is None or node is None or ident not in arrival.awaited or not running:
            return []
        if m["failure"]:
            return self._drop(arrival, f"{node} cannot connect to it: {m['failure']}")
        arrival.awaited.discard(ident)
        return self._admit(now)

    def _admit(self, now: float) -> list[Output]:
        """Let servers to which all senders have connected get keys."""
        assert self.terms is not None
        out: list[Output] = []
        for rank, arrival in list(self._arrivals.items()):
            if arrival.awaited:
                continue
            del self._arrivals[rank]
            self._roster.reached(arrival.node)
            self.terms.admit(rank, self._shares(self._roster.usable_servers()))
            self.terms.changes.joined(0, str(arrival.node), now)
            self.notes.append(f"{arrival.node} has joined: all workers have connected to it")
            out += self._feed(now)
        return out

    # ---- going before it was used

    def _drop(self, arrival: Arrival, why: str) -> list[Output]:
        """Send a server away, because some sender cannot connect to it."""
        node = arrival.node
        text = f"{node} cannot join the running job: {why}"
        del self._arrivals[node.rank]
        self._remove(node)
        return [(node.ident, lost_message(text)), *self._forget(arrival, text)]

    def _forget(self, arrival: Arrival, text: str) -> list[Output]:
        """Tell the workers that a server has gone before it had any key."""
        self.notes.append(text)
        out = self._tell_gone(arrival.lanes, text)
        return out + self._release(self._joins.lost(arrival.node.ident))

    def _lose_server(self, node: Node, text: str, now: float) -> list[Output]:
        """See :class:`~bpsx.scheduler.surviving.Surviving`."""
        arrival = self._arrivals.pop(node.rank, None)
        if arrival is None:
            return super()._lose_server(node, text, now)
        return self._forget(arrival, f"{text}, before all workers had connected to it")

    # ---- time

    def tend(self, now: float) -> list[Output]:
        """Give up what has taken too long. To be called about once a second."""
        self._now = now
        if self.state is not JobState.RUNNING or self.terms is None:
            return []
        live = {w.ident for w in self._roster.live.values()}
        out: list[Output] = []
        for arrival in list(self._arrivals.values()):
            arrival.awaited &= live
            arrival.since = now if arrival.since is None else arrival.since
            if arrival.awaited and now - arrival.since >= COMING_SECONDS:
                late = names(sorted(str(self.nodes[ident]) for ident in arrival.awaited))
                out += self._drop(arrival, f"not connected after {COMING_SECONDS:g} s: {late}")
        out += self._admit(now)
        return out + self._hunger(now)

    def _hunger(self, now: float) -> list[Output]:
        """Report that the job waits for a server; end the job when it has waited for too long."""
        hunger = self.starvation
        if hunger is None:
            return []
        left = hunger.since + self.elastic_wait - now
        if left <= 0 and not self._arrivals:
            return self._give_up_waiting()
        if now >= hunger.reported + REPORT_EVERY:
            hunger.reported = now
            self.notes.append(
                f"waiting for a server to replace {hunger.node}, for {max(left, 0):.0f} s more"
                " (BPSX_ELASTIC_WAIT): start one with the options of the others"
            )
        return []
