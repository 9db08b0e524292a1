"""A lane and scripted workers, one of which is lost: the state of compressed keys."""

from __future__ import annotations

import numpy as np
import pytest

from bpsx.compression.spec import compression
from core.test_lane import Rig
from core.test_lane_rebuild import ONEBIT, STATE_BYTES, N, have, load, log, push, push_of, register
from support import wire as w
from support.simulated import Partition


class Three(Rig):
    """A lane with three workers, of which one is lost after ``rounds`` rounds.

    ``right`` has the state of a lane after the first ``committed`` rounds. Worker 0 sets the state
    if it is the one that is lost, or ``first`` before all rounds. ``alone``: later rounds of worker
    2, with the others in join().
    """

    def __init__(
        self,
        rounds: int,
        committed: int,
        lost: int = 2,
        alone: int = 0,
        log_ratio: float = 100,
        first: bytes = b"",
    ) -> None:
        super().__init__(3, shrinks=True, fixed_order=True, log_ratio=log_ratio)
        self.right = Partition(compression(ONEBIT), "name", 0, N, "float32", 3)
        register(self)
        if first:
            self.set_state(first, 0)
        for round_ in range(rounds):
            for rank in range(3):
                push(self, rank, round_)
            for rank in range(3):
                assert [r.kind for r in self.take(rank)] == [w.ANSWER]
        for round_ in range(committed):
            self.answer(round_, 3)
        for rank in range(2 if alone else 0):
            self.lane.joined(rank)
        for round_ in range(rounds, rounds + alone):
            push(self, 2, round_, flags=w.KEPT)
            self.stored = self.take(2)[-1].divisor
        if alone:
            self.lane.all_joined()
        if lost == 0 and not first:
            self.set_state(bytes(STATE_BYTES), rounds)
        self.lane.drop(lost, 1)

    def set_state(self, state: bytes, round_: int) -> None:
        """Let worker 0 set the state."""
        self.push(0, 0, state, flags=w.STATE, round_=round_, cookie=0)
        assert [r.body for r in self.take(0)] == [state]

    def answer(self, round_: int, workers: int) -> bytes:
        """What a lane answers in a round, that has the state of ``right``."""
        pushes = {rank: push_of(10 * round_ + rank) for rank in range(workers)}
        return self.right.answer(pushes, 2, 0)

    def have(self, rank: int, round_: int, coded: w.Coded, flags: int = 0, joins: int = 0) -> None:
        """Say what a worker has in term 1."""
        body = coded.bytes()
        record = w.Record(w.HAVE, w.INLINE | flags, key=100, sender=rank, term=1, round=round_)
        record = record._replace(divisor=joins, cookie=1000 + rank, length=len(body), body=body)
        codec = compression(ONEBIT).text().encode()
        name = w.Record(w.REGISTER, w.INLINE, key=100, sender=rank, term=1, cookie=4 * N)
        name = name._replace(priority=len(codec), length=4 + len(codec), body=b"name" + codec)
        self.send(rank, name, record, w.Record(w.HAVES, w.INLINE, sender=rank, term=1, cookie=1))

    def saved(self, record: w.Record) -> tuple[int, bytes]:
        """Counter and residual in a SNAP."""
        assert record.kind == w.SNAP and record.length == STATE_BYTES
        assert record.cookie == 1000 + record.sender | 1 << 32
        return int.from_bytes(record.body[:8], "little"), record.body[48:]


@pytest.fixture
def three():
    made = []

    def make(*arguments, **more) -> Three:
        made.append(Three(*arguments, **more))
        return made[-1]

    yield make
    for one in made:
        one.close()


def test_a_sum_that_no_survivor_has_committed_is_taken_back(three):
    r = three(2, 1)
    for rank in range(2):
        r.have(rank, 1, w.Coded(1, w.SUMMED, 0, 1), w.WAITS)
    records = {rank: r.take(rank) for rank in range(2)}
    snaps = [x for rank in records for x in records[rank] if x.kind == w.SNAP]
    counter, _, residual, _ = r.right.state()
    assert [(x.round, r.saved(x)) for x in snaps] == [(1, (counter, residual))]
    assert [x.kind for x in (records[0][-1], records[1][-1])] == [w.TOOK] * 2
    for rank in range(2):
        push(r, rank, 1, term=1)
    answers = [r.take(rank)[-1] for rank in range(2)]
    assert {a.body for a in answers} == {r.answer(1, 2)} and answers[0].slot == 2
    assert r.lane.counters()["undone"] == 1 and r.lane.counters()["reset"] == 0


