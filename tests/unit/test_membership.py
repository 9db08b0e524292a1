"""The job's state machine under every order of events: who is sent which message.

No message can cause an exception.
"""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bpsx.scheduler import messages
from bpsx.scheduler.membership import Membership, names
from unit.scheduler_tools import config, declare, hello, kinds, members, running, waiting

NODES = {"w0": ("worker", 0), "w1": ("worker", 1), "s0": ("server", -1), "s1": ("server", -1)}


def greet(m: Membership, who: str, elastic: str = "off"):
    role, rank = NODES[who]
    options = config(2, 2, BPSX_ELASTIC=elastic)
    pid = list(NODES).index(who) + 1
    return m.hello(who.encode(), hello(role, rank, 2, 2, pid=pid, config=options))


@pytest.mark.parametrize("order", list(itertools.permutations(NODES)), ids="-".join)
def test_any_order_of_arrival_makes_the_same_job(order):
    m = members(2, 2)
    for i, who in enumerate(order[:-1]):
        assert greet(m, who) == [] and m.state == "waiting"
        lacking = [f"worker {w[1]}" for w in ("w0", "w1") if w not in order[: i + 1]]
        servers = len({"s0", "s1"} - set(order[: i + 1]))
        assert m.missing() == lacking + ([f"{servers} of 2 servers"] if servers else [])
    welcomes = {ident.decode(): w for ident, w in greet(m, order[-1])}
    assert set(welcomes) == set(NODES) and {w["type"] for w in welcomes.values()} == {"WELCOME"}
    assert [welcomes[f"w{i}"].pop("rank") for i in range(2)] == [0, 1]
    assert welcomes["w0"] == welcomes["w1"]
    assert sorted((welcomes["s0"]["rank"], welcomes["s1"]["rank"])) == [0, 1]
    assert (
        len(
            {
                (w["job"], w["workers"], str(w["servers"]), str(w["names"]))
                for w in welcomes.values()
            }
        )
        == 1
    )
    assert [n.split()[:2] for n in welcomes["w0"]["names"]["server"]] == [
        ["server", "0"],
        ["server", "1"],
    ]


@pytest.mark.parametrize("said", [{}, {"again": False}, {"again": True}])
def test_workers_learn_whether_a_process_was_in_an_earlier_job(said):
    m = members(2, 0)
    assert m.hello(b"w1", hello("worker", 1, 2, 0, **said)) == []
    welcomes = dict(m.hello(b"w0", hello("worker", 0, 2, 0, again=False)))
    assert [w["again"] for w in welcomes.values()] == [said.get("again", False)] * 2


def test_servers_keep_dense_ranks_when_one_is_started_again():
    m = members(2, 2)
    for who in ("s0", "s1"):
        greet(m, who)
    m.gone(b"s0", "x")
    m.hello(b"s2", hello("server", -1, 2, 2, pid=77, lanes=["h:77"]))
    greet(m, "w0")
    welcome = dict(greet(m, "w1"))
    assert sorted(welcome[i]["rank"] for i in (b"s1", b"s2")) == [0, 1]
    for ident, lane in ((b"s1", "h:-1"), (b"s2", "h:77")):
        assert welcome[b"w0"]["servers"][welcome[ident]["rank"]][2] == [lane]


def test_the_job_waits_for_all_processes_of_a_machine():
    m = members(1, 1)
    local = config(1, 1, BYTEPS_LOCAL_SIZE=3)
    for rank in (2, 0):
        assert m.hello(b"%d" % rank, hello("worker", rank, 1, 1, config=local)) == []
    assert m.missing() == ["worker 1", "the server"] and m.size == 3
    m.hello(b"1", hello("worker", 1, 1, 1, config=local))
    assert kinds(m.hello(b"s", hello("server", -1, 1, 1)))[b"0"] == "WELCOME"


def test_a_third_worker_gets_the_mismatch_of_two_others():
    m = running(3, 1)
    assert kinds(m.declare(b"w0", declare("t", [4]))) == {b"w0": "PLACED"}
    both = dict(m.declare(b"w1", declare("t", [5])))
    assert set(both) == {b"w0", b"w1"} and both[b"w0"] == both[b"w1"]
    assert (
        both[b"w0"]["status"] == -2
        and "worker 0 has float32 of shape (4,), worker 1 has float32 of shape (5,)"
        in both[b"w0"]["text"]
    )
    assert dict(m.declare(b"w2", declare("t", [4]))) == {b"w2": both[b"w0"]}
    assert kinds(m.declare(b"w2", declare("t", [4], generation=1))) == {b"w2": "PLACED"}


@pytest.mark.parametrize("who", [b"s0", b"nobody"])
def test_only_workers_declare_and_wait(who):
    m = running()
    assert (
        m.declare(who, declare("t", [4])) == [] == m.waiting(who, waiting(["t", 0, 0, 99.0]), 0.0)
    )
    assert members().declare(b"w0", declare("t", [4])) == []


def test_a_process_that_leaves_before_the_start_may_return():
    m = members()
    m.hello(b"w0", hello("worker", 0))
    assert m.bye(b"w0", {"failure": "changed my mind"}) == [(b"w0", {"type": "GOODBYE"})]
    assert m.state == "waiting" and "worker 0" in m.missing()
    assert m.hello(b"w0", hello("worker", 0)) == [] and m.present() == ["worker 0 (h, pid 100)"]


