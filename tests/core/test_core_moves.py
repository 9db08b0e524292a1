"""A core that loses a lane, with scripted lanes: what it says, pushes again, keeps and gives."""

from __future__ import annotations

import struct
import threading
import time

import pytest

from bpsx import errors
from bpsx.errors import Status
from core.cores import BIG, Rig, array, push_pull
from support import wire as w

#: Bytes: a barrier, inline without and with acknowledgement, and large.
SIZES = [0, 16, 8192, BIG]
#: Slots of lane 0 go to lane 1, those of odd numbers to lane 2.
MOVES = [(0, [(1, 100), (2, 200)])]


class Elastic(Rig):
    """A core with three lanes, and a tensor on lane 0."""

    def __init__(self, nbytes: int = 16, *, elastic: bool = True, **more: bool | int) -> None:
        super().__init__(lanes=3, elastic=elastic, **more)
        self.nbytes = nbytes
        self.x = self.tensor("x", nbytes)
        self.slot, self.unread = self._key, [[] for _ in self.lanes]
        target, base = MOVES[0][1][self.slot % 2]
        self.target, self.new_slot = target, base + self.slot // 2

    def round(self, value: float, lane: int = 0) -> bytes:
        """Do a whole round whose sum consists of ``value``; return the sum."""
        out, total = array(self.nbytes), array(self.nbytes, value).tobytes()
        handle = push_pull(self.core, self.x, array(self.nbytes), out)
        self.reply(self.next(w.PUSH, lane), total, lane)
        handle.wait(60)
        assert out.tobytes() == total
        return total

    def reply(self, push: w.Record, total: bytes, lane: int) -> None:
        self.answer(push, total, lane)

    def next(self, kind: int, lane: int) -> w.Record:
        """The next record of ``kind`` that a lane gets. Others stay unread."""
        unread = self.unread[lane]
        while not (found := [r for r in unread if r.kind == kind]):
            unread += self.take(lane)
        unread.remove(found[0])
        return found[0]

    def moves(self, term: int = 1, moves: list = MOVES) -> None:
        self.core.begin_term(term, moves)

    def took(self, lane: int, term: int = 1) -> None:
        self.endpoint.inject(lane, w.pack(w.Record(w.TOOK, w.INLINE, term=term)))

    def want(self, round_: int, **changes: int) -> None:
        """Ask for the outcome of a round of x, as its new lane does."""
        r = w.Record(w.WANT, w.INLINE, key=1, term=1, round=round_, cookie=0)
        self.endpoint.inject(self.target, w.pack(r._replace(**changes)))

    def wait_for(self, name: str, count: int) -> None:
        """Wait until one of the core's counters has a value."""
        end = time.monotonic() + 60
        while self.core.counters()[name] != count:
            assert time.monotonic() < end, self.core.counters()
            time.sleep(0.001)


@pytest.fixture
def elastic(request):
    made = []

    def make(*arguments, **more):
        made.append(Elastic(*arguments, **more))
        return made[-1]

    yield make
    for rig in made:
        rig.close()


@pytest.mark.parametrize("nbytes", SIZES)
def test_an_unanswered_round_is_pushed_again(elastic, nbytes):
    r = elastic(nbytes)
    r.round(5)
    out = array(nbytes)
    handle = push_pull(r.core, r.x, array(nbytes, 2), out)
    first = r.next(w.PUSH, 0)
    r.moves()
    have = r.next(w.HAVE, r.target)
    assert (have.key, have.slot, have.term, have.round) == (first.key, r.new_slot, 1, 1)
    assert have.flags & ~w.INLINE == w.WAITS | w.KEPT
    register = r.next(w.REGISTER, r.target)
    assert (register.slot, register.cookie, register.body) == (r.new_slot, nbytes, b"x")
    assert [r.next(w.HAVES, lane).cookie for lane in (1, 2)] == [r.target == 1, r.target == 2]
    again = r.next(w.PUSH, r.target)
    # The cookie's upper half tells the answer from one to the first push.
    assert again.cookie == first.cookie | 1 << 32
    assert again._replace(slot=first.slot, term=0, cookie=first.cookie) == first
    r.reply(again, array(nbytes, 3).tobytes(), 0)  # a lost lane is not heard
    r.wait_for("stale", 1)
    assert not handle.done()
    r.reply(again, array(nbytes, 4).tobytes(), r.target)
    handle.wait(60)
    assert out.tobytes() == array(nbytes, 4).tobytes()
    assert r.core.counters()["malformed"] == 0


