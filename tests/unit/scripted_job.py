"""A job of scripted nodes around a real :class:`Rebuilding`, whose scheduler may die at any time.

The nodes remember with the code of real ones (``Decisions``, ``Marks``). Each direction of each
link is a queue; whoever uses a :class:`World` says what is delivered when.
"""

from __future__ import annotations

import json
from collections import deque
from types import SimpleNamespace
from typing import Any

from bpsx.scheduler import messages
from bpsx.scheduler.rebuilding import Rebuilding
from bpsx.server.marks import Marks
from bpsx.session.decisions import Decisions, parts
from unit.scheduler_tools import config, declare, hello

WAIT, GRACE = 60.0, 3.0


class Node:
    """A scripted node: ``inbox`` holds what the hub has sent, ``outbox`` what it has sent."""

    token = ""

    def __init__(self, world: World, role: str, rank: int, number: int = -1) -> None:
        """``number``: of a server that has no rank yet."""
        self.world, self.role, self.rank = world, role, rank
        self.number = rank if number < 0 else number
        self.connections = 0
        self.inbox: deque[dict[str, Any]] = deque()
        self.outbox: deque[dict[str, Any]] = deque()
        self.state = "connected"
        self.dead = self.over = False
        self.lost, self.goes_on = "", False
        self.place = "free"  # see bpsx.session.boundaries; only workers come to boundaries
        self.bye: str | None = None
        self.greeted: Rebuilding | None = None  # the hub that has got its HELLO

    @property
    def ident(self) -> bytes:
        return b"%s%d.%d" % (self.role.encode(), self.number, self.connections)

    @property
    def hello(self) -> dict[str, Any]:
        greeting = hello(
            self.role,
            self.rank,
            pid=1000 * (self.role == "server") + self.number,
            host=self.world.host(self.number),
            config=self.world.options,
            token=self.token if self.state == "entering" else "",
        )
        greeting["rank"] = -1 if greeting["token"] else self.rank
        return {**greeting, "lanes": [f"h:{self.number}"] if self.role == "server" else []}

    def send(self, kind: str, **fields: Any) -> None:
        if self.state == "connected" and not self.dead:
            self.outbox.append({"type": kind, **fields})

    def part(self) -> None:
        """The hub has died, or this connection has."""
        self.inbox.clear()
        self.outbox.clear()
        if not (self.dead or self.over or self.state == "entering"):
            self.state = "orphaned"

    def is_unheard(self, hub: Rebuilding) -> bool:
        """Whether it wants to enter the job, and ``hub`` does not know."""
        waits = self.state == "entering" and not (self.dead or self.over or self.outbox)
        return waits and self.greeted is not hub

    def enter(self) -> None:
        """Say HELLO to the hub that is there now, on a new connection."""
        self.connections += 1
        self.outbox.append({**self.hello, "type": "HELLO"})

    def introduce(self) -> None:
        """Connect to the hub that is there now."""
        self.connections += 1
        self.state = "returning"
        fields, known = self.report()
        again = {**self.hello, **fields, "type": "AGAIN", "job": self.world.job, "bye": self.bye}
        again["parts"] = len(known)
        again["rank"] = self.rank
        self.outbox += [json.loads(json.dumps(m)) for m in (again, *map(json.loads, known))]

    def take(self) -> None:
        """Handle the oldest message."""
        m = self.inbox.popleft()
        if self.state == "entering":
            if m["type"] == "REFUSED":
                self.over, self.lost, self.state = True, m["reason"], "over"
            else:
                self.state = "connected"
                self.handle(m)
        elif self.state == "returning":
            if m["type"] == "RESUMED":
                self.state = "connected"
                self.resume()
                if self.bye is not None:
                    self.send("BYE", failure=self.bye)
            elif m["type"] == "REFUSED" and not m["over"]:
                self.state = "orphaned"
            elif m["type"] == "REFUSED":
                self.over, self.lost, self.state = True, m["reason"], "over"
            elif m["type"] == "GOODBYE":
                self.over, self.state = True, "over"
        elif m["type"] == "GOODBYE":
            self.over, self.state = True, "over"
        elif m["type"] == "LOST":
            self.lost, self.goes_on = m["text"], m["goes_on"]
            if self.goes_on and self.bye is None:  # its script ends with an error
                self.bye = self.lost
                self.send("BYE", failure=self.bye)
        else:
            self.handle(m)

    def leave(self) -> None:
        if self.bye is None:
            self.bye = ""
            self.send("BYE", failure="")


