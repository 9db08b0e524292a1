"""Servers that join a running job, at the scheduler."""

from __future__ import annotations

from typing import Any

from bpsx.scheduler import messages
from bpsx.scheduler.arrivals import COMING_SECONDS, REPORT_EVERY
from bpsx.scheduler.states import Handover, JobState, Presence
from unit.scheduler_tools import config, declare, elastic, hello, kinds, late_server, running

OK = {"failure": ""}


def connect(m: Any, server: int, *workers: bytes, failure: str = "") -> list[Any]:
    out = []
    for ident in workers:
        message = {"type": "CONNECTED", "server": server, "failure": failure}
        messages.check(message)
        out = m.connected(ident, message, 1.0)
    return out


def moves(out: list[Any]) -> list[Any]:
    (term,) = {str(m["moves"]): m for _, m in out if m["type"] == "TERM"}.values()
    return term["moves"]


def test_a_late_server_gets_a_new_rank_and_new_lanes() -> None:
    m = elastic(2, 2)
    out = m.hello(b"l0", late_server(0, servers=2) | {"lanes": ["h:1", "h:2"]})
    assert kinds(out) == {b"l0": "WELCOME", b"w0": "LANES", b"w1": "LANES"}
    welcome, lanes = dict(out)[b"l0"], dict(out)[b"w0"]
    assert (welcome["rank"], welcome["first"], welcome["workers"]) == (2, 2, 2)
    assert (lanes["server"], lanes["first"], lanes["lanes"]) == (2, 2, ["h:1", "h:2"])
    assert lanes["name"] == "server 2 (h, pid 700)"
    out = m.hello(b"l1", late_server(1, servers=2))
    assert (dict(out)[b"l1"]["rank"], dict(out)[b"l1"]["first"]) == (3, 4)


def test_no_key_is_on_a_server_before_all_workers_have_connected() -> None:
    m = elastic(2, 1)
    m.hello(b"l0", late_server(0))
    connect(m, 1, b"w0")
    (_, placed), *_ = m.declare(b"w0", declare("a", [4]))
    assert [p[1] for p in placed["places"]] == [0]
    connect(m, 1, b"w1")
    (_, placed), *_ = m.declare(b"w0", declare("b", [4]))
    assert [p[1] for p in placed["places"]] == [1]


def test_a_starved_job_goes_on_with_the_first_server_that_all_can_reach() -> None:
    m = elastic(2, 1)
    m.elastic_wait = 20.0
    m.declare(b"w0", declare("a", [4]))
    out = m.gone(b"s0", "cut", 5.0)
    assert kinds(out) == {b"w0": "GONE", b"w1": "GONE"} and dict(out)[b"w0"]["lanes"] == [0]
    assert m.terms.state is Handover.STARVED and m.losses[0].text.endswith("(BPSX_ELASTIC_WAIT)")
    # Names that are declared meanwhile move with all others.
    (_, placed), *_ = m.declare(b"w0", declare("b", [4]))
    assert [p[1] for p in placed["places"]] == [0]
    m.hello(b"l0", late_server(0)), m.hello(b"l1", late_server(1))
    assert connect(m, 1, b"w0") == connect(m, 2, b"w0") == []
    out = connect(m, 2, b"w1")
    assert kinds(out) == {b"w0": "TERM", b"w1": "TERM", b"l0": "TERM", b"l1": "TERM"}
    assert [lane for lane, _ in moves(out)] == [0]
    assert {to for _, targets in moves(out) for to, _ in targets} == {2}
    assert m.state is JobState.RUNNING and len(m.losses) == 2
    assert not connect(m, 1, b"w1") and m.nodes[b"l0"].presence is Presence.LIVE


def test_a_starved_job_fails_when_its_time_is_over_unless_a_server_is_coming() -> None:
    m = elastic(2, 1)
    m.elastic_wait = 20.0
    m.gone(b"s0", "cut", 5.0)
    assert m.tend(5.0 + REPORT_EVERY) == [] and "for 10 s more" in m.notes.pop()
    m.hello(b"l0", late_server(0))
    assert m.tend(26.0) == []
    m.gone(b"l0", "cut", 27.0)
    out = m.tend(27.0)
    assert kinds(out) == {b"w0": "LOST", b"w1": "LOST"}
    assert "no other has joined within 20 s (BPSX_ELASTIC_WAIT)" in m.failure
    assert m.blamed is m.nodes[b"s0"]


def test_a_job_that_waits_for_no_server_fails_at_once() -> None:
    m = elastic(2, 1)
    assert "LOST" in kinds(m.gone(b"s0", "cut")).values()
    assert m.failure.endswith("it was the last server")


