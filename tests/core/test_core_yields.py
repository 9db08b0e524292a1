"""A core whose lanes yield slots while they live, with scripted lanes."""

from __future__ import annotations

import threading

import pytest

from core.cores import array, push_pull
from core.test_core_moves import SIZES, Elastic
from support import wire as w


class Yielding(Elastic):
    """Lane 0 yields all its slots of the class of tensor x to lane 1."""

    def yields(self, term: int = 1, limit: int = 64) -> None:
        targets = [(0, 0)] * 64
        targets[self.slot % 64] = (1, 100)
        self.core.begin_term(term, [], False, [(0, limit, targets)])
        self.target, self.new_slot = 1, 100

    def left(self, term: int = 1, lane: int = 0) -> None:
        self.endpoint.inject(lane, w.pack(w.Record(w.LEFT, w.INLINE, term=term)))

    def assert_taken(self, *terms: int) -> None:
        """The targets say TOOK; the core then reports the terms."""
        found: list[int] = []
        while len(found) < len(terms):
            found += [term for term, *_ in self.core.take_moved()]
            threading.Event().wait(0.001)
        assert found == list(terms)
        assert self.core.counters()["malformed"] == 0


@pytest.fixture
def yielding():
    made = []

    def make(*arguments, **more):
        made.append(Yielding(*arguments, **more))
        return made[-1]

    yield make
    for rig in made:
        rig.close()


@pytest.mark.parametrize("nbytes", SIZES)
def test_rounds_go_on_until_the_lane_has_left(yielding, nbytes):
    r = yielding(nbytes)
    r.round(5)
    r.yields()
    asked = r.next(w.YIELD, 0)
    assert (asked.term, asked.slot, asked.divisor, asked.key) == (1, 64, 64, 1 << r.slot)
    r.round(6)
    out = array(nbytes)
    handle = push_pull(r.core, r.x, array(nbytes, 2), out)
    first = r.next(w.PUSH, 0)
    r.left()
    have = r.next(w.HAVE, 1)
    assert (have.key, have.slot, have.term, have.round) == (first.key, 100, 1, 2)
    assert have.flags & ~w.INLINE == w.WAITS | w.KEPT
    assert r.next(w.HAVES, 1).cookie == 1
    again = r.next(w.PUSH, 1)
    assert (again.slot, again.term, again.round) == (100, 1, 2)
    assert (again.body or b"") == (first.body or b"")
    r.took(1)
    r.reply(again, array(nbytes, 7).tobytes(), 1)
    handle.wait(60)
    assert out.tobytes() == array(nbytes, 7).tobytes()
    r.assert_taken(1)
    r.round(8, lane=1)


@pytest.mark.parametrize("kind", [w.ANSWER, w.ERROR, w.SNAP])
def test_what_left_overtakes_is_ignored(yielding, kind):
    """The round has been pushed to the new lane, whose outcome counts."""
    r = yielding(16)
    out = array(16)
    handle = push_pull(r.core, r.x, array(16, 2), out)
    first = r.next(w.PUSH, 0)
    r.yields()
    r.next(w.YIELD, 0)
    r.left()
    again = r.next(w.PUSH, 1)
    late = w.Record(kind, w.INLINE, key=first.key, cookie=first.cookie, divisor=2, length=16)
    r.endpoint.inject(0, w.pack(late._replace(body=array(16, 9).tobytes())))
    r.wait_for("stale", 1)
    assert not handle.done()
    r.reply(again, array(16, 3).tobytes(), 1)
    handle.wait(60)
    assert out.tobytes() == array(16, 3).tobytes() and r.core.counters()["malformed"] == 0


def test_pushes_that_wait_for_credit_go_where_they_belong(yielding):
    """Those of slots that stay keep their place in the queue."""
    r = yielding(40_000, credit=50_000, hold_done=True)
    y = r.tensor("y", 40_000)
    first = r.tensor("first", 40_000)
    handles = [push_pull(r.core, first, array(40_000, 1), array(40_000))]
    r.next(w.PUSH, 0)  # takes all of the credit
    handles += [push_pull(r.core, t, array(40_000, 1), array(40_000)) for t in (r.x, y)]
    r.yields()
    r.next(w.YIELD, 0)
    r.left()
    assert (r.next(w.PUSH, 1).key, r.next(w.HAVES, 1).cookie) == (1, 1)
    while r.endpoint.complete():
        pass
    assert r.next(w.PUSH, 0).key == 2
    while r.endpoint.complete():
        pass
    r.core.fail(-5, "over")


