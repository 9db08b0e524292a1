"""A scheduler that takes over a job, after the one before has died between any two messages."""

from __future__ import annotations

import random
from itertools import combinations

import pytest

from bpsx.scheduler.states import JobState
from unit.scheduler_tools import waiting
from unit.scripted_job import GRACE, WAIT, Node, Server, Worker, World


def decided_once(world: World) -> None:
    """No term number has two contents, and no slot two keys."""
    for one, other in combinations(world.workers, 2):
        a, b = one.decisions.terms, other.decisions.terms
        assert all(x == y for x, y in zip(a, b)), (a, b)
        assert abs(one.epoch - other.epoch) <= 1
        assert abs(one.decisions.joins - other.decisions.joins) <= 1


def resolved(place: list[int], terms: list) -> tuple[int, int]:
    _, lane, slot, _ = place
    for _, moves, _, _, yields, *_ in terms:
        for of, limit, targets in [*((lost, 1 << 32, to) for lost, to in moves), *yields]:
            to, base = targets[slot % len(targets)]
            if of == lane != to and slot < limit:
                lane, slot = to, base + slot // len(targets)
                break
    return lane, slot


def all_is_well(world: World) -> None:
    """What must hold once everything has been delivered."""
    hub = world.hub
    assert hub is not None and hub.state in (JobState.RUNNING, JobState.DONE), hub.failure
    decided_once(world)
    here = [w for w in world.workers if not w.over]
    assert not any(w.lost for w in world.workers)
    assert len({w.epoch for w in here}) <= 1
    assert len({len(w.decisions.terms) for w in here}) <= 1
    assert all(w.decisions.moved[0] == len(w.decisions.terms) for w in here)
    states: dict[tuple[str, int], str] = {}
    keys: dict[int, tuple[str, int, int]] = {}
    taken: dict[tuple[int, int], int] = {}
    for worker in here:
        for name, given in worker.declared.items():
            assert given.state in ("placed", "failed"), (name, given)
            assert states.setdefault(name, given.state) == given.state
            for part, place in enumerate(given.places or ()):
                where = resolved(place, worker.decisions.terms)
                assert keys.setdefault(place[0], (*name, part)) == (*name, part)
                assert taken.setdefault(where, place[0]) == place[0], "a slot has two keys"
                assert where[0] not in world.dead_lanes()
    if here and not any(w.over for w in world.workers):
        assert len({w.decisions.joins for w in here}) == 1
        assert not all(w.joined for w in here)
    assert all(w.over for w in world.workers if w.bye is not None)
    if not here:
        assert all(s.over or s.dead for s in world.nodes)
    elif hub.state is JobState.RUNNING:
        late = [n for n in world.nodes if n.number >= 100 and not (n.dead or n.over)]
        usable = {node.ident for node in hub._roster.usable_servers()}
        assert all(node.ident in usable for node in late)


def prepared(script: str, world: World) -> None:
    """Bring the job to the point where ``script`` acts."""
    for worker in world.workers:
        worker.declare("a", 40)
        worker.declare("b", 1_000_000)
    settle_now(world)
    if script == "join":
        world.workers[0].join()
        settle_now(world)


def settle_now(world: World) -> None:
    """Deliver all messages, and their answers, while no time passes."""
    for _ in range(20):
        for node in world.nodes:
            while node.outbox:
                world.act(node)
            while node.inbox:
                node.take()


