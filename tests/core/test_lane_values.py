"""A lane of an asynchronous job, with scripted workers that keep its values."""

from __future__ import annotations

import numpy as np
import pytest

from core.test_lane import BIG, Rig
from core.test_lane_moves import KEY, SLOT, TERM, Moved
from support import wire as w

#: Bytes: inline, and with a frame of their own.
SIZES = [16, 8192, BIG]


class Value(Moved):
    """A lane, and one key that moves there in term 1; workers push ones to it.

    ``kept``: the value that a worker keeps.
    """

    def have_value(self, rank: int, round_: int, applied: list[int], flags: int = 0) -> None:
        """REGISTER and HAVE of a worker that keeps a value with these pushes of each worker."""
        body = np.array(applied, np.uint32).tobytes()
        common = {"sender": rank, "key": KEY, "slot": SLOT, "term": TERM}
        register = w.Record(
            w.REGISTER, w.INLINE, **common, cookie=self.nbytes, length=4, body=b"name"
        )
        have = w.Record(
            w.HAVE,
            w.INLINE | w.KEPT | flags,
            **common,
            round=round_,
            cookie=1000 + rank,
            length=len(body),
            body=body,
        )
        self.rig.send(rank, register, have)

    def add(self, rank: int, round_: int, **changes) -> None:
        self.push(rank, round_, flags=w.ASYNC, **changes)

    def add_new(self) -> None:
        """All workers announce the key, and push for the first time."""
        for rank in range(len(self.rig.workers)):
            common = {"sender": rank, "key": KEY, "slot": SLOT, "term": TERM}
            self.rig.send(
                rank,
                w.Record(
                    w.REGISTER, w.INLINE, **common, cookie=self.nbytes, length=4, body=b"name"
                ),
            )
            self.add(rank, 0)
            self.assert_value(rank, rank + 1, [1] * (rank + 1) + [0] * (1 - rank))

    def assert_value(
        self, rank: int, value: float, applied: list[int], kind: int = w.ANSWER
    ) -> w.Record:
        """The next value for a worker, and what it contains."""
        said = self.take(rank, w.APPLIED)
        assert np.frombuffer(said.body, np.uint32).tolist() == applied
        got = self.take(rank, kind)
        assert got.body == np.full(self.nbytes // 4, value, np.float32).tobytes()
        return got


@pytest.fixture
def value(rig):
    def make(workers: int, nbytes: int, **options) -> Value:
        return Value(rig(workers, asynchronous=True, elastic=True, **options), nbytes)

    return make


def all_have(m: Value, *values: tuple[int, list[int]]) -> None:
    """All workers say what they have, and wait for an answer."""
    for rank, (round_, applied) in enumerate(values):
        m.have_value(rank, round_, applied, w.WAITS)
    for rank in range(len(values)):
        m.haves(rank)


@pytest.mark.parametrize("nbytes", SIZES)
@pytest.mark.parametrize("first", [True, False])
def test_an_unanswered_push_counts_once(value, nbytes, first):
    """Worker 0's push is in the newest value, which worker 1 keeps, and that of worker 2 is not.

    Whether they push again before that value arrives or after.
    """
    m = value(3, nbytes)
    all_have(m, (3, [3, 5, 0]), (7, [4, 7, 2]), (2, [4, 6, 2]))
    want = m.take(1, w.WANT)
    assert (want.key, want.term, want.cookie) == (KEY, TERM, 1001)
    for rank, round_ in ((0, 3), (2, 2)) if first else ():
        m.add(rank, round_)
    m.give(1, 6)
    for rank in range(3):
        m.take(rank, w.TOOK)
    for rank, round_ in () if first else ((0, 3), (2, 2)):
        m.add(rank, round_)
    answer = m.assert_value(0, 9, [4, 7, 2])
    assert (answer.round, answer.cookie) == (3, 1000)
    m.assert_value(2, 10, [4, 7, 3])
    m.add(1, 7)
    m.assert_value(1, 11, [4, 8, 3])
    m.add(0, 4)
    m.assert_value(0, 12, [5, 8, 3])
    assert m.rig.lane.counters()["malformed"] == 0


def test_a_value_that_no_worker_has_begins_as_zeros(value):
    m = value(2, 16)
    m.have(0, 0, w.WAITS)
    m.haves(0)
    m.haves(1, 0)
    m.take(0, w.TOOK), m.take(1, w.TOOK)
    m.add(0, 0)
    m.assert_value(0, 1, [1, 0])
    m.add(1, 0)
    m.assert_value(1, 2, [1, 1])


def test_another_is_asked_if_the_holder_has_left_or_has_nothing(value):
    """Here worker 1 alone had the answer to its last push, so that push is lost."""
    m = value(3, 16)
    all_have(m, (3, [3, 5, 2]), (6, [3, 6, 2]), (2, [3, 4, 2]))
    m.take(1, w.WANT)
    m.rig.lane.gone(1)
    m.take(0, w.WANT)
    m.give(0, 2, status=-1)
    m.take(2, w.WANT)
    m.give(2, 1)
    m.take(0, w.TOOK), m.take(2, w.TOOK)
    m.add(2, 2)
    m.assert_value(2, 10, [3, 4, 3])


def test_the_value_begins_as_zeros_if_all_that_have_it_are_gone(value):
    m = value(2, 16)
    m.have_value(0, 1, [1, 0])
    m.haves(0), m.haves(1, 0)
    m.take(0, w.WANT)
    m.rig.lane.gone(0)
    m.take(1, w.TOOK)
    m.add(1, 0)
    m.assert_value(1, 1, [0, 1])


def test_a_worker_that_is_gone_is_not_awaited(value):
    """Before it has said all that it has; its HAVE alone is worth nothing."""
    m = value(3, 16)
    m.have_value(2, 9, [3, 5, 9])
    m.have_value(0, 3, [3, 5, 1], w.WAITS)
    m.have_value(1, 5, [2, 5, 1])
    m.haves(0), m.haves(1)
    m.rig.assert_nothing_for(0)
    m.rig.lane.gone(2)
    m.take(0, w.WANT)
    m.give(0, 2)
    m.add(0, 3)
    m.assert_value(0, 10, [4, 5, 1])


@pytest.mark.parametrize("nbytes", SIZES)
def test_others_keep_what_only_a_worker_that_is_gone_has_got(value, nbytes):
    m = value(3, nbytes)
    all_have(m, (1, [1, 0, 0]), (0, [0, 0, 0]), (0, [0, 0, 0]))
    m.take(0, w.WANT)
    m.give(0, 0)
    m.add(1, 0)
    m.assert_value(1, 10, [1, 1, 0])
    m.add(2, 0)
    m.assert_value(2, 11, [1, 1, 1])
    m.rig.lane.gone(1)  # not the last that has been answered
    m.rig.lane.gone(2)
    kept = m.assert_value(0, 11, [1, 1, 1], w.VALUE)
    assert kept.cookie == 1000 | TERM << 32
    m.add(0, 1)
    m.assert_value(0, 12, [2, 1, 1])


@pytest.mark.parametrize("early", [False, True])
def test_a_late_worker_that_is_gone_is_forgotten(value, early):
    """Whether it goes before the value arrives or after."""
    m = value(2, 16)
    all_have(m, (3, [3, 5]), (4, [3, 4]))
    m.take(0, w.WANT)
    if early:
        m.rig.lane.gone(1)
        m.rig.assert_nothing_for(0)
    m.give(0, 2)
    m.take(0, w.TOOK)
    m.rig.lane.gone(1)
    m.add(0, 3)
    m.assert_value(0, 10, [4, 5])


def test_keys_are_yielded_without_workers_that_are_gone(value):
    m = value(2, 16)
    m.haves(0, 0), m.haves(1, 0)
    m.add_new()
    m.rig.lane.gone(1)
    m.assert_value(0, 2, [1, 1], w.VALUE)
    m.rig.send(0, w.Record(w.YIELD, w.INLINE, sender=0, term=2, slot=SLOT + 1, divisor=1, key=1))
    assert m.take(0, w.LEFT).term == 2


@pytest.mark.parametrize("body", [b"", bytes(4), bytes(12)])
def test_what_a_value_contains_has_to_be_said_of_all_workers(value, body):
    m = value(2, 16)
    common = {"sender": 0, "key": KEY, "slot": SLOT, "term": TERM}
    m.rig.send(
        0,
        w.Record(w.REGISTER, w.INLINE, **common, cookie=16, length=4, body=b"name"),
        w.Record(w.HAVE, w.INLINE | w.KEPT, **common, length=len(body), body=body),
    )
    m.rig.assert_nothing_for(0)
    assert m.rig.lane.counters()["malformed"] == (1 if body else 0)


def test_a_seed_says_what_it_contains(value):
    m = value(2, 16)
    m.haves(0, 0), m.haves(1, 0)
    m.add_new()
    m.push(0, 1, flags=w.ASYNC | w.BROADCAST, divisor=0)
    m.rig.send(
        1,
        w.Record(
            w.PUSH,
            w.ASYNC | w.BROADCAST | w.INLINE,
            sender=1,
            key=KEY,
            slot=SLOT,
            term=TERM,
            round=1,
            divisor=0,
            cookie=1001,
        ),
    )
    m.assert_value(0, 1, [2, 2])
    m.assert_value(1, 1, [2, 2])


def test_a_job_that_ends_with_its_servers_says_nothing_of_what_values_contain(rig):
    r: Rig = rig(1, asynchronous=True)
    r.register(0, 16)
    r.push(0, 0, np.ones(4, np.float32).tobytes(), flags=w.ASYNC)
    assert [record.kind for record in r.take(0)] == [w.ANSWER]