def test_a_push_that_has_no_credit_yet_waits_for_its_outcome_too(elastic):
    r = elastic(BIG, credit=BIG, hold_done=True)
    y = r.tensor("y", BIG)
    push_pull(r.core, r.x, array(BIG), array(BIG))
    r.next(w.PUSH, 0)  # uses the credit up
    push_pull(r.core, y, array(BIG), array(BIG))
    end = time.monotonic() + 60
    while not r.core.gauges()["queued"]:
        assert time.monotonic() < end
        time.sleep(0.001)
    r.moves()
    haves = [r.next(w.HAVE, lane) for lane in (1, 2)]
    assert all(have.flags & w.WAITS for have in haves)
    r.endpoint.complete()
    assert {r.next(w.PUSH, lane).key for lane in (1, 2)} == {1, 2}


def test_a_tensor_that_has_not_been_used_is_pushed_to_its_new_lane_only(elastic):
    r = elastic()
    r.moves()
    assert [r.next(w.HAVES, lane).cookie for lane in (1, 2)] == [0, 0]
    push_pull(r.core, r.x, array(16), array(16))
    push = r.next(w.PUSH, r.target)
    assert (push.slot, push.term, push.round) == (r.new_slot, 1, 0)


def test_a_term_ends_with_the_last_took(elastic):
    r = elastic()
    r.round(5)
    r.moves()
    r.next(w.HAVES, 1), r.next(w.HAVES, 2)
    assert r.core.outstanding == 1  # a lane may still ask
    r.took(1)
    r.want(9)
    r.next(w.GIVE, r.target)  # so the first TOOK has been handled
    assert r.core.take_moved() == []
    r.took(2)
    end = time.monotonic() + 60
    while not (moved := r.core.take_moved()):
        assert time.monotonic() < end
        time.sleep(0.001)
    assert moved == [(1, 1, 0)] and r.core.outstanding == 0
    r.took(2)
    push_pull(r.core, r.x, array(16), array(16))  # makes a thread drive
    r.wait_for("malformed", 1)


def test_nobody_waits_for_took_if_a_worker_has_left_before(elastic):
    r = elastic()
    r.round(5)
    r.core.begin_term(1, MOVES, True)
    end = time.monotonic() + 60
    while not (moved := r.core.take_moved()):
        assert time.monotonic() < end
        time.sleep(0.001)
    assert moved == [(1, 1, 0)] and r.core.outstanding == 0


def test_a_term_that_comes_while_the_last_answer_is_read_begins(elastic):
    """The thread that waits for the answer drives, and returns without a look at the news."""
    r = elastic(8 << 20)
    total, out = array(r.nbytes, 2).tobytes(), array(r.nbytes)

    def answer(term: int) -> None:
        r.reply(r.next(w.PUSH, 0), total, 0)
        r.core.begin_term(term, [], True)

    for term in range(1, 21):
        answering = threading.Thread(target=answer, args=(term,))
        answering.start()
        push_pull(r.core, r.x, array(r.nbytes), out, will_wait=True).wait(60)
        answering.join()
        begun(r, term)


def begun(r: Elastic, term: int) -> None:
    """Wait until a term that moves nothing has begun."""
    end = time.monotonic() + 20
    while not (moved := r.core.take_moved()):
        assert time.monotonic() < end, term
        time.sleep(0.001)
    assert moved == [(term, 0, 0)]


