"""Servers that ask to leave a running job, at the scheduler."""

from __future__ import annotations

from typing import Any

from bpsx.scheduler import messages
from bpsx.scheduler.states import Handover, JobState
from unit.scheduler_tools import declare, elastic, kinds, late_server, running
from unit.test_arrivals import OK, connect, moves


def ask(m: Any, ident: bytes) -> list[Any]:
    message = {"type": "DEPART", "why": "SIGTERM", "needs": ""}
    messages.check(message)
    return m.depart(ident, message, 5.0)


def test_its_keys_go_to_the_others_at_once() -> None:
    m = elastic(2, 3)
    m.declare(b"w0", declare("a", [4]))
    out = ask(m, b"s0")
    assert out[0] == (b"s0", {"type": "GOODBYE"})
    assert kinds(out[1:]) == dict.fromkeys((b"w0", b"w1", b"s1", b"s2"), "TERM")
    assert [lane for lane, _ in moves(out)] == [0]
    assert "server 0 (h, pid 900) leaves the job: SIGTERM; the job goes on" in m.losses[0].text
    assert m.nodes[b"s0"].left and m.gone(b"s0", "cut") == [] == ask(m, b"s0")
    assert m.bye(b"s0", OK) == [(b"s0", {"type": "GOODBYE"})]


def test_the_last_one_stays_until_another_has_come() -> None:
    m = elastic(2, 2)
    assert kinds(ask(m, b"s0"))[b"s0"] == "GOODBYE"
    assert ask(m, b"s1") == [
        (b"s1", {"type": "STAY", "text": "no other server can take its keys over"})
    ]
    m.hello(b"l0", late_server(0, servers=2))
    assert connect(m, 2, b"w0") == []
    out = connect(m, 2, b"w1")
    assert kinds(out) == {b"s1": "GOODBYE", b"w0": "TERM", b"w1": "TERM", b"l0": "TERM"}
    assert {to for _, targets in moves(out) for to, _ in targets} == {2}
    assert m.state is JobState.RUNNING and m.terms.state is Handover.MOVING


def test_one_that_dies_meanwhile_is_a_death() -> None:
    m = elastic(2, 1)
    m.elastic_wait = 20.0
    ask(m, b"s0")
    assert kinds(m.gone(b"s0", "cut", 6.0)) == {b"w0": "GONE", b"w1": "GONE"}
    m.hello(b"l0", late_server(0))
    connect(m, 1, b"w0")
    assert set(kinds(connect(m, 1, b"w1")).values()) == {"TERM"}
    assert m.nodes[b"l0"].left is False


def test_one_to_which_workers_still_connect_leaves_without_a_term() -> None:
    m = elastic(2, 1)
    m.hello(b"l0", late_server(0))
    assert kinds(ask(m, b"l0")) == {b"l0": "GOODBYE", b"w0": "GONE", b"w1": "GONE"}
    assert m.terms.number == 0 and connect(m, 1, b"w0", b"w1") == []


def test_one_stays_if_a_worker_has_left() -> None:
    m = elastic(2, 2)
    m.bye(b"w1", OK)
    ((ident, stay),) = ask(m, b"s0")
    assert (ident, stay["type"]) == (b"s0", "STAY") and "worker 1 (h, pid 101)" in stay["text"]
    assert m.tend(9.0) == [] and not m.nodes[b"s0"].left


def test_one_stays_if_the_servers_cannot_change() -> None:
    m = running(2, 2)
    assert ask(m, b"s0") == [(b"s0", {"type": "STAY", "text": "BPSX_ELASTIC=off"})]


def test_only_servers_of_a_running_job_are_heard() -> None:
    m = elastic(1, 2)
    assert ask(m, b"w0") == ask(m, b"x") == []
    m.bye(b"w0", OK)
    assert m.state is JobState.DONE and ask(m, b"s0") == []
