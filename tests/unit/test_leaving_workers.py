"""Workers that ask to leave a running job, at the scheduler."""

from __future__ import annotations

import random
from typing import Any

import pytest

from bpsx.scheduler import messages
from bpsx.scheduler.states import JobState
from unit.scheduler_tools import hello, kinds, running
from unit.scripted_job import World
from unit.test_growing import all_agree, called, gathered, lost_one, take_some
from unit.test_shrinking import moved, shrinking


def ask(m: Any, ident: bytes, needs: str = "") -> list[Any]:
    message = {"type": "DEPART", "why": "SIGTERM", "needs": needs}
    messages.check(message)
    return m.depart(ident, message, 1.0)


def stop(m: Any, *live: bytes) -> list[Any]:
    """All workers say HERE; returns what follows."""
    for ident in live:
        m.here(ident, {"meeting": m._meeting.number, "names": "x"})
    return m.tend(1.0)


def meet(m: Any, *live: bytes) -> list[Any]:
    """Bring the workers to the first boundary; returns what follows."""
    called(m, *live)
    for ident in live:
        m.said_at(ident, {"meeting": m._meeting.number, "boundary": 5})
    assert kinds(m.tend(1.0)) == dict.fromkeys(live, "MEET")
    return stop(m, *live)


ALL = (b"w0", b"w1", b"w2")


def parting(leaver: bytes = b"w1", **changes: Any) -> tuple[Any, list[bytes], list[Any]]:
    """A job that goes on without a worker, which has not got GOODBYE; the others; the latest."""
    m = shrinking(3, 1, **changes)
    assert ask(m, leaver) == []
    terms = meet(m, *ALL)
    assert kinds(terms) == dict.fromkeys(ALL, "TERM")
    rank = int(leaver[1:])
    assert {(x["term"], tuple(x["leaving"]), x["met"]) for _, x in terms} == {(1, (rank,), True)}
    assert {tuple(x["dropped"]) for _, x in terms} == {()}
    out = stop(m, *ALL)
    others = [ident for ident in ALL if ident != leaver]
    assert kinds(out) == dict.fromkeys((*others, b"s0"), "TERM")
    return m, others, out


@pytest.mark.parametrize("leaver", ALL)
def test_a_worker_leaves_at_the_second_boundary(leaver: bytes) -> None:
    m, others, out = parting(leaver)
    term = dict(out)[others[0]]
    rank = int(leaver[1:])
    assert (term["term"], term["dropped"], term["leaving"]) == (2, [rank], [rank])
    assert (term["living"], term["met"]) == (2, False)
    text = f"worker {rank} (h, pid 10{rank}) leaves the job: SIGTERM; the job goes on with term 2"
    assert text in term["text"] and m.losses[-1].planned
    # GOODBYE comes when all others know.
    assert not m.tend(1.0) and not moved(m, others[0], 2) and not m.tend(1.0)
    moved(m, others[1], 2)
    out = m.tend(1.0)
    assert out[0] == (leaver, {"type": "GOODBYE"})
    assert kinds(out[1:]) == dict.fromkeys(others, "TERM")
    assert [(x["met"], x["dropped"], x["leaving"]) for _, x in out[1:]] == [(True, [], [])] * 2
    assert "which has left in good order, and push 0 bytes again" in str(m.terms.finished[-1])
    assert not m.gone(leaver, "cut", 2.0) and m.state is JobState.RUNNING
    assert m.bye(leaver, {"failure": ""}, 2.0) == [(leaver, {"type": "GOODBYE"})]
    assert not m.tend(2.0), "no further meeting"


