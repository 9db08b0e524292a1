"""A lane and scripted workers: snapshots of compressed keys, and keys of a lost lane."""

from __future__ import annotations

import struct
import threading

import numpy as np
import pytest

from bpsx.compression.spec import compression
from bpsx.kernels import reference
from core.test_lane import Rig
from support import wire as w

N = 1000
ONEBIT = {"compressor": "onebit", "scaling": True, "ef": "vanilla"}
STATE_BYTES = 48 + 4 * N


def push_of(seed: int) -> bytes:
    values = np.random.default_rng(seed).standard_normal(N).astype(np.float32)
    return reference.onebit_encode(values, True)


def register(rig: Rig, term: int = 0, beside: int = -1, params: dict = ONEBIT) -> None:
    codec = compression(params).text().encode()
    body = b"name" + codec
    for rank in range(len(rig.workers)):
        record = w.Record(w.REGISTER, w.INLINE, key=100, sender=rank, term=term, cookie=4 * N)
        record = record._replace(divisor=int(rank == beside), priority=len(codec))
        rig.send(rank, record._replace(length=len(body), body=body))


def push(rig: Rig, rank: int, round_: int, *, term: int = 0, flags: int = 0) -> None:
    data = push_of(10 * round_ + rank)
    rig.push(rank, 0, data, flags=w.PACKED | flags, round_=round_, divisor=2, term=term)


def answers(rig: Rig, *ranks: int) -> list[w.Record]:
    """Return the answer to each of the ranks, which come alone."""
    found = []
    for rank in ranks:
        (record,) = rig.take(rank)
        assert record.kind == w.ANSWER
        found.append(record)
    return found


def have(rig: Rig, rank: int, round_: int, coded: w.Coded, flags: int = 0, term: int = 1) -> None:
    """Let a worker say what it has of the only key of a term."""
    body = coded.bytes()
    record = w.Record(w.HAVE, w.INLINE | flags, key=100, sender=rank, term=term, round=round_)
    record = record._replace(divisor=0, cookie=1000 + rank, length=len(body), body=body)
    haves = w.Record(w.HAVES, w.INLINE, sender=rank, term=term, cookie=1)
    rig.send(rank, record, haves)


def load(rig: Rig, rank: int, number: int, state: bytes, term: int = 1) -> None:
    record = w.Record(w.LOAD, w.INLINE, key=100, sender=rank, term=term, round=number)
    rig.send(rank, record._replace(length=len(state), body=state))


def log(rig: Rig, rank: int, part: int, parts: int, body: bytes, term: int = 1) -> None:
    record = w.Record(w.LOG, w.INLINE, key=100, sender=rank, term=term, round=part, divisor=parts)
    rig.send(rank, record._replace(length=len(body), body=body))


def undisturbed(rounds: int) -> list[bytes]:
    """Return the answers of a lane that has all pushes itself."""
    rig = Rig(2)
    register(rig)
    found = []
    for round_ in range(rounds):
        for rank in range(2):
            push(rig, rank, round_)
        found.append(answers(rig, 0, 1)[0].body)
    rig.close()
    return found


def test_answers_tell_the_number_of_their_sum_and_of_the_stored_one(rig):
    """The holder gets a snapshot with its push, and confirms it with its next one."""
    r = rig(2, log_ratio=0.01)
    register(r, beside=1)
    numbers = []
    for round_ in range(5):
        push(r, 0, round_)
        push(r, 1, round_, flags=w.KEPT if round_ == 3 else 0)
        (first,) = answers(r, 0)
        records = r.take(1)
        assert [x.kind for x in records] == [w.SNAP, w.ANSWER][round_ == 0 :]
        if round_:
            snapshot = records[0]
            assert (snapshot.round, snapshot.length, snapshot.cookie) == (round_, STATE_BYTES, 1001)
        assert records[-1].body == first.body
        numbers.append((first.slot, first.divisor, first.term | first.priority << 32))
    # The snapshot of sum 2 is confirmed in round 3; the others count as lost.
    assert numbers == [(1, 0, 1), (2, 0, 2), (3, 0, 3), (4, 2, 4), (5, 2, 5)]
    assert r.lane.counters()["snapshots"] == 4


def test_a_snapshot_is_not_sent_to_a_worker_that_has_joined(rig):
    r = rig(2, log_ratio=0.01)
    register(r, beside=1)
    r.lane.joined(1)
    for round_ in range(2):
        push(r, 0, round_)
        records = r.take(0)
        assert [x.kind for x in records] == [w.SNAP, w.ANSWER][round_ == 0 :]