@pytest.mark.parametrize("nbytes", SIZES)
def test_a_lane_gets_the_result_that_it_asks_for(elastic, nbytes):
    r = elastic(nbytes)
    r.round(5)
    total = r.round(7)
    r.moves()
    assert r.next(w.HAVE, r.target).flags & w.KEPT
    r.want(1)
    give = r.next(w.GIVE, r.target)
    assert (give.key, give.slot, give.term, give.round) == (1, r.new_slot, 1, 1)
    assert (give.divisor, give.body or b"") == (0, total)
    r.want(0)  # the outcome before
    assert r.next(w.GIVE, r.target).divisor == -Status.PROTOCOL


def test_a_lane_gets_the_error_that_it_asks_for(elastic):
    r = elastic()
    handle = push_pull(r.core, r.x, array(16), array(16))
    push = r.next(w.PUSH, 0)
    error = w.Record(w.ERROR, w.INLINE, key=push.key, cookie=push.cookie)
    error = error._replace(divisor=-Status.MISMATCH, slot=0, term=1)
    r.endpoint.inject(0, w.pack(error))
    with pytest.raises(errors.MismatchError):
        handle.wait(60)
    r.moves()
    assert r.next(w.HAVE, r.target).flags & w.KEPT
    r.want(0)
    give = r.next(w.GIVE, r.target)
    assert (give.divisor, give.priority, give.cookie) == (-Status.MISMATCH, 0, 1)


def test_an_error_for_one_push_only_is_not_kept(elastic):
    """Others may still get the result of that round, or lack the one before."""
    r = elastic()
    total = r.round(5)
    handle = push_pull(r.core, r.x, array(16), array(16))
    push = r.next(w.PUSH, 0)
    error = w.Record(w.ERROR, w.INLINE, key=push.key, cookie=push.cookie, round=1)
    r.endpoint.inject(0, w.pack(error._replace(divisor=-Status.LEFT)))
    with pytest.raises(errors.PeerLeftError):
        handle.wait(60)
    r.moves()
    assert not r.next(w.HAVE, r.target).flags & w.KEPT
    r.want(0)
    assert r.next(w.GIVE, r.target).body == total


def _settled(*items: tuple[int, int]) -> bytes:
    body = b"".join(struct.pack("<II", *item) for item in items)
    return w.pack(w.Record(w.SETTLED, w.INLINE, length=len(body), body=body))


@pytest.mark.parametrize("nbytes", [8192, BIG])
def test_large_results_are_acknowledged_and_forgotten_once_settled(elastic, nbytes):
    r = elastic(nbytes)
    r.round(5)
    assert r.core.gauges()["kept"] == nbytes
    handle = push_pull(r.core, r.x, array(nbytes), array(nbytes))
    ack, push = r.next(w.ACK, 0), r.next(w.PUSH, 0)
    assert list(struct.iter_unpack("<II", ack.body)) == [(r.slot, 0)]
    r.endpoint.inject(0, _settled((0, 0)))
    r.reply(push, array(nbytes).tobytes(), 0)
    handle.wait(60)
    r.endpoint.inject(0, _settled((0, 0)))  # of an earlier round: changes nothing
    r.moves()
    assert r.next(w.HAVE, r.target).flags & w.KEPT
    assert r.core.gauges()["kept"] == nbytes
    r.endpoint.inject(r.target, _settled((0, 1)))
    r.want(1)
    assert r.next(w.GIVE, r.target).divisor == -Status.PROTOCOL
    assert r.core.gauges()["kept"] == 0


def test_small_results_are_not_acknowledged(elastic):
    r = elastic(4096)
    r.round(5)
    push_pull(r.core, r.x, array(4096), array(4096))
    r.next(w.PUSH, 0)
    assert not [record for record in r.unread[0] if record.kind == w.ACK]