class Worker(Node):
    entered = True  # it is or was in the job

    def __init__(self, world: World, rank: int) -> None:
        super().__init__(world, "worker", rank)
        self.decisions = Decisions(
            [[world.host(s), 1000 + s, [f"h:{s}"]] for s in range(world.servers)], True
        )
        self.epoch = 0
        self.declared: dict[tuple[str, int], Any] = {}
        self.generations: dict[str, int] = {}
        self.joined = False
        self.last = -1
        self.said: dict[int, str] = {}  # what CONNECTED has said of servers that came late
        self.passed, self.stop = 0, 0
        self.meeting, self.fresh, self.wants = -1, False, False
        self.anew = False  # no meeting of the present scheduler has been called yet
        self.cleared = 0
        self.order = list(range(world.workers_n))
        self.current: dict[str, tuple[str, int]] = {}  # what the next push_pull of a name uses
        self.used: dict[str, list[int]] = {}  # the generations that its push_pulls have used

    @property
    def speaks(self) -> bool:
        """Whether it speaks to the servers for its machine."""
        return self.rank % self.world.each == self.world.each - 1

    def step(self) -> None:
        """Come to the next boundary, if this worker may."""
        if self.place in ("asked", "here") or self.state == "entering" or self.joined:
            return
        if self.goes_on:
            return
        self.passed += 1
        if self.fresh:
            self.fresh = False
            self.send("SYNCED")
        if self.place == "bound" and self.passed == self.stop:
            self.place = "here"
            self.send("HERE", meeting=self.meeting, names="x" if self.tells else "")

    def ask_to_leave(self, needs: str = "") -> None:
        """Want to leave, as after SIGTERM."""
        self.wants = True
        self.send("DEPART", why="SIGTERM", needs=needs)

    def declare(self, name: str, size: int) -> None:
        generation = self.generations.get(name, 0)
        self.generations[name] = generation + 1
        given = SimpleNamespace(
            generation=generation,
            nbytes=4 * size,
            dtype=3,
            shape=(size,),
            codec=None,
            state="asked",
            places=None,
            count=0,
            last=-1,
            successor=None,
        )
        self.declared[name, generation] = given
        self._ask(name, given)

    def push_pull(self, name: str) -> None:
        """Begin a push_pull of a placed tensor, unless it has to wait at its last count."""
        key = self.current.get(name, (name, 0))
        given = self.declared.get(key)
        if given is None or given.state != "placed" or self.joined or self.bye is not None:
            return
        if given.count == given.last and self.decisions.change != self.decisions.held:
            return
        if given.count == given.last:
            self.current[name] = key = given.successor
            given = self.declared[key]
        given.count += 1
        self.used.setdefault(name, []).append(key[1])

    def count(self, m: dict[str, Any]) -> None:
        """Handle COUNT."""
        items = [
            [*key, given.count]
            for key, given in self.declared.items()
            if given.state == "placed" and given.last < 0
        ]
        self.send("COUNTS", number=m["number"], epoch=self.epoch, items=items)

    def change(self, m: dict[str, Any]) -> None:
        """Handle CHANGE."""
        self.decisions.change = m["number"]
        items, fresh = m["items"], {"count": 0, "last": -1, "successor": None}
        fits = not self.joined and all(
            self.declared[name, old].count <= last for name, old, last, *_ in items
        )
        for name, old, last, new, places in items if fits else ():
            given = self.declared[name, old]
            given.last, given.successor = last, (name, new)
            self.declared[name, new] = SimpleNamespace(
                **{**vars(given), "generation": new, "places": places, **fresh}
            )
            self.decisions.place((name, new), places)
        self.send("TAKEN", number=m["number"], fits=fits)

    def end_change(self, m: dict[str, Any]) -> None:
        """Handle HOLD or DROP."""
        if m["number"] != self.decisions.change or m["number"] == self.decisions.held:
            return
        if m["type"] == "HOLD":
            self.decisions.held, self.decisions.size = m["number"], m["size"]
            return
        for given in list(self.declared.values()):
            if given.successor is not None and given.successor[1] >> 24 == m["number"]:
                self.decisions.forget(given.successor)
                del self.declared[given.successor]
                given.last, given.successor = -1, None

    def _ask(self, name: str, given: Any) -> None:
        m = declare(name, list(given.shape), given.generation)
        self.send("DECLARE", **{**m, "epoch": self.epoch})

    def join(self) -> None:
        self.joined = True
        self.send("JOIN", generation=self.decisions.joins)

    def move(self) -> None:
        """The driver has finished the latest term."""
        terms = len(self.decisions.terms) if self.speaks else 0
        if self.decisions.moved[0] < terms:
            self.decisions.moved = (self.decisions.moved[0] + 1, 1, 0)
            self._tell_moved()

    def _tell_moved(self) -> None:
        term, partitions, again = self.decisions.moved
        if term:
            self.send("MOVED", term=term, partitions=partitions, again=again)

    def report(self) -> tuple[dict[str, Any], list[bytes]]:
        fields = {
            "size": self.world.workers_n,
            "failure": None if self.goes_on else self.lost or None,
            "cleared": self.cleared,
            "state": self.decisions.report(
                self.epoch,
                self.joined,
                self.fresh,
                self.world.dead_lanes() if self.speaks else (),
                self.wants and self.place == "here",
                self.goes_on,
            ),
        }
        return fields, parts(self.decisions.known(self.declared))

    def resume(self) -> None:
        self.anew = True
        for (name, _), given in self.declared.items():
            if given.state == "asked":
                self._ask(name, given)
        if self.joined:
            self.send("JOIN", generation=self.decisions.joins)
        self._tell_moved()
        if self.wants:
            self.ask_to_leave()
        if not self.fresh:
            self.send("SYNCED")
        for server, failure in self.said.items():
            self.send("CONNECTED", server=server, failure=failure)

    def connect(self) -> None:
        """Connect to a server that has come, and say so."""
        for rank in range(self.world.servers, len(self.decisions.servers)):
            if rank not in self.said:
                self.said[rank] = ""
                self.send("CONNECTED", server=rank, failure="")
                return

    def handle(self, m: dict[str, Any]) -> None:
        kind = m["type"]
        if kind == "PLACED":
            key = (m["name"], m["generation"])
            self.decisions.place(key, m["places"])
            given = self.declared.get(key)
            if given is not None and given.state == "asked":
                given.state, given.places = "placed", m["places"]
        elif kind == "FAILED":
            for name, generation in m["tensors"]:
                if (given := self.declared.get((name, generation))) is not None:
                    given.state = "failed"
                    self.decisions.fail((name, generation), m["status"], m["text"])
            self.send("HEARD")
        elif kind == "RESET":
            assert m["epoch"] == self.epoch + 1
            self.epoch = m["epoch"]
            self.decisions.begin_epoch(m["status"], m["text"])
            self.declared.clear()
            self.generations.clear()
            self.send("HEARD")
        elif kind == "ALL_JOINED":
            assert self.joined
            self.joined, self.last = False, m["last"]
            self.decisions.joins += 1
            self.decisions.last = m["last"]
            for key, given in list(self.declared.items()):
                if self.current.get(key[0], (key[0], 0)) == key and given.successor is not None:
                    self.current[key[0]] = given.successor
                given.count = 0
            self.used.clear()
        elif kind == "SOON":
            assert self.place == "free" or self.anew
            self.place, self.meeting, self.anew = "asked", m["meeting"], False
            self.send("AT", meeting=self.meeting, boundary=self.passed)
        elif kind == "MEET":
            assert self.place == "asked" and m["boundary"] > self.passed
            self.place, self.stop, self.tells = "bound", m["boundary"], m["tells"]
        elif kind == "OFF":
            self.place, self.anew = "free", False
        elif kind == "TERM":
            self.begin_term(m)
        elif kind == "LANES":
            assert m["server"] == m["first"] == len(self.decisions.servers)
            self.decisions.come(m)
        elif kind == "GONE":
            assert not self.speaks or max(m["lanes"]) < len(self.decisions.servers)
            self.decisions.gone.update(m["lanes"])
        elif kind in ("DEPART", "CLEAR"):
            self.hear_of_machine(m)
        elif kind == "COUNT":
            self.count(m)
        elif kind == "CHANGE":
            self.change(m)
        elif kind in ("HOLD", "DROP"):
            self.end_change(m)

    def begin_term(self, m: dict[str, Any]) -> None:
        assert m["term"] == len(self.decisions.terms) + 1
        self.order = [r for r in self.order if r not in m["dropped"]] + m["entered"]
        if m["entered"]:
            assert self.place == "here" or self.rank in m["entered"]
            assert m["living"] * self.world.each == len(self.order)
            self.passed = 0
            self.decisions.joins += 1
        if m["met"]:
            assert self.place == "here" or self.rank in m["entered"]
            self.place = "bound" if m["leaving"] else "free"
            self.stop = self.passed + 1
        lanes = {to for *_, targets in [*m["moves"], *m["yields"]] for to, _ in targets}
        assert not self.speaks or all(lane < len(self.decisions.servers) for lane in lanes)
        self.decisions.begin_term(m)

    def hear_of_machine(self, m: dict[str, Any]) -> None:
        """Handle what concerns the other processes of this machine."""
        if m["type"] == "DEPART":
            self.wants = True
        else:
            self.cleared = max(self.cleared, m["generation"] + 1)
            self.send("CLEARED", generation=m["generation"])