@pytest.mark.parametrize("joins", [False, True])
def test_in_a_job_that_shrinks_snapshots_wait_for_all_pushes(rig, joins):
    """Worker 0 would be the holder at its push. A round may also close as a worker has joined."""
    r = rig(2, log_ratio=0.01, shrinks=True)
    register(r, beside=0)
    for rank in range(2):
        push(r, rank, 0)
    answers(r, 0, 1)
    push(r, 0, 1)
    r.assert_nothing_for(0)
    if joins:
        r.lane.joined(1)
    else:
        push(r, 1, 1)
    snapshot, answer = r.take(0)
    assert (snapshot.kind, snapshot.round, answer.kind) == (w.SNAP, 1, w.ANSWER)


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("errs", [False, True])
def test_a_key_is_rebuilt_from_snapshot_and_logs(rig, late, errs):
    """Worker 0 holds the state after sum 1. Worker 1 may lack the outcome of the last round, which
    is sum 3, or an error.
    """
    right = undisturbed(4)
    first = Rig(2, log_ratio=0.01)
    register(first, beside=0)
    for round_ in range(2):
        push(first, 0, round_)
        push(first, 1, round_)
        answers(first, 1)
        records = first.take(0)
    state = records[0].body
    first.close()

    r = rig(2)
    register(r, term=1)
    rounds = 4 if errs else 3
    summed = 0 if errs else w.SUMMED
    numbers = (3, 3 - (late and not errs))
    coded = w.Coded(3, w.HAS_STATE | summed, 1, 0, 0, 99)
    have(r, 0, rounds, coded, w.KEPT)
    coded = w.Coded(numbers[1], w.SUMMED, 0, 0, 0, 99)
    have(r, 1, rounds - late, coded, w.WAITS if late else 0)
    asked = sorted(r.take(0), key=lambda record: -record.kind)
    (fetch, *want) = asked
    assert (fetch.kind, fetch.flags & w.STATE, fetch.round, fetch.divisor, fetch.cookie) == (
        w.FETCH, w.STATE, 1, 0, 1000,
    )  # fmt: skip
    assert [x.kind for x in want] == [w.WANT] * late
    (other,) = r.take(1)
    unanswered = 3 if late and not errs else 0
    assert (other.flags & w.STATE, other.round, other.divisor) == (0, 1, unanswered)
    log(r, 0, 1, 2, w.log_entry(3, 2, push_of(20)))
    log(r, 1, 0, 1, w.log_entry(2, 2, push_of(11)) + w.log_entry(3, 2, push_of(21)))
    log(r, 0, 0, 2, w.log_entry(2, 2, push_of(10)))
    if late:
        give = w.Record(w.GIVE, w.INLINE, key=100, sender=0, term=1, round=rounds - 1, divisor=0)
        give = (
            give._replace(divisor=2) if errs else give._replace(length=len(right[2]), body=right[2])
        )
        r.send(0, give)
    load(r, 0, 1, state)
    assert [x.kind for x in r.take(0)] == [x.kind for x in r.take(1)] == [w.TOOK]
    assert r.lane.counters()["replayed"] == 2
    if late:
        r.push(1, 0, push_of(21), flags=w.PACKED, round_=rounds - 1, divisor=2, term=1)
        (outcome,) = r.take(1)
        assert outcome.kind == (w.ERROR if errs else w.ANSWER)
        assert errs or (outcome.body, outcome.slot, outcome.divisor) == (right[2], 3, 1)
    for rank in range(2):
        data = push_of(30 + rank)
        r.push(rank, 0, data, flags=w.PACKED, round_=rounds, divisor=2, term=1)
    for answer in answers(r, 0, 1):
        assert (answer.body, answer.slot, answer.divisor) == (right[3], 4, 1)


def test_a_state_that_was_set_counts_more_than_one_after_the_same_sum(rig):
    r = rig(3)
    register(r, term=1)
    have(r, 0, 2, w.Coded(2, w.HAS_STATE | w.SUMMED, 2))
    have(r, 1, 2, w.Coded(2, w.HAS_STATE | w.WAS_SET | w.SUMMED, 2))
    have(r, 2, 2, w.Coded(2, w.HAS_STATE | w.SUMMED, 2))
    (fetch,) = r.take(1)
    assert (fetch.kind, fetch.flags & w.STATE, fetch.round) == (w.FETCH, w.STATE, 2)
    for rank in (0, 2):
        r.assert_nothing_for(rank)


def test_the_counter_is_the_newest_that_workers_have(rig):
    r = rig(3)
    register(r, term=1, params={"compressor": "onebit"})
    have(r, 0, 2, w.Coded(2, w.HAS_STATE | w.SUMMED, 2, 0, 2))
    have(r, 1, 3, w.Coded(3, w.HAS_STATE | w.SUMMED, 3, 0, 7 << 32))
    have(r, 2, 3, w.Coded(3, w.HAS_STATE | w.SUMMED | w.WAS_SET, 3, 0, 5 << 32))
    for rank in range(3):
        assert [x.kind for x in r.take(rank)] == [w.TOOK]
    read = w.Record(w.PUSH, w.STATE, key=100, sender=1, term=1, round=3, cookie=1)
    r.send(1, read)
    (state,) = answers(r, 1)
    assert struct.unpack_from("<Q", state.body) == (5 << 32,) and state.slot == 3


@pytest.mark.parametrize(
    "entries",
    [
        b"",
        w.log_entry(2, 2, push_of(1)),
        w.log_entry(1, 2, push_of(1)[:-1]),
        w.log_entry(1, 2, bytes(5000)),
        w.log_entry(1, 2, push_of(1))[:-8],
        bytes(7),
    ],
    ids=["empty", "gap", "undecodable", "too long", "cut", "no head"],
)
def test_a_log_that_cannot_be_replayed_ends_the_lane(rig, monkeypatch, entries):
    raised: list[str] = []
    monkeypatch.setattr(threading, "excepthook", lambda args: raised.append(str(args.exc_value)))
    r = rig(2)
    register(r, term=1)
    have(r, 0, 1, w.Coded(1, w.SUMMED, 0, 0, 0, 99))
    have(r, 1, 1, w.Coded(1, w.SUMMED))
    (fetch,) = r.take(0)
    assert fetch.kind == w.FETCH
    log(r, 0, 0, 1, entries)
    r.thread.join(60)
    assert not r.thread.is_alive()
    assert raised == ["the compression state of key 100 cannot be rebuilt from the workers' logs"]