def test_a_sum_that_one_survivor_has_committed_stays(three):
    r = three(2, 2)
    r.have(0, 2, w.Coded(2, w.SUMMED, 0, 2), w.KEPT)
    r.have(1, 1, w.Coded(1, w.SUMMED, 0, 1), w.WAITS)
    (snap, want) = sorted(r.take(0), key=lambda x: -x.kind)
    counter, _, residual, _ = r.right.state()
    assert (snap.round, r.saved(snap)) == (2, (counter, residual))
    assert (want.kind, want.round) == (w.WANT, 1)
    assert r.lane.counters()["undone"] == 0


def test_a_snapshot_is_not_sent_if_a_survivor_holds_the_state(three):
    r = three(2, 2)
    r.have(0, 2, w.Coded(2, w.SUMMED | w.HAS_STATE, 2, 2))
    r.have(1, 2, w.Coded(2, w.SUMMED, 0, 2))
    for rank in range(2):
        assert [x.kind for x in r.take(rank)] == [w.TOOK]
    push(r, 0, 2, term=1)
    push(r, 1, 2, term=1)
    assert r.take(0)[-1].divisor == 2  # the number of the stored snapshot


@pytest.mark.parametrize(("confirms", "stored"), [(1, [1, 1, 1]), (2, [0, 1, 1]), (3, [0, 0, 0])])
def test_the_holder_may_have_pushed_before_the_snapshot_arrived(three, confirms, stored):
    """Its first push without KEPT means nothing; with the second one the snapshot is lost."""
    r = three(1, 1)
    for rank in range(2):
        r.have(rank, 1, w.Coded(1, w.SUMMED, 0, 1))
    records = [x for rank in range(2) for x in r.take(rank)]
    (holder,) = [x.sender for x in records if x.kind == w.SNAP]
    found = []
    for round_ in range(1, 4):
        for rank in range(2):
            kept = rank == holder and round_ == confirms
            push(r, rank, round_, term=1, flags=w.KEPT if kept else 0)
        found.append([r.take(rank)[-1].divisor for rank in range(2)])
    assert found == [[n, n] for n in stored]


def test_a_snapshot_that_only_the_lost_worker_had_is_not_stored_any_more(three):
    r = three(1, 1, alone=5, log_ratio=0.01)
    assert r.stored > 1
    for rank in range(2):
        r.have(rank, 0, w.Coded(1, w.SUMMED, 0, 1), joins=1)
    records = [x for rank in range(2) for x in r.take(rank)]
    (snap,) = [x for x in records if x.kind == w.SNAP]
    assert snap.round == 5
    for rank in range(2):
        push(r, rank, 0, term=1)
    assert [(x.slot, x.divisor) for x in (r.take(0)[-1], r.take(1)[-1])] == [(6, 0)] * 2


def test_sums_that_only_the_lost_worker_had_are_as_if_they_had_never_been(three):
    """No survivor has used the key, so none can hold a snapshot."""
    r = three(0, 0, alone=3)
    for rank in range(2):
        r.send(rank, w.Record(w.HAVES, w.INLINE, sender=rank, term=1, cookie=0))
    assert [[x.kind for x in r.take(rank)] for rank in range(2)] == [[w.TOOK]] * 2
    register(r, term=1)
    for rank in range(2):
        push(r, rank, 0, term=1)
    (one, other) = (r.take(rank)[-1] for rank in range(2))
    assert one.body == other.body == r.answer(0, 2) and one.slot == 1
    assert r.lane.counters()["reset"] == 0


def test_a_state_that_was_set_is_saved_if_the_sum_after_it_is_taken_back(three):
    state = (7).to_bytes(8, "little") + bytes(40) + np.ones(N, np.float32).tobytes()
    r = three(1, 0, lost=0, first=state)
    for rank in (1, 2):
        r.have(rank, 0, w.Coded(0, 0, 0, 0), w.WAITS)
    (snap,) = [x for rank in (1, 2) for x in r.take(rank) if x.kind == w.SNAP]
    assert (snap.round, snap.flags & w.STATE, snap.body) == (0, w.STATE, state)