class Newcomer(Worker):
    """A worker that wants to enter the job; ``visit`` tells it from others of its rank.

    ``rank``: -1 if the scheduler is to choose.
    """

    def __init__(self, world: World, rank: int, visit: int) -> None:
        super().__init__(world, rank)
        self.number = 10_000 + 100 * rank + visit
        self.token = f"token {visit}" if rank < 0 else ""
        self.state, self.entered = "entering", False

    def take(self) -> None:
        if self.state != "entering":
            super().take()
            return
        m = self.inbox.popleft()
        if m["type"] in ("REFUSED", "LOST"):
            self.over, self.lost, self.state = True, m.get("reason", "lost"), "over"
        elif m["type"] == "WELCOME":
            self.rank = m["rank"]
            self.decisions = Decisions(m["servers"], True)
            assert m["names_told"] == "x"
            self.decisions.terms = m["terms"]
            self.decisions.moved = (len(m["terms"]) if self.speaks else 0, 0, 0)
            self.decisions.joins, self.epoch, self.order = m["joins"], m["epoch"], m["living"]
            late = range(self.world.servers, len(m["servers"]))
            self.said = {rank: "" for rank in late if rank not in m["ended"]}
            self.outbox.append({"type": "READY", "meeting": m["meeting"]})
        elif m["type"] == "TERM" and self.rank in m["entered"]:
            self.state, self.fresh, self.entered = "connected", True, True
            self.handle(m)