def test_one_that_is_killed_before_it_leaves_is_a_death() -> None:
    for moment in range(4):
        m = shrinking(3, 1)
        ask(m, b"w1")
        if moment:
            m.tend(1.0)
        if moment == 2:
            for ident in ALL:
                m.said_at(ident, {"meeting": 1, "boundary": 5})
            m.tend(1.0)
        if moment == 3:
            m = shrinking(3, 1)
            ask(m, b"w1")
            meet(m, *ALL)  # announced
        out = m.gone(b"w1", "cut", 1.0)
        assert dict(out)[b"w0"]["dropped"] == [1] and dict(out)[b"w0"]["leaving"] == []
        assert not m.losses[-1].planned and m.state is JobState.RUNNING
        for ident in (b"w0", b"w2"):
            moved(m, ident, m.terms.number)
        m.tend(1.0)
        if moment == 3:
            assert {x["met"] for _, x in stop(m, b"w0", b"w2")} == {True}
        assert m._wishing == []


def test_one_that_is_killed_after_it_has_left_is_none() -> None:
    m, others, _ = parting()
    assert m.gone(b"w1", "killed", 1.0) == []
    for ident in others:
        moved(m, ident, 2)
    assert {x["type"] for ident, x in m.tend(1.0) if ident != b"w1"} == {"TERM"}


def test_another_worker_dies_while_one_leaves() -> None:
    m, (first, second), _ = parting()
    out = m.gone(first, "cut", 1.0)
    assert dict(out)[second]["living"] == 1
    moved(m, second, m.terms.number)
    out = m.tend(1.0)
    assert out[0] == (b"w1", {"type": "GOODBYE"}) and kinds(out[1:]) == {second: "TERM"}


def test_one_that_leaves_hears_so_if_the_job_fails_meanwhile() -> None:
    m, others, _ = parting()
    out = m.abort("the scheduler was ended by SIGTERM")
    assert kinds(out) == {**dict.fromkeys((*others, b"s0"), "LOST"), b"w1": "GOODBYE"}


def test_two_leave_at_once() -> None:
    m = shrinking(4, 1)
    live = (b"w0", b"w1", b"w2", b"w3")
    ask(m, b"w0"), ask(m, b"w3")
    assert {tuple(x["leaving"]) for _, x in meet(m, *live)} == {(0, 3)}
    out = stop(m, *live)
    assert [x["dropped"] for ident, x in out if ident == b"w1"] == [[0], [3]]
    assert {ident for ident, _ in out} == {b"w1", b"w2", b"s0"}, "nobody that leaves takes part"
    moved(m, b"w1", 3), moved(m, b"w2", 3)
    out = m.tend(1.0)
    assert kinds(out[:2]) == {b"w0": "GOODBYE", b"w3": "GOODBYE"}
    assert list(m._order) == [1, 2]


def test_one_that_asks_between_the_boundaries_leaves_with_the_first() -> None:
    m = shrinking(4, 1)
    live = (b"w0", b"w1", b"w2", b"w3")
    ask(m, b"w1"), meet(m, *live), ask(m, b"w2")
    assert [x["dropped"] for ident, x in stop(m, *live) if ident == b"w0"] == [[1], [2]]


@pytest.mark.parametrize("later", [False, True])
def test_if_all_leave_the_job_is_done(later: bool) -> None:
    m = shrinking(3, 1)
    asks = [lambda ident=ident: ask(m, ident) for ident in ALL]
    asks[0](), asks[1]()
    if later:
        meet(m, *ALL), asks[2]()
        out = stop(m, *ALL)
    else:
        asks[2]()
        out = meet(m, *ALL)
    assert [x for x in out if x[0] in ALL] == [(i, {"type": "GOODBYE"}) for i in ALL]
    assert (b"s0", {"type": "END"}) in out
    assert m.state is JobState.DONE and not m.losses


def test_the_last_worker_leaves_soon_after_a_loss() -> None:
    """Keys are not settled yet, but no worker is left that could need them."""
    m = shrinking(2, 1)
    m.gone(b"w0", "cut", 0.5)
    moved(m, b"w1", 1)
    ask(m, b"w1")
    out = meet(m, b"w1")
    assert (b"w1", {"type": "GOODBYE"}) in out and m.state is JobState.DONE


