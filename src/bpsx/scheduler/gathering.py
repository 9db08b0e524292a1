"""Gathering of a job: which processes may join it, and which are still missing. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from bpsx.config import MOST_WORKERS
from bpsx.config.fingerprint import wrong_options
from bpsx.scheduler.compatibility import disagreement
from bpsx.scheduler.departures import Vanished
from bpsx.scheduler.messages import PROTOCOL
from bpsx.scheduler.roster import Node, Roster
from bpsx.scheduler.states import JOB, JobEvent, JobState, PresenceEvent
from bpsx.scheduler.terms import fixed_workers

Output = tuple[bytes, dict[str, Any]]
#: Number of different option sets whose check results are cached.
_MOST_OPTIONS = 64


class Gathering:
    """The part of a job's :class:`~bpsx.scheduler.membership.Membership` that lets nodes in."""

    def __init__(self, num_worker: int, num_server: int, local_size: int) -> None:
        self.num_worker = num_worker
        self.num_server = num_server
        self.local_size = local_size
        self.state = JobState.WAITING
        self.failure = ""
        self._roster = Roster()
        self.nodes = self._roster.nodes
        # Some process was in an earlier job, and may have kept things from it.
        self.again = False
        self.refused: dict[str, str] = {}  # node that was refused or could not start -> reason
        # Options as given -> the names and values of the invalid ones.
        self._options: dict[str, list[str]] = {}
        self.vanished = Vanished()

    def _move(self, event: JobEvent, failure: str = "") -> None:
        """Change the job's state; ``failure``: why it fails."""
        self.state, self.failure = JOB.after(self.state, event), failure

    def _start(self) -> list[Output]:
        """Begin the job: all nodes are present."""
        raise NotImplementedError

    def hello(self, ident: bytes, m: dict[str, Any]) -> list[Output]:
        """Handle a node's HELLO."""
        why = self._refusal(m)
        if why:
            return self._refuse(ident, m, why)
        if ident in self.nodes:
            return []
        if self.state is JobState.RUNNING:
            return self._arrive(ident, m)
        known = self._roster.same(m)
        if known is not None:  # its connection broke while the job was gathering
            self._roster.drop(known, PresenceEvent.WITHDREW)
        node = self._make_node(ident, m, self._roster.count("server"))
        if node.rank < 0:
            node.rank = self._lowest_absent()
        if not self._roster.workers and node.role == "worker":
            self.local_size = int(node.config.get("BYTEPS_LOCAL_SIZE", self.local_size))
        self._roster.add(node)
        self.again = self.again or m.get("again") is True
        self.refused.pop(_place(m), None)
        self.vanished.back(node, self.num_server - self._roster.count("server"))
        complete = (
            len(self._roster.workers) == self.size
            and self._roster.count("server") == self.num_server
        )
        return self._start() if complete else []

    @staticmethod
    def _make_node(ident: bytes, m: dict[str, Any], server: int = -1) -> Node:
        """Return the node that HELLO ``m`` introduces; ``server``: its rank, if it is one."""
        rank = m["rank"] if m["role"] == "worker" else server
        config, token = m["config"], m.get("token", "")
        return Node(ident, m["role"], rank, m["host"], m["pid"], m["lanes"], config, token)

    def _lowest_absent(self) -> int:
        """The lowest number of a worker with which the job begins and that is not there, or -1."""
        ranks, _ = self._roster.absent(self.num_worker, 1)
        return ranks[0] if ranks else -1

    def _arrive(self, ident: bytes, m: dict[str, Any]) -> list[Output]:
        """Let a node join the running job."""
        raise NotImplementedError

    def _bars_server(self, m: dict[str, Any]) -> str:
        """Return why a server may not join the running job; empty if it may."""
        raise NotImplementedError

    def _bars_worker(self, m: dict[str, Any]) -> str:
        """Return why a worker may not join the running job; empty if it may."""
        raise NotImplementedError

    def would_refuse(self, ident: bytes, m: dict[str, Any]) -> bool:
        """Whether HELLO ``m`` would be refused now."""
        return bool(self._refusal(m))

    def _refuse(self, ident: bytes, m: dict[str, Any], why: str) -> list[Output]:
        """Refuse a node.

        If the job still waits for a node in its place, the waiting nodes get the reason: the
        refused node has proven that it knows the secret, if the job has one.
        """
        if self._lacks(m):
            self.refused[_place(m)] = f"refused: {why}"
            self._turn_away(ident, m, f"{newcomer(m)} was refused ({why})")
        over = self.state is not JobState.WAITING
        return [(ident, {"type": "REFUSED", "reason": why, "over": over})]

    def cannot_start(self, ident: bytes, m: dict[str, Any]) -> list[Output]:
        """Handle CANNOT: a node that has not sent HELLO says why it cannot start.

        Unless it is started again, the job cannot form.
        """
        if m["role"] == "worker" and m["rank"] < 0:  # it has no number, so it may be any
            m = {**m, "rank": self._lowest_absent()}
        if self._lacks(m):
            self.refused[_place(m)] = f"could not start: {m['reason']}"
            self._turn_away(ident, m, f"{newcomer(m)} could not start: {m['reason']}")
        return [(ident, {"type": "GOODBYE"})]

    def _turn_away(self, ident: bytes, m: dict[str, Any], text: str) -> None:
        self.vanished.turn_away(Node(ident, m["role"], m["rank"], m["host"], m["pid"]), text)

    def withdraw(self, node: Node) -> None:
        """A node says BYE before the job begins."""
        self._roster.drop(node, PresenceEvent.WITHDREW)

    def vanish(self, node: Node, text: str) -> None:
        """A node's connection ends before the job begins; ``text`` names it."""
        self._roster.drop(node, PresenceEvent.VANISHED)
        self.vanished.miss(node, text)

    def expire(self, text: str) -> list[Output]:
        """End the job because nodes are missing, which ``text`` names."""
        self._move(JobEvent.EXPIRED, text)
        return [(ident, {"type": "REFUSED", "reason": text}) for ident in self.nodes]

    def _lacks(self, m: dict[str, Any]) -> bool:
        """Whether the job still waits for a node in the place that ``m`` asks for."""
        if self.state is not JobState.WAITING or m["role"] not in ("worker", "server"):
            return False
        if m["role"] == "server":
            return self._roster.count("server") < self.num_server
        here = self._roster.workers
        # Before the first worker has come, only a worker itself knows the number per machine.
        theirs = m["config"].get("BYTEPS_LOCAL_SIZE")
        each = self.local_size if here or not isinstance(theirs, int) else theirs
        return 0 <= m["rank"] < min(self.num_worker * each, MOST_WORKERS) and m["rank"] not in here

    def _refusal(self, m: dict[str, Any]) -> str:
        """Return why a node may not join; empty if it may."""
        return (
            self._unfit(m)
            or self._too_late(m)
            or self._differs(m)
            or (self._no_place_for_server(m) if m["role"] == "server" else self._no_place(m))
        )

    def _unfit(self, m: dict[str, Any]) -> str:
        """Return what no job would accept."""
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
        if m.get("token") and m["config"]["BYTEPS_LOCAL_SIZE"] != 1:
            return "DMLC_WORKER_ID is needed where several processes of a machine are workers"
        if (most := self._most_workers(m["config"])) > MOST_WORKERS:
            return f"{most} workers; at most {MOST_WORKERS} are allowed"
        return ""

    def _too_late(self, m: dict[str, Any]) -> str:
        if self.state is JobState.FAILED:
            return f"the job has failed: {self.failure}"
        if self.state is JobState.WAITING:
            return ""
        why = "it is over"
        if self.state is JobState.RUNNING:
            why = self._bars_server(m) if m["role"] == "server" else self._bars_worker(m)
        return f"the job is {self.state} and accepts no more nodes: {why}" if why else ""

    def _differs(self, m: dict[str, Any]) -> str:
        """Return an option in which the node differs from the scheduler or the other nodes."""
        for name, ours in (
            ("DMLC_NUM_WORKER", self.num_worker),
            ("DMLC_NUM_SERVER", self.num_server),
        ):
            theirs = m["config"].get(name)
            if name == "DMLC_NUM_SERVER" and theirs == 0 and ours and m["role"] == "worker":
                return (
                    "the processes of a single machine need no servers: set DMLC_NUM_SERVER=0 for"
                    f" the scheduler, which has {ours}, and start none; or set"
                    " BYTEPS_FORCE_DISTRIBUTED=1 on all workers"
                )
            if theirs != ours:
                return (
                    f"{name}={theirs} on this {m['role']}, {ours} on the scheduler:"
                    " must be the same on both"
                )
        return disagreement(m["role"], m["config"], self._roster.kinds())

    def _no_place_for_server(self, m: dict[str, Any]) -> str:
        if not m["lanes"]:
            return "the server has no lanes"
        free = self._roster.count("server") < self.num_server
        if free or self.state is JobState.RUNNING or self._roster.same(m) is not None:
            return ""
        if self.num_server == 1:
            return "the job already has its server (DMLC_NUM_SERVER=1)"
        return f"the job already has its {self.num_server} servers (DMLC_NUM_SERVER)"

    def _differing_option(self, m: dict[str, Any]) -> str:
        """Return an option in which a worker differs from the others."""
        first = self._roster.a_worker()
        if first is not None:
            for name, value in first.config.items():
                if m["config"].get(name) != value:
                    return (
                        f"{name}={m['config'].get(name)} on worker {m['rank']}, {value} on {first}:"
                        " must be the same on all workers"
                    )
        return ""

    def _no_place(self, m: dict[str, Any]) -> str:
        """Return why a worker cannot have the rank that it wants."""
        if why := self._differing_option(m):
            return why
        if m.get("token"):
            return ""
        if not 0 <= m["rank"] < self._most_workers(m["config"]):
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
        """Number of worker processes with which the job begins."""
        return self.num_worker * self.local_size

    @property
    def places(self) -> int:
        """Largest number of worker processes at a time."""
        worker = self._roster.a_worker()
        return self.size if worker is None else self._most_workers(worker.config)

    def _most_workers(self, options: Mapping[str, Any]) -> int:
        """:attr:`places`, if a worker has these options."""
        grows = not fixed_workers([options])
        machines = max(self.num_worker, int(options["BPSX_MAX_WORKERS"]) if grows else 0)
        return machines * int(options["BYTEPS_LOCAL_SIZE"])

    def _of(self, role: str) -> list[Node]:
        return self._roster.all_workers() if role == "worker" else self._roster.servers()

    def missing(self) -> list[str]:
        """The missing nodes, as text for messages. Any thread may call it: it changes nothing."""
        ranks = [rank for rank in range(self.size) if rank not in self._roster.workers]
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
        servers = max(0, self.num_server - self._roster.count("server"))
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


def _place(m: dict[str, Any]) -> str:
    """The place that HELLO ``m`` asks for; servers get their numbers later."""
    return f"worker {m['rank']}" if m["role"] == "worker" else str(m["role"])


def newcomer(m: dict[str, Any], returning: bool = False) -> str:
    """Name of the sender of HELLO ``m``, as text for messages; or of AGAIN, if ``returning``."""
    place = f"{m['role']} {m['rank']}" if returning else _place(m)
    place = m["role"] if m["rank"] < 0 else place
    return f"{place} ({m['host']}, pid {m['pid']})"