@pytest.fixture
def heir():
    """A lane of three workers that has taken a key over by loading worker 0's state of sum 2.

    Its arguments: that state, its flags, and what workers 1 and 2 have.
    """
    made = []

    def make(state: bytes, flags: int, *others: w.Coded) -> Rig:
        r = Rig(3, shrinks=True, fixed_order=True)
        made.append(r)
        register(r, term=1)
        have(r, 0, 2, w.Coded(2, w.SUMMED | w.HAS_STATE | flags, 2), w.KEPT)
        late = [rank for rank, coded in enumerate(others, 1) if coded.sum < 2]
        for rank, coded in enumerate(others, 1):
            have(r, rank, 2 - (rank in late), coded, w.WAITS if rank in late else 0)
        asked = {rank: {x.kind for x in r.take(rank)} for rank in (0, *late)}
        assert asked == {0: {w.FETCH, w.WANT} if late else {w.FETCH}} | {i: {w.FETCH} for i in late}
        for rank in asked:
            log(r, rank, 0, 1, b"")
        load(r, 0, 2, state)
        if late:
            give = w.Record(w.GIVE, w.INLINE, key=100, sender=0, term=1, round=1, divisor=0)
            r.send(0, give._replace(length=len(push_of(1)), body=push_of(1)))
        assert [[x.kind for x in r.take(rank)] for rank in range(3)] == [[w.TOOK]] * 3
        r.lane.drop(0, 2)
        register(r, term=2)
        return r

    yield make
    for r in made:
        assert r.lane.counters()["reset"] == 0
        r.close()


def test_a_lane_without_the_state_before_a_sum_gets_it_from_a_survivor(heir):
    state, older = bytes(STATE_BYTES), (1).to_bytes(8, "little") + bytes(STATE_BYTES - 8)
    r = heir(state, 0, w.Coded(1, w.SUMMED | w.HAS_STATE, 1), w.Coded(1, w.SUMMED))
    have(r, 1, 1, w.Coded(1, w.SUMMED | w.HAS_STATE, 1, 1), w.WAITS, term=2)
    have(r, 2, 1, w.Coded(1, w.SUMMED, 0, 1), w.WAITS, term=2)
    (fetch,) = r.take(1)
    assert (fetch.kind, fetch.flags & w.STATE, fetch.round) == (w.FETCH, w.STATE, 1)
    log(r, 1, 0, 1, b"", term=2)
    load(r, 1, 1, older, term=2)
    assert [[x.kind for x in r.take(rank)] for rank in (1, 2)] == [[w.TOOK]] * 2
    r.send(1, w.Record(w.PUSH, w.STATE, key=100, sender=1, term=2, round=1, cookie=1))
    (now,) = r.take(1)
    assert (now.body, now.slot) == (older, 1)


def test_a_loaded_state_that_was_set_replaces_snapshots_of_the_same_sum(heir):
    state = (5).to_bytes(8, "little") + bytes(STATE_BYTES - 8)
    ordinary = w.Coded(2, w.SUMMED | w.HAS_STATE, 2)
    r = heir(state, w.WAS_SET, ordinary, w.Coded(2, w.SUMMED))
    have(r, 1, 2, ordinary, term=2)
    have(r, 2, 2, w.Coded(2, w.SUMMED), term=2)
    (snap,) = [x for rank in (1, 2) for x in r.take(rank) if x.kind == w.SNAP]
    assert (snap.round, snap.flags & w.STATE, snap.body) == (2, w.STATE, state)


def test_error_feedback_starts_from_zero_where_a_part_of_the_log_is_lost():
    """The lane is new, and the snapshot is older than the loss of a worker."""
    r = Rig(2, shrinks=True)
    register(r, term=1)
    body = w.Coded(5, w.SUMMED | w.HAS_STATE, 3, 4, 9).bytes()
    for rank in range(2):
        record = w.Record(w.HAVE, w.INLINE, key=100, sender=rank, term=1, round=5, divisor=0)
        record = record._replace(cookie=1000 + rank, length=len(body), body=body)
        r.send(rank, record, w.Record(w.HAVES, w.INLINE, sender=rank, term=1, cookie=1))
    records = [x for rank in range(2) for x in r.take(rank)]
    (snap,) = [x for x in records if x.kind == w.SNAP]
    assert snap.round == 5 and snap.body == (9).to_bytes(8, "little") + bytes(STATE_BYTES - 8)
    assert len(records) == 3 and len(r.log) == 1 and "error feedback" in r.log[0]
    assert r.lane.counters()["reset"] == 1
    r.close()


