"""How machines whose processes sum among themselves are lost, leave and join, as the scheduler
sees it.
"""

from __future__ import annotations

import random

import pytest

from bpsx.scheduler.registry import Registry
from bpsx.scheduler.states import JobState
from unit.scheduler_tools import kinds
from unit.scripted_job import Worker, World
from unit.test_growing import all_agree, ended_by_too_few, take_some
from unit.test_leaving_workers import left_well
from unit.test_shrinking import moved, shrinking

EACH = 2
MACHINES = {"BPSX_LOCAL_REDUCE": 1, "BYTEPS_LOCAL_SIZE": EACH}


def settled(machines: int = 3, servers: int = 2, most: int = 0) -> World:
    world = World(machines, servers, elastic="shrink", most=most, each=EACH)
    for worker in world.workers:
        worker.declare("a", 5)
    world.settle()
    return world


@pytest.mark.parametrize("lost", [2, 3])
def test_a_machine_is_lost_as_a_whole(lost):
    m = shrinking(3, **MACHINES)
    other = b"w%d" % (5 - lost)
    out = dict(m.gone(b"w%d" % lost, "cut", 0.5))
    told = out.pop(other)
    assert (told["type"], told["goes_on"]) == ("LOST", True)
    assert f"worker {lost} (h, pid" in told["text"]
    assert f"its machine leaves the job with it: worker {5 - lost} (" in told["text"]
    assert set(kinds(out.items()).values()) == {"TERM"}
    assert set(out) == {b"w0", b"w1", b"w4", b"w5", b"s0"}
    term = out[b"w0"]
    assert (term["dropped"], term["living"]) == ([2, 3], 2)
    assert "4 of 6 workers" in term["text"]
    assert [loss.node.rank for loss in m.losses] == [5 - lost, lost]
    # Only the roots move keys.
    moved(m, b"w1", 1), moved(m, b"w5", 1)
    assert len(m.terms.finished) == 1
    assert not m.gone(other, "its connection broke", 1.0)
    assert kinds(m.bye(other, {"failure": "PeerLostError"})) == {other: "GOODBYE"}
    assert m.state is JobState.RUNNING


def test_one_that_waits_to_leave_may_go_when_its_machine_is_lost():
    m = shrinking(3, **MACHINES)
    m.gone(b"w0", "cut", 0.5)
    assert not m.bye(b"w3", {"failure": ""}, 1.0), "keys are still on the move"
    out = dict(m.gone(b"w2", "cut", 1.5))
    assert out[b"w3"]["type"] == "GOODBYE" and out[b"w5"]["dropped"] == [2, 3]
    # It has left in good order: the launcher must not end it after the grace time.
    assert [(loss.node.rank, loss.planned) for loss in m.losses[-2:]] == [(3, True), (2, False)]


def test_the_last_machine_ends_the_job():
    m = shrinking(2, **MACHINES)
    m.gone(b"w1", "cut")
    out = m.gone(b"w2", "cut")
    assert kinds(out)[b"w3"] == "LOST" and not dict(out)[b"w3"]["goes_on"]
    assert m.state is JobState.FAILED and "it was the last machine" in m.failure


def test_a_root_that_is_lost_has_no_marks_of_join_to_clear():
    m = shrinking(3, **MACHINES)
    for rank in range(6):
        out = m.join(b"w%d" % rank)
    assert set(kinds(out)) == {b"s0", b"w1", b"w3", b"w5"} and dict(out)[b"s0"]["type"] == "CLEAR"
    for holder in (b"s0", b"w1", b"w5"):
        assert not m.cleared(holder, {"generation": 0})
    out = m.gone(b"w3", "cut")
    assert {i for i, x in out if x["type"] == "ALL_JOINED"} == {b"w0", b"w1", b"w4", b"w5"}


def test_roots_clear_their_marks_when_the_last_that_is_awaited_is_lost():
    m = shrinking(3, **MACHINES)
    for rank in (0, 1, 4, 5):
        m.join(b"w%d" % rank)
    clear = {ident for ident, x in m.gone(b"w2", "cut") if x["type"] == "CLEAR"}
    assert clear == {b"s0", b"w1", b"w5"}


def test_a_machine_enters_when_all_of_its_processes_wait():
    world = settled()
    world.kill(world.workers[0])
    world.settle()
    assert world.workers[1].over and "its machine leaves" in world.workers[1].lost
    first = world.enter(0)
    world.settle()
    assert first.state == "entering"
    second = world.enter(1)
    world.settle()
    assert {first.state, second.state} == {"connected"}
    all_agree(world)
    assert world.workers[2].order == [2, 3, 4, 5, 0, 1]


@pytest.mark.parametrize("first", [0, 1])
def test_processes_of_a_machine_get_neighbouring_places(first):
    """Whoever of them says HELLO first."""
    world = settled()
    for machine in (0, 1):
        world.kill(world.workers[machine * EACH])
        world.settle()
    for rank in (first, 2 + first, 1 - first, 3 - first):
        world.enter(rank)
    world.settle()
    assert world.workers[4].order == [4, 5, 0, 1, 2, 3]


def test_a_job_grows_by_machines():
    world = settled(2, 2, most=3)
    newcomers = world.enter_machine(2)
    world.settle()
    all_agree(world)
    assert {n.state for n in newcomers} == {"connected"}
    assert len(world.hub._roster.live) == 6