@pytest.mark.parametrize("state", ["waiting", "running"])
def test_an_interrupted_scheduler_reports_to_all(state):
    m = running() if state == "running" else members()
    m.hello(b"w0", hello("worker", 0))
    out = m.abort("the scheduler was ended by SIGTERM")
    want = {
        "waiting": ("REFUSED", "reason", {b"w0"}),
        "running": ("LOST", "text", {b"w0", b"w1", b"s0"}),
    }[state]
    assert kinds(out) == dict.fromkeys(want[2], want[0]) and all(
        o[want[1]].endswith("SIGTERM") for _, o in out
    )
    assert m.state == "failed" and "SIGTERM" in m.failure


def test_a_late_process_gets_the_reason_of_the_jobs_failure():
    m = members()
    m.hello(b"w0", hello("worker", 0))
    m.abort("the scheduler was ended by SIGTERM")
    ((_, refused),) = m.hello(b"w1", hello("worker", 1))
    assert refused["type"] == "REFUSED" and refused["over"]
    assert refused["reason"] == f"the job has failed: {m.failure}" and "SIGTERM" in m.failure


def test_long_lists_are_cut():
    assert (
        names(["a"] * 3) == "a, a, a"
        and names([str(i) for i in range(11)]) == "0, 1, 2, 3, 4, 5, 6, 7 and 3 more"
        and names([]) == ""
    )


EVENTS = st.lists(
    st.tuples(
        st.sampled_from(["hello", "bye", "fail", "gone", "declare", "wait", "moved", "settle"]),
        st.sampled_from([*NODES, "x"]),
        st.integers(0, 3),
    ),
    max_size=80,
)


def step(m: Membership, what: str, who: str, n: int, elastic: str):
    ident = who.encode()
    if what == "moved":
        return m.moved(ident, {"term": n, "partitions": n, "again": n % 2}, float(n))
    if what == "settle":
        return m.settle(20.0 * n)
    if what == "hello":
        return (
            greet(m, who, elastic)
            if who in NODES
            else m.hello(ident, hello("worker", n, 2, 2, pid=50 + n))
        )
    if what in ("bye", "fail"):
        return m.bye(ident, {"failure": "x" if what == "fail" else ""})
    if what == "gone":
        return m.gone(ident, "x")
    if what == "declare":
        return m.declare(ident, declare(f"t{n % 2}", [n], generation=n // 2))
    return m.waiting(ident, waiting([f"t{n}", 0, 0, 40.0], busy=n == 3), float(n))


@settings(max_examples=400, deadline=None)
@given(st.sampled_from(["off", "servers"]), EVENTS)
def test_messages_are_consistent_for_any_order_of_events(elastic, events):
    """For any order of events: WELCOME is sent once, and nothing raises.

    A node that has left gets only replies. A failed job stays failed. A worker gets each term once.
    """
    m = members(2, 2)
    welcomed, answers = [], {"GOODBYE", "REFUSED", "PLACED", "FAILED"}
    terms: dict[bytes, int] = {}
    for what, who, n in events:
        before, failure, gone = m.state, m.failure, {i for i, node in m.nodes.items() if node.left}
        out = step(m, what, who, n, elastic)
        for ident, message in out:
            kind = message["type"]
            assert kind in answers or ident not in gone or kind == "WELCOME", (ident, message)
            assert (
                messages.decode(
                    messages.encode(kind, **{k: v for k, v in message.items() if k != "type"})
                )["type"]
                == kind
            )
            if kind == "WELCOME":
                welcomed.append(ident)
            if kind == "TERM":
                assert elastic == "servers" and message["term"] == terms.get(ident, 0) + 1
                terms[ident] = message["term"]
            if kind == "LOST":
                assert m.state == "failed" and message["text"] == m.failure
            if kind == "LEFT":
                assert m.nodes[ident].role == "server" and before == "running"
            if kind == "END":
                assert m.nodes[ident].role == "server" and m.state in ("done", "failed")
        if before == "failed":
            assert (m.state, m.failure) == ("failed", failure)
        assert before != "done" or m.state == "done"
        assert (m.state == "waiting") == (not welcomed)
        assert m.everybody_left() == (
            m.state in ("done", "failed") and all(n.left for n in m.nodes.values())
        )
    assert len(welcomed) in (0, 4) and len(set(welcomed)) == len(welcomed)


@settings(max_examples=100, deadline=None)
@given(st.sampled_from(["off", "servers"]), EVENTS)
def test_every_job_can_be_ended(elastic, events):
    """After any events, once all nodes are gone no node is left to send messages to."""
    m = members(2, 2)
    for who in NODES:
        greet(m, who, elastic)
    for what, who, n in events:
        step(m, what, who, n, elastic)
    for ident in list(m.nodes):
        m.gone(ident, "x")
    assert m.everybody_left() and m.state in ("done", "failed")


def test_observers_ask_for_the_missing_while_the_hub_does():
    """The HTTP server's thread may be in the middle of it when the hub's asks."""
    m, told = members(4), []

    class Workers(dict):
        def __contains__(self, rank):
            if rank == 3 and not told:
                told.append("")
                told[0] = m.missing_text()
            return super().__contains__(rank)

    m._roster.workers = Workers(m._roster.workers)
    assert m.missing()[:4] == [f"worker {rank}" for rank in range(4)]
    assert told[0].startswith("worker 0, worker 1, worker 2, worker 3")