def begin(script: str, world: World) -> None:
    """Have the hub send messages to several nodes: some of them will not arrive."""
    hub = world.hub
    assert hub is not None
    first, second = world.workers[:2]
    if script == "term":
        world.kill(world.nodes[0])
        world.bury(world.nodes[0])
    elif script == "join":
        second.join()
        world.act(second)
    elif script == "joined":
        for worker in world.workers:
            worker.join()
            world.act(worker)
        for server in world.nodes[: world.servers]:
            server.take()
            while server.inbox:
                server.take()
            while server.outbox:
                world.act(server)
    elif script == "mismatch":
        for size, worker in enumerate(world.workers, 5):
            worker.declare("c", size)
            world.act(worker)
    elif script == "reset":
        for worker in world.workers:
            worker.declare(f"only {worker.rank}", 9)
            world.act(worker)
        for worker in world.workers:
            item = [f"only {worker.rank}", 0, 0, 100.0, 100.0]
            world.deliver(hub.waiting(worker.ident, waiting(item), world.now))
    elif script == "late":
        world.act(world.arrive())
    elif script in ("late, then used", "late, then given keys"):
        world.act(world.arrive())
        settle_now(world)
        for worker in world.workers:
            worker.connect()
            world.act(worker)
        assert hub.terms is not None and hub.terms.number == 1, "it gets keys of the others"
        if script == "late, then used":
            world.kill(world.nodes[0])
            world.bury(world.nodes[0])
    elif script == "late, then gone":
        late = world.arrive()
        world.act(late)
        for worker in world.workers[:2]:
            worker.take()
        world.kill(late)
        world.bury(late)
    elif script == "bye":
        for worker in world.workers:
            worker.leave()
            world.act(worker)


def take_some(world: World, rng: random.Random) -> None:
    """Each node gets any number of its messages.

    The first server gets all of them, but does not leave yet: only servers can tell a worker that
    has left from a dead one.
    """
    first = world.nodes[0]
    while first.inbox and first.inbox[0]["type"] != "END":
        first.take()
    for node in world.nodes[1:]:
        for _ in range(rng.randint(0, len(node.inbox))):
            if node.inbox and not node.over:
                node.take()


LATE = ["late", "late, then used", "late, then given keys", "late, then gone"]
SCRIPTS = ["term", "join", "joined", "mismatch", "reset", "bye", *LATE]


@pytest.mark.parametrize("also", ["", "server", "again"])
@pytest.mark.parametrize("script", SCRIPTS)
def test_the_scheduler_dies_between_any_two_sends(script: str, also: str) -> None:
    """Each node has got any number of the messages that were for it.

    ``also``: a server dies together with the scheduler, or the next scheduler dies, too.
    """
    rng, most = random.Random(script + also), 0
    for _ in range(150):
        world = World(3, 3)
        prepared(script, world)
        begin(script, world)
        most = max(most, *(len(n.inbox) for n in world.nodes))
        take_some(world, rng)
        world.kill_hub()
        if also == "server":
            world.kill(world.nodes[1])
        if also == "again":
            world.start_hub()
            for node in world.nodes:
                if node.state == "orphaned" and not node.dead:
                    node.introduce()
            for node in rng.sample(world.nodes, len(world.nodes)):
                while node.outbox and not node.dead:
                    world.act(node)
            world.now += GRACE
            world.look()
            world.now += GRACE
            world.look()
            take_some(world, rng)
            world.kill_hub()
        world.settle()
        all_is_well(world)
    assert most > 0


def test_random_lives_of_jobs() -> None:
    """Any order of events: nothing is decided twice, and in the end everybody knows all."""
    for seed in range(400):
        rng = random.Random(seed)
        world = World(rng.choice([2, 3]), rng.choice([1, 2, 4]))
        for _ in range(rng.randint(20, 120)):
            world.now += rng.choice([0.01, 0.5])
            random_event(world, rng)
            decided_once(world)
        world.arrive()  # all others may be dead
        world.settle()
        try:
            all_is_well(world)
        except AssertionError as e:
            raise AssertionError(f"seed {seed}: {e}") from e