def test_error_feedback_starts_from_zero_where_logs_lack_sums_that_no_survivor_knows_of():
    """A lost worker made sums 1 and 2 alone; the snapshot of sum 2 is lost with its lane."""
    r = Rig(2, shrinks=True, fixed_order=True)
    register(r, term=1)
    have(r, 0, 1, w.Coded(3, w.SUMMED, 0, 0, 3, 99), w.KEPT)
    have(r, 1, 0, w.Coded(0), w.WAITS)
    for rank in range(2):
        assert w.FETCH in [x.kind for x in r.take(rank)]
    for rank in range(2):
        log(r, rank, 0, 1, w.log_entry(3, 2, push_of(rank)))
    give = w.Record(w.GIVE, w.INLINE, key=100, sender=0, term=1, round=0, divisor=0)
    r.send(0, give._replace(length=len(push_of(1)), body=push_of(1)))
    assert [[x.kind for x in r.take(rank)] for rank in range(2)] == [[w.TOOK]] * 2
    r.push(1, 0, push_of(1), flags=w.PACKED, round_=0, divisor=2, term=1)
    assert r.take(1)[0].body == push_of(1)
    r.send(0, w.Record(w.PUSH, w.STATE, key=100, sender=0, term=1, round=1, cookie=1))
    (state,) = r.take(0)
    assert (state.slot, state.body) == (3, (3).to_bytes(8, "little") + bytes(STATE_BYTES - 8))
    assert r.lane.counters()["reset"] == 1 and len(r.log) == 1 and "error feedback" in r.log[0]
    r.close()


def test_a_state_that_was_set_after_a_sum_was_taken_back_stays(three):
    """Also if no survivor knows of the sums before it."""
    r = three(0, 0, alone=3, lost=1)
    r.have(0, 0, w.Coded(0), w.WAITS, joins=1)
    r.have(2, 3, w.Coded(0), joins=0)
    snaps = [x for rank in (0, 2) for x in r.take(rank) if x.kind == w.SNAP]
    assert [x.round for x in snaps] == [2]
    state = (9).to_bytes(8, "little") + bytes(STATE_BYTES - 8)
    r.push(0, 0, state, flags=w.STATE, round_=0, cookie=0, term=1)
    assert [x.body for x in r.take(0)] == [state]
    r.lane.drop(2, 2)
    register(r, term=2)
    have(r, 0, 0, w.Coded(0), w.WAITS, term=2)
    (snap,) = [x for x in r.take(0) if x.kind == w.SNAP]
    assert (snap.flags & w.STATE, snap.body) == (w.STATE, state)


def test_a_state_that_a_lost_worker_has_set_replaces_snapshots_of_the_same_sum(three):
    r = three(1, 1, lost=0)
    r.have(1, 1, w.Coded(1, w.SUMMED | w.HAS_STATE, 1, 1))
    r.have(2, 1, w.Coded(1, w.SUMMED, 0, 1))
    records = [x for rank in (1, 2) for x in r.take(rank)]
    (snap,) = [x for x in records if x.kind == w.SNAP]
    assert snap.round == 1 and snap.flags & w.STATE and snap.body == bytes(STATE_BYTES)


def test_a_lost_worker_ends_rebuilds_that_are_under_way_or_wait():
    """Two keys have so long logs that the second one has to wait for the first."""
    r = Rig(3, shrinks=True)
    codec = compression(ONEBIT).text().encode()
    much = w.Coded(2, w.SUMMED | w.HAS_STATE, 1, 0, 0, 100 << 20)

    def have(rank: int, term: int) -> None:
        records = []
        for slot in range(2):
            name = w.Record(w.REGISTER, w.INLINE, key=100 + slot, slot=slot, sender=rank, term=term)
            name = name._replace(cookie=4 * N, priority=len(codec), length=4 + len(codec))
            one = w.Record(w.HAVE, w.INLINE, key=100 + slot, slot=slot, sender=rank, term=term)
            one = one._replace(round=2, divisor=0, cookie=slot, length=32, body=much.bytes())
            records += [name._replace(body=b"name" + codec), one]
        r.send(rank, *records, w.Record(w.HAVES, w.INLINE, sender=rank, term=term, cookie=2))

    for rank in range(3):
        have(rank, 1)
    for rank in range(3):
        assert [(x.kind, x.key) for x in r.take(rank)] == [(w.FETCH, 100)]
    r.lane.drop(2, 2)
    for rank in range(2):
        have(rank, 2)
    for key in (100, 101):
        for rank in range(2):
            assert [(x.kind, x.key) for x in r.take(rank) if x.kind == w.FETCH] == [(w.FETCH, key)]
        for rank in range(2):
            body = w.log_entry(2, 2, push_of(rank))
            log = w.Record(w.LOG, w.INLINE, key=key, slot=key - 100, sender=rank, term=2, round=0)
            r.send(rank, log._replace(divisor=1, length=len(body), body=body))
        load = w.Record(w.LOAD, w.INLINE, key=key, slot=key - 100, sender=0, term=2, round=1)
        r.send(0, load._replace(length=STATE_BYTES, body=bytes(STATE_BYTES)))
    for rank in range(2):
        assert [x.kind for x in r.take(rank)] == [w.TOOK]
    assert r.lane.counters()["replayed"] == 2 and r.lane.counters()["malformed"] == 0
    r.close()
