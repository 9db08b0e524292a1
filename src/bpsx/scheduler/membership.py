"""Job membership: how the job reacts when nodes come, leave, die or wait.

Pure: events in, messages out; no sockets, no clock of its own. ``states.py`` has the tables.

A node is present after a valid HELLO. When all nodes are, the job is running and every node gets
WELCOME. The job is done when all workers have left in good order. It fails when a worker
disappears without a BYE or its BYE has a failure, and the others cannot go on without it
(``shrinking.py``), a server is lost that the others cannot replace (``surviving.py``), a worker
sends DOUBT, a deadlock cannot be resolved, or the scheduler has to end; all others then get the
reason. An asynchronous job goes on after workers die, and is
reported as failed at its end.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Sequence
from typing import Any

from bpsx.config import PARTITION_BYTES
from bpsx.errors import Status
from bpsx.planning.link_rate import PROBE
from bpsx.planning.placement import Assignment, Placement
from bpsx.scheduler import tuning
from bpsx.scheduler.gathering import Output
from bpsx.scheduler.registry import RegisteredTensor, Registry
from bpsx.scheduler.retuning import Retuning
from bpsx.scheduler.roster import Node, names
from bpsx.scheduler.states import JobEvent, JobState, Presence, Supply
from bpsx.scheduler.surviving import Loss, left_message, lost_message
from bpsx.scheduler.terms import Terms, is_asynchronous

#: Start of the failure text of a worker that ended with PeerLeftError.
_PEER_LEFT_PREFIX = "ended by PeerLeftError"


class Membership(Retuning):
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
        elastic_wait: float = 0.0,
        balances: bool = True,
    ) -> None:
        super().__init__(num_worker, num_server, local_size, stall_warn, deadlock_after)
        self.job, self.elastic_wait, self.balances = job, elastic_wait, balances
        self.epoch = 0  # number of resets after a stall
        # The first worker that left without a failure.
        self._first_leaver: Node | None = None
        self._dead: list[Loss] = []  # deaths of workers that an asynchronous job survived
        # True if the job failed only because of `_dead`: all other workers left in good order.
        self.survived = False
        #: Whether the job failed because a connection ended, and no worker has said BYE since. It
        #: may be this scheduler that was silent, and the job may go on with another one.
        self.unheard = False
        # The JOINs that wait for confirmations of errors: connection -> number of the join.
        self._deferred_joins: dict[bytes, int | None] = {}
        # The workers that have sent BROKEN, by the server's rank.
        self._accused: dict[int, set[bytes]] = {}
        #: Whether a node has come back since: the job does go on.
        self.lives_on = False

    def _start(self) -> list[Output]:
        workers, servers = self._of("worker"), self._of("server")
        for rank, server in enumerate(servers):
            server.rank = rank
        placement = self._arrange(servers)
        probes = tuning.tunes_partitions(workers[0].config, self.machines, self.asynchronous)
        if probes:
            senders = len(workers) // self.processes
            self._tuning = tuning.PartitionTuning(placement, PARTITION_BYTES, len(workers), senders)
        self._move(JobEvent.COMPLETE)
        self._roster.start()
        roster = {
            **self._welcome(),
            "living": list(self._order),
            "servers": [[s.host, s.pid, s.lanes] for s in servers],
            "names": {"server": [str(n) for n in servers]},
        }
        firsts = [0, *itertools.accumulate(len(s.lanes) for s in servers)]
        out: list[Output] = [
            (s.ident, {**roster, **self._for_server(s, first)})
            for s, first in zip(servers, firsts, strict=False)
        ]
        return out + [(w.ident, {**roster, "rank": w.rank, "probes": probes}) for w in workers]

    def _arrange(self, servers: Sequence[Node]) -> Placement:
        """Prepare the job that begins with ``servers``; returns the placement of its tensors."""
        workers = self._of("worker")
        config = workers[0].config
        self.asynchronous = is_asynchronous(self._given())
        self.processes = self.local_size if config.get("BPSX_LOCAL_REDUCE") else 1
        for worker in workers:
            self._note_root(worker)
            self._stalls.enter(worker.rank)
        self._order = dict.fromkeys(w.rank for w in workers if not w.left)
        self._quorum.confirm(self._order)
        partition_bytes = int(config["BYTEPS_PARTITION_BYTES"])
        placement = Placement(
            [len(s.lanes) for s in servers],
            str(config["BYTEPS_KEY_HASH_FN"]),
            int(config["BYTEPS_BUILT_IN_HASH_COEF"]),
            list(self._shares(servers).values()),
            partition_bytes,
        )
        self.registry = Registry(placement, partition_bytes, self.processes)
        self.terms = Terms(placement)
        self.machines = len({n.host for n in self.nodes.values()})
        return placement

    def _shares(self, nodes: Sequence[Node]) -> dict[int, float]:
        """The fraction of all bytes that each of these servers should sum, by rank."""
        servers = [(s.host, int(s.config["BPSX_SERVER_WEIGHT"])) for s in nodes]
        workers = self._roster.live.values()
        hosts = [w.host for w in workers if w.rank % self.processes == 0]
        found = tuning.shares(self._of("worker")[0].config, hosts, servers)
        return {node.rank: share for node, share in zip(nodes, found, strict=True)}

    # ---- while the job runs

    def declare(self, ident: bytes, m: dict[str, Any]) -> list[Output]:
        """Handle DECLARE: send the worker the tensor's places, or the error to all concerned.

        A declaration sent before the worker got RESET is void. ``m``: name, generation, nbytes,
        dtype, shape, codec, pieces, epoch.
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
        if self._tuning is not None and not name.startswith(PROBE):
            self._note_choice(self._tuning.decide())
        known, ranks = self.registry.declare(
            node.rank,
            name,
            generation,
            m["nbytes"],
            m["dtype"],
            m["shape"],
            m["codec"],
            m.get("pieces", ()),
        )
        if known.failure:
            failed = {
                "type": "FAILED",
                "tensors": [[name, generation]],
                "status": known.status,
                "text": known.failure,
            }
            return self._tell_error(
                (self._roster.live[r] for r in ranks if r in self._roster.live), failed
            )
        placed = {
            "type": "PLACED",
            "name": name,
            "generation": generation,
            "places": [list(p) for p in self._places_for(node, known.places)],
        }
        out: list[Output] = [(ident, placed)]
        return out + self._send_adoptions(node.rank)

    def _places_for(self, node: Node, places: list[Assignment]) -> list[Assignment]:
        """The places of a tensor as a worker has to hear of them.

        Workers apply the moves of all terms that they have heard of. One that has joined late has
        not heard of those before.
        """
        if node.rank not in self.entered or self.terms is None:
            return places
        term = self.entered[node.rank]
        return [
            Assignment(p.key, *self.terms.resolve(p.lane, p.slot, term), p.length) for p in places
        ]

    def _tell_error(self, workers: Iterable[Node], message: dict[str, Any]) -> list[Output]:
        """Send an error to several workers.

        None of them may join or leave before all have confirmed it. Otherwise, the servers' sums or
        reports about such a worker could arrive first, and be taken for a success or for the cause.
        One that has asked to leave needs to confirm nothing.
        """
        out = []
        for worker in workers:
            if worker.presence is Presence.LIVE:
                self._roster.error_sent(worker)
            out.append((worker.ident, message))
        return out

    def heard(self, ident: bytes) -> list[Output]:
        """Handle HEARD: count the confirmation of an error; the last one ends what it defers."""
        node = self._roster.unheard.get(ident)
        if node is None:
            return []
        self._roster.confirmed(node)
        return self._process_deferred()

    def _process_deferred(self) -> list[Output]:
        """Process the deferred JOINs and BYEs for which nothing is outstanding any more."""
        out: list[Output] = []
        if not self._roster.unheard:
            joins, self._deferred_joins = self._deferred_joins, {}
            for ident, generation in joins.items():
                out += self.join(ident, generation)  # which may defer it once more
        leaving = self._roster.leaving
        if self.terms is not None and len(leaving) == len(self._roster.live):
            self.terms.all_leave()
        ready = [n for n in leaving.values() if not self._has_to_wait(n, n.goodbye)]
        for node in ready:
            del leaving[node.ident]
        for node in ready:  # A BYE may make the next one wait again, which then puts its node back.
            out += self.bye(node.ident, node.goodbye)
        return out

    def _has_to_wait(self, node: Node, m: dict[str, Any]) -> bool:
        """Whether ``node``, whose BYE is ``m``, has to stay in the job for now."""
        if self.state is not JobState.RUNNING or node.role != "worker":
            return False
        return bool(self._roster.unheard) or not m["failure"] and self._is_needed(node)

    def waiting(self, ident: bytes, m: dict[str, Any], now: float) -> list[Output]:
        """Handle WAITING: note changes in a worker's push_pulls in progress, and end a deadlock.

        ``m``: new and over (push_pulls that began or ended to be in progress), busy (a thread does
        something else), calls (push_pulls asked for), epoch, last (the report is complete).
        """
        node = self.nodes.get(ident)
        if (
            node is None
            or node.role != "worker"
            or node.left
            or self.state is not JobState.RUNNING
            or m["epoch"] != self.epoch
        ):
            return []
        self._stalls.report(node.rank, m["new"], m["over"], now, m["busy"], m["calls"])
        if not m["last"]:  # warn and look for deadlocks only once the report is complete
            return []
        if lacks := self._waits_for_missed(node, now):
            return lacks
        text = self._stalls.warning(node.rank)
        out: list[Output] = [(ident, {"type": "WARN", "text": text})] if text else []
        return out + self._end_deadlock()

    def doubt(self, ident: bytes, m: dict[str, Any]) -> list[Output]:
        """Handle DOUBT: end the job, because a worker cannot tell which later push_pulls match.

        ``m``: text and status of the error that led to it.
        """
        node = self.nodes.get(ident)
        if node is None or node.role != "worker" or node.left or self.state is not JobState.RUNNING:
            return []
        return self._fail(f"the job has to end after an error: {node}: {m['text']}", m["status"])

    def _join(self, ident: bytes, generation: int | None) -> list[Output]:
        """Handle JOIN: let rounds close without the worker, until all workers have joined.

        It is deferred while a worker has not confirmed an error: a round that the error ends could
        close without this worker, and its sum overtake the error. ``generation``: number of the
        join; one that is over does not count.
        """
        node = self.nodes.get(ident)
        if node is None or node.role != "worker" or node.left or self.state is not JobState.RUNNING:
            return []
        if generation is not None and generation != self._joins.generation:
            return []
        off = self._call_off_change()
        if self._roster.unheard:
            self._deferred_joins[ident] = generation
            return off
        self._stalls.leave(node.rank)
        if node.supply is Supply.PUSHING:
            self._roster.join(node)
        out = (
            self._joins.join(node.rank, *self._present(), self._roots, self.processes)
            + self._notify_unjoined()
            + self._release(self._joins.over())
        )
        return off + out + self._send_adoptions(node.rank)

    def _send_adoptions(self, rank: int) -> list[Output]:
        """Send the root of ``rank``, if it has joined, the tensors that only neighbours declared.

        A root that has joined sums for its neighbours even what it does not push itself.
        """
        root = self._machine(rank)[-1]
        if self.registry is None or root not in self._joins.joined or root not in self._roster.live:
            return []
        node = self._roster.live[root]
        return [
            (node.ident, self._adopt_message(node, name, generation, d))
            for name, generation, d in self.registry.adopt(root)
        ]

    def _adopt_message(
        self, root: Node, name: str, generation: int, d: RegisteredTensor
    ) -> dict[str, Any]:
        return {
            "type": "ADOPT",
            "name": name,
            "generation": generation,
            "nbytes": d.nbytes,
            "dtype": d.dtype,
            "shape": list(d.shape),
            "codec": d.codec,
            "places": [list(p) for p in self._places_for(root, d.places)],
        }

    def cleared(self, ident: bytes, m: dict[str, Any]) -> list[Output]:
        """Handle CLEARED, the confirmation of a CLEAR: after the last, send ALL_JOINED.

        ``m``: generation, the number of the join.
        """
        return self._release(self._joins.cleared(ident, m["generation"]))

    def _release(self, last: int | None) -> list[Output]:
        """Send ALL_JOINED once all holders have cleared, else ``last`` is None.

        ``last``: the last rank to join.
        """
        if last is None:
            return []
        if self._entering:
            return self._let_in()
        for rank in self._roster.live:
            self._stalls.enter(rank)
        self._roster.all_joined()
        return [
            (w.ident, {"type": "ALL_JOINED", "last": last})
            for w in self._of("worker")
            if not w.left
        ]

    def _notify_unjoined(self) -> list[Output]:
        """Send UNJOINED to workers in ``join()`` if a worker has left without joining."""
        left, dropped = self._roster.left_unjoined, self._dropped
        if dropped:
            left = {rank: worker for rank, worker in left.items() if rank not in dropped}
        if not left or self.asynchronous or not self._joins.joined:
            return []
        text = (
            f"join: {names([str(w) for _, w in sorted(left.items())])} has left the"
            " job without calling join()"
        )
        return [
            (w.ident, {"type": "UNJOINED", "text": text})
            for r, w in sorted(self._roster.live.items())
            if w.supply is Supply.JOINED
        ]

    def _present(self) -> tuple[Collection[int], list[bytes]]:
        """The ranks of the workers that join() waits for, and the connections of live servers.

        A synchronous job waits for departed workers, too: they were to take part in its rounds. But
        it goes on without those that it has lost.
        """
        dropped = self._dropped
        roster = self._roster
        awaited: Collection[int] = roster.live if self.asynchronous else roster.workers
        if dropped:
            awaited = [rank for rank in awaited if rank not in dropped]
        return awaited, list(self._roster.live_servers)

    def is_lost(self, node: Node) -> bool:
        """Whether ``node``, which has left, has died or failed. Any thread may call it."""
        # An earlier scheduler's loss of a worker has no other mark than its rank.
        who = (node.role, node.rank, node.host, node.pid)
        lost = [loss.node for loss in [*self.losses, *self._dead] if not loss.planned]
        if self.blamed is not None and self.blamed is not self._first_leaver:
            lost.append(self.blamed)
        return who in [(n.role, n.rank, n.host, n.pid) for n in lost]

    def waits(self, rank: int) -> list[tuple[str, int, float]]:
        """The push_pulls that worker ``rank`` has waited for too long: see :meth:`Stalls.waits`."""
        return self._stalls.waits(rank)

    def _end_deadlock(self) -> list[Output]:
        """Reset the job on a deadlock: fail the push_pulls that can never end, and all others.

        Some workers have pushed what others have not, so push counts no longer match. From RESET
        on, every worker counts from zero under new keys, and no earlier push can meet a later one.
        """
        stuck = self._stalls.deadlock()
        if not stuck or self.registry is None or self._keys_move():
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
        off = self._call_off_change()
        self.epoch += 1
        self.registry.clear()
        self._stalls.clear()
        # Send it to workers in join(), too: they could later push an old declaration again.
        reset = {"type": "RESET", "epoch": self.epoch, "status": Status.STALL, "text": text}
        return off + self._tell_error([w for _, w in sorted(self._roster.live.items())], reset)

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

    def _bye(self, ident: bytes, m: dict[str, Any], now: float) -> list[Output]:
        """Handle BYE: remove the node, or defer it while other nodes need it.

        A deferred node gets GOODBYE only then. ``m``: failure, the reason for which it leaves
        unfinished work, or "".
        """
        node = self.nodes.get(ident)
        if node is None:
            return [(ident, {"type": "GOODBYE"})]
        goodbye: list[Output] = [(ident, {"type": "GOODBYE"})]
        if node.left:
            return goodbye
        if self.state is JobState.FAILED and node.role == "worker":
            self.unheard = False
        if self.state is JobState.WAITING:
            self.withdraw(node)
            return goodbye
        self._roster.excuse(node)
        if self._has_to_wait(node, m):
            if node.presence is Presence.LIVE:
                self._roster.defer(node, m)
            else:
                self._roster.leaving[ident] = node
            return self._process_deferred()
        if not (m["failure"] and self._survives_workers):
            self._note_leaving(node)
        self._remove(node)
        out = self._process_deferred()
        if node.role == "worker" and not m["failure"]:
            self._first_leaver = self._first_leaver or node
        if m["failure"] and self.state is JobState.RUNNING:
            out += self._lost(node, f"{node} has failed: {m['failure']}", now, m["failure"])
        elif node.role == "server" and self.state is JobState.RUNNING:
            out += self._lost(node, f"{node} has left while workers were running", now)
        # GOODBYE comes last: if the scheduler dies, others must know that the node has left.
        return out + self._after_leaving(node) + goodbye

    def _gone(self, ident: bytes, why: str, now: float) -> list[Output]:
        """Remove a node whose connection has ended.

        A server is replaced if that is possible, and a leaving node may go. Otherwise, the job
        fails.
        """
        node = self.nodes.get(ident)
        if node is None or node.left:
            return []
        if self.state is JobState.WAITING:
            self.vanish(node, f"{node} is gone: {why}")
            return []
        # It may have sent BYE, and did not wait for the reply.
        if node.presence is Presence.LEAVING and not self._must_take_part(node):
            node.cut = True
            return [out for out in self.bye(ident, node.goodbye) if out[0] != ident]
        self._remove(node)
        running = self.state is JobState.RUNNING
        out = self._lost(node, f"{node} is gone: {why}", now) if running else []
        if running and self.state is JobState.FAILED:
            self.unheard = self.may_lose_scheduler
        return out + self._process_deferred() + self._after_leaving(node)

    def broken(self, ident: bytes, m: dict[str, Any], now: float) -> list[Output]:
        """Handle BROKEN: a worker's connection to a server has ended, and the server lives.

        A connection is never made again, so the server is of no use. It is replaced if it can be.
        If the worker reaches no other server, all workers have to say so: its own links may be at
        fault. ``m``: server, its rank; alone, whether the worker reaches no other one.
        """
        worker, server = self.nodes.get(ident), self._roster.usable_server(m["server"])
        if (
            self.state is not JobState.RUNNING
            or worker is None
            or worker.role != "worker"
            or worker.left
            or server is None
            or self._fixed_servers()
        ):
            return []
        said = self._accused.setdefault(server.rank, set())
        said.add(ident)
        doubtful = m["alone"] or len(self._roster.usable_servers()) < 2
        if doubtful and any(
            self._speaks(w) and w.ident not in said for w in self._roster.live.values()
        ):
            return []
        why = f"its connection to {worker} broke"
        text = f"this server has been replaced: {server} is gone: {why}"
        lost = lost_message(text)
        return [(server.ident, lost), *self.gone(server.ident, why, now)]

    def _remove(self, node: Node) -> None:
        """Remove a node from all of the job's accounts."""
        self._roster.leave(node)
        if node.role == "worker":
            self._order.pop(node.rank, None)
            self._stalls.leave(node.rank)
            if self._roots.get(node.rank // self.processes) == node.ident:
                del self._roots[node.rank // self.processes]

    def abort(self, text: str) -> list[Output]:
        """End the job because the scheduler itself has to end."""
        if self.state in (JobState.DONE, JobState.FAILED):
            return []
        kind, field_ = ("REFUSED", "reason") if self.state is JobState.WAITING else ("LOST", "text")
        ended = {"type": kind, field_: text, "ended": True}
        out = self._fail(text, event=JobEvent.ABORTED)
        out = [(ident, ended if m["type"] == "LOST" else m) for ident, m in out]
        return out + self._refuse_newcomers(text)

    def _lost(self, node: Node, text: str, now: float = 0.0, failure: str = "") -> list[Output]:
        """Handle a node's unexpected end.

        A server is replaced if possible. The end of a worker ends the job, unless others are left
        that can go on, as those of an asynchronous job. ``failure``: the node's reason.
        """
        if node.role == "server":
            return self._lose_server(node, text, now)
        fixed = self._fixed_workers(node)
        if not fixed:
            return self._lose_machine(node, text, now)
        # A worker that failed because another one had left is not the first cause.
        by_leaver = failure.startswith(_PEER_LEFT_PREFIX)
        self.blamed = self.blamed or by_leaver and self._first_leaver or node
        workers = list(self._roster.live.values())
        if not self.asynchronous or not workers:
            if self._survives_workers:
                text += f"; the job cannot go on without it: {fixed}"
            return self._fail("; ".join([*self._deaths(), text]) + self._missed_text())
        self._dead.append(Loss(node, text, text))
        self._note_leaving(node)
        if self.terms is not None:
            self.terms.changes.ended(0, text, now)
        text += "; the job is asynchronous, so the other workers continue without it"
        return [(w.ident, {"type": "WARN", "text": text}) for w in workers]

    def _deaths(self) -> list[str]:
        """Return a text for each worker's death that an asynchronous job has survived."""
        return [loss.why for loss in self._dead]

    def _fail(
        self, text: str, status: int = Status.PEER_LOST, event: JobEvent = JobEvent.LOST
    ) -> list[Output]:
        """End the job as failed: send LOST to all remaining nodes.

        ``status``: code with which their push_pulls end.
        """
        self._move(event, text)
        lost = lost_message(text, status)
        self._roster.excuse(*self._roster.unheard.values())
        out = [(n.ident, lost) for n in self.nodes.values() if not n.left]
        return out + self._farewells() + self._process_deferred()

    def _after_leaving(self, node: Node) -> list[Output]:
        workers, servers = self._roster.live, list(self._roster.live_servers.values())
        out: list[Output] = []
        if node.role == "worker" and self.state is JobState.RUNNING:
            neighbours = self._neighbours(node)
            if self.terms is None or node.rank not in self.terms.dropped:
                out += [(n.ident, left_message(node)) for n in [*servers, *neighbours]]
            out += self._joins.left(*self._present(), self._roots) + self._notify_unjoined()
            out += self._release(self._joins.over())
        if not workers:
            if self.state is JobState.RUNNING and self._dead:
                deaths = "; ".join(self._deaths())
                self.survived = True
                self._move(
                    JobEvent.EMPTY_AFTER_DEATHS,
                    f"{deaths}; the other workers continued and left in good order",
                )
            elif self.state is JobState.RUNNING:
                self._move(JobEvent.EMPTY)
            if node.role == "worker":
                out += [(s.ident, {"type": "END"}) for s in servers]
        return out

    def everybody_left(self) -> bool:
        """Whether all nodes of an ended job have left, so that no message is due any more."""
        if self.lives_on:
            return True
        return self.state in (JobState.DONE, JobState.FAILED) and not (
            self._roster.live or self._roster.live_servers
        )

    def desert(self, text: str) -> None:
        """Give the running job up without a word to its nodes: it may go on with another scheduler.

        ``text``: why.
        """
        self._move(JobEvent.LOST, text)
        self.unheard = self.lives_on = True

    @property
    def deserted(self) -> bool:
        """Whether the job has failed here only, as far as this scheduler can know."""
        return self.unheard and (self.lives_on or not self._roster.live)