class Server(Node):
    def __init__(self, world: World, rank: int, number: int = -1) -> None:
        super().__init__(world, "server", rank, number)
        if number >= 0:
            self.state = "entering"
        self.marks = Marks(world.workers_n, range(world.workers_n))
        self.asked = False  # to leave

    def report(self) -> tuple[dict[str, Any], list[bytes]]:
        known = [w.rank for w in self.world.workers if w.dead and w.rank >= 0 and w.speaks]
        cut = [rank for rank in known if rank not in self.marks.dropped]
        return self.marks.report(self.lost, cut, 0, {"slots": [], "key": -1}, self.asked), []

    def resume(self) -> None:
        pass

    def handle(self, m: dict[str, Any]) -> None:
        if m["type"] == "WELCOME":
            assert m["rank"] == m["first"], "servers of this job have one lane each"
            self.rank = m["rank"]
            known = [rank for rank, _ in m["peers"]]
            self.marks = Marks(m["size"], known, m["joins"], m["term"], m["dropped"])
            for left in m["left"]:
                self.handle(left)
            for rank in m["joined"]:
                self.handle({"type": "JOINED", "rank": rank, "generation": m["joins"]})
        elif m["type"] == "LEFT":
            self.marks.leave(m["rank"], m["host"], m["pid"])
        elif m["type"] == "JOINED":
            self.marks.join(m["rank"], m["generation"])
        elif m["type"] == "CLEAR":
            if self.marks.clear(m["generation"]):
                for rank, _ in m["entering"]:
                    self.marks.enter(rank, m["term"])
            self.send("CLEARED", generation=m["generation"])
        elif m["type"] == "TERM" and any(lane == self.rank for lane, _ in m["moves"]):
            self.over, self.lost = True, "replaced"
        elif m["type"] == "TERM":
            for rank in m.get("dropped", []):
                self.marks.drop(rank, m["term"])
        elif m["type"] == "END":
            self.leave()


