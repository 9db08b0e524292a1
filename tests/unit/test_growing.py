"""How workers join a running job, as the scheduler sees it."""

from __future__ import annotations

import random

import pytest

from bpsx.planning.load_balance import shares_by_host
from bpsx.scheduler.growing import CONNECT_SECONDS
from bpsx.scheduler.meetings import MeetingState
from bpsx.scheduler.states import Handover, JobState
from unit.scheduler_tools import config, declare, hello, kinds, late_server, members
from unit.scripted_job import GRACE, Newcomer, World
from unit.test_shrinking import SHRINK, moved, shrinking


def lost_one(workers: int = 3, servers: int = 1, met: bool = False):
    """A job that has lost worker 1, and the HELLO of one in its place."""
    m = shrinking(workers, servers)
    out = m.gone(b"w1", "cut", 0.5)
    assert [x["type"] for ident, x in out if ident == b"w0"] == ["SOON", "TERM"]
    for rank in range(workers):
        moved(m, b"w%d" % rank, 1)
    if met:
        m._unsaid = False
        assert set(kinds(m.tend(0.5)).values()) == {"OFF"}
    given = hello("worker", 1, workers, servers, pid=555, config=m.nodes[b"w0"].config)
    return m, given


def called(m, *live: bytes) -> None:
    """Have the workers meet, unless they have been asked to because of a loss."""
    if m._meeting.state is MeetingState.IDLE:
        assert kinds(m.tend(1.0)) == dict.fromkeys(live, "SOON")
    assert m._meeting.state is MeetingState.ASKING and m._meeting.awaited.issuperset(live)


def gathered(m, given, *live: bytes, number: int = 1) -> dict:
    """Bring a newcomer's meeting to where it connects; returns its WELCOME."""
    m.hello(b"n%d" % number, given)
    called(m, *live)
    for i, ident in enumerate(live):
        m.said_at(ident, {"meeting": 1, "boundary": 5 + i})
    meet = m.tend(1.0)
    assert {x["boundary"] for _, x in meet} == {5 + len(live)}
    assert kinds(meet) == dict.fromkeys(live, "MEET")
    for ident in live:
        assert not m.tend(1.0)
        m.here(ident, {"meeting": 1, "names": "x"})
    ((ident, welcome),) = m.tend(1.0)
    assert ident == b"n%d" % number
    return welcome


def test_a_newcomer_enters_when_all_have_stopped():
    m, given = lost_one()
    ((_, status),) = m.hello(b"n1", given)
    assert status["type"] == "STATUS" and "commit()" in status["missing"]
    welcome = gathered(m, given, b"w0", b"w2")
    assert (welcome["living"], welcome["joins"], welcome["ended"]) == ([0, 2], 0, [])
    m.ready(b"n1", {"meeting": 1})
    ((server, clear),) = m.tend(1.0)
    assert (
        server == b"s0"
        and clear["term"] == 2
        and clear["entering"] == [[1, "worker 1 (h, pid 555)"]]
    )
    out = m.cleared(b"s0", {"generation": 0})
    assert kinds(out) == dict.fromkeys((b"w0", b"w2", b"n1", b"s0"), "TERM")
    term = dict(out)[b"n1"]
    assert (term["term"], term["entered"], term["living"]) == (2, [1], 3)
    # It counts as any other: its loss is the next term.
    lost = dict(m.gone(b"n1", "cut", 2.0))
    assert (lost[b"w0"]["term"], lost[b"w0"]["dropped"], lost[b"w0"]["living"]) == (3, [1], 2)


