"""States of nodes and of the job at the scheduler, under any events that nodes may cause."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bpsx.errors import InternalError
from bpsx.scheduler.meetings import MEETING, MeetingState
from bpsx.scheduler.membership import Membership
from bpsx.scheduler.states import (
    HANDOVER,
    HEARING,
    JOB,
    PRESENCE,
    SUPPLY,
    Handover,
    Hearing,
    JobEvent,
    JobState,
    Presence,
    Supply,
)
from bpsx.system.transitions import Table
from unit.scheduler_tools import (
    config,
    declare,
    elastic,
    hello,
    kinds,
    late_server,
    members,
    running,
    waiting,
)
from unit.scripted_job import World

#: Connection -> role and rank; "x" stands for another process that wants to be worker 1.
NODES = {
    "w0": ("worker", 0),
    "w1": ("worker", 1),
    "w2": ("worker", 2),
    "s0": ("server", -1),
    "s1": ("server", -1),
}
TABLES: list[Table[Any, Any]] = [PRESENCE, HEARING, SUPPLY, JOB, HANDOVER, MEETING]
#: Made once, as reading and checking all options takes a while.
HELLOS = {
    (servers, asynchronous, role): hello(
        role,
        -1,
        3,
        servers,
        config=config(
            3,
            servers,
            BYTEPS_ENABLE_ASYNC=int(asynchronous),
            BPSX_ELASTIC="servers",
            BPSX_ELASTIC_WAIT=1,
        ),
    )
    for servers in (1, 2)
    for asynchronous in (False, True)
    for role in ("worker", "server")
}
CHECKED: dict[str, list[str]] = {}
GATHERING = ["hello", "refused", "cannot", "bye", "gone", "expire"]
#: The more often, the more there is to see before the job ends.
RUNNING = [
    *["declare", "heard", "join", "cleared", "bye", "moved"] * 3,
    "settle",
    *["gone", "wait", "late", "connected", "tend"] * 2,
    *["hello", "refused", "cannot", "fails", "doubt", "abort"],
]


def events(kinds: list[str]) -> st.SearchStrategy[list[tuple[str, str, int]]]:
    one = st.tuples(st.sampled_from(kinds), st.sampled_from([*NODES, "x"]), st.integers(0, 3))
    return st.lists(one, min_size=10, max_size=40)


def greeting(who: str, asynchronous: bool, servers: int = 2, **changes: Any) -> dict[str, Any]:
    """The HELLO of a process; what is no node's name comes from another worker 1."""
    role, rank = NODES.get(who, ("worker", 1))
    pid = [*NODES, who].index(who) + 1
    return {**HELLOS[servers, asynchronous, role], "rank": rank, "pid": pid, **changes}


def late_greeting(n: int) -> dict[str, Any]:
    """The HELLO of a server that joins a running job."""
    return {**greeting("s0", False), "lanes": [f"h:{10 + n}"]}


def step(m: Membership, what: str, who: str, n: int, asynchronous: bool) -> list[Any]:
    """Do what the hub does for one event, under the conditions under which it does it."""
    ident, hello_ = who.encode(), greeting(who, asynchronous, m.num_server)
    actions: dict[str, Callable[[], list[Any]]] = {
        "hello": lambda: m.hello(ident, hello_),
        "refused": lambda: m.hello(b"r", {**hello_, "protocol": 0}),
        "cannot": lambda: m.cannot_start(ident, {**hello_, "reason": "no memory"}),
        "bye": lambda: m.bye(ident, {"failure": ""}),
        "fails": lambda: m.bye(ident, {"failure": "boom"}),
        "gone": lambda: m.gone(ident, "cut"),
        "declare": lambda: m.declare(ident, {**declare(f"t{n % 2}", [n]), "epoch": m.epoch}),
        "wait": lambda: m.waiting(ident, waiting([who, 0, 0, 40.0], epoch=m.epoch), float(n)),
        "heard": lambda: m.heard(ident),
        "doubt": lambda: m.doubt(ident, {"text": "lost count", "status": -4}),
        "join": lambda: m.join(ident),
        "cleared": lambda: m.cleared(ident, {"generation": m._joins.generation}),
        "moved": lambda: m.moved(ident, {"term": n, "partitions": 1, "again": n % 2}, float(n)),
        "settle": lambda: m.settle(20.0 * n),
        "late": lambda: m.hello(b"l%d" % n, {**late_greeting(n), "pid": 50 + n}),
        "connected": lambda: m.connected(
            ident, {"server": n + 2, "failure": "" if n < 3 else "no route"}, float(n)
        ),
        "tend": lambda: m.tend(20.0 * n),
        "abort": lambda: m.abort("SIGTERM") if n == 3 else [],
        "expire": lambda: m.expire("late") if m.state is JobState.WAITING and n == 3 else [],
    }
    return actions[what]()


