"""A server's lane with workers that have called join(), and with different counts of rounds."""

from __future__ import annotations

import random
import threading

import numpy as np
import pytest

from bpsx.dtypes import DTYPES
from bpsx.kernels.reference import reduce
from core.test_lane import BIG, Rig, values
from support import wire as w

ONE = np.float32([1]).tobytes()


@pytest.mark.parametrize("fixed_order", [False, True])
@pytest.mark.parametrize(
    ("workers", "joined"), [(2, [0]), (2, [1]), (3, [1]), (3, [0, 2]), (5, [0, 3]), (5, [4])]
)
@pytest.mark.parametrize("dtype", [d.name for d in DTYPES])
def test_a_joined_worker_counts_as_zeros_in_sums_and_averages(
    rig, dtype, workers, joined, fixed_order
):
    r = rig(workers, fixed_order=fixed_order)
    for rank in joined:
        r.lane.joined(rank)
    slot = 0
    for n in (1, 7, 33_001):
        for divisor in (1, workers):
            pushes = [
                np.zeros_like(values(dtype, n, rank)) if rank in joined else values(dtype, n, rank)
                for rank in range(workers)
            ]
            r.register(slot, pushes[0].nbytes, dtype)
            for rank in set(range(workers)) - set(joined):
                r.push(rank, slot, pushes[rank].tobytes(), dtype=dtype, divisor=divisor)
            want = reduce(pushes, dtype, divisor)
            for rank in set(range(workers)) - set(joined):
                (answer,) = r.take(rank)
                assert (answer.kind, answer.cookie, answer.round) == (w.ANSWER, 1000 + rank, 0)
                np.testing.assert_array_equal(np.frombuffer(answer.body, want.dtype), want)
            slot += 1
    for rank in joined:
        r.assert_nothing_for(rank)