@pytest.mark.parametrize("cleared_first", [False, True])
def test_losses_wait_until_a_newcomer_has_entered(cleared_first):
    m, given = lost_one(servers=2)
    gathered(m, given, b"w0", b"w2")
    m.ready(b"n1", {"meeting": 1})
    assert kinds(m.tend(1.0)) == {b"s0": "CLEAR", b"s1": "CLEAR"}
    if cleared_first:
        assert not m.cleared(b"s0", {"generation": 0})
    assert not m.gone(b"n1", "cut", 2.0) and not m.gone(b"w2", "cut", 2.0)
    out = m.gone(b"s1", "cut", 2.0)
    if not cleared_first:
        assert not out
        out = m.cleared(b"s0", {"generation": 0})
    told = [x for ident, x in out if ident == b"w0"]
    assert [x["type"] for x in told] == ["TERM", "SOON", "TERM", "TERM", "TERM"]
    terms = [x for x in told if x["type"] == "TERM"]
    assert [(x["term"], x["entered"], x["dropped"]) for x in terms] == [
        (2, [1], []), (3, [], [1]), (4, [], [2]), (5, [], []),
    ]  # fmt: skip
    assert terms[-1]["moves"] and m.state is JobState.RUNNING


def test_with_replace_workers_wait_where_they_have_stopped():
    m = shrinking(3, 1, BPSX_ELASTIC="replace")
    m.elastic_wait = 30.0
    m.gone(b"w1", "cut", 0.5)
    moved(m, b"w0", 1), moved(m, b"w2", 1)
    given = hello("worker", 1, 3, 1, pid=555, config=m.nodes[b"w0"].config)
    called(m, b"w0", b"w2")
    for ident in (b"w0", b"w2"):
        m.said_at(ident, {"meeting": 1, "boundary": 5})
    assert {x["tells"] for _, x in m.tend(1.0)} == {True, False}
    for ident in (b"w0", b"w2"):
        m.here(ident, {"meeting": 1, "names": "x"})
    assert not m.tend(2.0) and "wait for another in the place of worker 1, for 30 s" in m.notes[-1]
    assert not m.tend(13.0) and "for 19 s more" in m.notes[-1]
    m.hello(b"n1", given)
    ((ident, welcome),) = m.tend(14.0)
    assert (ident, welcome["type"]) == (b"n1", "WELCOME")
    m.ready(b"n1", {"meeting": 1})
    m.tend(15.0), m.cleared(b"s0", {"generation": 0})
    # The next loss, without anybody in its place.
    m.synced(b"n1"), m.gone(b"w0", "killed", 20.0)
    moved(m, b"w2", 3), moved(m, b"n1", 3)
    m.tend(20.0)
    for ident in (b"w2", b"n1"):
        m.said_at(ident, {"meeting": 2, "boundary": 1})
    m.tend(20.0)
    for ident in (b"w2", b"n1"):
        m.here(ident, {"meeting": 2, "names": "x"})
    assert not m.tend(21.0)
    assert set(kinds(m.tend(51.0)).values()) == {"LOST"} and m.blamed.rank == 0
    assert "killed; the job cannot go on without it: no other worker has joined" in m.failure


@pytest.mark.parametrize("elastic", ["shrink", "replace"])
def test_workers_are_asked_to_meet_before_they_hear_of_a_loss(elastic):
    """Each further step is one with fewer gradients. They part when all keys have moved."""
    m = shrinking(3, 1, BPSX_ELASTIC=elastic)
    m.elastic_wait = 30.0
    out = m.gone(b"w1", "cut", 0.5)
    assert m.terms.state is Handover.MOVING
    for worker in (b"w0", b"w2"):
        assert [x["type"] for ident, x in out if ident == worker] == ["SOON", "TERM"]
    assert m.tend(0.5) == []
    for ident in (b"w0", b"w2"):
        m.said_at(ident, {"meeting": 1, "boundary": 5})
    assert kinds(m.tend(0.5)) == {b"w0": "MEET", b"w2": "MEET"}
    moved(m, b"w0", 1)
    for ident in (b"w0", b"w2"):
        m.here(ident, {"meeting": 1, "names": "x"})
    assert not m.tend(0.5) and not m.notes
    moved(m, b"w2", 1)
    out, waits = m.tend(0.5), elastic == "replace"
    assert set(kinds(out).values()) == (set() if waits else {"TERM"})
    assert any("all workers have stopped" in note for note in m.notes) == waits


