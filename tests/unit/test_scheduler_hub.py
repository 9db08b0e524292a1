"""The scheduler's pure parts: who may join, what names mean, which messages are valid."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
import zmq
from hypothesis import given, settings
from hypothesis import strategies as st

from bpsx.planning.placement import Placement
from bpsx.scheduler import messages
from bpsx.scheduler.hub import Hub
from bpsx.scheduler.messages import PROTOCOL
from bpsx.scheduler.registry import Registry
from unit.scheduler_tools import config, declare, hello, kinds, members, running, waiting

# ---- joining


@pytest.mark.parametrize("order", [["w0", "s0", "w1"], ["s0", "w1", "w0"], ["w1", "w0", "s0"]])
def test_the_last_arrival_starts_the_job_for_all(order):
    m = members()
    outputs = []
    for i, who in enumerate(order):
        outputs = m.hello(
            who.encode(),
            hello("worker" if who[0] == "w" else "server", int(who[1]) if who[0] == "w" else -1),
        )
        assert (m.state == "running") == (i == 2)
    assert kinds(outputs) == {b"w0": "WELCOME", b"w1": "WELCOME", b"s0": "WELCOME"}
    worker, server = dict(outputs)[b"w1"], dict(outputs)[b"s0"]
    # A server reports the worker that it has lost.
    peers = [[0, "worker 0 (h, pid 100)"], [1, "worker 1 (h, pid 101)"]]
    assert worker.pop("probes") is False
    assert (worker["job"], worker["workers"], len(worker["servers"])) == (9, 2, 1) and {
        **worker,
        "rank": 0,
        "first": 0,
        "left": [],
        "joined": [],
        "joins": 0,
        "term": 0,
        "dropped": [],
        "size": 2,
        "peers": peers,
        "vacant": [],
    } == server


def test_missing_processes_are_known():
    m = members(3, 2)
    m.hello(b"w1", hello("worker", 1, 3, 2))
    m.hello(b"s0", hello("server", -1, 3, 2))
    assert m.missing() == ["worker 0", "worker 2", "1 of 2 servers"]
    assert m.present() == ["worker 1 (h, pid 101)", "server 0 (h, pid 149)"]


@pytest.mark.parametrize(
    ("message", "text"),
    [
        (hello("worker", 0, pid=7), "worker 0 (h, pid 100) is already in the job"),
        (hello("worker", 5), "rank 5"),
        (hello("boss", 0), "'boss'"),
        (hello("worker", 1, protocol=PROTOCOL + 1), f"protocol version {PROTOCOL + 1}"),
        (hello("worker", 1, 3), "DMLC_NUM_WORKER=3"),
        (hello("server", -1, 2, 4), "DMLC_NUM_SERVER=4"),
        (hello("worker", 1, config=config(2, 0)), "set DMLC_NUM_SERVER=0 for the scheduler"),
        (
            hello("worker", 1, config=config(2, 1, BYTEPS_PARTITION_BYTES=8192)),
            "BYTEPS_PARTITION_BYTES=8192",
        ),
        (hello("server", -1, pid=8), "the job already has its server (DMLC_NUM_SERVER=1)"),
        (hello("server", -1, lanes=[]), "has no lanes"),
        (hello("worker", 1, config=config(2, 1, BYTEPS_LOCAL_SIZE="x")), "invalid options: "),
    ],
)
def test_a_refusal_says_why_and_changes_nothing(message, text):
    m = members()
    m.hello(b"w0", hello("worker", 0))
    if "lanes" not in text:
        m.hello(b"s0", hello("server", -1))
    before = m.present()
    ((ident, answer),) = m.hello(b"x", message)
    assert (ident, answer["type"]) == (b"x", "REFUSED") and text in answer["reason"]
    assert m.present() == before and m.state == "waiting"


@pytest.mark.parametrize(
    "message",
    [
        hello("worker", 1, config=config(2, 1, BYTEPS_PARTITION_BYTES=8192)),
        hello("worker", 1, protocol=PROTOCOL + 1),
        hello("server", -1, config=config(2, 1, BPSX_ENCRYPT=1)),
        hello("server", -1, 2, 4),
    ],
)
def test_a_refused_process_is_missed_until_it_returns_with_other_options(message):
    m = members()
    m.hello(b"w0", hello("worker", 0))
    assert kinds(m.hello(b"x", message)) == {b"x": "REFUSED"}
    when, text = m.vanished.due(5.0, 3.0)
    who = "worker 1 (h, pid 101)" if message["role"] == "worker" else "server (h, pid 149)"
    assert (
        when == 8.0
        and text.startswith(f"{who} was refused (")
        and text.endswith(
            "), and did not come back within 3 s (BPSX_GATHER_GRACE) while the job was gathering"
        )
    )
    m.hello(b"again", hello(message["role"], message["rank"], pid=7))
    assert m.vanished.due(6.0, 3.0) is None


@pytest.mark.parametrize(
    "message",
    [
        hello("worker", 0, pid=7),
        hello("worker", 0, protocol=PROTOCOL + 1),
        hello("worker", 5),
        hello("boss", 0),
        hello("server", -1, pid=8),
        hello("worker", 10**6, config=config(2, 1, BYTEPS_LOCAL_SIZE=10**9)),
    ],
)
def test_a_process_without_a_place_is_not_missed(message):
    m = members()
    m.hello(b"w0", hello("worker", 0))
    m.hello(b"s0", hello("server", -1))
    assert kinds(m.hello(b"x", message)) == {b"x": "REFUSED"}
    assert m.vanished.due(5.0, 3.0) is None and not m.refused


def test_before_the_first_worker_a_refused_ones_own_machine_size_counts():
    m = members()
    m.hello(b"x", hello("worker", 7, 2, 4, config=config(2, 4, BYTEPS_LOCAL_SIZE=4)))
    assert "worker 7" in m.vanished.due(0.0, 3.0)[1]


def test_no_process_joins_a_running_job():
    assert "running" in dict(running().hello(b"x", hello("worker", 1, pid=3)))[b"x"]["reason"]


def test_a_node_that_reconnects_while_gathering_takes_its_own_place():
    m = members()
    m.hello(b"w0", hello("worker", 0))
    assert m.hello(b"w0", hello("worker", 0)) == []
    m.hello(b"w0-again", hello("worker", 0))
    assert m.gone(b"w0", "x") == [] and m.missing() == ["worker 1", "the server"]


def test_a_process_that_goes_while_the_job_gathers_may_return():
    m = members()
    m.hello(b"w0", hello("worker", 0))
    assert m.gone(b"w0", "x") == [] and "worker 0" in m.missing()
    assert m.bye(b"nobody", {"failure": ""}) == [(b"nobody", {"type": "GOODBYE"})]


# ---- leaving


def test_a_loss_is_reported_by_name_to_all_others():
    m = running(3, 2)
    outputs = m.gone(b"w1", "its connection broke")
    assert kinds(outputs) == dict.fromkeys([b"w0", b"w2", b"s0", b"s1"], "LOST")
    assert all(
        "worker 1 (h, pid 101) is gone: its connection broke" in m["text"] for _, m in outputs
    )
    assert m.state == "failed" and not m.everybody_left()


def test_leaving_in_good_order():
    m = running(2, 1)
    assert kinds(m.bye(b"w0", {"failure": ""})) == {b"w0": "GOODBYE", b"s0": "LEFT"}
    outputs = m.bye(b"w1", {"failure": ""})
    assert [o["type"] for i, o in outputs if i == b"s0"][-1] == "END" and m.state == "done"
    m.bye(b"s0", {"failure": ""})
    assert m.everybody_left()
    assert m.gone(b"w0", "x") == [] and m.bye(b"w0", {"failure": ""}) == [
        (b"w0", {"type": "GOODBYE"})
    ]


@pytest.mark.parametrize(
    ("who", "failure", "text"),
    [
        (b"w1", "RuntimeError: no", "worker 1 (h, pid 101) has failed: RuntimeError: no"),
        (b"s0", "", "server 0 (h, pid 900) has left while workers were running"),
    ],
)
def test_leaving_with_work_outstanding_is_a_failure(who, failure, text):
    m = running()
    outputs = m.bye(who, {"failure": failure})
    assert (
        any(o["type"] == "LOST" and text in o["text"] for _, o in outputs) and m.state == "failed"
    )


def test_the_first_cause_is_blamed():
    m = running(3, 1)
    assert m.blamed is None
    m.bye(b"w1", {"failure": ""})
    m.bye(b"w0", {"failure": "ended by PeerLeftError: tensor 'a': worker 1 has left"})
    m.gone(b"s0", "x")
    assert str(m.blamed) == "worker 1 (h, pid 101)"
    for end, who in (
        (lambda m: m.gone(b"w2", "x"), "w2"),
        (lambda m: m.bye(b"w2", {"failure": "ended by ValueError: x"}), "w2"),
        (lambda m: m.bye(b"s0", {"failure": ""}), "s0"),
    ):
        m = running(3, 1)
        m.bye(b"w1", {"failure": ""})
        end(m)
        m.gone(b"w0", "x")
        assert m.blamed.ident.decode() == who
    m = running()
    m.abort("the scheduler was ended by SIGTERM")
    assert m.blamed is None


def test_an_asynchronous_job_that_lost_a_worker_reports_that_at_its_end():
    m = members()
    m.hello(b"s0", hello("server", -1, config=config(2, 1, BYTEPS_ENABLE_ASYNC=1)))
    for rank in (0, 1):
        m.hello(b"w%d" % rank, hello("worker", rank, config=config(2, 1, BYTEPS_ENABLE_ASYNC=1)))
    m.gone(b"w1", "its connection broke")
    assert m.state == "running" and not m.survived
    m.bye(b"w0", {"failure": ""})
    assert m.state == "failed" and m.survived
    assert m.failure == (
        "worker 1 (h, pid 101) is gone: its connection broke; the other workers continued and"
        " left in good order"
    )


def test_servers_are_ended_when_the_last_worker_is_gone_even_after_a_failure():
    m = running()
    m.gone(b"w0", "x")
    assert (b"s0", {"type": "END"}) in m.bye(b"w1", {"failure": "x"})


@settings(max_examples=200, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.sampled_from(["hello", "bye", "badbye", "gone", "declare", "waiting"]),
            st.sampled_from(["w0", "w1", "w2", "s0", "s1", "x"]),
        ),
        max_size=60,
    )
)
def test_the_state_of_a_job_only_advances(events):
    m = members(3, 2)
    order = ["waiting", "running", "done", "failed"]
    for n, (what, who) in enumerate(events):
        before = m.state
        ident = who.encode()
        if what == "hello":
            m.hello(
                ident,
                hello(
                    "worker" if who[0] == "w" else "server",
                    int(who[1:]) if who[0] == "w" else -1,
                    3,
                    2,
                    pid=ord(who[-1]),
                ),
            )
        elif what in ("bye", "badbye"):
            m.bye(ident, {"failure": "x" if what == "badbye" else ""})
        elif what == "gone":
            m.gone(ident, "x")
        elif what == "declare":
            m.declare(ident, declare("t", [n % 2 + 1]))
        else:
            m.waiting(ident, waiting(["t", 0, n, 40.0]), float(n))
        assert order.index(m.state) >= order.index(before) and not (
            before == "done" and m.state == "failed"
        )
        assert len(m.missing()) >= 0 and isinstance(m.everybody_left(), bool)


# ---- names


def registry() -> Registry:
    return Registry(Placement([1, 1], partition_bytes=8192), 8192)


def test_all_workers_get_the_placement_of_the_first():
    r = registry()
    first, told = r.declare(1, "w", 0, 20_000, 3, [5000])
    second, told_second = r.declare(0, "w", 0, 20_000, 3, [5000])
    assert (
        (told, told_second) == ([1], [0])
        and second.places == first.places
        and len(first.places) == 3
    )


def test_a_compressed_tensor_has_partitions_of_twice_the_size():
    known, _ = registry().declare(0, "w", 0, 20_000, 3, [5000], '{"compressor":"onebit"}')
    assert len(known.places) == 2


def test_a_mismatch_is_reported_to_all_earlier_and_later_declarers():
    r = registry()
    r.declare(0, "w", 0, 16, 3, [4])
    r.declare(1, "w", 0, 16, 3, [4])
    known, told = r.declare(2, "w", 0, 16, 3, [2, 2])
    assert (
        sorted(told) == [0, 1, 2]
        and "worker 0 has float32 of shape (4,), worker 2 has float32 of shape (2, 2)"
        in known.failure
    )
    assert r.declare(3, "w", 0, 16, 3, [4])[1] == [3] and known.failure
    # worker 0's next declaration is a new one
    assert not r.declare(0, "w", 1, 16, 3, [4])[0].failure


def test_after_a_stall_names_start_at_their_first_generation_with_new_keys():
    r = registry()
    before, _ = r.declare(0, "w", 0, 16, 3, [4])
    r.declare(1, "w", 0, 16, 3, [5])
    r.clear()
    after, told = r.declare(1, "w", 0, 16, 3, [4])
    assert (after.failure, told) == ("", [1]) and {p.key for p in after.places}.isdisjoint(
        p.key for p in before.places
    )
    assert r.describe("w", 0) == "'w' (float32 of shape (4,))" and r.describe("x", 0) == "'x'"


# ---- the hub


class _Deaf:
    """A socket to nodes of which some are dead.

    The scheduler finds that out when it sends to them.
    """

    def __init__(self, dead: set[bytes]) -> None:
        self.dead = dead
        self.sent: list[tuple[bytes, str]] = []

    def send_multipart(self, frames: list[bytes]) -> None:
        if frames[0] in self.dead:
            raise zmq.ZMQError(zmq.EHOSTUNREACH)
        self.sent.append((frames[0], messages.decode(frames[1])["type"]))


def test_a_server_gets_the_failure_before_the_end_when_all_workers_die_at_once():
    m = members(2, 1)
    for r in range(2):  # connected before the server, so they are told first
        m.hello(b"w%d" % r, hello("worker", r, 2, 1))
    m.hello(b"s0", hello("server", -1, 2, 1))
    hub = object.__new__(Hub)
    hub._members, hub._broke, hub._socket = m, "its connection broke", _Deaf({b"w0", b"w1"})
    hub._gone, hub._silent_until = [], float("-inf")
    hub._monitor = SimpleNamespace(getsockopt=lambda option: 0)
    hub._send(hub._members.gone(b"w0", hub._broke))
    hub._bury()
    assert hub._socket.sent == [(b"s0", "LOST"), (b"s0", "END")]


# ---- messages


@settings(max_examples=500, deadline=None)
@given(
    st.one_of(
        st.binary(max_size=300),
        st.recursive(
            st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=9),
            lambda c: st.lists(c, max_size=5) | st.dictionaries(st.text(max_size=5), c, max_size=5),
            max_leaves=20,
        ).map(lambda x: json.dumps(x).encode()),
        st.builds(
            lambda kind, field, value: json.dumps(
                {**hello("worker", 0), **waiting(), "type": kind, field: value}
            ).encode(),
            st.sampled_from(["HELLO", "DECLARE", "WAITING", "BYE", "WELCOME"]),
            st.sampled_from(
                [
                    "protocol",
                    "role",
                    "rank",
                    "lanes",
                    "config",
                    "name",
                    "new",
                    "over",
                    "epoch",
                    "shape",
                    "failure",
                ]
            ),
            st.none()
            | st.integers()
            | st.text()
            | st.lists(st.integers() | st.lists(st.integers() | st.text() | st.floats()))
            | st.just({}),
        ),
    )
)
def test_anything_is_a_message_or_a_bad_message(data):
    try:
        message = messages.decode(data)
        messages.check(message)
    except messages.BadMessage:
        return
    m = running()
    if message["type"] == "HELLO":
        m.hello(b"x", message)
    elif message["type"] == "DECLARE":
        m.declare(b"w0", message)
    elif message["type"] == "WAITING":
        m.waiting(b"w0", message, 0.0)


def test_deep_nesting_is_refused():
    with pytest.raises(messages.BadMessage):
        messages.decode(b"[" * 200_000)
