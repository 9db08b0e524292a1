"""Who is in the job, and what follows from who comes, goes and waits. Pure: events in, messages out; no sockets, no clock of its own.

A node is ``joined`` after a good HELLO. When all are, the job is ``running``: everybody gets WELCOME. It ends ``done`` when all workers have
left in good order, or ``failed`` when somebody is gone without a goodbye; then everybody else is told who. An asynchronous job survives the
death of workers, and fails for it at its end.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from bpsx.cards import shares_by_host
from bpsx.config import MOST_WORKERS
from bpsx.config.fingerprint import wrong_options
from bpsx.placement import Placement
from bpsx.rendezvous.agreement import disagreement
from bpsx.rendezvous.joins import Joins
from bpsx.rendezvous.messages import PROTOCOL
from bpsx.rendezvous.registry import Registry
from bpsx.rendezvous.stall import Stalls
from bpsx.rendezvous.vanished import Vanished

Output = tuple[bytes, dict[str, Any]]
_ASYNC = "BYTEPS_ENABLE_ASYNC"
#: How the failure begins of a worker whose script ends by this exception.
_FOR_WANT = "ended by PeerLeftError"


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
    early: bool = False         # the first worker to leave, in good order

    def __str__(self) -> str:
        return f"{self.role} {self.rank} ({self.host}, pid {self.pid})"


class Membership:
    """The state of the job. One thread owns it; every method returns the messages to send, as (node, message)."""

    def __init__(self, num_worker: int, num_server: int, local_size: int, job: int, *, stall_warn: float, deadlock_after: float) -> None:
        self.num_worker = num_worker
        self.num_server = num_server
        self.local_size = local_size
        self.job = job
        self.state = "waiting"
        self.failure = ""
        self.nodes: dict[bytes, Node] = {}
        self.refused: dict[str, str] = {}       # who was turned away, and why
        self.vanished = Vanished()
        self.registry: Registry | None = None
        self._stalls = Stalls(stall_warn, deadlock_after)
        self._joins = Joins()
        self._dead: list[str] = []              # workers that an asynchronous job has survived
        self.survived = False                   # ... and then ended, for lack of them not "done", though the others were
        self.blamed: Node | None = None         # whose end was the first that should not have been

    # ---- coming

    def hello(self, ident: bytes, m: dict[str, Any]) -> list[Output]:
        """A node introduces itself."""
        why = self._refusal(ident, m)
        if why:
            return self._refuse(ident, m, why)
        if ident in self.nodes:
            return []
        self._replace_reconnected(m)
        rank = m["rank"] if m["role"] == "worker" else len(self._of("server"))
        node = Node(ident, m["role"], rank, m["host"], m["pid"], m["lanes"], m["config"])
        if not self._of("worker") and node.role == "worker":
            self.local_size = int(node.config.get("BYTEPS_LOCAL_SIZE", self.local_size))
        self.nodes[ident] = node
        self.refused.pop(_place(m), None)
        self.vanished.back(node.role, node.rank, node.host, self.num_server - len(self._of("server")))
        return self._start() if not self.missing() else []

    def _refuse(self, ident: bytes, m: dict[str, Any], why: str) -> list[Output]:
        """Turn a node away. Who waits for one in its place shall hear of it: the node has proven the secret, if the job has one."""
        if self._lacks(m):
            self.refused[_place(m)] = why
            self.vanished.turn_away(m["role"], m["rank"], m["host"], f"{newcomer(m)} was refused ({why})")
        return [(ident, {"type": "REFUSED", "reason": why, "over": self.state != "waiting"})]

    def _lacks(self, m: dict[str, Any]) -> bool:
        """Whether the job still waits for what HELLO ``m`` wants to be, whoever that is."""
        if self.state != "waiting" or m["role"] not in ("worker", "server"):
            return False
        if m["role"] == "server":
            return len(self._of("server")) < self.num_server
        here = [w.rank for w in self._of("worker")]
        # Before the first worker only they themselves know how many a machine has.
        theirs = m["config"].get("BYTEPS_LOCAL_SIZE")
        each = self.local_size if here or not isinstance(theirs, int) else theirs
        return 0 <= m["rank"] < min(self.num_worker * each, MOST_WORKERS) and m["rank"] not in here

    def _replace_reconnected(self, m: dict[str, Any]) -> None:
        """A node that lost its connection while the job was gathering introduces itself again: forget its former self."""
        for ident, node in list(self.nodes.items()):
            if self._same(node, m):
                del self.nodes[ident]

    @staticmethod
    def _same(node: Node, m: dict[str, Any]) -> bool:
        """Whether HELLO ``m`` comes from the process that ``node`` is. A pid alone says little: in containers all are 1."""
        if (node.host, node.pid, node.role) != (m["host"], m["pid"], m["role"]):
            return False
        return bool(node.lanes == m["lanes"] if node.role == "server" else node.rank == m["rank"])

    def _refusal(self, ident: bytes, m: dict[str, Any]) -> str:
        """Why a node may not join, or nothing."""
        if m["protocol"] != PROTOCOL:
            return f"protocol version {m['protocol']}, the scheduler speaks {PROTOCOL}: install the same bpsx everywhere"
        wrong = wrong_options(m["config"])
        if wrong:
            return f"options that make no sense: {', '.join(wrong)}"
        if m["role"] not in ("worker", "server"):
            return f"role {m['role']!r}: allowed are worker and server"
        if self.num_worker * int(m["config"]["BYTEPS_LOCAL_SIZE"]) > MOST_WORKERS:
            return f"{self.num_worker} x {m['config']['BYTEPS_LOCAL_SIZE']} workers; at most {MOST_WORKERS} are possible"
        if self.state != "waiting":
            return f"the job is {self.state} and complete"
        for name, ours in (("DMLC_NUM_WORKER", self.num_worker), ("DMLC_NUM_SERVER", self.num_server)):
            if name == "DMLC_NUM_SERVER" and m["config"].get(name) == 0 and ours and m["role"] == "worker":
                return (f"the processes of a single machine need no servers: set DMLC_NUM_SERVER=0 for the scheduler, which has {ours}, "
                        "and start none; or set BYTEPS_FORCE_DISTRIBUTED=1 on all workers")
            if m["config"].get(name) != ours:
                return f"{name}={m['config'].get(name)} there, {ours} at the scheduler"
        differs = disagreement(m["role"], m["config"], ((n.role, n.config) for n in self.nodes.values()))
        if differs:
            return differs
        if m["role"] == "server":
            if not m["lanes"]:
                return "a server without lanes"
            again = any(self._same(s, m) for s in self._of("server"))
            full = "there is a server already" if self.num_server == 1 else f"there are {self.num_server} servers already"
            return "" if again or len(self._of("server")) < self.num_server else full
        workers = self._of("worker")
        if workers:
            for name, value in workers[0].config.items():
                if m["config"].get(name) != value:
                    return f"{name}={m['config'].get(name)} on worker {m['rank']}, {value} on {workers[0]}: must be the same on all workers"
        if not 0 <= m["rank"] < self.num_worker * int(m["config"].get("BYTEPS_LOCAL_SIZE", 1)):
            return f"rank {m['rank']} is out of range"
        same = [w for w in workers if w.rank == m["rank"] and not self._same(w, m)]
        if same:
            return f"there is a {same[0]} already: two processes have the same DMLC_WORKER_ID and BYTEPS_LOCAL_RANK"
        return ""

    @property
    def size(self) -> int:
        """Worker processes in the job."""
        return self.num_worker * self.local_size

    @property
    def processes(self) -> int:
        """Workers for whom one of them speaks to the servers."""
        workers = self._of("worker")
        return self.local_size if workers and workers[0].config.get("BPSX_LOCAL_REDUCE") else 1

    def _of(self, role: str) -> list[Node]:
        return sorted((n for n in self.nodes.values() if n.role == role), key=lambda n: n.rank)

    def missing(self) -> list[str]:
        """Who has not come yet, for people."""
        here = {w.rank for w in self._of("worker")}
        gone = [self._with_reason(f"worker {r}", f"worker {r}") for r in range(self.size) if r not in here]
        servers = self.num_server - len(self._of("server"))
        lacking = f"{servers} of {self.num_server} servers" if self.num_server > 1 else "the server"
        return gone + ([self._with_reason(lacking, "server")] if servers else [])

    def _with_reason(self, text: str, place: str) -> str:
        return f"{text} (refused: {self.refused[place]})" if place in self.refused else text

    def present(self) -> list[str]:
        """Who is here, for people."""
        return [str(n) for role in ("worker", "server") for n in self._of(role)]

    def _start(self) -> list[Output]:
        config = self._of("worker")[0].config
        servers = self._of("server")
        for rank, server in enumerate(servers):
            server.rank = rank
        partition_bytes = int(config["BYTEPS_PARTITION_BYTES"])
        placement = Placement([len(s.lanes) for s in servers], str(config["BYTEPS_KEY_HASH_FN"]), int(config["BYTEPS_BUILT_IN_HASH_COEF"]),
                              self._shares(), partition_bytes)
        self.registry = Registry(placement, partition_bytes)
        self.state = "running"
        roster = {
            "type": "WELCOME", "job": self.job, "workers": self.size // self.processes, "processes": self.processes,
            "lanes": [s.lanes for s in servers],
            "names": {role: [str(n) for n in self._of(role)] for role in ("worker", "server")},
        }
        return [(n.ident, {**roster, "rank": n.rank}) for n in self.nodes.values()]

    def _shares(self) -> list[float]:
        """What part of all bytes each server should sum."""
        servers = [(s.host, int(s.config["BPSX_SERVER_WEIGHT"])) for s in self._of("server")]
        if not (servers and self._of("worker")[0].config["BYTEPS_ENABLE_MIXED_MODE"]):
            return [weight / sum(w for _, w in servers) for _, weight in servers]
        return shares_by_host([w.host for w in self._of("worker") if w.rank % self.processes == 0], servers)

    # ---- while it runs

    def declare(self, ident: bytes, m: dict[str, Any]) -> list[Output]:
        """A worker declares a tensor."""
        node = self.nodes.get(ident)
        if node is None or node.role != "worker" or self.registry is None:
            return []
        name, generation = m["name"], m["generation"]
        known, told = self.registry.declare(node.rank, name, generation, m["nbytes"], m["dtype"], m["shape"], m["codec"])
        answer: dict[str, Any] = {"type": "PLACED", "name": name, "generation": generation, "places": [list(p) for p in known.places]}
        if known.failure:
            answer = {"type": "FAILED", "tensors": [[name, generation]], "status": known.status, "text": known.failure}
        out = [(w.ident, answer) for w in self._of("worker") if w.rank in told]
        if self.processes > 1 and self._joins.joined:
            for root in (w for w in self._of("worker") if w.rank // self.processes == node.rank // self.processes and not w.left):
                out += self._make_known(root)
        return out

    def waiting(self, ident: bytes, m: dict[str, Any], now: float) -> list[Output]:
        """A worker says which push_pulls it has waited for, and how long."""
        node = self.nodes.get(ident)
        if node is None or node.role != "worker" or self.state != "running":
            return []
        self._stalls.report(node.rank, m["tensors"], m["more"])
        live = {w.rank: w for w in self._of("worker") if not w.left and w.rank not in self._joins.joined}
        out: list[Output] = [(live[r].ident, {"type": "WARN", "text": text}) for r, text in self._stalls.warnings(sorted(live), now) if r in live]
        return out + self._end_deadlock(list(live.values()))

    def join(self, ident: bytes) -> list[Output]:
        """A worker has run out of data and waits until all have."""
        node = self.nodes.get(ident)
        if node is None or node.role != "worker" or node.left or self.state != "running":
            return []
        out = self._joins.join(node.rank, *self._here(), self._roots(), self.processes) + self._end_join()
        return out + self._make_known(node) if self.processes > 1 else out

    def _roots(self) -> dict[int, bytes]:
        """Machine -> who speaks for its processes, where they sum among themselves."""
        n = self.processes
        return {w.rank // n: w.ident for w in self._of("worker") if n > 1 and w.rank % n == n - 1 and not w.left}

    def _make_known(self, root: Node) -> list[Output]:
        """A root that has joined adds for its neighbours what it does not push itself: tell it of what only they have declared."""
        n = self.processes
        if self.registry is None or root.rank % n != n - 1 or root.rank not in self._joins.joined:
            return []
        machine = range(root.rank // n * n, root.rank)
        return [(root.ident, {"type": "ADOPT", "name": name, "generation": generation, "nbytes": d.nbytes, "dtype": d.dtype,
                              "shape": list(d.shape), "codec": d.codec, "places": [list(p) for p in d.places]})
                for name, generation, d in self.registry.adopt(root.rank, machine)]

    def cleared(self, ident: bytes, m: dict[str, Any]) -> list[Output]:
        """A server, or a machine's root, has forgotten who had joined."""
        last = self._joins.cleared(ident, m["generation"])
        return [] if last is None else [(w.ident, {"type": "ALL_JOINED", "last": last}) for w in self._of("worker") if not w.left]

    def _end_join(self) -> list[Output]:
        """Nobody can wait for a worker that has left: who has joined hears so."""
        left = [w for w in self._of("worker") if w.left and w.rank not in self._joins.joined]
        if not left or self.asynchronous or not self._joins.joined:
            return []
        text = f"join: {names([str(w) for w in left])} has left the job without calling join()"
        return [(w.ident, {"type": "UNJOINED", "text": text}) for w in self._of("worker") if w.rank in self._joins.joined and not w.left]

    def _here(self) -> tuple[list[int], list[bytes]]:
        """The ranks of the workers and the servers that are still in the job. Without asynchronous training all workers count."""
        workers = [w.rank for w in self._of("worker") if not (w.left and self.asynchronous)]
        return workers, [s.ident for s in self._of("server") if not s.left]

    @property
    def asynchronous(self) -> bool:
        """Whether no worker waits for another, so that the job goes on when one dies."""
        return any(n.config.get(_ASYNC) for n in self.nodes.values())
    def waits(self, rank: int) -> list[tuple[str, int, float]]:
        """What worker ``rank`` has waited for too long: see :meth:`Stalls.waits`."""
        return self._stalls.waits(rank)[:8]

    def _end_deadlock(self, live: list[Node]) -> list[Output]:
        """Fail what nobody will ever get, on everybody: a declaration given up by one worker alone would leave its push in the sum."""
        stuck = self._stalls.deadlock([w.rank for w in live])
        if not stuck or self.registry is None:
            return []
        described = {k: self.registry.describe(*k) for keys in stuck.values() for k in keys}
        who = "; ".join(f"worker {r} waits for {names([described[k] for k in keys], 4)}" for r, keys in stuck.items())
        text = (f"nobody can go on: {who}; each of these has not been pushed by another worker. Do all workers use the same names and shapes, "
                "in code that all of them reach, equally often? (For batches that run out earlier on some there is join(): "
                "docs/uneven-and-elastic.md.)")
        for key in described:
            self.registry.fail(*key, -4, text)
        # Who has joined, too: it would push this declaration again some day, and a machine's root may be standing in for its neighbours.
        return [(w.ident, {"type": "FAILED", "tensors": [list(k) for k in described], "status": -4, "text": text})
                for w in self._of("worker") if not w.left]

    # ---- going

    def bye(self, ident: bytes, m: dict[str, Any]) -> list[Output]:
        """A node leaves; with a ``failure`` it leaves work undone."""
        node = self.nodes.get(ident)
        if node is None:
            return [(ident, {"type": "GOODBYE"})]
        out: list[Output] = [(ident, {"type": "GOODBYE"})]
        if node.left:
            return out
        node.left = True
        if self.state == "waiting":
            del self.nodes[ident]
            return out
        node.early = not any(w.early for w in self._of("worker")) and not m["failure"]
        self._stalls.report(node.rank, [], False) if node.role == "worker" else None
        if m["failure"] and self.state == "running":
            # Who failed for want of one that had left is not the first cause.
            early = [w for w in self._of("worker") if w.early] if m["failure"].startswith(_FOR_WANT) else []
            self.blamed = self.blamed or next(iter(early), node)
            return out + self._lost(node, f"{node} has failed: {m['failure']}") + self._after_leaving(node)
        if node.role == "server" and self.state == "running":
            self.blamed = self.blamed or node
            return out + self._fail(f"{node} has left while workers were running")
        return out + self._after_leaving(node)

    def gone(self, ident: bytes, why: str) -> list[Output]:
        """A node's connection is lost."""
        node = self.nodes.get(ident)
        if node is None or node.left:
            return []
        if self.state == "waiting":
            del self.nodes[ident]
            self.vanished.miss(node.role, node.rank, node.host, f"{node} is gone: {why}")
            return []
        node.left = True
        out = self._lost(node, f"{node} is gone: {why}") if self.state == "running" else []
        return out + self._after_leaving(node)

    def abort(self, text: str) -> list[Output]:
        """The scheduler itself has to end."""
        if self.state in ("done", "failed"):
            return []
        kind, field_ = ("REFUSED", "reason") if self.state == "waiting" else ("LOST", "text")
        out = self._fail(text)
        return [(ident, {"type": kind, field_: text, "ended": True}) for ident, _ in out]

    def _lost(self, node: Node, text: str) -> list[Output]:
        """A node is gone that should not be: the end of the job, unless it is asynchronous and lacks only a worker."""
        self.blamed = self.blamed or node
        workers = [w for w in self._of("worker") if not w.left]
        if node.role != "worker" or not self.asynchronous or not workers:
            return self._fail("; ".join([*self._dead, text]))
        self._dead.append(text)
        text += "; the others go on without it, since the job is asynchronous"
        return [(w.ident, {"type": "WARN", "text": text}) for w in workers]

    def _fail(self, text: str) -> list[Output]:
        """The job is over: tell everybody who is left."""
        self.state = "failed"
        self.failure = text
        return [(n.ident, {"type": "LOST", "text": text}) for n in self.nodes.values() if not n.left]

    def _after_leaving(self, node: Node) -> list[Output]:
        workers = [w for w in self._of("worker") if not w.left]
        servers = [s for s in self._of("server") if not s.left]
        out: list[Output] = []
        if node.role == "worker" and self.state == "running":
            neighbours = [w for w in workers if w.rank // self.processes == node.rank // self.processes]
            out += [(n.ident, {"type": "LEFT", "rank": node.rank}) for n in [*servers, *neighbours]]
            out += self._joins.left(*self._here()) + self._end_join()
        if not workers:
            if self.state == "running":
                self.survived = bool(self._dead)
                self.state = "failed" if self._dead else "done"
                self.failure = "; ".join(self._dead) + "; the others have gone on and left in good order" if self._dead else ""
            if node.role == "worker":
                out += [(s.ident, {"type": "END"}) for s in servers]
        return out

    def everybody_left(self) -> bool:
        """Whether nobody has to be told anything any more."""
        return self.state in ("done", "failed") and all(n.left for n in self.nodes.values())


def _place(m: dict[str, Any]) -> str:
    """What HELLO ``m`` wants to be; servers get their numbers later."""
    return f"worker {m['rank']}" if m["role"] == "worker" else str(m["role"])


def newcomer(m: dict[str, Any]) -> str:
    """Who sends HELLO ``m``, for people."""
    return f"{_place(m)} ({m['host']}, pid {m['pid']})"


def names(items: Sequence[str], most: int = 8) -> str:
    """A list for people, cut when long."""
    text = ", ".join(items[:most])
    return text + (f" and {len(items) - most} more" if len(items) > most else "")