@pytest.mark.parametrize("limit", [0, 1])
def test_slots_from_the_limit_on_stay(yielding, limit):
    r = yielding(16)
    r.round(1)
    r.yields(limit=r.slot + limit)
    r.next(w.YIELD, 0)
    r.left()
    assert r.next(w.HAVES, 1).cookie == limit
    r.took(1)
    r.assert_taken(1)
    r.round(2, lane=limit)


def test_a_tensor_that_is_used_first_while_its_lane_yields(yielding):
    """Others may have used it before: it goes where they are."""
    r = yielding(16)
    r.yields()
    r.next(w.YIELD, 0)
    handle = push_pull(r.core, r.x, array(16, 2), array(16))
    assert r.next(w.PUSH, 0).slot == r.slot
    r.left()
    assert r.next(w.HAVE, 1).flags & w.WAITS
    r.reply(r.next(w.PUSH, 1), array(16).tobytes(), 1)
    handle.wait(60)


def test_a_tensor_that_is_used_first_after_its_lane_has_left(yielding):
    r = yielding(16)
    r.yields()
    r.next(w.YIELD, 0)
    r.left()
    assert r.next(w.HAVES, 1).cookie == 0
    r.took(1)
    r.assert_taken(1)
    r.round(2, lane=1)


def test_the_old_lane_is_lost_before_it_has_left(yielding):
    """Yielded slots go to the first term's target, the others to the second's."""
    r = yielding(16)
    y = r.tensor("y", 16)
    handles = [push_pull(r.core, t, array(16, 2), array(16)) for t in (r.x, y)]
    pushes = [r.next(w.PUSH, 0) for _ in handles]
    r.yields()
    r.next(w.YIELD, 0)
    r.moves(2, [(0, [(2, 50)])])
    said = r.next(w.HAVE, 1), r.next(w.HAVE, 2)
    assert [(h.key, h.slot, h.term) for h in said] == [(1, 100, 1), (2, 50 + 2, 2)]
    haves = r.next(w.HAVES, 1), r.next(w.HAVES, 2)
    assert [(h.term, h.cookie) for h in haves] == [(1, 1), (2, 1)]
    r.took(1, 1), r.took(2, 2)
    for lane, push in ((1, pushes[0]), (2, pushes[1])):
        again = r.next(w.PUSH, lane)
        assert again.key == push.key
        r.reply(again, array(16).tobytes(), lane)
    for handle in handles:
        handle.wait(60)
    r.assert_taken(1, 2)


def test_the_new_lane_is_lost_before_the_old_one_has_left(yielding):
    """HAVES of the later term waits, as keys for its target still come."""
    r = yielding(16)
    r.round(1)
    r.yields()
    r.next(w.YIELD, 0)
    r.moves(2, [(1, [(2, 10)])])
    r.round(2)  # at the old lane
    assert r.lanes[2].sent(0) is None
    r.left()
    have = r.next(w.HAVE, 2)
    assert (have.slot, have.term, have.round) == (110, 2, 2)
    haves = r.next(w.HAVES, 2)
    assert (haves.term, haves.cookie) == (2, 1)
    r.took(2, 2)
    r.assert_taken(1, 2)
    r.round(3, lane=2)


def test_left_that_is_not_expected_is_malformed(yielding):
    r = yielding(16)
    r.round(1)
    r.yields(term=3)
    r.next(w.YIELD, 0)
    r.left(term=2), r.left(term=3, lane=1)
    r.wait_for("malformed", 2)
    r.left(term=3)
    assert r.next(w.HAVES, 1).term == 3
    r.left(term=3)
    r.wait_for("malformed", 3)


def test_rules_are_checked(yielding):
    r = yielding(16)
    with pytest.raises(ValueError, match="at most 64"):
        r.core.begin_term(1, [], False, [(0, 9, [(1, 0)] * 65)])
    with pytest.raises(ValueError, match="there are 3 lanes"):
        r.core.begin_term(1, [], False, [(0, 9, [(3, 0)])])
    r.round(1)
