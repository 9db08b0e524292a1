"""Another size of partitions while a job runs: the scheduler's decisions and its protocol."""

from __future__ import annotations

import random
from itertools import combinations
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bpsx.core._tensor import Declaration
from bpsx.scheduler import resizing
from bpsx.scheduler.resizing import (
    FIRST_WAIT,
    LEAST_COUNT,
    MARGIN,
    MOST_SHRINKS,
    REPORTS,
    Resizing,
    change_of,
    successor_of,
)
from bpsx.scheduler.states import JobState
from bpsx.session.successors import Successors
from unit.scripted_job import Server, Worker, World
from unit.test_rebuilding import decided_once, settle_now

KIB = 1 << 10
MOST = 2 << 20
#: Bytes per second of links for whose partitions 128 KiB, 512 KiB and 2 MiB are right.
SLOW, MIDDLE, FAST = 12.5e6, 250e6, 2.5e9


def told(size: int, *rates: float, workers: int = 2, now: float = FIRST_WAIT) -> int:
    """Return the size that is found after all workers have reported these rates."""
    one = Resizing(size, MOST, 0.0)
    for rate in rates:
        for worker in range(workers):
            one.note_peak(worker, rate)
    return one.find(range(workers), now)


@pytest.mark.parametrize(
    ("size", "rates", "wanted"),
    [
        (MOST, [FAST] + [SLOW] * 3, 128 * KIB),
        (128 * KIB, [FAST] * 3, MOST),
        (128 * KIB, [MIDDLE] * 3, 512 * KIB),
        (MOST, [FAST] + [MIDDLE] * 3, 512 * KIB),
        (256 * KIB, [MIDDLE] * 3, 0),
        (MOST, [SLOW, SLOW, FAST], 0),
        (MOST, [FAST, SLOW, MIDDLE, SLOW], 512 * KIB),
        (MOST, [FAST] + [SLOW] * 2, 0),
        (MOST, [SLOW] * 9, 0),  # it has always been so: other things than the link may be slow
    ],
)
def test_a_size_changes_if_all_reports_want_one_that_differs_much(size, rates, wanted) -> None:
    assert told(size, *rates) == wanted


def test_the_slowest_worker_decides() -> None:
    one = Resizing(MOST, MOST, 0.0)
    for rate in (FAST, *[SLOW] * REPORTS):
        one.note_peak(0, FAST), one.note_peak(1, rate)
    assert one.find([0, 1], FIRST_WAIT) == 128 * KIB
    assert not one.news and one.find([0, 1], FIRST_WAIT) == 0, "nobody has said more"
    one.note_peak(0, FAST)
    assert one.find([0], FIRST_WAIT) == 0
    one.note_peak(0, FAST)
    assert one.find([0, 1, 2], FIRST_WAIT) == 0, "worker 2 has said nothing"