def random_event(world: World, rng: random.Random) -> None:
    """Let something happen."""
    node = rng.choice(world.nodes)
    some = ["act", "declare", "join", "move", "kill hub", "kill", "arrive"]
    what = rng.choice(["deliver"] * 8 + some)
    if world.hub is None:
        if rng.random() < 0.3:
            world.start_hub()
        elif isinstance(node, Worker):
            own_event(node, rng)
        return
    world.look()
    if node.dead or node.over:
        if node.ident in world.hub.nodes:
            world.bury(node)
        return
    if node.is_unheard(world.hub):
        node.enter()
    elif what == "arrive" and rng.random() < 0.2 and len(world.nodes) < 12:
        world.arrive()
    elif node.state == "orphaned":
        node.introduce()
    elif what == "deliver" and node.outbox:
        world.act(node)
    elif what == "deliver" and node.inbox:
        node.take()
    elif what == "kill hub" and rng.random() < 0.3:
        world.kill_hub()
    elif what == "kill" and isinstance(node, Server) and rng.random() < 0.3:
        world.kill(node)
    elif isinstance(node, Worker):
        own_event(node, rng)


def own_event(worker: Worker, rng: random.Random) -> None:
    """A worker's script does something."""
    what = rng.choice(["declare", "declare", "join", "move", "move", "connect"])
    if what == "declare" and not worker.joined and worker.bye is None:
        # The order of names may differ between workers, but not what they mean.
        name = rng.choice("abcdefgh")
        if (name, 0) not in worker.declared:
            worker.declare(name, 10 ** "abcdefgh".index(name))
    elif what == "join" and not worker.joined and rng.random() < 0.3:
        worker.join()
    elif what == "move":
        worker.move()
    elif what == "connect":
        worker.connect()


# ---- what does not go on


def orphans(world: World) -> list[Node]:
    world.kill_hub()
    world.start_hub()
    for node in world.nodes:
        node.introduce()
    return world.nodes


def test_a_join_waits_for_errors_at_another_scheduler_too() -> None:
    """One worker has heard of a mismatch and has joined; then the scheduler dies."""

    def act(*nodes: Node) -> None:
        for node in nodes:
            while node.outbox:
                world.act(node)

    def marked() -> set[int]:
        return {m["rank"] for s in servers for m in s.inbox if m["type"] == "JOINED"}

    def take(*nodes: Node) -> None:
        for node in nodes:
            while node.inbox:
                node.take()

    world = World(3, 2)
    first, *others = world.workers
    servers = world.nodes[: world.servers]
    for worker in (*others, first):
        worker.declare("c", 5 + (worker is first))
        act(worker)
        take(worker)  # PLACED, for the last worker FAILED
    first.join()
    act(first)
    assert marked() == set()
    world.kill_hub()
    world.start_hub()
    for node in world.nodes:
        node.introduce()
    act(*world.nodes)
    world.look()
    take(first)  # RESUMED
    act(first)
    assert first.joined and marked() == set()
    assert all("FAILED" in {m["type"] for m in worker.inbox} for worker in others)
    take(*others)
    act(*others)
    assert marked() == {0}


def test_a_worker_that_does_not_come_back_ends_the_job() -> None:
    world = World()
    world.kill(world.workers[1])
    world.kill_hub()
    world.settle()
    assert world.hub is not None and world.hub.state is JobState.FAILED
    assert "worker 1 did not come back within 60 s" in world.hub.failure
    assert "worker 1" in world.workers[0].lost


def test_an_asynchronous_job_goes_on_without_a_worker_that_does_not_come_back() -> None:
    world = World(3, asynchronous=True)
    world.kill(world.workers[1])
    world.kill_hub()
    world.settle()
    assert world.hub is not None and world.hub.state is JobState.RUNNING
    assert [w.lost for w in world.workers] == [""] * 3
    servers = [node for node in world.nodes if isinstance(node, Server)]
    assert all([*s.marks.report("", [], 0, {}, False)["state"]["left"][0]][0] == 1 for s in servers)


def test_an_asynchronous_job_ends_without_too_many_workers() -> None:
    """They may be in another part of a split network."""
    world = World(4, asynchronous=True)
    for rank in (0, 1):
        world.kill(world.workers[rank])
    world.kill_hub()
    world.settle()
    assert world.hub is not None and world.hub.state is JobState.FAILED
    assert "worker 0, worker 1 did not come back" in world.hub.failure