def assert_sound(m: Membership) -> None:
    """No combination of states that cannot be, and each index holds the nodes of its state."""
    roster = m._roster
    begun = m.registry is not None
    for ident, node in m.nodes.items():
        assert node.ident == ident
        here = (Presence.LIVE, Presence.LEAVING) if begun else (Presence.PRESENT,)
        here += (Presence.COMING,) if begun and node.role == "server" else ()
        assert node.presence in (*here, Presence.LEFT)
        assert begun or not node.left or m.state is JobState.FAILED
        assert (node.hearing is Hearing.UNHEARD) == (node.unconfirmed > 0)
        assert node.hearing is Hearing.HEARD or node.presence is Presence.LIVE
        assert bool(node.goodbye) >= (node.presence is Presence.LEAVING)
        if node.role == "server":
            assert (node.hearing, node.supply) == (Hearing.HEARD, Supply.PUSHING)
            assert node.presence is not Presence.LEAVING
    nodes = m.nodes.values()
    here = [n for n in nodes if not n.left]
    assert list(roster.live.items()) == [(n.rank, n) for n in roster.live.values()]
    assert {id(n) for n in here if n.role == "worker"} == set(map(id, roster.live.values()))
    assert {id(n) for n in here if n.role == "server"} == set(map(id, roster.live_servers.values()))
    unheard = {n.ident for n in nodes if n.hearing is Hearing.UNHEARD}
    assert unheard == set(roster.unheard)
    assert {n.ident for n in nodes if n.presence is Presence.LEAVING} == set(roster.leaving)
    moving = m.terms is not None and m.terms.unsettled
    assert not roster.leaving or unheard or moving, "a worker waits to leave, and for nothing"
    assert m.state is not JobState.RUNNING or len(roster.leaving) < len(roster.live)
    assert {r for r, n in roster.workers.items() if n.supply is Supply.JOINED} == set(
        m._joins.joined
    )
    assert set(roster.left_unjoined) == {
        r for r, n in roster.workers.items() if n.left and n.supply is Supply.PUSHING
    }
    for missed in m.vanished._missed:
        assert missed.node.presence is Presence.MISSED and missed.node.ident not in m.nodes
        assert m.state in (JobState.WAITING, JobState.FAILED)
    assert not m.survived or m.state is JobState.FAILED
    assert m.blamed is None or m.state is not JobState.WAITING
    coming = {n.rank for n in nodes if n.presence is Presence.COMING}
    assert m.state is not JobState.RUNNING or coming == set(m._arrivals)
    if m.terms is not None and m.state is JobState.RUNNING and roster.live:
        starved = m.terms.state is Handover.STARVED
        assert starved == (m.starvation is not None) == (not roster.usable_servers())


@settings(max_examples=300, deadline=None)
@given(st.booleans(), events(GATHERING))
def test_states_are_sound_while_a_job_gathers(asynchronous, happening):
    m = members(3, 1)
    m._options = CHECKED
    for what, who, n in happening:
        step(m, what, who, n, asynchronous)
        assert_sound(m)


@settings(max_examples=600, deadline=None)
@given(st.booleans(), events(RUNNING))
def test_states_are_sound_while_a_job_runs(asynchronous, happening):
    m = members(3, 2)
    m._options, m.elastic_wait = CHECKED, 30.0
    for who in NODES:
        m.hello(who.encode(), greeting(who, asynchronous))
    for what, who, n in happening:
        step(m, what, who, n, asynchronous)
        assert_sound(m)


def test_one_that_has_asked_to_leave_confirms_no_error() -> None:
    """All have asked to leave, and none of them would ever say HEARD."""
    m = elastic(3, 2)
    m.declare(b"w1", declare("a", [4]))
    m.gone(b"s0", "cut")
    m.bye(b"w2", {"failure": ""})
    assert m.nodes[b"w2"].presence is Presence.LEAVING
    out = m.declare(b"w2", declare("a", [5]))
    assert kinds(out) == {b"w1": "FAILED", b"w2": "FAILED"}
    assert_sound(m)
    for who in (b"w0", b"w1"):
        m.bye(who, {"failure": ""})
        assert_sound(m)
    assert m.state is JobState.DONE


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> Iterator[set[tuple[Any, Any]]]:
    """The rows of all tables that are used."""
    used: set[tuple[Any, Any]] = set()
    after = Table.after

    def noted(table: Table[Any, Any], state: Any, event: Any) -> Any:
        used.add((state, event))
        return after(table, state, event)

    monkeypatch.setattr(Table, "after", noted)
    yield used


