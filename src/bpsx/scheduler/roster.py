"""The job's nodes, indexed so that a look-up costs the same whatever their number.

Pure.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import islice
from typing import Any


@dataclass
class Node:
    """One process of the job."""

    ident: bytes
    role: str
    rank: int
    host: str
    pid: int
    lanes: list[str] = field(default_factory=list)
    config: dict[str, Any] = field(default_factory=dict)
    left: bool = False
    early: bool = False  # the first worker to leave, in good order

    def __str__(self) -> str:
        return f"{self.role} {self.rank} ({self.host}, pid {self.pid})"


class Roster:
    """All nodes that are or were in the job.

    ``nodes``: by connection; ``workers``: by rank.
    """

    def __init__(self) -> None:
        self.nodes: dict[bytes, Node] = {}
        self.workers: dict[int, Node] = {}
        self.live: dict[int, Node] = {}  # workers that have not left
        self.live_servers: dict[bytes, Node] = {}
        self._servers: dict[tuple[str, int, tuple[str, ...]], Node] = {}
        self._configs: dict[tuple[str, str], dict[bytes, Node]] = {}
        self._absent: list[int] = []  # heap of ranks that may be missing
        self._absent_of = 0  # number of workers for which `_absent` was built

    # ---- changes

    def add(self, node: Node) -> None:
        """Add a node."""
        self.nodes[node.ident] = node
        self._configs.setdefault(_kind(node), {})[node.ident] = node
        if node.role == "worker":
            self.workers[node.rank] = self.live[node.rank] = node
        else:
            self._servers[_identity(node.host, node.pid, node.lanes)] = node
            self.live_servers[node.ident] = node

    def drop(self, ident: bytes) -> Node | None:
        """Remove a node that disappeared before the job began; returns it if it was known."""
        node = self.nodes.pop(ident, None)
        if node is None:
            return None
        kind = _kind(node)
        del self._configs[kind][ident]
        if not self._configs[kind]:
            del self._configs[kind]
        if node.role == "worker":
            del self.workers[node.rank], self.live[node.rank]
            heappush(self._absent, node.rank)
        else:
            del self._servers[_identity(node.host, node.pid, node.lanes)], self.live_servers[ident]
        return node

    def leave(self, node: Node) -> None:
        """Mark a node as having left a job that had begun."""
        node.left = True
        if node.role == "worker":
            self.live.pop(node.rank, None)
        else:
            self.live_servers.pop(node.ident, None)

    # ---- queries

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