def test_a_worker_that_servers_take_for_gone_is_not_let_in_again() -> None:
    """The scheduler has lost its connection. Lanes ignore what it sends."""
    world = World(3, asynchronous=True)
    world.bury(world.workers[1])
    settle_now(world)
    world.kill_hub()
    world.settle()
    assert world.hub is not None and world.hub.state is JobState.RUNNING
    assert "not awaited any more" in world.workers[1].lost
    assert [world.workers[rank].lost for rank in (0, 2)] == ["", ""]


def test_nothing_is_decided_before_all_workers_are_back() -> None:
    world = World(2, 3)
    first, *others = orphans(world)
    for node in [first, world.workers[0]]:
        while node.outbox:
            world.act(node)
    world.now += WAIT - 1
    world.look()
    assert world.hub is not None and world.hub.state is JobState.WAITING
    assert not any(n.inbox for n in world.nodes)


@pytest.mark.parametrize("asked", [False, True], ids=["stays", "leaves"])
def test_a_replaced_server_that_comes_back_is_told_so(asked: bool) -> None:
    """The old scheduler had lost it and told one worker; it only was slow, or had asked to leave.

    What it had asked for is no error.
    """
    world = World(2, 3)
    slow = world.nodes[0]
    assert isinstance(slow, Server)
    slow.asked = asked
    world.bury(slow)
    world.workers[0].take()
    world.kill_hub()
    slow.state = "orphaned"
    world.settle()
    all_is_well_but(world, slow)
    assert slow.over
    assert not slow.lost if asked else "replaced" in slow.lost


@pytest.mark.parametrize("late", [False, True], ids=["in time", "too late"])
@pytest.mark.parametrize("asked", [False, True], ids=["stays", "leaves"])
def test_a_server_of_which_no_worker_has_heard_is_not_needed(asked: bool, late: bool) -> None:
    """Its end is an error, unless it has asked to leave meanwhile."""
    world = World(2, 2)
    stranger = world.arrive()
    world.act(stranger)
    stranger.take()
    world.kill_hub()
    stranger.asked, stranger.dead = asked, late
    world.settle()
    stranger.dead = False
    world.settle()
    assert stranger.over and bool(stranger.lost) is not asked
    assert asked or "start it again" in stranger.lost
    assert world.hub is not None and world.hub.state is JobState.RUNNING
    assert not any(w.decisions.terms for w in world.workers)


def test_a_server_that_has_failed_and_comes_back_learns_which_term_replaces_it() -> None:
    """The old scheduler was silent, and had told it alone that the job has failed."""
    world = World(2, 3)
    failed = world.nodes[0]
    world.kill_hub()
    failed.state, failed.lost = "orphaned", "the scheduler is gone"
    world.settle()
    all_is_well_but(world, failed)
    assert failed.over
    ended = "server 0 (h, pid 1000) is gone: it had ended: the scheduler is gone"
    assert f"this server has been replaced: {ended}; the job goes on with term 1" in failed.lost


def test_a_server_that_has_failed_learns_which_term_has_replaced_it() -> None:
    """The old scheduler had told the workers so, and a later loss, too."""
    world = World(2, 4)
    failed, killed = world.nodes[0], world.nodes[1]
    for server in (failed, killed):
        world.bury(server)
        for worker in world.workers:
            while worker.inbox:
                worker.take()
    killed.dead = True
    world.kill_hub()
    failed.state, failed.lost = "orphaned", "the scheduler is gone"
    world.settle()
    assert world.hub is not None and world.hub.state is JobState.RUNNING
    assert failed.lost == "this server has been replaced in term 1"


def all_is_well_but(world: World, replaced: Node) -> None:
    replaced.dead = True
    all_is_well(world)
    assert all(len(w.decisions.terms) == 1 for w in world.workers)