def job_that_forms_with_difficulty() -> None:
    m = members(3, 2)
    m.hello(b"w0", greeting("w0", False))
    m.bye(b"w0", {"failure": ""})
    m.hello(b"w0", greeting("w0", False))
    m.gone(b"w0", "cut")
    for _ in range(2):
        m.cannot_start(b"w0", {**greeting("w0", False), "reason": "no memory"})
    m.cannot_start(b"w1", {**greeting("w1", False), "reason": "no memory"})
    m.hello(b"w0", greeting("w0", False))
    m.expire("worker 1 is missing")
    m.bye(b"w0", {"failure": ""})
    members(3, 2).abort("SIGTERM")


def job_whose_workers_disagree() -> None:
    m = running(3)
    m.declare(b"w0", declare("a", [4])), m.declare(b"w1", declare("a", [5]))
    m.declare(b"w0", declare("b", [4])), m.declare(b"w1", declare("b", [5]))
    m.bye(b"w2", {"failure": ""})
    m.heard(b"w0"), m.heard(b"w0"), m.heard(b"w1")
    m.doubt(b"w1", {"text": "lost count", "status": -4})


def job_whose_workers_join() -> None:
    m = running(2)
    m.join(b"w0"), m.join(b"w1"), m.cleared(b"s0", {"generation": 0})
    m.bye(b"w0", {"failure": ""}), m.bye(b"w1", {"failure": ""})


def job_that_outlives_a_worker() -> None:
    m = members(3, 2)
    for who in NODES:
        m.hello(who.encode(), greeting(who, True))
    m.gone(b"w0", "cut")
    m.bye(b"w1", {"failure": ""}), m.bye(b"w2", {"failure": ""})
    running().abort("SIGTERM")


def job_that_outlives_servers() -> None:
    m = elastic(2, 5)
    m.gone(b"s0", "cut"), m.gone(b"s1", "cut")
    for term in (1, 2):
        m.moved(b"w0", {"term": term, "partitions": 0, "again": 0}, 0.0)
        m.moved(b"w1", {"term": term, "partitions": 0, "again": 0}, 0.0)
    m.gone(b"s2", "cut")
    m.moved(b"w0", {"term": 3, "partitions": 0, "again": 0}, 0.0)
    m.moved(b"w1", {"term": 3, "partitions": 0, "again": 0}, 0.0)
    m.settle(60.0)
    m.gone(b"s3", "cut")
    m.bye(b"w0", {"failure": ""}), m.bye(b"w1", {"failure": ""})
    m = elastic(2, 2)
    m.gone(b"s0", "cut")
    m.moved(b"w0", {"term": 1, "partitions": 0, "again": 0}, 0.0)
    m.moved(b"w1", {"term": 1, "partitions": 0, "again": 0}, 0.0)
    m.bye(b"w0", {"failure": ""}), m.bye(b"w1", {"failure": ""})
    assert m.state is JobState.DONE and m.terms.state is Handover.SETTLED


def job_that_gets_more_servers() -> None:
    m = elastic(2, 2)
    for n in range(8):
        m.declare(b"w0", declare(f"t{n}", [100_000]))
    for n in (0, 1):
        m.hello(b"l%d" % n, late_server(n, servers=2))
        for who in (b"w0", b"w1"):
            m.connected(who, {"server": n + 2, "failure": ""}, 1.0)
        assert m.terms.number == 1 + 2 * n and m.terms.state is Handover.MOVING
        for who in (b"w0", b"w1"):
            m.moved(who, {"term": m.terms.number, "partitions": 0, "again": 0}, 2.0)
        assert m.terms.state is (Handover.SETTLING if n else Handover.SETTLED)
        m.gone(b"s%d" % n, "cut")
        for who in (b"w0", b"w1"):
            m.moved(who, {"term": m.terms.number, "partitions": 0, "again": 0}, 2.0)


def job_that_runs_out_of_servers() -> None:
    m = elastic(2, 1)
    m.elastic_wait = 30.0
    m.gone(b"s0", "cut")
    m.hello(b"l0", late_server(0))
    m.gone(b"l0", "cut")
    for n in (1, 2, 3):
        m.hello(b"l%d" % n, late_server(n))
        m.connected(b"w0", {"server": n + 1, "failure": ""}, 1.0)
        m.connected(b"w1", {"server": n + 1, "failure": ""}, 1.0)
        if n == 2:
            for term in (1, 2):
                m.moved(b"w0", {"term": term, "partitions": 0, "again": 0}, 0.0)
                m.moved(b"w1", {"term": term, "partitions": 0, "again": 0}, 0.0)
        m.gone(b"l%d" % n, "cut")
    m.bye(b"w0", {"failure": ""}), m.bye(b"w1", {"failure": ""})
    assert m.state is JobState.DONE and m.terms.state is Handover.SETTLED


