"""Observers of a job: ``bpsx-run top``, ``bpsx-run trace``, the metrics port.

Events in, messages out; no sockets.

An observer is not a member of the job. It sends OBSERVE and gets the job's present state (VIEW);
when it stops asking, no cleanup is needed. Nodes send their statistics (STATS) for as long as the
last WATCH said; the hub renews it while observers ask. So a job without observers carries none of
this traffic, and an observer that dies leaves nothing behind.
"""

from __future__ import annotations

import time
from collections import deque
from typing import Any

from bpsx.scheduler.gathering import Output
from bpsx.scheduler.membership import Membership
from bpsx.scheduler.messages import PROTOCOL
from bpsx.scheduler.states import JobState

#: Seconds for which nodes report after a WATCH, and age in seconds after which it is renewed.
LEASE, RENEW = 10.0, 3.0
#: Number of finished recordings that are kept.
_MOST_TRACED = 1024
KINDS = frozenset(("OBSERVE", "STATS", "CLOCK", "TRACED"))


class Observers:
    """The statistics that nodes have reported, for observers.

    The hub's thread calls :meth:`handle`; :meth:`view` may be called from any thread.
    """

    def __init__(self, members: Membership, host: str) -> None:
        self._members = members
        self._host = host
        self._asked = -RENEW
        self._stats: dict[bytes, dict[str, Any]] = {}
        self._traced: deque[dict[str, Any]] = deque(maxlen=_MOST_TRACED)
        self._traced_count = 0
        self._started = time.time()

    def handle(self, ident: bytes, m: dict[str, Any], now: float) -> list[Output]:
        """Handle a checked message of a kind in :data:`KINDS`; returns the messages to send."""
        if m["type"] == "CLOCK":
            return [(ident, {"type": "CLOCK", "at": m["at"], "wall": time.time_ns()})]
        if m["type"] == "OBSERVE":
            if m["protocol"] != PROTOCOL:
                return [
                    (
                        ident,
                        {
                            "type": "REFUSED",
                            "reason": (
                                f"this process speaks protocol version {m['protocol']}, the"
                                f" scheduler {PROTOCOL}: install the same version of bpsx"
                                " everywhere"
                            ),
                        },
                    )
                ]
            out = self._watch(now)
            if m["trace"] and self._members.state is JobState.RUNNING:
                out += [(n.ident, {"type": "TRACE", "seconds": m["trace"]}) for n in self._live()]
            return [*out, (ident, {"type": "VIEW", **self.view(now)})]
        node = self._members.nodes.get(ident)
        if node is not None and m["type"] == "STATS":
            self._stats[ident] = {
                "at": m["at"],
                "here": now,
                "values": m["values"],
                "late": m["late"],
            }
        elif node is not None:
            self._traced_count += 1
            self._traced.append(
                {
                    "number": self._traced_count - 1,
                    "role": node.role,
                    "rank": node.rank,
                    "host": node.host,
                    "path": m["path"],
                    "records": m["records"],
                }
            )
        return []

    def _live(self) -> list[Any]:
        return [n for n in list(self._members.nodes.values()) if not n.left]

    def _watch(self, now: float) -> list[Output]:
        if now - self._asked < RENEW:
            return []
        self._asked = now
        return self.watch_for(LEASE)

    def watch_for(self, seconds: float) -> list[Output]:
        """Return the messages that make all nodes report for ``seconds``."""
        return (
            [(n.ident, {"type": "WATCH", "seconds": seconds}) for n in self._live()]
            if self._members.state is JobState.RUNNING
            else []
        )

    def view(self, now: float) -> dict[str, Any]:
        """The present state of the job as plain data."""
        members = self._members
        nodes = []
        for node in sorted(members.nodes.values(), key=lambda n: (n.role != "worker", n.rank)):
            if members.has_successor(node):  # a place has one set of figures
                continue
            found = self._stats.get(node.ident)
            ended = "lost" if members.is_lost(node) else "left"
            state = ended if node.left else members.state
            nodes.append(
                {
                    "role": node.role,
                    "rank": node.rank,
                    "host": node.host,
                    "pid": node.pid,
                    "state": state,
                    "lanes": node.lanes,
                    "at": found["at"] if found else 0,
                    "age": round(now - found["here"], 3) if found else None,
                    "values": found["values"] if found else {},
                    "late": found["late"] if found else [],
                    "waits": members.waits(node.rank) if node.role == "worker" else [],
                }
            )
        return {
            "state": members.state,
            "failure": members.failure,
            "missing": members.missing() if members.state is JobState.WAITING else [],
            "workers": members.size,
            "servers": members.servers_now,
            "host": self._host,
            "seconds": round(time.time() - self._started, 1),
            "tensors": len(members.registry) if members.registry is not None else 0,
            **members.changes(now),
            "nodes": nodes,
            "traced": list(self._traced),
            "traced_count": self._traced_count,
        }
