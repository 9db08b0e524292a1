"""The scheduler's pure parts: who waits for what, who is warned, when the job is deadlocked."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bpsx.scheduler.stall_detector import Stalls
from unit.scheduler_tools import declare, kinds, running, waiting

# ---- waiting


def stalls(workers: int) -> Stalls:
    s = Stalls(10, 30)
    for rank in range(workers):
        s.enter(rank)
    return s


def told(s: Stalls, rank: int, *new: list, now: float = 0.0, **more) -> str:
    m = waiting(*new, **more)
    s.report(rank, m["new"], m["over"], now, m["busy"])
    return s.warning(rank)


def test_a_slow_worker_causes_repeated_warnings():
    s = stalls(3)
    assert told(s, 1, now=100.0) == "" == told(s, 0, ["w", 0, 7, 2.0], now=90.0)
    text = told(s, 0, now=100.0)
    assert (
        "tensor 'w' round 7: pushed 12 s ago by worker 0, not pushed by worker 1, worker 2" in text
    )
    assert told(s, 0, now=105.0) == told(s, 0, now=111.0) == ""  # once per stall
    assert told(s, 0, now=201.0)  # and again if it lasts
    assert told(s, 0, ["x", 0, 0, 10.0], over=[["w", 0]], now=210.0) == "" and "'x'" in told(
        s, 0, now=212.0
    )
    assert s.deadlock() == {}


@pytest.mark.parametrize("count", [1, 100, 400, 20_000])
def test_a_stall_of_any_number_of_tensors_is_one_warning_and_one_error(count):
    s = stalls(2)
    for at in range(0, count, 4096):
        chunk = [
            [f"t{i}", 0, 0, 1.0, 1.0 if i == 0 else -1] for i in range(at, min(at + 4096, count))
        ]
        assert told(s, 0, *chunk, now=1.0) == ""
    told(s, 1, ["other", 0, 0, 1.0], now=1.0)
    warnings = [(r, told(s, r, now=float(t))) for t in range(2, 29) for r in (0, 1)]
    (_, first), (_, second) = [w for w in warnings if w[1]]
    more = f" and {count - 1} more" if count > 1 else ""
    assert (
        f"tensor 't0' round 0{more}: pushed" in first
        and "not pushed by worker 1 (which waits for 'other')" in first
    )
    assert (
        "do all workers use the same names" in first and "'other'" in second and s.deadlock() == {}
    )
    told(s, 0, now=31.0), told(s, 1, now=31.0)
    stuck = s.deadlock()
    assert len(stuck[0]) == count and stuck[1] == [("other", 0)]


def test_a_report_in_several_messages_causes_one_warning():
    m = running(2)
    first = waiting(*[[f"t{i}", 0, 0, 11.0] for i in range(4096)]) | {"last": False}
    assert m.waiting(b"w0", first, 11.0) == []
    ((_, warning),) = m.waiting(
        b"w0", waiting(*[[f"t{i}", 0, 0, 11.0] for i in range(4096, 5000)]), 11.0
    )
    assert "tensor 't0' round 0 and 4999 more" in warning["text"]


def test_workers_all_waiting_for_missing_pushes_are_deadlocked():
    s = stalls(2)
    told(s, 0, ["both", 0, 0, 31.0], ["a", 0, 0, 31.0])
    told(s, 1, ["both", 0, 0, 31.0], ["b", 0, 0, 31.0])
    assert s.deadlock() == {0: [("a", 0)], 1: [("b", 0)]}
    s.clear()
    assert s.deadlock() == {}


@pytest.mark.parametrize(
    "second",
    [
        [["b", 0, 0, 29.0]],
        [],
        [["a", 0, 0, 31.0]],
        [["b", 0, 0, 31.0, -1]],
        [["b", 0, 0, 31.0, 29.0]],
    ],
)
def test_a_deadlock_is_reported_only_if_certain(second):
    s = stalls(2)
    told(s, 0, ["a", 0, 0, 31.0])
    told(s, 1, *second)
    assert s.deadlock() == {}


def test_a_worker_whose_other_thread_may_continue_gets_time():
    s = stalls(2)
    told(s, 0, ["a", 0, 0, 31.0])
    told(s, 1, ["b", 0, 0, 31.0], busy=True)
    assert s.deadlock() == {}
    told(s, 1, now=271.0, busy=True)
    assert s.deadlock()


def test_workers_out_of_step_after_a_stall_end_the_job():
    m = running(2)
    m.waiting(b"w0", waiting(["a", 0, 0, 31.0]) | {"calls": 3}, 0.0)
    out = m.waiting(b"w1", waiting(["b", 0, 0, 31.0]) | {"calls": 4}, 0.0)
    assert kinds(out) == {b"w0": "LOST", b"w1": "LOST", b"s0": "LOST"} and m.state == "failed"
    assert all(
        "the job has to end: worker 1 has asked for 4 push_pulls, worker 0 for 3" in o["text"]
        for _, o in out
        if o["type"] == "LOST"
    )


def test_after_a_stall_all_start_again_and_no_worker_leaves_before_all_know():
    m = running(2)
    m.declare(b"w0", declare("a", [4]))
    m.waiting(b"w0", waiting(["a", 0, 0, 31.0]), 0.0)
    out = m.waiting(b"w1", waiting(["b", 0, 0, 31.0]), 0.0)
    resets = [(i, o["epoch"], o["status"]) for i, o in out if o["type"] == "RESET"]
    assert resets == [(b"w0", 1, -4), (b"w1", 1, -4)]
    assert (
        m.declare(b"w0", declare("a", [4]))
        == []
        == m.waiting(b"w0", waiting(["a", 0, 0, 99.0]), 0.0)
    )  # a report about the previous epoch
    assert m.heard(b"w1") == [] == m.bye(b"w1", {"failure": ""})
    assert kinds(m.heard(b"w0")) == {b"w1": "GOODBYE", b"s0": "LEFT"}
    assert kinds(m.declare(b"w0", declare("a", [5]) | {"epoch": 1})) == {b"w0": "PLACED"}


@pytest.mark.parametrize("how", ["heard", "gone", "failed"])
def test_a_worker_that_leaves_after_a_mismatch_waits_until_the_others_know(how):
    m = running(3)
    m.declare(b"w0", declare("a", [4]))
    assert kinds(m.declare(b"w1", declare("a", [5]))) == {b"w0": "FAILED", b"w1": "FAILED"}
    assert m.bye(b"w1", {"failure": "boom" if how == "failed" else ""}) == []
    if how == "gone":
        out = m.gone(b"w0", "cut")
        assert kinds([o for o in out if o[0] == b"w2"]) == {b"w2": "LOST"} and m.blamed.rank == 0
    else:
        out = m.heard(b"w0")
        assert (b"w2" in kinds(out)) == (how == "failed")
    assert kinds(out)[b"w1"] in ("GOODBYE", "LOST") and m.nodes[b"w1"].left


def test_a_leaving_worker_need_not_confirm_a_mismatch():
    m = running(3)
    m.declare(b"w0", declare("a", [4])), m.declare(b"w1", declare("a", [5]))
    assert (
        m.bye(b"w0", {"failure": ""}) == []
        and kinds(m.bye(b"w1", {"failure": ""}))[b"w1"] == "GOODBYE"
    )
    assert m.nodes[b"w0"].left and m.nodes[b"w1"].left


def test_a_worker_that_leaves_or_joins_is_not_waited_for():
    s = stalls(3)
    told(s, 0, ["a", 0, 0, 31.0]), told(s, 1, ["b", 0, 0, 31.0])
    s.leave(2)
    assert s.deadlock() == {0: [("a", 0)], 1: [("b", 0)]}
    s.leave(1)
    assert s.deadlock() == {} and "its sum has not arrived yet" in told(s, 0, now=101.0)


@pytest.mark.parametrize("ended", [[], [0]])
def test_a_tensor_pushed_by_all_without_a_reply_is_reported(ended):
    s = stalls(2)
    for rank in (0, 1):
        s.report(rank, [["a", 0, 0, 5.0, 5.0]], [], 0.0)
    for rank in ended:  # a worker that has the result does not count as one that has not pushed
        s.report(rank, [], [["a", 0]], 0.0)
    assert "its sum has not arrived yet" in told(s, 1, now=30.0)


def test_a_round_that_is_over_elsewhere_does_not_count_for_the_next():
    """Worker 1 reports late that its round 2 is over, while worker 0 already waits in round 3."""
    s = stalls(2)
    told(s, 1, ["a", 0, 2, 1.0], now=1.0)
    told(s, 0, ["a", 0, 3, 0.1], now=1.1)
    told(s, 1, ["b", 0, 0, 0.1], over=[["a", 0]], now=1.2)
    told(s, 0, now=40.0), told(s, 1, now=40.0)
    assert s.deadlock() == {0: [("a", 0)], 1: [("b", 0)]}


OPERATIONS = st.lists(
    st.one_of(
        st.tuples(st.just("report"), st.integers(0, 3), st.integers(0, 3), st.booleans()),
        st.tuples(st.just("over"), st.integers(0, 3), st.integers(0, 3), st.booleans()),
        st.tuples(
            st.sampled_from(["leave", "enter"]), st.integers(0, 3), st.just(0), st.booleans()
        ),
    ),
    max_size=60,
)


@settings(max_examples=400, deadline=None)
@given(OPERATIONS)
def test_incremental_counts_equal_recounted_ones(operations):
    """The incremental counts equal those of a model that recounts everything each time."""
    s, live, pushed, now = stalls(4), set(range(4)), {}, 0.0
    for what, rank, tensor, waited in operations:
        now += 7.0
        key = (f"t{tensor}", 0)
        if what == "leave":
            s.leave(rank), live.discard(rank)
            pushed = {k: v for k, v in pushed.items() if k[0] != rank}
        elif what == "enter":
            s.enter(rank), live.add(rank)
        elif rank in live:
            known = pushed.pop((rank, key), None)
            if what == "report":
                # Reporting the same round again changes only whether a script waits for it.
                pushed[rank, key] = [
                    now - 1.0,
                    now - 1.0 if waited else None,
                    bool(known and known[2]),
                ]
                s.report(rank, [[*key, 0, 1.0, 1.0 if waited else -1]], [], now)
            else:
                s.report(rank, [], [key], now)
        for r in live:
            s.report(r, [], [], now)
        for key in {k for _, k in pushed}:
            if live and all((r, key) in pushed for r in live):
                for r in live:
                    pushed[r, key][2] = True
        stuck = {
            r: any(
                v[1] is not None and not v[2] and now - v[1] >= 30.0
                for (q, _), v in pushed.items()
                if q == r
            )
            for r in live
        }
        expected = len(live) > 1 and all(stuck.values())
        found = s.deadlock()
        assert bool(found) == expected
        assert {r: set(keys) for r, keys in found.items()} == (
            {r: {k for (q, k), v in pushed.items() if q == r and not v[2]} for r in live}
            if expected
            else {}
        )