def test_a_server_that_some_worker_cannot_reach_is_sent_away() -> None:
    m = elastic(2, 1)
    m.hello(b"l0", late_server(0))
    connect(m, 1, b"w0")
    out = connect(m, 1, b"w1", failure="no route")
    assert kinds(out) == {b"l0": "LOST", b"w0": "GONE", b"w1": "GONE"}
    text = "server 1 (h, pid 700) cannot join the running job: worker 1 (h, pid 101) cannot connect"
    assert dict(out)[b"l0"]["text"].startswith(text) and dict(out)[b"w0"]["lanes"] == [1]
    assert m.state is JobState.RUNNING and m.nodes[b"l0"].left
    assert m.bye(b"l0", OK) == [(b"l0", {"type": "GOODBYE"})]


def test_a_server_that_some_worker_does_not_reach_in_time_is_sent_away() -> None:
    m = elastic(2, 1)
    m.hello(b"l0", late_server(0))
    connect(m, 1, b"w1")
    assert m.tend(100.0) == m.tend(100.0 + COMING_SECONDS - 0.1) == []
    out = m.tend(100.0 + COMING_SECONDS)
    assert kinds(out) == {b"l0": "LOST", b"w0": "GONE", b"w1": "GONE"}
    assert dict(out)[b"l0"]["text"].endswith("not connected after 30 s: worker 0 (h, pid 100)")


def test_a_worker_that_leaves_is_not_awaited() -> None:
    m = elastic(2, 1)
    m.hello(b"l0", late_server(0))
    connect(m, 1, b"w0")
    m.bye(b"w1", OK)
    m.tend(1.0)
    assert m.nodes[b"l0"].presence is Presence.LIVE


def test_a_server_at_the_address_of_another_replaces_it() -> None:
    """Its port was free, so the other has ended, as its connection will show."""
    m = elastic(2, 2)
    m.elastic_wait = 20.0
    m.nodes[b"s0"].lanes[:] = ["h:50"]
    out = m.hello(b"l0", late_server(0, servers=2) | {"lanes": ["h:50"]})
    assert [message["type"] for ident, message in out if ident == b"w0"] == ["TERM", "LANES"]
    assert m.nodes[b"s0"].left and m.gone(b"s0", "cut") == []


def test_a_late_server_learns_who_has_left_and_joined() -> None:
    m = elastic(3, 1)
    m.join(b"w0"), m.join(b"w1"), m.join(b"w2"), m.cleared(b"s0", {"generation": 0})
    m.join(b"w1")
    welcome = dict(m.hello(b"l0", late_server(0, workers=3)))[b"l0"]
    assert (welcome["left"], welcome["joined"], welcome["joins"]) == ([], [1], 1)
    m.join(b"w2")
    out = m.join(b"w0")
    assert kinds(out) == {b"s0": "CLEAR", b"l0": "CLEAR"}
    # The marks of this join are being cleared: it counts as ended.
    welcome = dict(m.hello(b"l1", late_server(1, workers=3)))[b"l1"]
    assert (welcome["joined"], welcome["joins"]) == ([], 2)
    m.cleared(b"s0", {"generation": 1})
    out = m.gone(b"l0", "cut")  # the last that has not confirmed
    assert [message["type"] for ident, message in out if ident == b"w0"] == ["GONE", "ALL_JOINED"]
    m.bye(b"w2", OK)
    welcome = dict(m.hello(b"l2", late_server(2, workers=3)))[b"l2"]
    assert [left["rank"] for left in welcome["left"]] == [2]


def test_jobs_whose_servers_cannot_change_accept_none() -> None:
    for change, why in (
        ({"BPSX_ELASTIC": "off"}, "BPSX_ELASTIC=off"),
        ({"BPSX_ELASTIC_WAIT": 0}, "BPSX_ELASTIC_WAIT=0"),
    ):
        m = running(2, 1, **{"BPSX_ELASTIC": "servers", "BPSX_ELASTIC_WAIT": 1, **change})
        (_, refused), *_ = m.hello(b"l0", late_server(0, **change))
        assert refused["type"] == "REFUSED" and refused["over"] and why in refused["reason"]
    m = elastic(2, 1)
    # A server that keeps its workers' outcomes for no one does not fit, either.
    (_, refused), *_ = m.hello(b"l1", late_server(1, BPSX_ELASTIC_WAIT=0))
    assert "BPSX_ELASTIC_WAIT=0" in refused["reason"]
    (_, refused), *_ = m.hello(b"l0", hello("server", -1, pid=7, config=config(2, 1)))
    assert "BPSX_ELASTIC=off" in refused["reason"]
    (_, refused), *_ = m.hello(b"x", hello("worker", 1, pid=7, config=config(2, 1)))
    assert refused["type"] == "REFUSED" and "only servers may join it now" in refused["reason"]


def test_a_join_ends_while_the_job_waits_for_a_server() -> None:
    """No server is there that could clear its marks."""
    m = elastic(2, 1)
    m.elastic_wait = 30.0
    m.gone(b"s0", "cut")
    assert not m.join(b"w0")
    assert m.join(b"w1") == [(w, {"type": "ALL_JOINED", "last": 1}) for w in (b"w0", b"w1")]
    welcome = dict(m.hello(b"l0", late_server(0)))[b"l0"]
    assert (welcome["joined"], welcome["joins"]) == ([], 1)