def test_workers_do_not_meet_while_no_server_is_left():
    """They cannot finish their steps, and would be said to call commit() unequally often."""
    m = shrinking(3, 1)
    m.elastic_wait = 30.0
    m.gone(b"s0", "cut", 0.5), m.gone(b"w1", "cut", 0.5)
    assert m.starvation is not None and m.tend(0.5) == []


def test_a_newcomer_that_cannot_connect_is_refused():
    m, given = lost_one()
    gathered(m, given, b"w0", b"w2")
    assert not m.tend(1.0 + CONNECT_SECONDS / 2)
    out = m.tend(1.0 + CONNECT_SECONDS)
    assert [(i, x["type"]) for i, x in out] == [(b"w0", "OFF"), (b"w2", "OFF"), (b"n1", "REFUSED")]
    assert kinds(m.tend(20.0)) == {b"w0": "SOON", b"w2": "SOON"}  # because of the lost worker


def test_a_newcomer_that_dies_ends_the_meeting():
    m, given = lost_one()
    gathered(m, given, b"w0", b"w2")
    m.gone(b"n1", "cut", 1.0)
    assert kinds(m.tend(1.0)) == {b"w0": "OFF", b"w2": "OFF"}


def test_a_newcomer_that_comes_while_others_connect_waits_for_the_next_meeting():
    m, given = lost_one(4)
    m.gone(b"w2", "cut", 0.6)
    moved(m, b"w0", 2), moved(m, b"w3", 2)
    gathered(m, given, b"w0", b"w3")
    other = hello("worker", 2, 4, 1, pid=556, config=m.nodes[b"w0"].config)
    m.hello(b"n2", other)
    m.gone(b"n1", "cut", 1.0)  # nobody connects any more
    assert kinds(m.tend(1.0)) == {b"w0": "OFF", b"w3": "OFF"}
    assert kinds(m.tend(1.0)) == {b"w0": "SOON", b"w3": "SOON"}


def test_newcomers_hear_of_the_end_of_the_job():
    m, given = lost_one()
    m.hello(b"n1", given)
    ident, refused = m.abort("the scheduler was ended by SIGTERM")[-1]
    assert ident == b"n1" and "was ended by SIGTERM" in refused["reason"] and refused["over"]


def test_a_server_that_joins_waits_for_the_newcomer():
    m, given = lost_one(servers=2)
    gathered(m, given, b"w0", b"w2")
    assert kinds(m.hello(b"l0", late_server(0, 3, 2, **SHRINK))) == {b"l0": "STATUS"}
    m.ready(b"n1", {"meeting": 1})
    m.tend(1.0)
    out = m.cleared(b"s0", {"generation": 0}) + m.cleared(b"s1", {"generation": 0})
    assert [x["type"] for ident, x in out if ident == b"n1"] == ["TERM", "LANES"]
    assert dict(out)[b"l0"]["type"] == "WELCOME"


def test_workers_that_do_not_come_to_a_boundary_are_named():
    m, given = lost_one()
    m.hello(b"n1", given), m.tend(1.0)
    m.said_at(b"w0", {"meeting": 1, "boundary": 5}), m.said_at(b"w2", {"meeting": 1, "boundary": 5})
    m.tend(1.0), m.here(b"w0", {"meeting": 1, "names": "x"})
    assert not m.tend(m.patience)
    out = m.tend(m.patience + 1.0)
    assert kinds(out) == {b"w0": "OFF", b"w2": "OFF", b"n1": "REFUSED"}
    assert "worker 2 (h, pid 102)" in dict(out)[b"n1"]["reason"]


@pytest.mark.parametrize("event", ["join", "leave"])
def test_what_forbids_a_meeting(event):
    m, given = lost_one()
    m.hello(b"n1", given), m.tend(1.0)
    if event == "join":
        m.join(b"w0")
    else:
        m.bye(b"w0", {"failure": ""}, 1.0)
    assert kinds(m.tend(1.0))[b"w2"] == "OFF"
    m.settle(100.0)
    assert kinds(m.tend(100.0)) == ({} if event == "join" else {b"n1": "REFUSED"})


