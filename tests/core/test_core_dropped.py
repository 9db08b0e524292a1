"""A core against scripted lanes that loses another worker: what it says of compressed keys."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from bpsx.core._tensor import CommitGroup
from bpsx.errors import Status
from core.test_core_logs import STATE_BYTES, Rig
from support import wire as w


class Shrinking(Rig):
    """One of three workers; push_pulls of the tensor belong to a group that the test seals."""

    def __init__(self) -> None:
        super().__init__(shrinks=True, senders=3)
        self.group = CommitGroup(self.core)
        self.core.groups["t"] = self.group

    def commit(self) -> None:
        self.group.seal()
        self.core.notify()

    def drop(self) -> w.Coded:
        """Lose a worker; return what the core says of the key."""
        self.core.begin_term(1, [], living=2)
        return w.coded(self.take(w.HAVE).body or b"")

    def respond(self, push: w.Record, number: int, stored: int = 0) -> bytes:
        """Answer a push with other bytes; return these."""
        body = bytes(reversed(push.body or b""))
        self.send(w.ANSWER, push, body, round=push.round, slot=number, divisor=stored)
        return body


@pytest.fixture
def rig() -> Iterator[Shrinking]:
    made = Shrinking()
    yield made
    made.close()


def step(r: Shrinking, number: int, stored: int = 0) -> w.Record:
    handle, push = r.begin()
    r.respond(push, number, stored)
    r.commit()
    handle.wait(60)
    return push


def wait_for(r: Shrinking, received: int) -> None:
    while r.core.counters()["messages_received"] < received:
        r.core.wait_for_progress(0.01)


def test_an_answer_that_is_not_committed_neither_changes_the_push_nor_is_logged(rig):
    step(rig, 1)
    logged = rig.core.gauges()["logged"]
    _, push = rig.begin()
    rig.respond(push, 2)
    wait_for(rig, 2)
    assert rig.core.gauges()["logged"] == logged > 0
    said = rig.drop()
    assert (said.sum, said.gap, said.logged) == (1, 1, 0)
    again = rig.take(w.PUSH)
    assert again.body == push.body and again.round == push.round == 1
    assert (push.divisor, again.divisor, again.term) == (3, 2, 1)
    assert rig.core.gauges()["logged"] == 0


def test_an_error_that_is_not_committed_does_not_count_as_an_outcome(rig):
    step(rig, 1)
    _, push = rig.begin()
    rig.send(w.ERROR, push, round=push.round, divisor=-Status.MISMATCH)
    wait_for(rig, 2)
    said = rig.drop()
    assert (said.sum, said.flags & w.SUMMED) == (1, w.SUMMED)
    assert rig.take(w.PUSH).body == push.body


def test_a_committed_answer_is_logged_with_the_divisor_of_its_sum(rig):
    step(rig, 1)
    assert rig.drop().gap == 1
    rig.send(w.TOOK, w.Record(w.PUSH), term=1)
    handle, push = rig.begin()
    rig.respond(push, 2)
    rig.commit()
    handle.wait(60)
    said = rig.lose_lane(2)
    assert (said.sum, said.gap) == (2, 1)
    assert rig.logged(push._replace(cookie=0), after=1, term=2) == [(2, 2, push.body)]


def test_a_snapshot_of_the_latest_sum_outlives_the_log(rig):
    """An older one is of no use, as the sums after it cannot be repeated."""
    step(rig, 1)
    push = step(rig, 2)
    rig.send(w.SNAP, push, bytes(STATE_BYTES), round=2)
    wait_for(rig, 3)
    assert rig.core.gauges()["held"] == STATE_BYTES
    said = rig.drop()
    assert (said.sum, said.gap, said.state, said.flags) == (2, 2, 2, w.SUMMED | w.HAS_STATE)
    step(rig, 3)
    rig.core.begin_term(2, [], living=1)
    said = w.coded(rig.take(w.HAVE).body or b"")
    assert (said.sum, said.gap, said.flags) == (3, 3, w.SUMMED)
    assert rig.core.gauges()["held"] == 0


def test_a_snapshot_may_replace_another_one_of_the_same_sum(rig):
    push = step(rig, 1)
    for number, flags in enumerate((0, w.STATE, 0, w.STATE, 0)):
        state = bytes([number]) * STATE_BYTES
        rig.send(w.SNAP, push, state, round=1, flags=w.INLINE | flags)
    wait_for(rig, 6)
    rig.core.begin_term(1, [(0, [(1, 20)])], living=2)
    rig.lane = 1
    said = w.coded(rig.take(w.HAVE).body or b"")
    assert said.flags == w.SUMMED | w.HAS_STATE | w.WAS_SET
    rig.send(w.FETCH, push, term=1, round=1, flags=w.INLINE | w.STATE, divisor=0)
    assert rig.take(w.LOAD).body == bytes([3]) * STATE_BYTES