def test_a_root_that_has_joined_late_adopts_what_it_does_not_know():
    registry = Registry(shrinking(2, **MACHINES).terms._placement, 4096, EACH)
    for rank in range(4):
        registry.declare(rank, "a", 0, 40, 3, [10])
    registry.forget([2, 3])
    registry.declare(2, "a", 0, 40, 3, [10])  # of a process that has joined in the place
    assert [name for name, _, _ in registry.adopt(3)] == ["a"]
    registry.forget(range(4))
    known, told = registry.declare(0, "a", 0, 44, 3, [11])
    assert "a worker that was lost has float32 of shape (10,)" in known.failure and told == [0]


def test_a_machine_leaves_when_one_of_its_processes_has_to():
    world = settled()
    world.workers[2].ask_to_leave()
    world.settle()
    left_well(world)
    assert world.workers[2].over and world.workers[3].over
    all_agree(world)


@pytest.mark.parametrize("heard", ["", "w3", "w0", "s0", "w3 w0 s1"])
@pytest.mark.parametrize("how", ["killed", "failed"])
def test_the_scheduler_dies_while_it_tells_of_a_lost_machine(how, heard):
    world = settled()
    nodes = {f"s{i}": n for i, n in enumerate(world.nodes[:2])}
    nodes |= {f"w{i}": w for i, w in enumerate(world.workers)}
    if how == "killed":
        world.kill(nodes["w2"])
        world.bury(nodes["w2"])
    else:
        nodes["w2"].bye = "ValueError: no"
        nodes["w2"].send("BYE", failure=nodes["w2"].bye)
        world.act(nodes["w2"])
    for name in heard.split():
        nodes[name].take()
    world.kill_hub()
    world.settle()
    assert nodes["w3"].over
    all_agree(world)
    assert sorted(nodes["w0"].order) == [0, 1, 4, 5]


@pytest.mark.parametrize("seed", range(40))
def test_the_scheduler_dies_while_a_machine_leaves(seed):
    rng = random.Random(seed)
    world = settled()
    world.workers[rng.randrange(4)].ask_to_leave()
    for _ in range(rng.randrange(40)):
        world.look()
        take_some(world, rng)
    world.kill_hub()
    world.settle()
    left_well(world)
    all_agree(world)


def living(world: World) -> list[Worker]:
    """The workers in the job, but not those whose machine has been lost."""
    live = [w for w in world.workers if w.state == "connected" and not (w.dead or w.over)]
    if is_running(world):
        nodes = world.hub.nodes
        live = [w for w in live if w.ident in nodes and not nodes[w.ident].left]
    return live


def is_running(world: World) -> bool:
    return world.hub is not None and world.hub.state == "running"


def lose_one(world: World, rng: random.Random) -> None:
    """Kill a worker, unless the job would end or no worker with the model would stay."""
    lost, live = rng.choice(living(world)), living(world)
    live = [w for w in live if w.rank // EACH != lost.rank // EACH]
    known = [w for w in live if w.rank not in world.hub._fresh]
    if known and any(not (w.wants or w.fresh) for w in live):
        world.kill(lost)
        world.bury(lost)


def kill_newcomers(world: World, rng: random.Random, share: float) -> None:
    """Kill some of the workers that wait to enter."""
    for newcomer in world.workers:
        if newcomer.state == "entering" and not newcomer.dead and rng.random() < share:
            world.kill(newcomer)
            if world.hub is not None:
                world.bury(newcomer)


def restart_hub(world: World, rng: random.Random) -> None:
    for witness in world.workers:  # a loss of which too few have heard would end the job
        while witness.inbox and not witness.dead:
            witness.take()
    world.kill_hub()
    kill_newcomers(world, rng, 1)
    world.settle()


@pytest.mark.parametrize("seed", range(200))
def test_random_lives(seed):
    """Machines leave, die and come, servers die, and the scheduler too, at any time."""
    rng = random.Random(seed)
    places = rng.choice([4, 5])
    world = settled(4, rng.choice([2, 3]), most=places if places > 4 else 0)
    for _ in range(rng.randrange(10, 160)):
        if world.hub is not None:
            world.look()
        take_some(world, rng)
        what = rng.random()
        staying = [w for w in living(world) if not (w.wants or w.fresh)]
        if what < 0.02 and is_running(world) and living(world):
            lose_one(world, rng)
        elif what < 0.03 and len({w.rank // EACH for w in staying}) > 1:
            rng.choice(staying).ask_to_leave()
        elif what < 0.05:
            kill_newcomers(world, rng, 0.5)
        elif what < 0.07:
            world.enter_machine(rng.randrange(places))
        elif what < 0.08 and world.hub is not None:
            restart_hub(world, rng)
        elif what < 0.1 and is_running(world):
            servers = [n for n in world.nodes if n.role == "server" and not (n.dead or n.over)]
            if len(servers) > 1:
                world.kill(servers[0])
                world.bury(servers[0])
    world.settle()
    for worker in world.workers:
        if worker.wants and not (worker.dead or worker.goes_on):  # or its machine was lost first
            assert worker.over and not worker.lost, worker.lost
    if all(w.dead or w.over for w in world.workers if w.entered) or ended_by_too_few(world):
        return  # all have left, or too few are left
    kill_newcomers(world, rng, 1)  # a machine of which one process was killed waits for another
    world.settle()
    all_agree(world)
