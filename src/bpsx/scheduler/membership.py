"""Job membership: how the job reacts when nodes come, leave, die or wait.

Pure: events in, messages out; no sockets, no clock of its own.

A node is ``joined`` after a valid HELLO. When all nodes are, the job is ``running`` and every node
gets WELCOME. The job ends ``done`` when all workers have left in good order, or ``failed`` when a
node disappears without a BYE; all others then get its name. An asynchronous job survives the death
of workers, and ends as ``failed`` because of it.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from bpsx.config import MOST_WORKERS
from bpsx.config.fingerprint import wrong_options
from bpsx.errors import Status
from bpsx.planning.load_balance import shares_by_host
from bpsx.planning.placement import Placement
from bpsx.scheduler.compatibility import disagreement
from bpsx.scheduler.departures import Vanished
from bpsx.scheduler.join_barrier import Joins
from bpsx.scheduler.messages import PROTOCOL
from bpsx.scheduler.registry import Declared, Registry
from bpsx.scheduler.roster import Node, Roster
from bpsx.scheduler.stall_detector import Stalls

Output = tuple[bytes, dict[str, Any]]
_ASYNC = "BYTEPS_ENABLE_ASYNC"
#: Number of different option sets whose check results are cached.
_MOST_OPTIONS = 64
#: Prefix of the failure text of a worker whose script ended with this exception.
_FOR_WANT = "ended by PeerLeftError"


class Membership:
    """The state of the job.

    Owned by one thread. Every method returns the messages to send, as (node, message).
    """

    def __init__(
        self,
        num_worker: int,
        num_server: int,
        local_size: int,
        job: int,
        *,
        stall_warn: float,
        deadlock_after: float,
    ) -> None:
        self.num_worker = num_worker
        self.num_server = num_server
        self.local_size = local_size
        self.job = job
        self.state = "waiting"
        self.failure = ""
        self._roster = Roster()
        self.nodes = self._roster.nodes
        # Some process was in an earlier job, and may have kept things from it.
        self.again = False
        self.processes = 1  # workers per machine when only its root speaks to the servers, else 1
        # No worker waits for another, so the job continues when one dies.
        self.asynchronous = False
        self.epoch = 0  # number of resets after a stall
        self.refused: dict[str, str] = {}  # node that was refused or could not start -> reason
        # Options as given -> the names and values of the invalid ones.
        self._options: dict[str, list[str]] = {}
        self.vanished = Vanished()
        self.registry: Registry | None = None
        self._stalls = Stalls(stall_warn, deadlock_after)
        self._joins = Joins()
        # Machine -> its root's connection, where only the root speaks to the servers.
        self._roots: dict[int, bytes] = {}
        self._left_unjoined: dict[int, Node] = {}
        self._nobody_left_early = True
        # Worker -> number of errors that it has not confirmed with HEARD.
        self._unheard: dict[bytes, int] = {}
        # BYEs deferred until all workers have confirmed their errors.
        self._leaving: list[tuple[bytes, dict[str, Any]]] = []
        self._dead: list[str] = []  # deaths of workers that an asynchronous job survived
        # The job then ended: as "failed" because of those deaths, though the other workers left
        # well.
        self.survived = False
        self.blamed: Node | None = None  # the node whose end was the first unexpected one

    # ---- joining the job

    def hello(self, ident: bytes, m: dict[str, Any]) -> list[Output]:
        """Handle a node's HELLO."""
        why = self._refusal(ident, m)
        if why:
            return self._refuse(ident, m, why)
        if ident in self.nodes:
            return []
        known = self._roster.same(m)
        if known is not None:  # its connection broke while the job was gathering
            self._roster.drop(known.ident)
        rank = m["rank"] if m["role"] == "worker" else self._roster.count("server")
        node = Node(ident, m["role"], rank, m["host"], m["pid"], m["lanes"], m["config"])
        if not self._roster.workers and node.role == "worker":
            self.local_size = int(node.config.get("BYTEPS_LOCAL_SIZE", self.local_size))
        self._roster.add(node)
        self.again = self.again or m.get("again") is True
        self.refused.pop(_place(m), None)
        self.vanished.back(
            node.role, node.rank, node.host, self.num_server - self._roster.count("server")
        )
        complete = (
            len(self._roster.workers) == self.size
            and self._roster.count("server") == self.num_server
        )
        return self._start() if complete else []

    def would_refuse(self, ident: bytes, m: dict[str, Any]) -> bool:
        """Whether HELLO ``m`` would be refused now."""
        return bool(self._refusal(ident, m))

    def _refuse(self, ident: bytes, m: dict[str, Any], why: str) -> list[Output]:
        """Refuse a node.

        If the job still waits for a node in its place, the waiting nodes get the reason: the
        refused node has proven that it knows the secret, if the job has one.
        """
        if self._lacks(m):
            self.refused[_place(m)] = f"refused: {why}"
            self.vanished.turn_away(
                m["role"], m["rank"], m["host"], f"{newcomer(m)} was refused ({why})"
            )
        return [(ident, {"type": "REFUSED", "reason": why, "over": self.state != "waiting"})]

    def cannot_start(self, ident: bytes, m: dict[str, Any]) -> list[Output]:
        """Handle CANNOT: a node that has not sent HELLO says why it cannot start.

        Unless it is started again, the job cannot form.
        """
        if self._lacks(m):
            self.refused[_place(m)] = f"could not start: {m['reason']}"
            self.vanished.turn_away(
                m["role"], m["rank"], m["host"], f"{newcomer(m)} could not start: {m['reason']}"
            )
        return [(ident, {"type": "GOODBYE"})]

    def _lacks(self, m: dict[str, Any]) -> bool:
        """Whether the job still waits for a node in the place that ``m`` asks for."""
        if self.state != "waiting" or m["role"] not in ("worker", "server"):
            return False
        if m["role"] == "server":
            return self._roster.count("server") < self.num_server
        here = self._roster.workers
        # Before the first worker has come, only a worker itself knows the number per machine.
        theirs = m["config"].get("BYTEPS_LOCAL_SIZE")
        each = self.local_size if here or not isinstance(theirs, int) else theirs
        return 0 <= m["rank"] < min(self.num_worker * each, MOST_WORKERS) and m["rank"] not in here

    def _refusal(self, ident: bytes, m: dict[str, Any]) -> str:
        """Return why a node may not join; empty if it may."""
        if m["protocol"] != PROTOCOL:
            return (
                f"this process speaks protocol version {m['protocol']}, the scheduler {PROTOCOL}:"
                " install the same version of bpsx everywhere"
            )
        given = repr(sorted(m["config"].items()))
        # Most nodes give the same options, and one check reads every option many times.
        if given not in self._options:
            if len(self._options) >= _MOST_OPTIONS:
                self._options.clear()
            self._options[given] = wrong_options(m["config"])
        wrong = self._options[given]
        if wrong:
            return f"invalid options: {', '.join(wrong)}"
        if m["role"] not in ("worker", "server"):
            return f"role {m['role']!r}: expected worker or server"
        if self.num_worker * int(m["config"]["BYTEPS_LOCAL_SIZE"]) > MOST_WORKERS:
            return (
                f"{self.num_worker} x {m['config']['BYTEPS_LOCAL_SIZE']} workers; at most"
                f" {MOST_WORKERS} are allowed"
            )
        if self.state == "failed":
            return f"the job has failed: {self.failure}"
        if self.state != "waiting":
            return f"the job is {self.state} and accepts no more nodes"
        for name, ours in (
            ("DMLC_NUM_WORKER", self.num_worker),
            ("DMLC_NUM_SERVER", self.num_server),
        ):
            if (
                name == "DMLC_NUM_SERVER"
                and m["config"].get(name) == 0
                and ours
                and m["role"] == "worker"
            ):
                return (
                    "the processes of a single machine need no servers: set DMLC_NUM_SERVER=0 for"
                    f" the scheduler, which has {ours}, and start none; or set"
                    " BYTEPS_FORCE_DISTRIBUTED=1 on all workers"
                )
            if m["config"].get(name) != ours:
                return (
                    f"{name}={m['config'].get(name)} on this {m['role']}, {ours} on the scheduler:"
                    " must be the same on both"
                )
        differs = disagreement(m["role"], m["config"], self._roster.kinds())
        if differs:
            return differs
        if m["role"] == "server":
            if not m["lanes"]:
                return "the server has no lanes"
            again = self._roster.same(m) is not None
            full = (
                "the job already has its server (DMLC_NUM_SERVER=1)"
                if self.num_server == 1
                else f"the job already has its {self.num_server} servers (DMLC_NUM_SERVER)"
            )
            return "" if again or self._roster.count("server") < self.num_server else full
        first = self._roster.a_worker()
        if first is not None:
            for name, value in first.config.items():
                if m["config"].get(name) != value:
                    return (
                        f"{name}={m['config'].get(name)} on worker {m['rank']}, {value} on {first}:"
                        " must be the same on all workers"
                    )
        if not 0 <= m["rank"] < self.num_worker * int(m["config"].get("BYTEPS_LOCAL_SIZE", 1)):
            return f"rank {m['rank']} is out of range"
        there = self._roster.workers.get(m["rank"])
        if there is not None and self._roster.same(m) is None:
            return (
                f"{there} is already in the job: two processes have the same DMLC_WORKER_ID and"
                " BYTEPS_LOCAL_RANK"
            )
        return ""

    @property
    def size(self) -> int:
        """Number of worker processes in the job."""
        return self.num_worker * self.local_size

    def _of(self, role: str) -> list[Node]:
        return self._roster.all_workers() if role == "worker" else self._roster.servers()

    def missing(self) -> list[str]:
        """The missing nodes, as text for messages."""
        ranks, _ = self._roster.absent(self.size, self.size)
        return [
            self._with_reason(f"worker {r}", f"worker {r}") for r in ranks
        ] + self._missing_servers()

    def missing_text(self, most: int = 8) -> str:
        """The missing nodes in one line, cut when long; empty when the job is complete."""
        ranks, count = self._roster.absent(self.size, most)
        listed = [self._with_reason(f"worker {r}", f"worker {r}") for r in ranks]
        if count > len(ranks):
            listed[-1] += f" and {count - len(ranks)} more workers"
        return ", ".join([*listed, *self._missing_servers()])

    def _missing_servers(self) -> list[str]:
        servers = self.num_server - self._roster.count("server")
        lacking = f"{servers} of {self.num_server} servers" if self.num_server > 1 else "the server"
        return [self._with_reason(lacking, "server")] if servers else []

    def _with_reason(self, text: str, place: str) -> str:
        return f"{text} ({self.refused[place]})" if place in self.refused else text

    def present(self) -> list[str]:
        """The nodes that are present, as text for messages."""
        return [str(n) for role in ("worker", "server") for n in self._of(role)]

    def present_text(self, most: int = 8) -> str:
        """Some of the present nodes in one line."""
        count = self._roster.count("worker") + self._roster.count("server")
        listed = [str(n) for n in self._roster.some(most)]
        return ", ".join(listed) + (f" and {count - most} more" if count > most else "")

    def _start(self) -> list[Output]:
        workers, servers = self._of("worker"), self._of("server")
        config = workers[0].config
        for rank, server in enumerate(servers):
            server.rank = rank
        self.asynchronous = any(n.config.get(_ASYNC) for n in self.nodes.values())
        self.processes = self.local_size if config.get("BPSX_LOCAL_REDUCE") else 1
        if self.processes > 1:
            self._roots = {
                w.rank // self.processes: w.ident
                for w in workers
                if w.rank % self.processes == self.processes - 1
            }
        for worker in workers:
            self._stalls.enter(worker.rank)
        partition_bytes = int(config["BYTEPS_PARTITION_BYTES"])
        placement = Placement(
            [len(s.lanes) for s in servers],
            str(config["BYTEPS_KEY_HASH_FN"]),
            int(config["BYTEPS_BUILT_IN_HASH_COEF"]),
            self._shares(),
            partition_bytes,
        )
        self.registry = Registry(placement, partition_bytes, self.processes)
        self.state = "running"
        roster = {
            "type": "WELCOME",
            "job": self.job,
            "workers": self.size // self.processes,
            "processes": self.processes,
            "lanes": [s.lanes for s in servers],
            "names": {"server": [str(n) for n in servers]},
            "again": self.again,
        }
        # A server names a worker that it loses; workers know only servers by name.
        peers = [str(w) for w in workers]
        told: list[Output] = [
            (s.ident, {**roster, "rank": s.rank, "peers": peers}) for s in servers
        ]
        return told + [(w.ident, roster) for w in workers]  # workers know their ranks

    def _shares(self) -> list[float]:
        """The fraction of all bytes that each server should sum."""
        servers = [(s.host, int(s.config["BPSX_SERVER_WEIGHT"])) for s in self._of("server")]
        if not (servers and self._of("worker")[0].config["BYTEPS_ENABLE_MIXED_MODE"]):
            return [weight / sum(w for _, w in servers) for _, weight in servers]
        return shares_by_host(
            [w.host for w in self._of("worker") if w.rank % self.processes == 0], servers
        )

    # ---- while the job runs

    def declare(self, ident: bytes, m: dict[str, Any]) -> list[Output]:
        """A worker declares a tensor.

        A declaration sent before the worker got RESET is void.
        """
        node = self.nodes.get(ident)
        if (
            node is None
            or node.role != "worker"
            or self.registry is None
            or m["epoch"] != self.epoch
        ):
            return []
        name, generation = m["name"], m["generation"]
        known, told = self.registry.declare(
            node.rank, name, generation, m["nbytes"], m["dtype"], m["shape"], m["codec"]
        )
        if known.failure:
            failed = {
                "type": "FAILED",
                "tensors": [[name, generation]],
                "status": known.status,
                "text": known.failure,
            }
            return self._tell_error(
                (self._roster.live[r].ident for r in told if r in self._roster.live), failed
            )
        placed = {
            "type": "PLACED",
            "name": name,
            "generation": generation,
            "places": [list(p) for p in known.places],
        }
        out: list[Output] = [(ident, placed)]
        return out + self._make_known(node.rank // self.processes) if self.processes > 1 else out

    def _tell_error(self, idents: Collection[bytes] | Any, message: dict[str, Any]) -> list[Output]:
        """Send an error to several workers.

        None of them may leave before all have confirmed it. Otherwise, the servers' reports about a
        worker that left could arrive first and name the consequence instead of the cause.
        """
        out = [(ident, message) for ident in idents]
        for ident, _ in out:
            self._unheard[ident] = self._unheard.get(ident, 0) + 1
        return out

    def heard(self, ident: bytes) -> list[Output]:
        """A worker confirms that it received an error."""
        if self._unheard.get(ident, 0) > 1:
            self._unheard[ident] -= 1
            return []
        self._unheard.pop(ident, None)
        return self._let_leave()

    def _let_leave(self) -> list[Output]:
        if self._unheard:
            return []
        leaving, self._leaving = self._leaving, []
        return [out for ident, m in leaving for out in self.bye(ident, m)]

    def waiting(self, ident: bytes, m: dict[str, Any], now: float) -> list[Output]:
        """A worker reports what has changed in the tensors that it has pushed and waits for."""
        node = self.nodes.get(ident)
        if (
            node is None
            or node.role != "worker"
            or node.left
            or self.state != "running"
            or m["epoch"] != self.epoch
        ):
            return []
        self._stalls.report(node.rank, m["new"], m["over"], now, m["busy"], m["calls"])
        if not m["last"]:  # warn and look for deadlocks only once the report is complete
            return []
        text = self._stalls.warning(node.rank)
        out: list[Output] = [(ident, {"type": "WARN", "text": text})] if text else []
        return out + self._end_deadlock()

    def doubt(self, ident: bytes, m: dict[str, Any]) -> list[Output]:
        """A worker cannot tell which of its later push_pulls match which of the others'."""
        node = self.nodes.get(ident)
        if node is None or node.role != "worker" or node.left or self.state != "running":
            return []
        return self._fail(f"the job has to end after an error: {node}: {m['text']}", m["status"])

    def join(self, ident: bytes) -> list[Output]:
        """A worker has no more data and waits until all workers have joined."""
        node = self.nodes.get(ident)
        if node is None or node.role != "worker" or node.left or self.state != "running":
            return []
        self._stalls.leave(node.rank)
        out = (
            self._joins.join(node.rank, *self._here(), self._roots, self.processes)
            + self._end_join()
        )
        return out + self._make_known(node.rank // self.processes) if self.processes > 1 else out

    def _make_known(self, machine: int) -> list[Output]:
        """Send a joined root the tensors that only its neighbours have declared.

        A root that has joined sums for its neighbours even what it does not push itself.
        """
        root = machine * self.processes + self.processes - 1
        if self.registry is None or root not in self._joins.joined or root not in self._roster.live:
            return []
        return [
            (self._roster.live[root].ident, self._adopted(name, generation, d))
            for name, generation, d in self.registry.adopt(root)
        ]

    @staticmethod
    def _adopted(name: str, generation: int, d: Declared) -> dict[str, Any]:
        return {
            "type": "ADOPT",
            "name": name,
            "generation": generation,
            "nbytes": d.nbytes,
            "dtype": d.dtype,
            "shape": list(d.shape),
            "codec": d.codec,
            "places": [list(p) for p in d.places],
        }

    def cleared(self, ident: bytes, m: dict[str, Any]) -> list[Output]:
        """A server or a machine's root has cleared its marks of joined workers."""
        last = self._joins.cleared(ident, m["generation"])
        if last is None:
            return []
        for rank in self._roster.live:
            self._stalls.enter(rank)
        self._left_unjoined = {r: w for r, w in self._roster.workers.items() if w.left}
        return [
            (w.ident, {"type": "ALL_JOINED", "last": last})
            for w in self._of("worker")
            if not w.left
        ]

    def _end_join(self) -> list[Output]:
        """Workers in ``join()`` cannot wait for a worker that has left: send them UNJOINED."""
        if not self._left_unjoined or self.asynchronous or not self._joins.joined:
            return []
        text = (
            f"join: {names([str(w) for _, w in sorted(self._left_unjoined.items())])} has left the"
            " job without calling join()"
        )
        return [
            (w.ident, {"type": "UNJOINED", "text": text})
            for r, w in sorted(self._roster.live.items())
            if r in self._joins.joined
        ]

    def _here(self) -> tuple[Collection[int], list[bytes]]:
        """The ranks of the workers and the servers that are still in the job.

        Without asynchronous training, all workers count.
        """
        return self._roster.live if self.asynchronous else range(self.size), list(
            self._roster.live_servers
        )

    def waits(self, rank: int) -> list[tuple[str, int, float]]:
        """The push_pulls that worker ``rank`` has waited for too long: see :meth:`Stalls.waits`."""
        return self._stalls.waits(rank)

    def _end_deadlock(self) -> list[Output]:
        """Reset the job on a deadlock: fail the push_pulls that can never end, and all others.

        Some workers have pushed what others have not, so push counts no longer match. From RESET
        on, every worker counts from zero under new keys, and no earlier push can meet a later one.
        """
        stuck = self._stalls.deadlock()
        if not stuck or self.registry is None:
            return []
        shown = dict(list(stuck.items())[:8])
        who = "; ".join(f"worker {r} waits for {self._awaited(keys)}" for r, keys in shown.items())
        who += f"; and {len(stuck) - len(shown)} more workers" if len(stuck) > len(shown) else ""
        text = (
            f"no worker can continue: {who}; for each of these tensors, the push of another worker"
            " is missing. Do all workers use the same names and shapes, equally often, in code"
            " that all of them reach? (If batches run out earlier on some workers, call join():"
            " docs/train/uneven-and-elastic.md.)"
        )
        # Workers at different points of their scripts would continue one step apart. Servers of an
        # asynchronous job keep values by key, which would be lost.
        apart = self._stalls.out_of_step()
        if apart or self.asynchronous:
            return self._fail(
                f"the job has to end{': ' if apart else ''}{apart}: {text}", Status.STALL
            )
        self.epoch += 1
        self.registry.clear()
        self._stalls.clear()
        # Send it to workers in join(), too: they could later push an old declaration again.
        reset = {"type": "RESET", "epoch": self.epoch, "status": Status.STALL, "text": text}
        return self._tell_error([w.ident for _, w in sorted(self._roster.live.items())], reset)

    def _awaited(self, keys: Sequence[tuple[str, int]]) -> str:
        """The tensors that a worker has pushed in vain, and a worker that has not pushed the first.

        :class:`~bpsx.errors.StallError` parses this text.
        """
        assert self.registry is not None
        described = [self.registry.describe(*key) for key in keys]
        for rank in self._stalls.lacking(keys[0])[:1]:
            described[0] += f", which worker {rank} has not pushed"
        return names(described, 4)

    # ---- leaving

    def bye(self, ident: bytes, m: dict[str, Any]) -> list[Output]:
        """A node leaves; a ``failure`` means that it leaves unfinished work."""
        node = self.nodes.get(ident)
        if node is None:
            return [(ident, {"type": "GOODBYE"})]
        out: list[Output] = [(ident, {"type": "GOODBYE"})]
        if node.left:
            return out
        self._unheard.pop(ident, None)
        if self._unheard and self.state == "running" and node.role == "worker":
            self._leaving.append((ident, m))
            return []
        if self.state == "waiting":
            self._roster.drop(ident)
            return out
        self._let_go(node)
        out += self._let_leave()
        node.early = node.role == "worker" and self._nobody_left_early and not m["failure"]
        self._nobody_left_early = self._nobody_left_early and not node.early
        if m["failure"] and self.state == "running":
            # A worker that failed because another one had left is not the first cause.
            early = (
                [w for w in self._of("worker") if w.early]
                if m["failure"].startswith(_FOR_WANT)
                else []
            )
            self.blamed = self.blamed or next(iter(early), node)
            return (
                out
                + self._lost(node, f"{node} has failed: {m['failure']}")
                + self._after_leaving(node)
            )
        if node.role == "server" and self.state == "running":
            self.blamed = self.blamed or node
            return out + self._fail(f"{node} has left while workers were running")
        return out + self._after_leaving(node)

    def gone(self, ident: bytes, why: str) -> list[Output]:
        """A node's connection has ended."""
        node = self.nodes.get(ident)
        if node is None or node.left:
            return []
        if self.state == "waiting":
            self._roster.drop(ident)
            self.vanished.miss(node.role, node.rank, node.host, f"{node} is gone: {why}")
            return []
        said = [m for i, m in self._leaving if i == ident]
        self._unheard.pop(ident, None)
        if said:  # it had sent BYE and did not wait for the reply
            self._leaving = [(i, m) for i, m in self._leaving if i != ident]
            return [out for out in self.bye(ident, said[0]) if out[0] != ident]
        self._let_go(node)
        out = self._lost(node, f"{node} is gone: {why}") if self.state == "running" else []
        return out + self._let_leave() + self._after_leaving(node)

    def _let_go(self, node: Node) -> None:
        """Remove a node from all of the job's accounts."""
        self._roster.leave(node)
        if node.role == "worker":
            self._stalls.leave(node.rank)
            if self._roots.get(node.rank // self.processes) == node.ident:
                del self._roots[node.rank // self.processes]
            if node.rank not in self._joins.joined:
                self._left_unjoined[node.rank] = node

    def abort(self, text: str) -> list[Output]:
        """End the job because the scheduler itself has to end."""
        if self.state in ("done", "failed"):
            return []
        kind, field_ = ("REFUSED", "reason") if self.state == "waiting" else ("LOST", "text")
        out = self._fail(text)
        return [(ident, {"type": kind, field_: text, "ended": True}) for ident, _ in out]

    def _lost(self, node: Node, text: str) -> list[Output]:
        """Handle a node's unexpected end.

        It ends the job, unless the job is asynchronous, the node is a worker, and other workers are
        left.
        """
        self.blamed = self.blamed or node
        workers = list(self._roster.live.values())
        if node.role != "worker" or not self.asynchronous or not workers:
            return self._fail("; ".join([*self._dead, text]))
        self._dead.append(text)
        text += "; the job is asynchronous, so the other workers continue without it"
        return [(w.ident, {"type": "WARN", "text": text}) for w in workers]

    def _fail(self, text: str, status: int = Status.PEER_LOST) -> list[Output]:
        """End the job as failed: send LOST to all remaining nodes.

        ``status``: code with which their push_pulls end.
        """
        self.state = "failed"
        self.failure = text
        lost = {"type": "LOST", "text": text, "status": status}
        self._unheard.clear()
        return [(n.ident, lost) for n in self.nodes.values() if not n.left] + self._let_leave()

    def _after_leaving(self, node: Node) -> list[Output]:
        workers, servers = self._roster.live, list(self._roster.live_servers.values())
        out: list[Output] = []
        if node.role == "worker" and self.state == "running":
            first = node.rank // self.processes * self.processes
            neighbours = [workers[r] for r in range(first, first + self.processes) if r in workers]
            out += [(n.ident, {"type": "LEFT", "rank": node.rank}) for n in [*servers, *neighbours]]
            out += self._joins.left(*self._here()) + self._end_join()
        if not workers:
            if self.state == "running":
                self.survived = bool(self._dead)
                self.state = "failed" if self._dead else "done"
                self.failure = (
                    "; ".join(self._dead) + "; the other workers continued and left in good order"
                    if self._dead
                    else ""
                )
            if node.role == "worker":
                out += [(s.ident, {"type": "END"}) for s in servers]
        return out

    def everybody_left(self) -> bool:
        """Whether all nodes of an ended job have left, so that no message is due any more."""
        return self.state in ("done", "failed") and not (
            self._roster.live or self._roster.live_servers
        )


def _place(m: dict[str, Any]) -> str:
    """The place that HELLO ``m`` asks for; servers get their numbers later."""
    return f"worker {m['rank']}" if m["role"] == "worker" else str(m["role"])


def newcomer(m: dict[str, Any]) -> str:
    """Name of the sender of HELLO ``m``, as text for messages."""
    return f"{_place(m)} ({m['host']}, pid {m['pid']})"


def names(items: Sequence[str], most: int = 8) -> str:
    """Join ``items`` to text for messages, cut after ``most``."""
    text = ", ".join(items[:most])
    return text + (f" and {len(items) - most} more" if len(items) > most else "")