def job_that_shrinks() -> None:
    m = running(5, 2, BPSX_ELASTIC="shrink", BPSX_ELASTIC_WAIT=1)
    m.elastic_wait = 30.0
    m.gone(b"w0", "cut"), m.gone(b"w1", "cut")
    for who in (b"w2", b"w3", b"w4"):
        m.moved(who, {"term": 2, "partitions": 0, "again": 0}, 0.0)
    m.gone(b"w2", "cut")
    m.gone(b"s0", "cut"), m.gone(b"s1", "cut"), m.gone(b"w3", "cut")
    assert m.state is JobState.RUNNING and m.terms.state is Handover.STARVED


def job_that_outlives_its_scheduler() -> None:
    world = World()
    world.kill_hub()
    world.settle()
    assert world.hub is not None and world.hub.state is JobState.RUNNING


def job_that_grows() -> None:
    world = World(2, 1, elastic="shrink")
    world.kill(world.workers[1])
    world.settle()
    world.enter(1)
    world.settle()
    assert world.workers[2].state == "connected"


def job_that_a_worker_leaves() -> None:
    world = World(3, 1, elastic="shrink")
    world.workers[1].ask_to_leave()
    world.settle()
    assert world.workers[1].over and world.workers[0].order == [0, 2]


def job_that_calls_meetings_off() -> None:
    for stage in (MeetingState.ASKING, MeetingState.GATHERING, MeetingState.CONNECTING):
        world = World(2, 1, elastic="shrink")
        world.kill(world.workers[1])
        world.settle()
        newcomer, worker = world.enter(1), world.workers[0]
        world.act(newcomer), world.look()
        if stage is not MeetingState.ASKING:
            worker.take(), world.act(worker), world.look()
        if stage is MeetingState.CONNECTING:
            worker.take(), worker.step(), world.act(worker), world.look()
        assert world.hub is not None and world.hub._meeting.state is stage
        world.kill(newcomer), world.bury(newcomer), world.look()
        assert world.hub._meeting.state is MeetingState.IDLE


def job_whose_scheduler_dies_while_a_worker_enters() -> None:
    world = World(2, 2, elastic="shrink")
    world.kill(world.workers[1])
    world.settle()
    newcomer, worker = world.enter(1), world.workers[0]
    world.act(newcomer), world.look(), worker.take(), world.act(worker), world.look()
    worker.take(), worker.step(), world.act(worker), world.look()
    newcomer.take(), newcomer.take(), world.act(newcomer), world.look()
    world.nodes[0].take()  # CLEAR
    world.kill(newcomer)
    world.kill_hub()
    world.settle()
    assert worker.order == [0] and [t[7] for t in worker.decisions.terms if t[7]] == [[1]]


def test_each_row_of_the_tables_happens(taken):
    job_that_forms_with_difficulty()
    job_whose_workers_disagree()
    job_that_gets_more_servers()
    job_whose_workers_join()
    job_that_outlives_a_worker()
    job_that_outlives_servers()
    job_that_runs_out_of_servers()
    job_that_shrinks()
    job_that_grows()
    job_that_a_worker_leaves()
    job_that_calls_meetings_off()
    job_whose_scheduler_dies_while_a_worker_enters()
    job_that_outlives_its_scheduler()
    rows = {(state, event) for t in TABLES for state, events in t.rows.items() for event in events}
    assert rows == taken


def test_an_event_that_the_job_does_not_expect_names_itself_and_the_state():
    m = running()
    with pytest.raises(InternalError, match="the job in state 'running' .* event 'expired'"):
        m._move(JobEvent.EXPIRED)
    assert m.state is JobState.RUNNING


def test_the_end_of_the_scheduler_does_not_overwrite_a_goodbye():
    """A worker that waits to leave gets its reply, and does not wait for it until a deadline."""
    m = running(3)
    m.declare(b"w0", declare("a", [4])), m.declare(b"w1", declare("a", [5]))
    assert m.bye(b"w2", {"failure": ""}) == []
    out = m.abort("the scheduler was ended by SIGTERM")
    assert (b"w2", {"type": "GOODBYE"}) in out and m.nodes[b"w2"].left


def test_a_second_goodbye_while_others_are_unheard_changes_nothing():
    m = running(3)
    m.declare(b"w0", declare("a", [4])), m.declare(b"w1", declare("a", [5]))
    assert m.bye(b"w2", {"failure": "boom"}) == [] == m.bye(b"w2", {"failure": ""})
    assert m.nodes[b"w2"].presence is Presence.LEAVING
    assert m.gone(b"w2", "cut") == [] and m.heard(b"w0") == []
    out = m.heard(b"w1")
    assert [o["type"] for ident, o in out if ident == b"w2"] == ["GOODBYE"]
    assert m.state is JobState.FAILED and "boom" in m.failure
