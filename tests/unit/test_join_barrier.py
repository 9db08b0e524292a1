"""The hub's part in join() and in asynchronous jobs: messages, their order, the final status."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from bpsx.scheduler.join_barrier import Joins
from bpsx.scheduler.membership import Membership
from bpsx.session.join import Joining
from bpsx.session.states import Event, Lifetime
from unit.scheduler_tools import config, declare, hello, kinds, members, running, waiting


def asynchronous(workers: int = 3, servers: int = 1) -> Membership:
    m = members(workers, servers)
    on = config(workers, servers, BYTEPS_ENABLE_ASYNC=1)
    for i in range(servers):
        m.hello(b"s%d" % i, hello("server", -1, workers, servers, pid=900 + i, config=on))
    for r in range(workers):
        m.hello(b"w%d" % r, hello("worker", r, workers, servers, config=on))
    assert m.state == "running" and m.asynchronous
    return m


def test_nobody_joins_before_all_have_heard_of_an_error():
    """A round that the error ends would close without it, and the sum overtake the error."""
    for ends in ("HEARD", "BYE"):
        m = running(3, 1)
        for rank, size in enumerate((5, 6, 5)):
            m.declare(b"w%d" % rank, declare("x", [size]))
        assert m.heard(b"w1") == [] == m.join(b"w1") == m.join(b"w1") == m.heard(b"w2")
        after = m.heard(b"w0") if ends == "HEARD" else m.bye(b"w0", {"failure": ""}, 1.0)
        joined = (b"s0", {"type": "JOINED", "rank": 1, "generation": 0})
        assert joined in after and joined not in m.join(b"w1")


def test_workers_are_released_when_all_servers_have_cleared():
    m = running(2, 2)
    joined = {"type": "JOINED", "rank": 1, "generation": 0}
    assert m.join(b"w1") == [(s, joined) for s in (b"s0", b"s1")]
    assert m.join(b"w1") == [] == m.join(b"s0") == m.join(b"nobody")
    clear = {"type": "CLEAR", "generation": 0, "entering": [], "term": 0}
    assert m.join(b"w0") == [(s, clear) for s in (b"s0", b"s1")]
    assert (
        m.cleared(b"s0", {"generation": 0})
        == []
        == m.cleared(b"s0", {"generation": 0})
        == m.cleared(b"s1", {"generation": 1})
    )
    assert m.cleared(b"s1", {"generation": 0}) == [
        (w, {"type": "ALL_JOINED", "last": 0}) for w in (b"w0", b"w1")
    ]
    assert m.cleared(b"s1", {"generation": 0}) == []
    m.join(b"w0")
    assert {o["generation"] for _, o in m.join(b"w1")} == {1}


def test_leaving_instead_of_joining_is_reported_at_any_time():
    m = running(3)
    m.join(b"w1")
    out = m.bye(b"w0", {"failure": ""})
    ((ident, told),) = [o for o in out if o[1]["type"] == "UNJOINED"]
    assert ident == b"w1" and "worker 0" in told["text"]
    assert kinds(m.join(b"w2")) == {b"s0": "JOINED", b"w1": "UNJOINED", b"w2": "UNJOINED"}


def test_a_joined_worker_is_neither_waiting_nor_waited_for():
    m = running(3)
    m.join(b"w0")
    ((_, warning),) = m.waiting(b"w1", waiting(["t", 0, 0, 40.0]), 0.0)
    assert warning["text"].startswith(
        "tensor 't' round 0: pushed 40 s ago by worker 1, not pushed by worker 2; is that worker"
        " slow"
    )
    out = m.waiting(b"w2", waiting(["u", 0, 0, 40.0]), 0.0)
    assert [o["text"] for _, o in out if o["type"] == "RESET"] and all(
        "worker 0" not in o["text"] for _, o in out
    )


def test_an_asynchronous_job_survives_lost_workers_and_reports_them_at_its_end():
    m = asynchronous()
    out = m.gone(b"w1", "cut")
    assert kinds(out) == {b"w0": "WARN", b"w2": "WARN", b"s0": "LEFT"} and m.state == "running"
    assert all("worker 1 (" in o["text"] for _, o in out if o["type"] == "WARN")
    assert kinds(m.bye(b"w0", {"failure": "boom"})) == {
        b"w0": "GOODBYE",
        b"w2": "WARN",
        b"s0": "LEFT",
    }
    assert kinds(m.bye(b"w2", {"failure": ""}))[b"s0"] == "END"
    assert m.state == "failed" and "worker 1" in m.failure and "boom" in m.failure


def test_the_death_of_the_last_worker_ends_the_job():
    m = asynchronous(1)
    assert (
        kinds(m.gone(b"w0", "cut"))[b"s0"] in ("LOST", "END")
        and m.state == "failed"
        and "worker 0" in m.failure
    )


def test_a_lost_server_fails_an_asynchronous_job_too():
    m = asynchronous(2, 2)
    assert set(kinds(m.gone(b"s0", "cut")).values()) == {"LOST"} and m.state == "failed"


def test_a_death_completes_a_gathering_of_an_asynchronous_job_without_naming_the_dead():
    m = asynchronous()
    m.join(b"w0"), m.join(b"w1")
    m.gone(b"w1", "cut")
    assert kinds(m.gone(b"w2", "cut"))[b"s0"] == "CLEAR"
    assert m.cleared(b"s0", {"generation": 0}) == [(b"w0", {"type": "ALL_JOINED", "last": 0})]


def test_servers_must_agree_with_workers():
    m = members()
    m.hello(b"w0", hello("worker", 0, config=config(2, 1, BYTEPS_ENABLE_ASYNC=1)))
    ((_, answer),) = m.hello(b"s0", hello("server", -1))
    assert (
        answer["type"] == "REFUSED"
        and "BYTEPS_ENABLE_ASYNC=0 on this server, 1 on a worker" in answer["reason"]
        and not answer["over"]
    )
    m = running()
    assert dict(m.hello(b"w9", hello("worker", 1, pid=5)))[b"w9"]["over"] is True


@settings(max_examples=300, deadline=None)
@given(st.integers(1, 4), st.integers(1, 3), st.data())
def test_marks_never_outlive_their_join(workers, servers, data):
    """In any order of events, servers are told to clear marks before workers are told.

    The message to clear comes after the last mark that the server was told of.
    """
    joins, marks, told = Joins(), {b"%d" % s: set() for s in range(servers)}, []
    waiting, pending, newest = set(), [], -1
    for _ in range(40):
        choices = [("join", r) for r in range(workers) if r not in waiting] + [
            ("clear", s) for s in pending
        ]
        what, who = data.draw(st.sampled_from(choices))
        if what == "clear":
            pending.remove(who)
            last = joins.cleared(who, joins.generation)
            if last is not None:
                assert (
                    waiting == set(range(workers))
                    and not any(marks.values())
                    and not pending
                    and last == newest
                )
                told.append(last)
                waiting.clear()
            continue
        waiting.add(who)
        newest = who
        for server, message in joins.join(who, range(workers), marks):
            if message["type"] == "JOINED":
                marks[server].add(message["rank"])
            else:
                marks[server].clear()
                pending.append(server)
    assert len(told) == joins.generation


def test_join_in_a_failed_job_reports_the_failure():
    """If the job failed before join(), join() must raise that failure.

    Its request must not be refused because this worker has joined.
    """
    life = Lifetime()
    life.move(Event.BEGUN), life.move(Event.JOB_FAILS)
    joining = Joining(life)
    assert joining.run(lambda: 0, lambda _: None, lambda _: None) == -1
    assert not life.halted