def test_a_place_is_given_once():
    m, given = lost_one()
    m.hello(b"n1", given)
    ((_, refused),) = m.hello(b"n2", {**given, "pid": 556})
    assert "waits for the same place" in refused["reason"]


def test_a_newcomer_waits_until_the_one_before_is_known_to_be_dead():
    m, given = lost_one(met=True)
    ((_, status),) = m.hello(b"n3", {**given, "rank": 0})
    assert "the end of worker 0 (h, pid 100)" in status["missing"] and not m.tend(1.0)
    out = m.gone(b"w0", "silent", 5.0)
    assert [x["type"] for ident, x in out if ident == b"w2"] == ["SOON", "TERM"]
    m.moved(b"w2", {"term": 2, "partitions": 0, "again": 0}, 5.0)
    m.said_at(b"w2", {"meeting": 2, "boundary": 5})
    assert kinds(m.tend(6.0)) == {b"w2": "MEET"}
    m.here(b"w2", {"meeting": 2, "names": "x"})
    assert kinds(m.tend(6.0)) == {b"n3": "WELCOME"}


def test_two_workers_with_one_number_are_an_error():
    m, given = lost_one(met=True)
    m.hello(b"n3", {**given, "rank": 0})
    assert not m.tend(30.0)
    ((_, refused),) = m.tend(50.0)
    assert "two processes have the same DMLC_WORKER_ID" in refused["reason"]


def test_a_newcomer_hears_where_keys_have_gone():
    world = World(2, 2, elastic="shrink")
    for worker in world.workers:
        worker.declare("t", 10)
    world.settle()
    place = world.workers[0].decisions._places["t", 0][0]
    world.kill(world.nodes[place[1]]), world.kill(world.workers[1])
    world.settle()
    newcomer = world.enter(1)
    world.settle()
    newcomer.declare("t", 10)
    world.settle()
    assert newcomer.decisions._places["t", 0][0][1] == 1 - place[1]


# ---- more workers than at the beginning


def test_a_worker_that_is_one_too_many_waits_until_the_job_runs():
    m = members(1, 1)
    options = config(1, 1, **SHRINK, BPSX_MAX_WORKERS=3)
    ((_, status),) = m.hello(b"n1", hello("worker", 1, 1, config=options))
    assert status["type"] == "STATUS" and "begins with 1 worker" in status["missing"]
    m.hello(b"s0", hello("server", -1, 1, config=options))
    out = m.hello(b"w0", hello("worker", 0, 1, config=options))
    welcome = dict(out)[b"s0"]
    assert (welcome["workers"], welcome["size"], welcome["vacant"]) == (3, 1, [1, 2])
    assert dict(out)[b"w0"]["living"] == [0]
    assert kinds(m.tend(1.0)) == {b"w0": "SOON"}


def test_what_is_wrong_with_a_worker_that_is_one_too_many():
    m = members(1, 1)
    options = config(1, 1, **SHRINK, BPSX_MAX_WORKERS=3)
    ((_, refused),) = m.hello(b"n3", hello("worker", 3, 1, config=options))
    assert "rank 3 is out of range" in refused["reason"]
    fixed = {**options, "BPSX_ELASTIC": "servers"}
    ((_, refused),) = m.hello(b"n1", hello("worker", 1, 1, config=fixed))
    assert "rank 1 is out of range" in refused["reason"]
    m.hello(b"n2", hello("worker", 2, 1, config={**options, "BYTEPS_PARTITION_BYTES": 8192}))
    m.hello(b"s0", hello("server", -1, 1, config=options))
    m.hello(b"w0", hello("worker", 0, 1, config=options))
    ((ident, refused),) = m.tend(1.0)
    assert ident == b"n2" and "BYTEPS_PARTITION_BYTES=8192 on worker 2" in refused["reason"]


