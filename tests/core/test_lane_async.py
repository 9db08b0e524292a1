"""A server's lane in asynchronous training.

Only the pusher gets an answer: the value after its push.
"""

from __future__ import annotations

import numpy as np
import pytest

from bpsx.dtypes import DTYPES
from bpsx.kernels.reference import reduce
from core.test_lane import BIG, values
from support import wire as w

ONE = np.float32([1]).tobytes()


@pytest.mark.parametrize("n", [1, 7, 33_001])
@pytest.mark.parametrize("dtype", [d.name for d in DTYPES])
def test_every_push_is_added_at_once_and_answered_to_its_sender(rig, dtype, n):
    """After each push the value is the oracle's sum of the old value and the push, rounded once."""
    r = rig(3, asynchronous=True)
    want = np.zeros_like(values(dtype, n, 0))
    r.register(0, want.nbytes, dtype)
    rounds = [0, 0, 0]
    for i, rank in enumerate((0, 0, 2, 1, 2, 0)):
        divisor = 3 if i % 2 else 1
        push = values(dtype, n, i)
        r.push(
            rank,
            0,
            push.tobytes(),
            dtype=dtype,
            round_=rounds[rank],
            divisor=divisor,
            flags=w.ASYNC,
        )
        want = reduce([want, reduce([push], dtype, divisor)], dtype)
        (answer,) = r.take(rank)
        assert (answer.kind, answer.round, answer.cookie, answer.key) == (
            w.ANSWER,
            rounds[rank],
            1000 + rank,
            100,
        )
        assert answer.body == want.tobytes()
        rounds[rank] += 1
    for rank in range(3):
        r.assert_nothing_for(rank)


def test_an_answer_is_a_snapshot(rig):
    """A later push does not change an earlier answer that is still being sent."""
    r = rig(2, asynchronous=True)
    r.register(0, BIG)
    one = np.ones(BIG // 4, np.float32)
    for round_ in range(5):
        r.push(0, 0, one.tobytes(), round_=round_, flags=w.ASYNC)
    assert [r.take(0)[0].body for _ in range(5)] == [(one * (i + 1)).tobytes() for i in range(5)]


def test_a_repeat_is_ignored_and_nonsense_refused(rig):
    r = rig(2, asynchronous=True)
    r.register(0, 4)
    r.push(0, 0, ONE, flags=w.ASYNC), r.push(0, 0, ONE, flags=w.ASYNC)
    assert r.take(0)[0].body == ONE
    for change in (
        {"round": 2},
        {"key": 5},
        {"divisor": 0},
        {"dtype": "int32"},
        {"length": 8, "body": bytes(8)},
        {"slot": 9},
        {"term": 1},
    ):
        r.push(0, 0, ONE, flags=w.ASYNC, **{"round": 1, **change})
        (refusal,) = r.take(0)
        assert (refusal.kind, refusal.divisor) == (w.ERROR, 5), change
    r.push(0, 0, ONE, round_=1, flags=w.ASYNC)
    assert r.take(0)[0].body == np.float32([2]).tobytes()
    assert (r.lane.counters()["repeated"], r.lane.counters()["malformed"]) == (1, 7)


def test_a_synchronous_lane_refuses_it(rig):
    r = rig(2)
    r.register(0, 4)
    r.push(0, 0, ONE, flags=w.ASYNC)
    assert (r.take(0)[0].kind, r.lane.counters()["malformed"]) == (w.ERROR, 1)


@pytest.mark.parametrize("divisor", [1, 2])
@pytest.mark.parametrize("n", [4, BIG])
def test_a_broadcast_sets_the_value_while_others_push(rig, n, divisor):
    r = rig(2, asynchronous=True)
    r.register(0, n)
    one, nine = (np.full(n // 4, v, np.float32).tobytes() for v in (1, 9))
    r.push(0, 0, one, flags=w.ASYNC)
    assert r.take(0)[0].body == one
    r.push(0, 0, nine, divisor=0, flags=w.ASYNC | w.BROADCAST, round_=1)
    r.assert_nothing_for(0)
    # The broadcast is not complete yet, so this push adds to the old value.
    r.push(1, 0, one, divisor=divisor, flags=w.ASYNC)
    assert r.take(1)[0].body == np.full(n // 4, 1 + 1 / divisor, np.float32).tobytes()
    r.push(1, 0, b"", divisor=0, flags=w.ASYNC | w.BROADCAST, round_=1)
    assert r.take(0)[0].body == r.take(1)[0].body == nine
    r.push(1, 0, one, flags=w.ASYNC, round_=2)
    assert r.take(1)[0].body == np.full(n // 4, 10, np.float32).tobytes()


def test_a_plain_broadcast_and_a_plain_sum_leave_the_value_alone(rig):
    r = rig(2, asynchronous=True)
    r.register(0, 4)
    r.push(0, 0, ONE, flags=w.ASYNC)
    r.take(0)
    for rank in range(2):
        r.push(
            rank,
            0,
            np.float32([7]).tobytes() if rank == 0 else b"",
            divisor=0,
            flags=w.BROADCAST,
            round_=1 - rank,
        )
    assert r.take(0)[0].body == np.float32([7]).tobytes()
    for rank in range(2):
        r.push(rank, 0, np.float32([5]).tobytes(), round_=2 - rank)
    assert r.take(0)[0].body == np.float32([10]).tobytes()
    r.push(0, 0, ONE, flags=w.ASYNC, round_=3)
    assert r.take(0)[0].body == np.float32([2]).tobytes()


def test_the_value_survives_a_worker_and_broadcasts_that_lack_it_fail(rig):
    r = rig(2, asynchronous=True)
    r.register(0, 4)
    r.push(1, 0, ONE, flags=w.ASYNC)
    r.take(1)
    r.push(0, 0, b"", divisor=1, flags=w.ASYNC | w.BROADCAST)
    r.lane.gone(1)
    (e,) = r.take(0)
    assert (e.kind, e.divisor, e.slot, e.round) == (w.ERROR, 3, 1, 0)
    for round_ in (1, 2):
        r.push(0, 0, ONE, flags=w.ASYNC, round_=round_)
        assert r.take(0)[0].body == np.float32([1 + round_]).tobytes()
    r.push(0, 0, b"", divisor=1, flags=w.ASYNC | w.BROADCAST, round_=3)
    assert r.take(0)[0].divisor == 3
    r.push(0, 0, ONE, flags=w.ASYNC, round_=4)
    assert r.take(0)[0].body == np.float32([4]).tobytes()


def test_an_empty_push_is_answered(rig):
    r = rig(2, asynchronous=True)
    r.register(0, 0)
    r.push(0, 0, b"", flags=w.ASYNC)
    assert (r.take(0)[0].kind, r.lane.counters()["rounds"]) == (w.ANSWER, 1)