class World:
    """A job with one lane on each server.

    ``workers``: number of machines, with ``each`` worker processes that sum among themselves.
    """

    def __init__(
        self,
        workers: int = 2,
        servers: int = 2,
        elastic: str = "servers",
        most: int = 0,
        each: int = 1,
        asynchronous: bool = False,
        apart: bool = False,
    ) -> None:
        """``apart``: each node has a machine of its own."""
        self.machines, self.each, self.apart = workers, each, apart
        self.workers_n, self.servers, self.now = workers * each, servers, 0.0
        more = {"BPSX_ELASTIC": elastic, "BPSX_ELASTIC_WAIT": 1, "BPSX_MAX_WORKERS": most}
        more |= {"BYTEPS_LOCAL_SIZE": each, "BPSX_LOCAL_REDUCE": int(each > 1)}
        more |= {"BYTEPS_ENABLE_ASYNC": 1} if asynchronous else {}
        self.options = config(workers, servers, **more)
        self.job = 77
        self.workers = [Worker(self, r) for r in range(self.workers_n)]
        self.nodes: list[Node] = [Server(self, s) for s in range(servers)]
        self.nodes += self.workers
        self.hub: Rebuilding | None = self._new_hub(self.job)
        for node in self.nodes:
            out = self.hub.hello(node.ident, node.hello)
        assert {m["type"] for _, m in out} == {"WELCOME"}

    def host(self, number: int) -> str:
        """The machine of a node."""
        return f"h{number}" if self.apart else "h"

    def arrive(self) -> Server:
        """Start another server."""
        server = Server(self, -1, 100 + len(self.nodes))
        self.nodes.append(server)
        server.enter()
        return server

    def enter(self, rank: int) -> Newcomer:
        """Start a worker in a vacant place."""
        newcomer = Newcomer(self, rank, len(self.nodes))
        self.nodes.append(newcomer)
        self.workers.append(newcomer)
        newcomer.enter()
        return newcomer

    def machine(self, rank: int) -> range:
        """The ranks of the processes of a worker's machine."""
        first = rank - rank % self.each
        return range(first, first + self.each)

    def enter_machine(self, machine: int) -> list[Newcomer]:
        """Start the workers of a machine in a vacant place."""
        return [self.enter(rank) for rank in self.machine(machine * self.each)]

    def _new_hub(self, job: int) -> Rebuilding:
        return Rebuilding(
            self.machines,
            self.servers,
            1,
            job,
            stall_warn=10,
            deadlock_after=30,
            elastic_wait=1e9,
            wait=WAIT,
            grace=GRACE,
        )

    def dead_lanes(self) -> set[int]:
        """Lanes of dead servers, but not of one that no worker knew and whose rank another has."""
        servers = [n for n in self.nodes if n.role == "server" and n.rank >= 0]
        return {n.rank for n in servers if n.dead} - {n.rank for n in servers if not n.dead}

    def by_ident(self, ident: bytes) -> Node | None:
        return next((n for n in self.nodes if n.ident == ident), None)

    def deliver(self, out: list[tuple[bytes, dict[str, Any]]]) -> None:
        """Queue what the hub sends."""
        for ident, m in out:
            node = self.by_ident(ident)
            if node is not None and not (node.dead or node.state == "orphaned"):
                node.inbox.append(json.loads(json.dumps(m)))

    def act(self, node: Node) -> None:
        """The hub handles the node's oldest message."""
        assert self.hub is not None
        m, hub = node.outbox.popleft(), self.hub
        messages.check(m)
        kind, ident = m["type"], node.ident
        node.greeted = hub if kind == "HELLO" else node.greeted
        out = {
            "HELLO": lambda: hub.hello(ident, m),
            "CONNECTED": lambda: hub.connected(ident, m, self.now),
            "AGAIN": lambda: hub.come_back(ident, m, self.now),
            "KNOWN": lambda: hub.known(ident, m),
            "ENDED": lambda: hub.ended(ident, m),
            "DECLARE": lambda: hub.declare(ident, m),
            "HEARD": lambda: hub.heard(ident),
            "JOIN": lambda: hub.join(ident, m["generation"]),
            "CLEARED": lambda: hub.cleared(ident, m),
            "MOVED": lambda: hub.moved(ident, m, self.now),
            "AT": lambda: hub.said_at(ident, m),
            "HERE": lambda: hub.here(ident, m),
            "READY": lambda: hub.ready(ident, m),
            "SYNCED": lambda: hub.synced(ident),
            "DEPART": lambda: hub.depart(ident, m, self.now),
            "BYE": lambda: hub.bye(ident, m, self.now),
            **dict.fromkeys(("RATE", "PEAK", "COUNTS", "TAKEN"), lambda: hub.hear_size(ident, m)),
        }[kind]()
        self.deliver(out)

    def look(self) -> None:
        """What the hub does between messages."""
        assert self.hub is not None
        if self.hub.state == "waiting":
            self.deliver(self.hub.rebuild(self.now))
        elif self.hub.state == "running":
            self.deliver(self.hub.settle(self.now))
            self.deliver(self.hub.tend(self.now))

    def kill_hub(self) -> None:
        """Nothing that has not been delivered arrives any more."""
        self.hub = None
        for node in self.nodes:
            node.part()

    def start_hub(self) -> None:
        self.hub = self._new_hub(78)

    def kill(self, node: Node) -> None:
        node.dead = True
        node.inbox.clear()
        node.outbox.clear()

    def bury(self, node: Node) -> None:
        """The hub notices the end of a node's connection."""
        assert self.hub is not None
        self.deliver(self.hub.gone(node.ident, "its connection broke", self.now))

    def settle(self) -> None:
        """Deliver everything, until nothing happens any more; time passes."""
        end, quiet = self.now + 200, 0
        while self.now < end:
            # Only the hub's timeouts act in a quiet job, so the hub may look at the clock less
            # often. The step is shorter than GRACE.
            self.now += 0.5 if quiet < 10 else 2.5
            quiet += 1
            if self.hub is None:
                self.start_hub()
            for node in self.nodes:
                if node.state == "orphaned" and not (node.dead or node.over):
                    node.introduce()
                elif node.is_unheard(self.hub):
                    node.enter()
            self.look()
            for node in self.nodes:
                if node.outbox or node.inbox or node.place == "bound":
                    quiet = 0
                while node.outbox and not node.dead:
                    self.act(node)
                known = node.ident in self.hub.nodes or node.ident in self.hub._newcomers
                if (node.dead or node.over) and known:
                    quiet = 0
                    self.bury(node)
                while node.inbox:
                    node.take()
                if isinstance(node, Worker):
                    node.move()
                    node.connect()
                    node.step()