@pytest.mark.parametrize("how", ["expire", "abort"])
def test_a_worker_that_is_one_too_many_hears_that_the_job_cannot_begin(how):
    m = members(1, 1)
    options = config(1, 1, **SHRINK, BPSX_MAX_WORKERS=3)
    m.hello(b"n1", hello("worker", 1, 1, config=options))
    ((ident, refused),) = getattr(m, how)("it was Tuesday")
    assert (ident, refused["type"]) == (b"n1", "REFUSED")
    assert "it was Tuesday" in refused["reason"]


def test_workers_without_a_number_get_one():
    m = members(2, 1)
    options = config(2, 1, **SHRINK, BPSX_MAX_WORKERS=3)

    def come(ident: bytes, token: str, rank: int = -1):
        return m.hello(ident, hello("worker", rank, pid=1, config=options, token=token))

    assert not come(b"a", "a") and not come(b"b2", "", 1)
    assert [str(n) for n in m.nodes.values()] == ["worker 0 (h, pid 1)", "worker 1 (h, pid 1)"]
    assert not come(b"a again", "a"), "its connection broke; it is the same worker"
    assert {ident: n.rank for ident, n in m.nodes.items()} == {b"b2": 1, b"a again": 0}
    ((_, status),) = come(b"c", "c")
    assert "the job, which begins with 2 workers" in status["missing"]
    out = m.hello(b"s0", hello("server", -1, config=options))
    assert {i: x["rank"] for i, x in out} == {b"a again": 0, b"b2": 1, b"s0": 0}
    ((_, status),) = come(b"d", "d")
    assert "a vacant place" in status["missing"]
    m._unsaid = False
    for ident in (b"a again", b"b2"):
        assert kinds(m.tend(1.0)) in ({}, dict.fromkeys((b"a again", b"b2"), "SOON"))
        m.said_at(ident, {"meeting": 1, "boundary": 1})
    m.tend(1.0)
    for ident in (b"a again", b"b2"):
        m.here(ident, {"meeting": 1, "names": "x"})
    ((ident, welcome),) = m.tend(1.0)
    assert (ident, welcome["rank"]) == (b"c", 2)


def test_a_number_is_needed_where_processes_share_a_machine():
    m = members(2, 1)
    options = config(2, 1, **SHRINK, BYTEPS_LOCAL_SIZE=2)
    ((_, refused),) = m.hello(b"a", hello("worker", -1, pid=1, config=options, token="a"))
    assert "DMLC_WORKER_ID is needed" in refused["reason"]


def test_a_worker_without_a_number_that_cannot_start_is_named():
    m = members(2, 1)
    m.hello(b"a", hello("worker", 0, config=config(2, 1, **SHRINK)))
    m.cannot_start(b"b", {**hello("worker", -1), "reason": "no memory"})
    assert "worker 1 (could not start: no memory)" in m.missing_text()


def test_mixed_mode_follows_the_workers():
    """The servers' shares depend on the machines of the workers that are there."""
    m = members(3, 2)
    options = config(3, 2, **SHRINK, BYTEPS_ENABLE_MIXED_MODE=1, BPSX_MAX_WORKERS=4)
    for i, host in enumerate("ad"):
        m.hello(b"s%d" % i, hello("server", -1, 3, 2, pid=900 + i, host=host, config=options))
    for i, host in enumerate("abc"):
        m.hello(b"w%d" % i, hello("worker", i, 3, 2, host=host, config=options))
    for i in range(50):
        m.declare(b"w0", declare(f"t{i}", [100_000]))

    def follows(*workers: str) -> None:
        """After at most one move of keys the bytes are shared as in a job that begins so."""
        if m.terms.state is Handover.MOVING:
            for w in m._roster.live.values():
                m.moved(w.ident, {"term": m.terms.number, "partitions": 0, "again": 0}, 1.0)
        shares = shares_by_host(workers, [("a", 1), ("d", 1)])
        found = m.terms._placement.server_bytes
        assert all(abs(b / sum(found) - s) < 0.06 for b, s in zip(found, shares, strict=True))

    follows("a", "b", "c")
    m.gone(b"w1", "cut", 0.5)
    follows("a", "c")
    given = hello("worker", 3, 3, 2, host="e", pid=5, config=options)
    m._unsaid = False
    gathered(m, given, b"w0", b"w2", number=3)
    m.ready(b"n3", {"meeting": 1})
    m.tend(1.0)
    for server in (b"s0", b"s1"):
        m.cleared(server, {"generation": 0})
    m.tend(2.0)
    follows("a", "c", "e")