def test_changes_are_few_and_far_between() -> None:
    one, now, at = Resizing(MOST, MOST, 0.0), 0.0, []
    for i in range(5000):
        now += 1.0
        one.note_peak(0, SLOW if i // 50 % 2 else FAST)
        if size := one.find([0], now):
            at.append(now)
            one.begin(size, [b"w0"], now)
            assert one.count(b"w0", {})
            one.close([b"w0"])
            assert one.take(b"w0") and one.size == size
    assert len(at) == 2 * MOST_SHRINKS and one.size == MOST
    gaps = [b - a for a, b in zip([0.0, *at], at)]
    assert all(gap >= FIRST_WAIT * 2**i for i, gap in enumerate(gaps)), gaps


def test_a_change_that_is_dropped_is_tried_again_after_as_long() -> None:
    one, now = Resizing(MOST, MOST, 0.0), FIRST_WAIT
    one.note_peak(0, FAST)
    for _ in range(3):
        assert size_wanted(one, now) == 128 * KIB, "links are still slower than they were once"
        one.begin(128 * KIB, [b"w0"], now)
        assert one.call_off() and size_wanted(one, now + FIRST_WAIT - 1) == 0
        now += FIRST_WAIT
    assert size_wanted(one, now) == 128 * KIB
    one.begin(128 * KIB, [b"w0"], now)
    assert one.count(b"w0", {})
    one.close([b"w0"])
    assert one.take(b"w0")
    assert size_wanted(one, now + 2 * FIRST_WAIT, FAST) == MOST
    assert size_wanted(one, now + 2 * FIRST_WAIT - 1, FAST) == 0


def size_wanted(one: Resizing, now: float, rate: float = SLOW) -> int:
    for _ in range(REPORTS):
        one.note_peak(0, rate)
    return one.find([0], now)


def test_a_declaration_that_fails_while_it_closes_has_no_successor() -> None:
    known = Successors()
    failed, other, successor = (Declaration(i, (4,), 3, 16, None) for i in range(3))
    known.close("failed", failed, successor), known.close("other", other, successor)
    known.forget(failed)
    assert [name for name, *_ in known.hold()] == ["other"]
    assert known.follow(failed) is None and known.follow(other) is successor
    known.forget(other)
    assert known.follow(other) is None and not known.held()


@given(st.lists(st.dictionaries(st.sampled_from("abc"), st.integers(0, 99)), min_size=1))
def test_no_count_has_passed_its_last_one(counts: list[dict[str, int]]) -> None:
    one = Resizing(MOST, MOST, 0.0)
    idents = [b"w%d" % i for i in range(len(counts))]
    one.begin(128 * KIB, idents, 0.0)
    for ident, mine in zip(idents, counts):
        last = one.count(ident, {(name, 0): n for name, n in mine.items()})
        assert last is (ident == idents[-1])
    found = one.last_counts()
    for name in "abc":
        each = [mine.get(name, -1) for mine in counts]
        if min(each) >= LEAST_COUNT:
            assert found[name, 0] == max(each) + MARGIN + max(each) - min(each)
        else:
            assert (name, 0) not in found


def test_generations_of_successors_are_apart() -> None:
    made = {successor_of(g, n) for g in range(50) for n in range(1, 50)}
    assert len(made) == 50 * 49 and min(made) > 1 << 20
    assert successor_of(successor_of(7, 3), 4) == successor_of(7, 4) < 1 << 32
    assert change_of(successor_of(7, 3)) == 3 and change_of(7) == 0


# ---- the protocol


def tuned(workers: int = 2, servers: int = 2, rate: float = FAST) -> World:
    """A job that has measured its links, and whose workers have used three tensors."""
    world = World(workers, servers, apart=True)
    for worker in world.workers:
        worker.send("RATE", rate=int(rate), round_trip=300)
    settle_now(world)
    for worker in world.workers:
        worker.declare("large", 1 << 20), worker.declare("small", 100)
        worker.declare("seldom", 1 << 20)
    settle_now(world)
    for worker in world.workers:
        for _ in range(LEAST_COUNT):
            worker.push_pull("large"), worker.push_pull("small")
    return world


def notice(world: World, rate: float) -> None:
    """The links of all workers carry ``rate`` for long enough, and the hub asks for counts."""
    world.now += 4 * FIRST_WAIT
    for worker in world.workers:
        for told in (FAST, *[rate] * REPORTS):
            worker.send("PEAK", rate=int(told))
        while worker.outbox:
            world.act(worker)
    world.look()


def uses(world: World, name: str, n: int) -> list[list[int]]:
    """Let each worker make ``n`` push_pulls; returns the changes that made their generations."""
    for worker in world.workers:
        for _ in range(n):
            worker.push_pull(name)
    return [[change_of(g) for g in worker.used.get(name, [])] for worker in world.workers]


def lengths(worker: Worker, name: str) -> set[int]:
    """Bytes of the partitions of a tensor's latest declaration, without the last one's."""
    given = worker.declared[worker.current.get(name, (name, 0))]
    return {place[3] for place in given.places[:-1]}


def test_all_workers_change_after_the_same_push_pull() -> None:
    world = tuned()
    assert world.hub.registry is not None
    tensors = len(world.hub.registry)
    world.workers[0].push_pull("large"), world.workers[0].push_pull("large")
    assert lengths(world.workers[0], "large") == {MOST}
    notice(world, SLOW)
    settle_now(world)
    assert [w.decisions.held for w in world.workers] == [1, 1]
    last = LEAST_COUNT + 2 + MARGIN + 2
    for used in uses(world, "large", 60):
        assert used[:70] == [0] * last + [1] * (70 - last)
    for used in uses(world, "small", 60) + uses(world, "seldom", 60):
        assert set(used) == {0}
    assert all(max(lengths(w, "large")) <= 128 * KIB for w in world.workers)
    assert "from now on partitions have 128 KiB" in world.hub.choices[-1]
    assert len(world.hub.registry) == tensors, "a tensor and its successor are one"


def test_a_push_pull_waits_at_its_last_count() -> None:
    world = tuned()
    notice(world, SLOW)
    first, second = world.workers
    for worker in world.workers:
        worker.take()  # COUNT
        world.act(worker)
    first.take()  # CHANGE
    for _ in range(50):
        first.push_pull("large")
    assert first.used["large"] == [0] * (LEAST_COUNT + MARGIN)
    settle_now(world)
    for _ in range(50):
        first.push_pull("large")
    assert len(first.used["large"]) == 50 + LEAST_COUNT + MARGIN


def test_a_change_is_off_if_a_worker_has_gone_too_far() -> None:
    world = tuned()
    notice(world, SLOW)
    for worker in world.workers:
        worker.take()
        world.act(worker)
    for _ in range(MARGIN + 1):
        world.workers[1].push_pull("large")
    settle_now(world)
    assert [w.decisions.held for w in world.workers] == [0, 0]
    assert all(set(used) == {0} for used in uses(world, "large", 60))


@pytest.mark.parametrize("event", ["join", "bye", "deadlock"])
def test_what_calls_a_change_off(event: str) -> None:
    world = tuned()
    notice(world, SLOW)
    first, second = world.workers
    for worker in world.workers:
        worker.take()
    world.act(first)
    if event == "join":
        first.join()
    elif event == "bye":
        first.leave()
    else:
        world.deliver(world.hub._call_off_change())
    if first.outbox:
        world.act(first)
    settle_now(world)
    assert (first.decisions.held, second.decisions.held) == (0, 0)
    assert world.hub._resizing.state is resizing.ResizeState.IDLE


def test_counts_begin_anew_after_join() -> None:
    """One worker joins before its last push_pull of the old size, the other one passes it."""
    world = tuned()
    notice(world, SLOW)
    settle_now(world)
    first, second = world.workers
    for _ in range(40):
        first.push_pull("large")
    second.join()
    settle_now(world)
    first.join()
    settle_now(world)
    assert not first.joined and not second.joined
    assert uses(world, "large", 30) == [[1] * 30] * 2


@pytest.mark.parametrize("elastic", ["shrink", "replace"])
def test_a_job_whose_workers_may_change_keeps_its_size(elastic: str) -> None:
    world = World(2, 2, elastic=elastic, apart=True)
    for worker in world.workers:
        worker.send("RATE", rate=int(FAST), round_trip=300), worker.declare("large", 1 << 20)
    settle_now(world)
    notice(world, SLOW)
    assert not any(m["type"] == "COUNT" for w in world.workers for m in w.inbox)


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("cut", range(17))
def test_the_scheduler_dies_between_any_two_messages(cut: int, seed: int) -> None:
    """Either all workers hear that the change holds, or all that it is off."""
    rng = random.Random(seed)
    world = tuned(3, 2)
    notice(world, SLOW)
    for _ in range(cut):
        ready = [n for n in world.nodes if n.outbox or n.inbox]
        if ready:
            node = rng.choice(ready)
            world.act(node) if node.outbox else node.take()
        world.workers[rng.randrange(3)].push_pull("large")
    heard = [w.decisions.held for w in world.workers]
    world.kill_hub()
    for worker in world.workers:
        for _ in range(rng.randrange(30)):
            worker.push_pull("large")
    same_generations(world)
    world.settle()
    assert world.hub is not None and world.hub.state is JobState.RUNNING
    held = {w.decisions.held for w in world.workers}
    assert len(held) == 1 and held >= {1} & {*heard}
    uses(world, "large", 60)
    same_generations(world)
    assert all(len(w.used["large"]) >= 60 + LEAST_COUNT for w in world.workers)
    # The next change begins where this one has ended.
    rate = FAST if held == {1} else SLOW
    notice(world, rate)
    settle_now(world)
    assert {w.decisions.held for w in world.workers} == {world.workers[0].decisions.change}
    uses(world, "large", 60)
    same_generations(world)
    assert world.hub._resizing.size == (MOST if rate == FAST else 128 * KIB)


def same_generations(world: World) -> None:
    """The n-th push_pull of a name uses the same generation on all workers."""
    for one, other in combinations(world.workers, 2):
        for name in one.used:
            mine, theirs = one.used[name], other.used.get(name, [])
            assert all(a == b for a, b in zip(mine, theirs)), (name, mine, theirs)


@pytest.mark.parametrize("seed", range(120))
def test_random_lives(seed: int) -> None:
    """Workers push, links change, schedulers and servers die, in any order."""
    rng = random.Random(seed)
    world = tuned(rng.choice([2, 3]), 3)
    for _ in range(400):
        world.now += rng.choice([0.01, 0.5])
        happen(world, rng)
        same_generations(world)
        decided_once(world)
    world.settle()
    settle_now(world)
    assert world.hub is not None and world.hub.state is JobState.RUNNING, world.hub.failure
    before = [len(w.used.get("large", ())) for w in world.workers]
    uses(world, "large", 60)
    assert [len(w.used["large"]) for w in world.workers] == [n + 60 for n in before]
    same_generations(world)
    assert len({w.decisions.held for w in world.workers}) == 1


def happen(world: World, rng: random.Random) -> None:
    node: Any = rng.choice(world.nodes)
    what = rng.choice(["deliver"] * 8 + ["use"] * 4 + ["links"] * 2 + ["kill hub", "kill", "move"])
    if world.hub is None:
        if rng.random() < 0.3:
            world.start_hub()
        elif isinstance(node, Worker):
            node.push_pull("large")
        return
    world.look()
    if node.dead or node.over:
        if node.ident in world.hub.nodes:
            world.bury(node)
    elif what == "links":
        if world.hub.state is JobState.RUNNING:
            notice(world, rng.choice([SLOW, FAST]))
    elif node.state == "orphaned":
        node.introduce()
    elif what == "deliver" and node.outbox:
        world.act(node)
    elif what == "deliver" and node.inbox:
        node.take()
    elif what == "kill hub" and rng.random() < 0.1:
        world.kill_hub()
    elif what == "kill" and isinstance(node, Server) and rng.random() < 0.05:
        if sum(not n.dead for n in world.nodes if isinstance(n, Server)) > 1:
            world.kill(node)
    elif isinstance(node, Worker):
        node.move()
        node.push_pull(rng.choice(["large", "large", "small"]))


@pytest.mark.parametrize("held", [True, False])
@pytest.mark.parametrize("restarted", [False, True])
def test_shares_count_what_is_used(held: bool, restarted: bool) -> None:
    """Neither ended tensors nor successors that were dropped count as a server's bytes."""
    world = tuned()
    assert world.hub is not None
    before = list(world.hub._tuning.placement.server_bytes)
    notice(world, SLOW)
    for worker in world.workers:
        worker.take()
        world.act(worker)
    if not held:
        for _ in range(2 * MARGIN):
            world.workers[1].push_pull("large")
    settle_now(world)
    if restarted:
        world.kill_hub()
        world.settle()
    assert {w.decisions.held for w in world.workers} == {int(held)}
    after = world.hub._tuning.placement.server_bytes
    slack = 2 * max(world.hub._tuning.placement.lane_bytes) // 10
    assert abs(sum(after) - sum(before)) < 100_000
    assert all(abs(a - b) < slack for a, b in zip(after, before)), (before, after)
