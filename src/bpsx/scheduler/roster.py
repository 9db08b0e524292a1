"""The job's nodes, indexed so that a look-up costs the same whatever their number.

Pure.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import islice
from typing import Any

from bpsx.scheduler.states import (
    HEARING,
    PRESENCE,
    SUPPLY,
    Hearing,
    HearingEvent,
    Presence,
    PresenceEvent,
    Supply,
    SupplyEvent,
)


@dataclass
class Node:
    """One process that wants to be, is or was in the job. Its :class:`Roster` changes its states.

    ``rank``: -1 if it has none yet. ``token``: identifies a worker that lets the scheduler choose.
    ``unconfirmed``: number of errors that it has not confirmed. ``goodbye``: its BYE, while it
    waits to leave. ``cut``: its connection ended meanwhile. ``silent``: its connection has not
    ended, but nothing was heard on it for too long.
    """

    ident: bytes
    role: str
    rank: int
    host: str
    pid: int
    lanes: list[str] = field(default_factory=list)
    config: dict[str, Any] = field(default_factory=dict)
    token: str = ""
    presence: Presence = Presence.ABSENT
    hearing: Hearing = Hearing.HEARD
    unconfirmed: int = 0
    supply: Supply = Supply.PUSHING
    goodbye: dict[str, Any] = field(default_factory=dict)
    cut: bool = False
    silent: bool = False

    @property
    def left(self) -> bool:
        """Whether it was in the job once."""
        return self.presence is Presence.LEFT

    def go(self, event: PresenceEvent) -> None:
        """Change :attr:`presence`."""
        self.presence = PRESENCE.after(self.presence, event)

    def __str__(self) -> str:
        number = f" {self.rank}" if self.rank >= 0 else ""
        return f"{self.role}{number} ({self.host}, pid {self.pid})"


class Roster:
    """All nodes that are or were in the job, and the only place where their states change.

    ``nodes``: by connection; ``workers``: by rank. The other public fields index nodes by state.
    ``live_servers`` has those that are coming, too.
    """

    def __init__(self) -> None:
        self.nodes: dict[bytes, Node] = {}
        self.workers: dict[int, Node] = {}
        self.live: dict[int, Node] = {}  # workers that have not left
        self.live_servers: dict[bytes, Node] = {}
        self.unheard: dict[bytes, Node] = {}
        self.leaving: dict[bytes, Node] = {}  # in the order of their BYEs
        # Workers that have left without joining since the last ALL_JOINED.
        self.left_unjoined: dict[int, Node] = {}
        self._servers: dict[tuple[str, int, tuple[str, ...]], Node] = {}
        self._configs: dict[tuple[str, str], dict[bytes, Node]] = {}
        self._absent: list[int] = []  # heap of ranks that may be missing
        self._absent_of = 0  # number of workers for which `_absent` was built

    # ---- changes

    def add(self, node: Node) -> None:
        """Add a node whose HELLO is accepted."""
        node.go(PresenceEvent.ACCEPTED)
        if node.role == "server":
            self._add_server(node)
            return
        self._note(node)
        self.workers[node.rank] = self.live[node.rank] = node

    def _add_server(self, node: Node) -> None:
        self._note(node)
        self._servers[_identity(node.host, node.pid, node.lanes)] = node
        self.live_servers[node.ident] = node

    def _note(self, node: Node) -> None:
        self.nodes[node.ident] = node
        self._configs.setdefault(_kind(node), {})[node.ident] = node

    def drop(self, node: Node, event: PresenceEvent) -> None:
        """Remove a node that disappears before the job begins."""
        node.go(event)
        ident, kind = node.ident, _kind(node)
        del self.nodes[ident], self._configs[kind][ident]
        if not self._configs[kind]:
            del self._configs[kind]
        if node.role == "worker":
            del self.workers[node.rank], self.live[node.rank]
            heappush(self._absent, node.rank)
        else:
            del self._servers[_identity(node.host, node.pid, node.lanes)], self.live_servers[ident]

    def enter(self, node: Node) -> None:
        """Add a worker that joins the running job, perhaps in the place of a lost one."""
        node.go(PresenceEvent.ENTERED)
        self._note(node)
        self.workers[node.rank] = self.live[node.rank] = node
        self.left_unjoined.pop(node.rank, None)

    def arrive(self, node: Node) -> None:
        """Add a server that joins the running job."""
        node.go(PresenceEvent.CAME_LATE)
        self._add_server(node)

    def reached(self, node: Node) -> None:
        """All senders have connected to a server that joins the running job."""
        node.go(PresenceEvent.REACHED)

    def start(self) -> None:
        """The job begins with all nodes."""
        for node in self.nodes.values():
            node.go(PresenceEvent.STARTED)

    def defer(self, node: Node, goodbye: dict[str, Any]) -> None:
        """Note a worker that has to wait before it leaves: others need it, or confirm errors."""
        node.go(PresenceEvent.ASKED_TO_LEAVE)
        node.goodbye = goodbye
        self.leaving[node.ident] = node

    def leave(self, node: Node) -> None:
        """A node leaves a job that does not wait for nodes any more."""
        node.go(PresenceEvent.WENT)
        self.excuse(node)
        self.leaving.pop(node.ident, None)
        if node.role == "server":
            del self.live_servers[node.ident]
            return
        del self.live[node.rank]
        if node.supply is Supply.PUSHING:
            self.left_unjoined[node.rank] = node

    def error_sent(self, node: Node) -> None:
        """A worker gets an error that it has to confirm."""
        node.hearing = HEARING.after(node.hearing, HearingEvent.ERROR_SENT)
        node.unconfirmed += 1
        self.unheard[node.ident] = node

    def confirmed(self, node: Node) -> None:
        """A worker that has not confirmed all errors confirms one."""
        last = node.unconfirmed == 1
        event = HearingEvent.LAST_CONFIRMED if last else HearingEvent.ERROR_CONFIRMED
        node.hearing = HEARING.after(node.hearing, event)
        node.unconfirmed -= 1
        if last:
            del self.unheard[node.ident]

    def excuse(self, *nodes: Node) -> None:
        """Wait for the confirmations of ``nodes`` no longer."""
        for node in nodes:
            node.hearing = HEARING.after(node.hearing, HearingEvent.EXCUSED)
            node.unconfirmed = 0
            self.unheard.pop(node.ident, None)

    def join(self, node: Node) -> None:
        """A worker joins."""
        node.supply = SUPPLY.after(node.supply, SupplyEvent.JOINED)

    def all_joined(self) -> None:
        """Note that all workers have joined, and have data again."""
        for node in self.workers.values():
            if node.supply is Supply.JOINED:
                node.supply = SUPPLY.after(node.supply, SupplyEvent.ALL_JOINED)
        self.left_unjoined = {r: w for r, w in self.workers.items() if w.left}

    # ---- queries

    def usable_servers(self) -> list[Node]:
        """The servers to which all senders have connected, by rank."""
        found = [n for n in self.live_servers.values() if n.presence is Presence.LIVE]
        return sorted(found, key=lambda n: n.rank)

    def usable_server(self, rank: int) -> Node | None:
        """The server ``rank``, if all senders have connected to it and it lives."""
        return next((n for n in self.usable_servers() if n.rank == rank), None)

    def servers(self) -> list[Node]:
        """All servers, by rank."""
        return sorted(self._servers.values(), key=lambda n: n.rank)

    def all_workers(self) -> list[Node]:
        """All workers, by rank."""
        return [self.workers[rank] for rank in sorted(self.workers)]

    def count(self, role: str) -> int:
        """Number of nodes of a role, those that have left included."""
        return len(self.workers) if role == "worker" else len(self._servers)

    def a_worker(self) -> Node | None:
        """Any worker: the options in which workers must agree are the same on all."""
        return next(iter(self.workers.values()), None)

    def kinds(self) -> Iterator[tuple[str, Mapping[str, Any]]]:
        """The distinct (role, options) pairs of the nodes."""
        firsts = (next(iter(nodes.values())) for nodes in self._configs.values())
        return ((node.role, node.config) for node in firsts)

    def same(self, m: Mapping[str, Any]) -> Node | None:
        """The known node that sent HELLO ``m``, or None.

        In containers all pids may be 1, so a server is also identified by its lanes.
        """
        if m["role"] == "server":
            return self._servers.get(_identity(m["host"], m["pid"], m["lanes"]))
        if token := m.get("token"):
            return next((n for n in self.workers.values() if n.token == token), None)
        node = self.workers.get(m["rank"])
        return node if node is not None and (node.host, node.pid) == (m["host"], m["pid"]) else None

    def absent(self, workers: int, most: int) -> tuple[list[int], int]:
        """The lowest missing ranks of ``workers``, at most ``most``, and the number missing."""
        if workers != self._absent_of:
            self._absent, self._absent_of = list(range(workers)), workers
        found: list[int] = []
        while self._absent and len(found) < most:
            rank = heappop(self._absent)
            if rank not in self.workers and rank not in found[-1:]:
                found.append(rank)
        for rank in found:
            heappush(self._absent, rank)
        return found, workers - len(self.workers)

    def some(self, most: int) -> list[Node]:
        """At most ``most`` of the present nodes, workers first."""
        workers = list(islice(self.workers.values(), most))
        return workers + list(islice(self._servers.values(), most - len(workers)))


def _identity(host: str, pid: int, lanes: Sequence[str]) -> tuple[str, int, tuple[str, ...]]:
    return host, pid, tuple(lanes)


def _kind(node: Node) -> tuple[str, str]:
    return node.role, repr(sorted(node.config.items()))


def names(items: Sequence[str], most: int = 8) -> str:
    """Join ``items`` to text for messages, cut after ``most``."""
    text = ", ".join(items[:most])
    return text + (f" and {len(items) - most} more" if len(items) > most else "")