def test_a_server_that_comes_too_late_is_told_so() -> None:
    world = World(2, 3)
    late, *others = orphans(world)
    for node in others:
        while node.outbox:
            world.act(node)
    world.look()
    world.now += GRACE + 0.1
    world.look()
    assert world.hub is not None and world.hub.state is JobState.RUNNING
    world.act(late)
    late.take()
    assert not late.over, "no worker has heard that it has been replaced"
    world.settle()
    assert late.over and "replaced" in late.lost
    all_is_well_but(world, late)


def test_orphans_and_a_new_job_at_the_same_address() -> None:
    """Whichever is complete first runs; the nodes of the other are told so."""
    for first in ("orphans", "new job"):
        old, new = World(), World()
        orphans(old)
        hub = old.hub
        assert hub is not None
        last = old.nodes[-1]
        for node in old.nodes[:-1]:
            while node.outbox:
                old.act(node)
        out = []
        for i, node in enumerate(new.nodes[:-1]):
            lanes = [f"n:{i}"] if node.role == "server" else []
            out += hub.hello(b"new %d" % i, {**node.hello, "pid": 5000 + i, "lanes": lanes})
        assert not out and hub.state is JobState.WAITING
        if first == "orphans":
            while last.outbox:
                old.act(last)
            told = dict(hub.rebuild(old.now))
            assert [told[b"new %d" % i]["type"] for i in range(3)] == ["WELCOME"] * 2 + ["REFUSED"]
            assert told[b"new 2"]["over"]
            assert told[last.ident]["type"] != "REFUSED" and hub.job == old.job
        else:
            told = dict(hub.hello(b"new 9", {**new.nodes[-1].hello, "pid": 5009}))
            assert told[b"new 9"]["type"] == "WELCOME"
            assert told[old.nodes[0].ident]["type"] == "REFUSED" and hub.job != old.job
        assert hub.state is JobState.RUNNING


@pytest.mark.parametrize("change", [{"protocol": 0}, {"config": {}}])
def test_a_node_that_does_not_fit_may_wait_for_another_scheduler(change: dict) -> None:
    world = World()
    node = orphans(world)[0]
    assert world.hub is not None
    ((_, refused),) = world.hub.come_back(b"x", {**node.outbox[0], **change}, world.now)
    assert refused["type"] == "REFUSED" and not refused["over"]


def test_a_failure_that_only_some_had_heard_of_ends_the_job_for_all() -> None:
    world = World()
    assert world.hub is not None
    world.deliver(world.hub.gone(world.workers[1].ident, "its connection broke", world.now))
    world.workers[0].take()
    assert "worker 1" in world.workers[0].lost
    world.kill_hub()
    world.settle()
    assert world.hub.state is JobState.FAILED and "worker 1" in world.hub.failure
    assert all("worker 1" in n.lost for n in world.nodes)


def test_a_failure_of_which_only_a_server_has_heard_is_the_end_of_that_server() -> None:
    """A scheduler that was silent has told it so; all workers are back, and know of none."""
    world = World(2, 3)
    server = next(n for n in world.nodes if isinstance(n, Server))
    server.lost = "the job has failed: worker 0 is gone"
    world.kill_hub()
    world.settle()
    assert server.over
    all_is_well_but(world, server)


@pytest.mark.parametrize("heard", [0, 1, 2])
def test_a_late_server_that_was_sent_away_does_not_end_the_job(heard: int) -> None:
    """It had been told why, and ``heard`` of the workers that it is gone."""
    world = World(2, 2)
    late = world.arrive()
    world.act(late)
    late.take()
    for worker in world.workers:
        worker.take()  # LANES
    world.workers[0].send("CONNECTED", server=2, failure="no route to host")
    world.workers[0].said[2] = "no route to host"
    world.act(world.workers[0])
    late.take()
    assert "cannot join the running job" in late.lost
    for worker in world.workers[:heard]:
        worker.take()  # GONE
    world.kill_hub()
    world.settle()
    assert world.hub is not None and world.hub.state is JobState.RUNNING, world.hub.failure
    assert late.over and not any(w.lost for w in world.workers)
    assert not world.hub._arrivals
    all_is_well(world)