@pytest.mark.parametrize("scheduled", [False, True])
@pytest.mark.parametrize("fixed_order", [False, True])
@pytest.mark.parametrize("n", [4, BIG])
def test_open_rounds_that_lack_only_joined_workers_close(rig, n, fixed_order, scheduled):
    r = rig(3, fixed_order=fixed_order, scheduled=scheduled)
    one = np.ones(n // 4, np.float32).tobytes()
    for slot in range(3):
        r.register(slot, n)
    r.push(1, 0, one), r.push(2, 0, one)  # only worker 0 is missing
    r.push(2, 1, one)  # workers 0 and 1 are missing
    if not scheduled:  # with scheduling, a ping overtakes pushes
        r.assert_nothing_for(1), r.assert_nothing_for(2)
    r.lane.joined(0)
    assert r.take(1)[0].body == r.take(2)[0].body == (2 * np.ones(n // 4, np.float32)).tobytes()
    r.push(1, 1, one)
    assert r.take(1)[0].key == r.take(2)[0].key == 101
    r.push(2, 2, one)
    r.lane.joined(1)
    (answer,) = r.take(2)
    assert (answer.key, answer.body) == (102, one)
    r.assert_nothing_for(0), r.assert_nothing_for(1)


@pytest.mark.parametrize("fixed_order", [False, True])
def test_rounds_are_counted_per_worker_and_from_zero_after_all_have_joined(rig, fixed_order):
    r = rig(3, fixed_order=fixed_order)
    r.register(0, 4)
    r.lane.joined(1)
    for round_ in range(3):
        r.push(2, 0, ONE, round_=round_), r.push(0, 0, ONE, round_=round_)
        assert r.take(0)[0].round == r.take(2)[0].round == round_
    r.lane.all_joined()
    r.push(0, 0, ONE, round_=0), r.push(2, 0, ONE, round_=0)
    r.assert_nothing_for(0)  # worker 1 is needed again
    r.push(1, 0, ONE, round_=3)  # worker 1 counts from zero, too, so it cannot mean another round
    (refusal,) = r.take(1)
    assert (refusal.kind, refusal.divisor) == (w.ERROR, 5)
    r.push(1, 0, ONE, round_=0)
    got = [r.take(rank)[0] for rank in range(3)]
    assert [(a.kind, a.round, a.body) for a in got] == [
        (w.ANSWER, 0, np.float32([3]).tobytes())
    ] * 3
    r.push(1, 0, ONE, round_=0), r.push(0, 0, ONE, round_=0)
    r.assert_nothing_for(0), r.assert_nothing_for(1)
    assert r.lane.counters()["repeated"] == 2


def test_a_broadcast_fails_when_its_root_has_joined_and_works_when_another_has(rig):
    r = rig(3)
    r.register(0, 4, "uint8")

    def broadcast(root: int, ranks: tuple[int, ...], round_: int) -> list[w.Record]:
        for rank in ranks:
            r.push(
                rank,
                0,
                b"root" if rank == root else b"",
                dtype="uint8",
                divisor=root,
                flags=w.BROADCAST,
                round_=round_,
            )
        return [r.take(rank)[0] for rank in ranks]

    r.lane.joined(1)
    assert [a.body for a in broadcast(0, (0, 2), 0)] == [b"root"] * 2
    assert {(a.kind, a.divisor, a.slot) for a in broadcast(1, (2, 0), 1)} == {(w.ERROR, 9, 1)}
    assert [a.body for a in broadcast(2, (2, 0), 2)] == [b"root"] * 2
    r.assert_nothing_for(1)


def test_an_empty_round_closes_without_joined_workers(rig):
    r = rig(3)
    r.register(0, 0, "uint8")
    r.push(0, 0, b"", dtype="uint8")
    r.lane.joined(2)
    r.push(1, 0, b"", dtype="uint8")
    assert r.take(0)[0].length == r.take(1)[0].length == 0


def test_different_operations_fail_at_the_end_of_a_round_that_lacks_the_joined(rig):
    r = rig(3)
    r.register(0, 4)
    r.lane.joined(0)
    r.push(1, 0, ONE), r.push(2, 0, ONE, divisor=2)
    assert {(e.kind, e.divisor, e.slot, e.term) for e in (r.take(1)[0], r.take(2)[0])} == {
        (w.ERROR, 2, 1, 2)
    }
    r.push(1, 0, ONE, round_=1), r.push(2, 0, ONE, round_=1)
    assert r.take(1)[0].body == r.take(2)[0].body == np.float32([2]).tobytes()


def test_a_worker_that_left_after_joining_counts_as_left(rig):
    r = rig(2)
    r.register(0, 4)
    r.lane.joined(1)
    r.push(0, 0, ONE)
    assert r.take(0)[0].body == ONE
    r.lane.gone(1)
    r.push(0, 0, ONE, round_=1)
    (e,) = r.take(0)
    assert (e.kind, e.divisor, e.slot) == (w.ERROR, 3, 1)


def test_held_pushes_are_freed_when_a_round_is_abandoned(rig):
    r: Rig = rig(3, fixed_order=True)
    r.register(0, BIG)
    r.push(2, 0, bytes(BIG))  # held back: it is rank 0's turn
    r.lane.gone(1)
    assert r.take(2)[0].divisor == 3
    r.push(0, 0, bytes(BIG))
    assert r.take(0)[0].divisor == 3


def test_a_worker_may_join_while_another_ones_push_is_held(rig):
    """In fixed order: the lane must not close the round with what it still holds."""
    r, n, rng = rig(3, fixed_order=True), 32_768, random.Random(1)
    r.register(0, n)
    for i in range(300):
        data = np.full(n // 4, i + 1, np.float32).tobytes()
        r.lane.joined(0)
        r.assert_nothing_for(0)
        pushing = threading.Thread(target=r.push, args=(2, 0, data))
        pushing.start()
        for _ in range(rng.randrange(200)):  # before, while or after the lane handles the push
            pass
        r.lane.joined(1)
        pushing.join()
        assert r.take(2)[-1].body == data, i
        r.lane.all_joined()
        r.assert_nothing_for(0)