def test_with_replace_the_others_wait_for_another() -> None:
    m, others, _ = parting(BPSX_ELASTIC="replace")
    m.elastic_wait = 30.0
    for ident in others:
        moved(m, ident, 2)
    assert m.tend(1.0) == [(b"w1", {"type": "GOODBYE"})]
    assert "all workers have stopped, and wait for another in the place of worker 1" in m.notes[-1]
    # One of those that wait leaves, too: no step is made with fewer.
    assert ask(m, b"w2") == []
    out = m.tend(2.0)
    assert dict(out)[b"w0"]["dropped"] == [2]
    moved(m, b"w0", 3)
    assert m.tend(2.0) == [(b"w2", {"type": "GOODBYE"})]
    for rank, ident in ((1, b"n1"), (2, b"n2")):
        given = hello("worker", rank, 3, 1, pid=555 + rank, config=m.nodes[b"w0"].config)
        m.hello(ident, given)
    assert kinds(m.tend(3.0)) == {b"n1": "WELCOME", b"n2": "WELCOME"}


def test_with_replace_nobody_comes() -> None:
    m, others, _ = parting(BPSX_ELASTIC="replace")
    m.elastic_wait = 30.0
    for ident in others:
        moved(m, ident, 2)
    m.tend(1.0)
    assert kinds(m.tend(32.0)) == dict.fromkeys((*others, b"s0"), "LOST")
    assert "worker 1 (h, pid 101) leaves the job: SIGTERM; the job cannot go on" in m.failure


def test_a_newcomer_takes_the_place_at_once() -> None:
    m = shrinking(3, 1)
    given = hello("worker", 1, 3, 1, pid=555, config=m.nodes[b"w0"].config)
    m.hello(b"n1", given), ask(m, b"w1")
    meet(m, *ALL), stop(m, *ALL)
    moved(m, b"w0", 2), moved(m, b"w2", 2)
    assert kinds(m.tend(1.0)) == {b"w1": "GOODBYE", b"n1": "WELCOME"}


def test_the_only_one_with_the_model_stays_until_a_newcomer_has_it() -> None:
    m = shrinking(2, 1)
    m.gone(b"w1", "cut", 0.5), moved(m, b"w0", 1)
    given = hello("worker", 1, 2, 1, pid=555, config=m.nodes[b"w0"].config)
    gathered(m, given, b"w0")
    m.ready(b"n1", {"meeting": 1})
    m.tend(1.0), m.cleared(b"s0", {"generation": 0})
    assert ask(m, b"w0") == [
        (b"w0", {"type": "STAY", "text": "no other worker has got the model yet"})
    ]
    assert not m.tend(2.0)
    m.synced(b"n1")
    assert kinds(m.tend(2.0)) == {b"w0": "SOON", b"n1": "SOON"}


@pytest.mark.parametrize("newcomer_dies", [False, True])
def test_the_last_worker_waits_for_a_newcomer_and_ends_the_job_without(newcomer_dies: bool) -> None:
    m = shrinking(2, 1)
    m.gone(b"w1", "cut", 0.5), moved(m, b"w0", 1)
    given = hello("worker", 1, 2, 1, pid=555, config=m.nodes[b"w0"].config)
    m.hello(b"n1", given)
    ((_, stay),) = ask(m, b"w0")
    assert stay["text"] == "no other worker has got the model yet"
    if newcomer_dies:
        m.gone(b"n1", "cut", 1.0)
        assert (b"w0", {"type": "GOODBYE"}) in meet(m, b"w0") and m.state is JobState.DONE
    else:
        assert kinds(meet(m, b"w0")) == {b"n1": "WELCOME"}