def test_a_second_term_moves_a_key_again(elastic):
    r = elastic()
    r.round(5)
    handle = push_pull(r.core, r.x, array(16, 2), out := array(16))
    r.next(w.PUSH, 0)
    r.moves()
    r.next(w.PUSH, r.target)
    other = 3 - r.target
    r.moves(2, [(r.target, [(other, 300)])])
    have = r.next(w.HAVE, other)
    while have.term != 2:
        have = r.next(w.HAVE, other)
    assert (have.slot, have.round, have.flags & w.WAITS) == (300 + r.new_slot, 1, w.WAITS)
    again = r.next(w.PUSH, other)
    assert (again.slot, again.term, again.round) == (300 + r.new_slot, 2, 1)
    # One TOOK of each term that the lane was a target of; the lost lane owes none any more.
    r.took(other), r.took(other, 2)
    r.reply(again, array(16, 6).tobytes(), other)
    handle.wait(60)
    assert (out == 6).all()
    end = time.monotonic() + 60
    while len(moved := r.core.take_moved()) < 2 and not moved:
        assert time.monotonic() < end
        time.sleep(0.001)
    assert [term for term, _, _ in moved] == [1, 2]


def test_after_a_join_rounds_count_from_zero_and_nothing_is_kept(elastic):
    r = elastic()
    r.round(5)
    r.round(5)
    r.core.all_joined()
    push_pull(r.core, r.x, array(16), array(16))
    assert r.next(w.PUSH, 0).round == 0
    r.moves()
    have = r.next(w.HAVE, r.target)
    assert (have.round, have.divisor, have.flags & w.KEPT) == (0, 1, 0)


@pytest.mark.parametrize(
    "changes", [{"key": 2}, {"term": 0}, {"term": 2}, {"cookie": 1}, {"cookie": 2**32}, {"job": 8}]
)
def test_a_want_of_another_key_or_term_is_malformed(elastic, changes):
    r = elastic()
    r.round(5)
    r.moves()
    r.next(w.HAVES, r.target)  # until then, the key's term is 0
    r.want(0, **changes)
    r.wait_for("malformed", 1)
    r.want(0)
    assert r.next(w.GIVE, r.target).length == 16


@pytest.mark.parametrize("body", [b"", bytes(7), struct.pack("<II", 1, 0), b"\xff" * 8])
def test_a_settled_of_no_partition_is_malformed(elastic, body):
    r = elastic()
    r.moves()
    r.endpoint.inject(1, w.pack(w.Record(w.SETTLED, w.INLINE, length=len(body), body=body)))
    r.wait_for("malformed", 1)


def test_a_core_that_is_not_elastic_refuses_terms_and_their_records():
    r = Rig(lanes=3)
    with pytest.raises(ValueError, match="cannot move"):
        r.core.begin_term(1, MOVES)
    tensor, out = r.tensor("x", 16), array(16)
    handle = push_pull(r.core, tensor, array(16), out)
    (push,) = r.pushes(1)
    for kind in (w.WANT, w.SETTLED, w.TOOK):
        record = w.Record(kind, w.INLINE, key=push.key, length=8, body=bytes(8))
        r.endpoint.inject(0, w.pack(record))
    r.answer(push, array(16, 3).tobytes())
    handle.wait(60)
    assert (out == 3).all() and r.core.counters()["malformed"] == 3
    r.close()


@pytest.mark.parametrize("moves", [[(3, [(1, 0)])], [(0, [(3, 0)])], [(0, [])]])
def test_moves_of_lanes_that_do_not_exist_are_refused(elastic, moves):
    r = elastic()
    with pytest.raises(ValueError, match="there are 3 lanes"):
        r.moves(1, moves)
    r.round(5)


def test_a_key_goes_from_lane_to_lane(elastic):
    r = elastic()
    r.round(1)
    r.moves(1, [(0, [(1, 10)])])
    r.round(2, lane=1)
    r.moves(2, [(1, [(2, 20)])])
    r.round(3, lane=2)