# ---- the scheduler dies


def entering(rng: random.Random, servers: int, most: int = 0) -> tuple[World, Newcomer]:
    """A job into which a worker is about to enter in the place of one that was lost.

    ``most``: places; with more than three the last one is taken.
    """
    world = World(3, servers, elastic="shrink", most=most)
    for worker in world.workers:
        worker.declare("a", 5)
    world.settle()
    if most:
        return world, world.enter(rng.choice([-1, most - 1]))
    world.kill(world.workers[1])
    world.settle()
    return world, world.enter(1)


def ended_by_too_few(world: World) -> bool:
    """Whether the job has ended, as those that are left cannot tell that they are the majority."""
    if world.hub.state is JobState.RUNNING:
        return False
    left = [w for w in world.workers if w.entered and not (w.dead or w.goes_on)]
    ranks = {w.rank for w in left}
    # Of a machine without one of its processes none counts.
    left = [w for w in left if ranks.issuperset(world.machine(w.rank))]
    assert 2 * len(left) <= max(len(w.order) for w in left), world.hub.failure
    return True


def take_some(world: World, rng: random.Random) -> None:
    """Let the nodes do some of what they have to do, in any order."""
    for node in rng.sample(world.nodes, len(world.nodes)):
        if node.dead or node.over:
            continue
        if node.outbox and rng.random() < 0.5 and world.hub is not None:
            world.act(node)
        if node.inbox and rng.random() < 0.5:
            node.take()
        if rng.random() < 0.3 and hasattr(node, "step"):
            node.move(), node.connect(), node.step()


def all_agree(world: World) -> None:
    """All live workers know the same terms, and servers the same workers as they do."""
    assert world.hub is not None and world.hub.state is JobState.RUNNING, world.hub.failure
    live = [w for w in world.workers if not (w.dead or w.over)]
    if len(world.hub._roster.live) == world.hub.places:
        live = [w for w in live if w.entered or not w.token]  # others wait for a vacant place
    assert len({str(w.decisions.terms) for w in live}) == 1
    assert {tuple(w.order) for w in live} == {tuple(live[0].order)}
    assert sorted(live[0].order) == sorted(w.rank for w in live)
    assert {w.decisions.joins for w in live} == {world.hub._joins.generation}
    assert all(w.place == "free" for w in live)
    for server in world.nodes:
        if server.role == "server" and not (server.dead or server.over or server.lost):
            assert server.marks.cleared == live[0].decisions.joins
            assert server.marks.workers == set(live[0].order), server.marks.dropped


def come_back(world: World, rng: random.Random) -> None:
    """Let the nodes come to the next scheduler, and go on in any order."""
    world.start_hub()
    for node in world.nodes:
        if node.state == "orphaned" and not (node.dead or node.over):
            node.introduce()
    for _ in range(40):
        world.now += 0.25
        world.look()
        take_some(world, rng)


@pytest.mark.parametrize("most", [0, 5])
@pytest.mark.parametrize("also", ["", "newcomer", "worker", "server", "again", "any order"])
@pytest.mark.parametrize("seed", range(30))
def test_the_scheduler_dies_while_a_worker_enters(seed, also, most):
    rng = random.Random(f"{seed} {also} {most}")
    world, newcomer = entering(rng, 2, most)
    for _ in range(rng.randrange(40)):
        world.look()
        take_some(world, rng)
    if also == "newcomer":
        world.kill(newcomer)
    elif also == "worker":
        world.kill(world.workers[rng.choice([0, 2])])
    elif also == "server":
        world.kill(world.nodes[rng.randrange(2)])
    world.kill_hub()
    if newcomer.state == "entering" and rng.random() < 0.5:
        world.kill(newcomer)
    if also == "any order":  # some MOVED may come before the next scheduler finishes the entry
        come_back(world, rng)
    world.settle()
    if also == "again":
        world.kill_hub()
        world.settle()
    if ended_by_too_few(world):
        return
    all_agree(world)
    if newcomer.dead:
        newcomer = world.enter(newcomer.rank if newcomer.token == "" else -1)
        world.settle()
    all_agree(world)
    assert newcomer.state == "connected", newcomer.lost


