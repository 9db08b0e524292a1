"""A server's lane that takes keys of a lost lane over, with scripted workers."""

from __future__ import annotations

import struct
import time

import numpy as np
import pytest

from bpsx.errors import Status
from core.test_lane import BIG, Rig
from support import wire as w

#: Bytes: a barrier, inline without and with acknowledgement, and large.
SIZES = [0, 16, 8192, BIG]
SLOT, KEY, TERM = 5, 77, 1


class Moved:
    """A lane, and one key that moves there in term 1. ``kept``: the outcome of its latest round."""

    def __init__(self, rig: Rig, nbytes: int) -> None:
        self.rig, self.nbytes = rig, nbytes
        self.ones = np.ones(nbytes // 4, np.float32).tobytes()
        self.kept = np.full(nbytes // 4, 9, np.float32).tobytes()
        self.unread: list[list[w.Record]] = [[] for _ in rig.workers]

    def have(self, rank: int, round_: int, flags: int = 0, joins: int = 0) -> None:
        """REGISTER and HAVE of a worker that has the outcome of ``round_`` rounds."""
        common = {"sender": rank, "key": KEY, "slot": SLOT, "term": TERM}
        register = w.Record(
            w.REGISTER, w.INLINE, **common, cookie=self.nbytes, length=4, body=b"name"
        )
        have = w.Record(
            w.HAVE, w.INLINE | flags, **common, round=round_, divisor=joins, cookie=1000 + rank
        )
        self.rig.send(rank, register, have)

    def haves(self, rank: int, count: int = 1) -> None:
        self.rig.send(rank, w.Record(w.HAVES, w.INLINE, sender=rank, term=TERM, cookie=count))

    def push(self, rank: int, round_: int, **changes) -> None:
        self.rig.push(rank, SLOT, self.ones, round_=round_, key=KEY, term=TERM, **changes)

    def give(self, rank: int, round_: int, status: int = 0, **changes) -> None:
        """What a holder replies to WANT: its kept result, or an error."""
        body = self.kept if status == 0 else b""
        inline = len(body) <= 32768
        r = w.Record(
            w.GIVE,
            w.INLINE if inline else 0,
            sender=rank,
            key=KEY,
            slot=SLOT,
            term=TERM,
            round=round_,
            divisor=-status,
            length=len(body),
            body=body if inline else None,
        )
        self.rig.send(rank, r._replace(**changes), body=None if inline else body)

    def take(self, rank: int, kind: int) -> w.Record:
        """The next record of ``kind`` for a worker. Others stay unread."""
        unread = self.unread[rank]
        while not (found := [record for record in unread if record.kind == kind]):
            unread += self.rig.take(rank)
        unread.remove(found[0])
        return found[0]

    def late(self) -> None:
        """Worker 1 lacks round 3's outcome, which worker 0 keeps and is asked for."""
        self.have(0, 4, w.WAITS | w.KEPT)
        self.have(1, 3, w.WAITS)
        self.haves(0)
        self.haves(1)
        want = self.take(0, w.WANT)
        assert (want.key, want.term, want.round, want.cookie) == (KEY, TERM, 3, 1000)

    def both_sum(self, round_: int) -> None:
        """All workers push a round and get its sum."""
        for rank in range(len(self.rig.workers)):
            self.push(rank, round_)
        self.assert_sum(round_)

    def assert_sum(self, round_: int) -> None:
        n = len(self.rig.workers)
        want = np.full(self.nbytes // 4, n, np.float32).tobytes()
        for rank in range(n):
            answer = self.take(rank, w.ANSWER)
            assert (answer.round, answer.body or b"") == (round_, want)

    def wait_for(self, name: str, count: int) -> None:
        """Wait until one of the lane's counters has a value."""
        end = time.monotonic() + 60
        while self.rig.lane.counters()[name] != count:
            assert time.monotonic() < end, self.rig.lane.counters()
            time.sleep(0.001)


@pytest.mark.parametrize("nbytes", SIZES)
@pytest.mark.parametrize("first", [True, False])
def test_a_late_worker_gets_the_outcome_that_another_keeps(rig, nbytes, first):
    """Whether its push comes before that outcome or after."""
    m = Moved(rig(2), nbytes)
    m.late()
    m.push(0, 4)
    if first:
        m.push(1, 3)
    m.give(0, 3)
    m.take(0, w.TOOK), m.take(1, w.TOOK)
    if not first:
        m.push(1, 3)
    answer = m.take(1, w.ANSWER)
    assert (answer.round, answer.cookie, answer.body or b"") == (3, 1001, m.kept)
    m.push(1, 4)
    m.assert_sum(4)
    m.both_sum(5)
    assert m.rig.lane.counters()["malformed"] == 0


@pytest.mark.parametrize("nbytes", SIZES)
def test_a_late_worker_gets_the_error_that_another_keeps(rig, nbytes):
    m = Moved(rig(2), nbytes)
    m.late()
    m.push(1, 3)
    m.give(0, 3, status=Status.MISMATCH, priority=0, cookie=1)
    error = m.take(1, w.ERROR)
    assert (error.round, error.divisor, error.slot, error.term) == (3, -Status.MISMATCH, 0, 1)
    m.take(0, w.TOOK), m.take(1, w.TOOK)
    m.both_sum(4)


@pytest.mark.parametrize("changes", [{"length": 8, "body": bytes(8)}, {"divisor": 3_000}])
def test_what_no_worker_can_have_kept_is_an_error_for_late_workers(rig, changes):
    m = Moved(rig(2), 16)
    m.late()
    m.push(1, 3)
    m.give(0, 3, **changes)
    assert m.take(1, w.ERROR).divisor == -Status.PROTOCOL
    m.take(0, w.TOOK)


@pytest.mark.parametrize("nbytes", SIZES)
def test_pushes_wait_until_all_workers_have_said_what_they_have(rig, nbytes):
    m = Moved(rig(2), nbytes)
    m.have(0, 2, w.WAITS)
    m.push(0, 2)
    m.haves(0)
    m.have(1, 2, w.WAITS)
    m.push(1, 2)
    m.rig.assert_nothing_for(0)
    m.haves(1)
    m.assert_sum(2)
    m.take(0, w.TOOK), m.take(1, w.TOOK)
    m.both_sum(3)


def test_a_have_may_come_after_the_haves_that_counts_it(rig):
    m = Moved(rig(2), 16)
    m.have(0, 4, w.WAITS | w.KEPT)
    m.haves(0)
    m.haves(1)  # counts a HAVE that is still on its way
    m.push(1, 3)
    m.rig.assert_nothing_for(0)
    m.have(1, 3, w.WAITS)
    assert m.take(0, w.WANT).round == 3
    m.give(0, 3)
    assert m.take(1, w.ANSWER).body == m.kept


def test_a_worker_that_has_never_used_the_key_is_not_waited_for(rig):
    m = Moved(rig(2), 16)
    m.have(0, 0, w.WAITS)
    m.haves(0)
    m.haves(1, 0)
    m.take(0, w.TOOK), m.take(1, w.TOOK)
    m.both_sum(0)


def test_a_key_that_is_announced_after_its_term_needs_no_takeover(rig):
    m = Moved(rig(2), 16)
    m.haves(0, 0)
    m.haves(1, 0)
    m.take(0, w.TOOK), m.take(1, w.TOOK)
    for rank in (0, 1):
        m.rig.send(
            rank,
            w.Record(
                w.REGISTER,
                w.INLINE,
                sender=rank,
                key=KEY,
                slot=SLOT,
                term=TERM,
                cookie=16,
                length=4,
                body=b"name",
            ),
        )
    m.both_sum(0)
    assert m.rig.lane.counters()["taken_over"] == 0


def test_counts_from_before_a_join_mean_nothing(rig):
    """Worker 1 has not heard yet that all have joined, and its count is the larger one."""
    m = Moved(rig(2), 16)
    m.have(0, 0, w.WAITS, joins=1)
    m.have(1, 7, w.KEPT)
    m.haves(0)
    m.haves(1)
    m.take(0, w.TOOK), m.take(1, w.TOOK)
    m.both_sum(0)


def test_counts_from_before_the_lanes_own_join_mean_nothing(rig):
    m = Moved(rig(2), 16)
    m.have(0, 5, w.KEPT)
    m.have(1, 7, w.KEPT)
    m.haves(0)
    m.rig.lane.all_joined()
    m.haves(1)
    m.take(0, w.TOOK), m.take(1, w.TOOK)
    m.both_sum(0)


def test_a_push_of_another_term_is_refused(rig):
    m = Moved(rig(2), 16)
    m.have(0, 0, w.WAITS)
    m.rig.push(0, SLOT, m.ones, key=KEY, term=0)
    assert m.take(0, w.ERROR).divisor == -Status.PROTOCOL


@pytest.mark.parametrize(
    "record",
    [
        pytest.param(w.Record(w.HAVE, w.INLINE, key=KEY, slot=SLOT, term=TERM), id="no key"),
        pytest.param(w.Record(w.HAVE, w.INLINE, key=KEY, slot=2**31, term=TERM), id="far slot"),
        pytest.param(w.Record(w.HAVE, w.INLINE, key=KEY, slot=SLOT), id="term 0"),
        pytest.param(w.Record(w.HAVE, w.INLINE, term=2**32 - 1), id="far term"),
        pytest.param(w.Record(w.HAVES, w.INLINE), id="haves of term 0"),
        pytest.param(w.Record(w.HAVES, w.INLINE, term=2**20), id="haves of a far term"),
        pytest.param(w.Record(w.GIVE, w.INLINE, key=KEY, slot=SLOT, term=TERM), id="give"),
        pytest.param(w.Record(w.ACK, w.INLINE, length=8, body=b"\xff" * 8), id="ack of no key"),
        pytest.param(w.Record(w.ACK, w.INLINE, length=7, body=bytes(7)), id="cut ack"),
        pytest.param(w.Record(w.ACK), id="empty ack"),
        pytest.param(
            w.Record(w.REGISTER, w.INLINE, key=1, slot=1, term=2**20, cookie=4), id="register"
        ),
    ],
)
def test_malformed_records_are_counted_and_change_nothing(rig, record):
    m = Moved(rig(2), 16)
    m.rig.send(0, record)
    m.wait_for("malformed", 1)
    m.late()
    m.push(1, 3)
    m.give(0, 3)
    assert m.take(1, w.ANSWER).body == m.kept


def test_only_the_first_give_counts(rig):
    m = Moved(rig(2), 16)
    m.late()
    m.give(1, 3, key=KEY + 1)
    m.give(1, 3, term=TERM + 1)
    m.wait_for("malformed", 2)
    m.give(0, 3)
    m.take(0, w.TOOK), m.take(1, w.TOOK)
    m.give(0, 3, status=Status.MISMATCH)
    m.wait_for("malformed", 3)
    m.push(1, 3)
    assert m.take(1, w.ANSWER).body == m.kept


def test_a_have_may_come_once(rig):
    m = Moved(rig(2), 16)
    m.have(0, 4, w.WAITS | w.KEPT)
    m.have(0, 9, w.KEPT)
    m.wait_for("malformed", 1)
    m.have(1, 3, w.WAITS)
    m.haves(0)
    m.haves(1)
    assert m.take(0, w.WANT).round == 3


def _settlements(record: w.Record) -> list[tuple[int, int]]:
    return list(struct.iter_unpack("<II", record.body or b""))


def test_results_are_settled_once_all_workers_have_acknowledged_them(rig):
    r, ones = rig(2), np.ones(2048, np.float32).tobytes()
    r.register(0, len(ones))

    def acknowledge(rank: int, round_: int) -> None:
        body = struct.pack("<II", 0, round_)
        r.send(rank, w.Record(w.ACK, w.INLINE, sender=rank, length=8, body=body))

    for rank in (0, 1):
        r.push(rank, 0, ones)
    for rank in (0, 1):
        assert [record.kind for record in r.take(rank)] == [w.ANSWER]
    acknowledge(0, 0)
    acknowledge(0, 0)  # once more: that means nothing
    acknowledge(1, 7)  # nor does another round
    r.assert_nothing_for(0)
    r.assert_nothing_for(1)
    acknowledge(1, 0)
    for rank in (0, 1):  # with the next message
        r.send(rank, w.Record(w.PING, w.INLINE, sender=rank, length=32, body=bytes(32)))
        settled, pong = r.take(rank)
        assert (settled.kind, pong.kind) == (w.SETTLED, w.PONG)
        assert _settlements(settled) == [(1000 + rank, 0)]