def test_all_leave_while_others_wait_for_their_places() -> None:
    """One stays until a newcomer has got the model; nobody waits for its place."""
    m = shrinking(3, 1)
    given = hello("worker", 0, 3, 1, pid=555, config=m.nodes[b"w0"].config)
    m.hello(b"n0", given)
    asks = [ask(m, ident) for ident in ALL]
    assert asks[:2] == [[], []] and asks[2] == []
    assert {tuple(x["leaving"]) for _, x in meet(m, *ALL)} == {(0, 2)}
    stop(m, *ALL)
    moved(m, b"w1", 3)
    assert kinds(m.tend(1.0)) == {b"w0": "GOODBYE", b"w2": "GOODBYE", b"n0": "WELCOME"}
    m.ready(b"n0", {"meeting": 1})
    m.tend(1.0), m.cleared(b"s0", {"generation": 0})
    assert not m.tend(2.0)
    m.synced(b"n0")
    assert kinds(m.tend(2.0)) == {b"w1": "SOON", b"n0": "SOON"}


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"BPSX_ELASTIC": "servers"}, "BPSX_ELASTIC is neither shrink nor replace"),
        ({"BYTEPS_ENABLE_ASYNC": 1}, "the job is asynchronous"),
    ],
)
def test_a_job_that_cannot_lose_workers_keeps_them(changes: dict[str, Any], why: str) -> None:
    m = shrinking(3, 1, **changes)
    ((ident, stay),) = ask(m, b"w1")
    assert (ident, stay["type"]) == (b"w1", "STAY") and why in stay["text"]
    assert not m.tend(1.0)


def test_what_needs_all_workers_keeps_them() -> None:
    m = shrinking(2, 1)
    ((_, stay),) = ask(m, b"w1", "allgather")
    assert stay["text"] == "allgather needs all workers" and not m.tend(1.0)
    assert ask(m, b"w0") == []  # all leave
    assert kinds(m.tend(1.0)) == {b"w0": "SOON", b"w1": "SOON"}


def test_none_leaves_after_another_has_left_in_good_order() -> None:
    m = shrinking(3, 1)
    m.bye(b"w0", {"failure": ""}, 1.0)
    ((_, stay),) = ask(m, b"w1")
    assert "worker 0 (h, pid 100) has left" in stay["text"] and not m.tend(1.0)


def test_one_waits_while_others_are_in_join() -> None:
    m = shrinking(3, 1)
    m.join(b"w0")
    assert ask(m, b"w1") == [] and not m.tend(1.0)
    m.join(b"w1"), m.join(b"w2"), m.cleared(b"s0", {"generation": 0})
    assert kinds(m.tend(1.0)) == dict.fromkeys(ALL, "SOON")


def test_a_server_leaves_before_a_worker_does() -> None:
    m = shrinking(3, 2)
    ask(m, b"w1")
    meet(m, *ALL)  # announced
    out = m.depart(b"s0", {"why": "SIGTERM", "needs": ""}, 1.0)
    assert kinds(out)[b"s0"] == "GOODBYE" and dict(out)[b"w1"]["term"] == 2
    assert not stop(m, *ALL), "its keys move first"
    for ident in ALL:
        moved(m, ident, 2)
    assert {tuple(x["dropped"]) for _, x in m.tend(1.0)} == {(1,)}


def test_one_that_never_comes_to_a_boundary_keeps_the_others() -> None:
    m = shrinking(3, 1)
    ask(m, b"w1"), m.tend(1.0)
    for ident in ALL:
        m.said_at(ident, {"meeting": 1, "boundary": 5})
    m.tend(1.0)
    out = m.tend(m.patience + 2.0)
    assert kinds(out) == {b"w0": "OFF", b"w1": "STAY", b"w2": "OFF"}
    assert not m.tend(m.patience + 3.0)


def test_only_workers_and_servers_of_a_running_job_are_heard() -> None:
    m = running(1, 1, BPSX_ELASTIC="shrink")
    assert ask(m, b"x") == []
    m.bye(b"w0", {"failure": ""}, 1.0)
    assert ask(m, b"w0") == []


def test_losses_are_told_with_the_announcement() -> None:
    m, _ = lost_one(4)
    ask(m, b"w2")
    (_, term), *_ = meet(m, b"w0", b"w2", b"w3")
    assert term["leaving"] == [2] and term["met"]


# ---- the scheduler dies


def test_one_that_comes_back_late_has_left_if_it_wants_to() -> None:
    """The scheduler had lost its connection while it waited for its GOODBYE."""
    world = settled()
    leaver = world.workers[1]
    world.bury(leaver)  # it was only silent
    leaver.wants, leaver.place, leaver.state = True, "here", "orphaned"
    world.settle()
    left_well(world)
    all_agree(world)