@pytest.mark.parametrize("told", [1, 2])
def test_a_worker_whose_connections_have_all_ended_is_not_awaited_for_long(told):
    """Servers tell the next scheduler of it; one alone may be cut off from the worker."""
    world = World(3, 2, elastic="shrink")
    lost = world.workers[2]
    world.kill(lost)
    world.kill_hub()
    world.start_hub()
    for node in world.nodes:
        if not node.dead:
            node.introduce()
    for server in world.nodes[told:2]:
        server.outbox[0]["state"]["broken"] = []
    for node in world.nodes:
        while node.outbox:
            world.act(node)
    world.look()
    took = 0.0
    while world.hub.state is JobState.WAITING:
        world.now, took = world.now + 0.25, took + 0.25
        world.look()
    assert took == (1.0 if told == 2 else GRACE)


def test_a_server_that_is_back_first_does_not_end_the_job():
    """It has seen each worker enter late, and cannot know that they are still there."""
    world = World(2, 1, elastic="shrink")
    for rank in (0, 1):
        world.kill(world.workers[rank])
        world.settle()
        assert world.enter(rank)
        world.settle()
    world.kill_hub()
    world.start_hub()
    server = world.nodes[0]
    server.introduce()
    while server.outbox:
        world.act(server)
    world.look()
    assert world.hub.state is JobState.WAITING
    world.settle()
    all_agree(world)


def test_a_newcomer_gets_the_model_while_there_is_no_scheduler():
    """It says so again to the next one, to which it has introduced itself before."""
    rng = random.Random(1)
    world, newcomer = entering(rng, 2)
    while newcomer.state == "entering":
        world.look()
        take_some(world, rng)
    newcomer.fresh = True
    world.kill_hub()
    world.start_hub()
    for node in world.nodes:
        if not node.dead:
            node.introduce()
    newcomer.step()
    assert not newcomer.fresh
    world.settle()
    assert not world.hub._fresh


@pytest.mark.parametrize("seed", range(200))
def test_random_lives(seed):
    """Workers and servers die and come, and the scheduler too, at any time."""
    rng = random.Random(seed)
    places = rng.choice([3, 5])
    world, _ = entering(rng, rng.choice([2, 3]), places if places > 3 else 0)
    for _ in range(rng.randrange(10, 120)):
        if world.hub is not None:
            world.look()
        take_some(world, rng)
        what = rng.random()
        live = [w for w in world.workers if w.state == "connected" and not (w.dead or w.over)]
        if what < 0.02 and len(live) > 1 and world.hub is not None and world.hub.state == "running":
            lost = rng.choice(live)
            if any(w.rank not in world.hub._fresh for w in live if w is not lost):
                world.kill(lost)
                world.bury(lost)
        elif what < 0.04:
            for newcomer in world.workers:
                if newcomer.state == "entering" and not newcomer.dead and world.hub is not None:
                    world.kill(newcomer)
                    world.bury(newcomer)
        elif what < 0.06:
            world.enter(rng.choice([-1, *range(places)]))
        elif what < 0.07 and world.hub is not None:
            for witness in live:  # a loss of which too few have heard would end the job
                while witness.inbox:
                    witness.take()
            world.kill_hub()
            for newcomer in world.workers:
                if newcomer.state == "entering":
                    world.kill(newcomer)
            world.settle()
        elif what < 0.09:
            servers = [n for n in world.nodes if n.role == "server" and not (n.dead or n.over)]
            if len(servers) > 1 and world.hub is not None and world.hub.state == "running":
                world.kill(servers[0])
                world.bury(servers[0])
    world.settle()
    if not ended_by_too_few(world):
        all_agree(world)