def settled(workers: int = 3, servers: int = 2) -> World:
    world = World(workers, servers, elastic="shrink")
    for worker in world.workers:
        worker.declare("a", 5)
    world.settle()
    return world


def left_well(world: World) -> None:
    """Whoever wanted to leave and was not killed has left, and ends well."""
    for worker in world.workers:
        if worker.wants and not worker.dead:
            assert worker.over and not worker.lost, worker.lost


@pytest.mark.parametrize("also", ["", "leaver", "worker", "server", "again", "newcomer"])
@pytest.mark.parametrize("leaver", [0, 1])
@pytest.mark.parametrize("seed", range(20))
def test_the_scheduler_dies_while_a_worker_leaves(seed: int, leaver: int, also: str) -> None:
    rng = random.Random(f"{seed} {leaver} {also}")
    world = settled()
    world.workers[leaver].ask_to_leave()
    newcomer = world.enter(leaver) if also == "newcomer" else None
    for _ in range(rng.randrange(40)):
        world.look()
        take_some(world, rng)
    if also == "leaver":
        world.kill(world.workers[leaver])
    elif also == "server":
        world.kill(world.nodes[rng.randrange(2)])
    # Of two workers that are left, one alone could not tell whether the other one lives.
    elif also == "worker" and not (world.workers[leaver].over or world.hub._parting):
        world.kill(world.workers[2])
    world.kill_hub()
    world.settle()
    if also == "again":
        world.kill_hub()
        world.settle()
    assert world.hub is not None
    left_well(world)
    all_agree(world)
    if newcomer is not None:
        assert newcomer.state == "connected", newcomer.lost


@pytest.mark.parametrize("seed", range(60))
def test_the_scheduler_dies_while_all_leave(seed: int) -> None:
    rng = random.Random(seed)
    world = settled()
    for worker in world.workers:
        worker.ask_to_leave()
    for _ in range(rng.randrange(40)):
        world.look()
        take_some(world, rng)
    world.kill_hub()
    world.settle()
    left_well(world)
    assert all(worker.over for worker in world.workers)


@pytest.mark.parametrize("all_may", [False, True])
@pytest.mark.parametrize("seed", range(100))
def test_random_lives_with_departures(seed: int, all_may: bool) -> None:
    """Workers leave, die and come, servers die, and the scheduler too, at any time.

    ``all_may``: perhaps all workers want to leave, which ends the job.
    """
    rng = random.Random(seed)
    world = settled(4, rng.choice([2, 3]))
    for _ in range(rng.randrange(10, 200)):
        if world.hub is not None:
            world.look()
        take_some(world, rng)
        what = rng.random()
        live = [w for w in world.workers if w.state == "connected" and not (w.dead or w.over)]
        staying = [w for w in live if not (w.wants or w.fresh)]
        running_now = world.hub is not None and world.hub.state == "running"
        if what < 0.03 and len(staying) > (0 if all_may else 1):
            rng.choice(staying).ask_to_leave()
        elif what < 0.04 and running_now and len(staying) > 1:
            lost = rng.choice(live)
            if any(w.rank not in world.hub._fresh for w in staying if w is not lost):
                world.kill(lost)
                world.bury(lost)
        elif what < 0.06:
            world.enter(rng.randrange(4))
        elif what < 0.07 and world.hub is not None:
            for witness in world.workers:  # what too few have heard of would end the job
                while witness.inbox and not witness.dead:
                    witness.take()
            world.kill_hub()
            for newcomer in world.workers:
                if newcomer.state == "entering":
                    world.kill(newcomer)
            world.settle()
        elif what < 0.08 and running_now:
            servers = [n for n in world.nodes if n.role == "server" and not (n.dead or n.over)]
            if len(servers) > 1:
                world.kill(servers[0])
                world.bury(servers[0])
    world.settle()
    left_well(world)
    if all_may and all(w.wants or w.dead or w.state != "connected" for w in world.workers):
        return  # those that have come later find no job
    all_agree(world)
