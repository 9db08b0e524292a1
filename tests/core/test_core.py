"""The worker's core against a scripted peer: what it sends, in which order, and what it makes of right and wrong answers."""

from __future__ import annotations

import gc
import threading
import weakref

import numpy as np
import pytest

import core.wire as w
from bpsx import errors
from bpsx._core import Core
from bpsx._tensor import Tensor
from bpsx.pipeline import stages_for
from bpsx.transports.loopback import LoopbackEndpoint

BIG = 40_000                    # bytes: more than travels inline
LONG = 300_000                  # ... from which is learnt how fast a link is


class Rig:
    """A core whose lanes are endpoints that the test reads and writes."""

    def __init__(self, lanes: int = 1, credit: int = 0, hold_done: bool = False, start: bool = True, ahead_ms: float = 0,
                 servers: int = 1) -> None:
        self.endpoint = LoopbackEndpoint()
        self.endpoint.hold_done = hold_done
        self.lanes = [LoopbackEndpoint() for _ in range(lanes)]
        for i, lane in enumerate(self.lanes):
            self.endpoint.connect(i, lane, 0)
            lane.connect(0, self.endpoint, i)
        self.core = Core(self.endpoint, rank=0, job=7, lanes=[i % servers for i in range(lanes)], credit=credit, spin_us=0, ahead_ms=ahead_ms)
        if start:
            self.core.start()
        self._key = 0

    def tensor(self, name: str, *lengths: int, lane: int = 0) -> Tensor:
        parts, at = [], 0
        for length in lengths:
            self._key += 1
            parts.append((self._key, lane, self._key, at, length))
            at += length
        return Tensor(name, 3, parts, stages_for("cpu"))

    def take(self, lane: int = 0, timeout: float = 20) -> list[w.Record]:
        """The records of the next message that a lane gets."""
        message = self.lanes[lane].sent(timeout)
        assert message is not None, "the core has sent nothing"
        return w.unpack(message[1], message[2])

    def pushes(self, n: int, lane: int = 0) -> list[w.Record]:
        """The next ``n`` pushes, registrations left out."""
        found: list[w.Record] = []
        while len(found) < n:
            found += [r for r in self.take(lane) if r.kind == w.PUSH]
        assert len(found) == n
        return found

    def answer(self, push: w.Record, content: bytes, lane: int = 0, **changes: object) -> None:
        r = w.Record(w.ANSWER, w.INLINE, push.dtype, 7, push.key, 0, 0, 0, push.round, 0, 0, push.cookie, len(content), content)
        self.endpoint.inject(lane, w.pack(r._replace(**changes)))

    def close(self) -> None:
        self.core.close()
        self.endpoint.close()
        for lane in self.lanes:
            lane.close()
        self.core.reap()


@pytest.fixture
def rig():
    made: list[Rig] = []

    def make(**options) -> Rig:
        made.append(Rig(**options))
        return made[-1]

    yield make
    for r in made:
        r.close()


def array(n: int, value: float = 1.0) -> np.ndarray:
    return np.full(n // 4, value, np.float32)


def test_first_push_registers_and_carries_everything(rig):
    r = rig()
    t = r.tensor("weight", 16)
    a, out = array(16, 2.0), array(16, 0.0)
    handle = r.core.submit(t, a, out, divisor=2, priority=-3)
    register, push = r.take()
    assert (register.kind, register.body, register.cookie, register.key) == (w.REGISTER, b"weight", 16, push.key)
    assert (push.kind, push.divisor, push.priority, push.round, push.dtype, push.body) == (w.PUSH, 2, -3, 0, 3, a.tobytes())
    r.answer(push, array(16, 5.0).tobytes())
    handle.wait(20)
    assert (out == 5).all()


def test_second_round_registers_no_more_and_counts_on(rig):
    r = rig()
    t = r.tensor("x", 16)
    for i in range(3):
        handle = r.core.submit(t, array(16), array(16))
        (push,) = r.pushes(1)
        assert push.round == i
        r.answer(push, bytes(16))
        handle.wait(20)


def test_large_partition_travels_as_second_frame_uncopied(rig):
    r = rig()
    a = array(BIG, 3.0)
    handle = r.core.submit(r.tensor("big", BIG), a, a)
    _, frame, second = r.lanes[0].sent(20)
    assert second == a.tobytes() and len(frame) < 256
    push = w.unpack(frame, second)[-1]
    r.endpoint.inject(0, w.pack(w.Record(w.ANSWER, 0, 3, 7, push.key, 0, 0, 0, 0, 0, 0, push.cookie, BIG)), array(BIG, 9.0).tobytes())
    handle.wait(20)
    assert (a == 9).all()


def test_partitions_come_home_in_any_order_to_their_place(rig):
    r = rig()
    t = r.tensor("cut", 4096, 4096, 100)
    out = array(8292, 0.0)
    handle = r.core.submit(t, array(8292), out)
    pushes = r.pushes(3)
    for value, push in reversed(list(enumerate(pushes))):
        assert not handle.done()
        r.answer(push, np.full(push.length // 4, value, np.float32).tobytes())
    handle.wait(20)
    assert (out[:1024] == 0).all() and (out[1024:2048] == 1).all() and (out[2048:] == 2).all()


def test_small_partitions_share_a_message(rig):
    r = rig(start=False)
    tensors = [r.tensor(f"t{i}", 16) for i in range(50)]
    handles = [r.core.submit(t, array(16), array(16)) for t in tensors]
    r.core.start()
    pushes = [p for p in r.take() if p.kind == w.PUSH]
    assert len(pushes) == 50
    for p in pushes:
        r.answer(p, bytes(16))
    for h in handles:
        h.wait(20)


def test_most_urgent_first_then_oldest(rig):
    r = rig(credit=1, hold_done=True, start=False)      # so that the core sees them all at once
    order = [5, -1, 7, 5, 0]
    pushes = []
    tensors = [r.tensor(f"p{i}", BIG) for i in range(len(order))]
    handles = [r.core.submit(t, array(BIG), array(BIG), priority=p) for t, p in zip(tensors, order)]
    r.core.start()
    seen = []
    for _ in order:
        (push,) = r.pushes(1)
        r.endpoint.complete()
        seen.append((push.priority, push.key))
        pushes.append(push)
    assert seen == sorted(seen, key=lambda s: (-s[0], s[1]))
    for p in pushes:
        r.answer(p, bytes(BIG))
    for h in handles:
        h.wait(20)


def test_credit_bounds_what_is_handed_over_and_returns_without_answers(rig):
    r = rig(credit=2 * BIG, hold_done=True)
    tensors = [r.tensor(f"c{i}", BIG) for i in range(5)]
    handles = [r.core.submit(t, array(BIG), array(BIG)) for t in tensors]
    pushes = r.pushes(2)
    assert r.lanes[0].sent(0.05) is None
    assert r.endpoint.complete() == 2
    pushes += r.pushes(2)
    assert r.lanes[0].sent(0.05) is None
    r.endpoint.complete()
    pushes += r.pushes(1)
    for p in pushes:
        r.answer(p, bytes(BIG))
    for h in handles:
        h.wait(20)


def test_lanes_of_a_server_share_what_its_link_takes_in_a_short_time(rig):
    r = rig(lanes=4, servers=2, credit=100 * LONG, hold_done=True, ahead_ms=1e-6)       # lanes 0 and 2 are the first server's
    handles, pushes = [], []

    def submit(name: str, lane: int, priority: int = 0) -> None:
        handles.append(r.core.submit(r.tensor(name, LONG, lane=lane), array(LONG), array(LONG), priority=priority))

    submit("learn", 0)                                          # when that is written out it is known that its link is not infinitely fast
    pushes += [(0, r.pushes(1)[0])]
    r.endpoint.complete()
    submit("plug", 0)
    pushes += [(0, r.pushes(1)[0])]
    for i, lane in enumerate((0, 2, 2, 0)):
        submit(f"s{i}", lane, priority=i)
    for lane, priority in ((0, 3), (2, 2), (2, 1), (0, 0)):     # one at a time, the most urgent of both lanes
        assert r.lanes[0].sent(0.02) is None and r.lanes[2].sent(0.02) is None
        r.endpoint.complete()
        (push,) = r.pushes(1, lane)
        assert push.priority == priority
        pushes.append((lane, push))
    for lane, push in pushes:
        r.answer(push, bytes(LONG), lane)
    for h in handles:
        h.wait(20)


def test_all_servers_have_the_room_of_the_slowest(rig):
    r = rig(lanes=2, servers=2, credit=100 * LONG, hold_done=True, ahead_ms=1e-6)
    handles, pushes = [], []

    def submit(name: str, lane: int) -> None:
        handles.append(r.core.submit(r.tensor(name, LONG, lane=lane), array(LONG), array(LONG)))

    def pushed(lane: int, n: int = 1) -> None:
        pushes.extend((lane, push) for push in r.pushes(n, lane))

    submit("learn", 0)                                          # how slow the first one is
    pushed(0)
    r.endpoint.complete()
    for i in range(3):
        submit(f"fast {i}", 1)
    pushed(1, 3)                                                # nothing is under way to the slow one: it bounds nobody
    submit("slow", 0)
    pushed(0)
    submit("other", 1)
    assert r.lanes[1].sent(0.05) is None
    r.endpoint.complete()
    pushed(1)
    for lane, push in pushes:
        r.answer(push, bytes(LONG), lane)
    for h in handles:
        h.wait(20)


def test_what_is_small_does_not_pass_what_is_urgent_and_large_on_another_lane_of_its_server(rig):
    r = rig(lanes=2, credit=100 * LONG, hold_done=True, ahead_ms=1e-6)
    handles = [r.core.submit(r.tensor("learn", LONG), array(LONG), array(LONG))]
    pushes = [(0, r.pushes(1)[0])]
    r.endpoint.complete()
    handles.append(r.core.submit(r.tensor("plug", LONG), array(LONG), array(LONG)))
    pushes.append((0, r.pushes(1)[0]))
    handles.append(r.core.submit(r.tensor("large", 2 * LONG), array(2 * LONG), array(2 * LONG), priority=1))
    handles += [r.core.submit(r.tensor(f"small {i}", BIG, lane=1), array(BIG), array(BIG)) for i in range(3)]
    assert r.lanes[1].sent(0.05) is None            # there would be room
    r.endpoint.complete()
    pushes.append((0, r.pushes(1)[0]))
    assert pushes[-1][1].priority == 1 and r.lanes[1].sent(0.05) is None
    r.endpoint.complete()
    pushes += [(1, p) for p in r.pushes(3, lane=1)]
    for lane, push in pushes:
        r.answer(push, bytes(push.length), lane)
    for h in handles:
        h.wait(20)


def test_however_slow_a_server_is_there_is_room_to_learn_that_it_is_faster_now(rig):
    r = rig(credit=100 * LONG, hold_done=True, ahead_ms=1e-6)
    handles = [r.core.submit(r.tensor("learn", LONG), array(LONG), array(LONG))]
    pushes = r.pushes(1)
    r.endpoint.complete()
    handles += [r.core.submit(r.tensor(f"{i}", LONG // 2), array(LONG // 2), array(LONG // 2)) for i in range(4)]
    pushes += r.pushes(3)                           # of less than tells anything each; together more
    assert r.lanes[0].sent(0.05) is None
    r.endpoint.complete()
    pushes += r.pushes(1)
    for push in pushes:
        r.answer(push, bytes(push.length))
    for h in handles:
        h.wait(20)


def test_a_partition_larger_than_the_credit_goes_alone(rig):
    r = rig(credit=10)
    handle = r.core.submit(r.tensor("huge", BIG), array(BIG), array(BIG))
    (push,) = r.pushes(1)
    r.answer(push, bytes(BIG))
    handle.wait(20)


def test_same_tensor_twice_runs_one_round_after_the_other(rig):
    r = rig()
    t = r.tensor("again", 16)
    out1, out2 = array(16, 0.0), array(16, 0.0)
    h1, h2 = r.core.submit(t, array(16, 1.0), out1), r.core.submit(t, array(16, 2.0), out2)
    (p1,) = r.pushes(1)
    assert r.lanes[0].sent(0.05) is None
    r.answer(p1, array(16, 10.0).tobytes())
    (p2,) = r.pushes(1)
    assert (p1.round, p2.round) == (0, 1) and p2.body == array(16, 2.0).tobytes()
    r.answer(p2, array(16, 20.0).tobytes())
    h1.wait(20), h2.wait(20)
    assert (out1 == 10).all() and (out2 == 20).all()


@pytest.mark.parametrize("changes", [
    {"key": 999}, {"round": 5}, {"cookie": 999}, {"job": 8}, {"sender": 3}, {"kind": 99}, {"length": 8, "body": bytes(8)}, {"kind": w.PUSH},
])
def test_an_answer_that_fits_nothing_is_dropped_and_counted(rig, changes):
    r = rig()
    out = array(16, 0.0)
    handle = r.core.submit(r.tensor("x", 16), array(16), out)
    (push,) = r.pushes(1)
    r.answer(push, array(16, 66.0).tobytes(), **changes)
    r.answer(push, array(16, 4.0).tobytes())
    handle.wait(20)
    assert (out == 4).all() and r.core.counters()["malformed"] == 1


@pytest.mark.parametrize("garbage", [b"", b"x", b"\0" * 64, b"\xff" * 64, b"\xff" * 1000])
def test_garbage_is_dropped(rig, garbage):
    r = rig()
    handle = r.core.submit(r.tensor("x", 16), array(16), array(16))
    (push,) = r.pushes(1)
    r.endpoint.inject(0, garbage)
    r.endpoint.inject(0, w.pack(w.Record(w.ANSWER, w.INLINE, length=1 << 60))[:64])
    r.answer(push, bytes(16))
    handle.wait(20)
    assert r.core.counters()["malformed"] == (2 if garbage else 1)


def test_an_answer_from_the_wrong_lane_is_dropped(rig):
    r = rig(lanes=2)
    out = array(16, 0.0)
    handle = r.core.submit(r.tensor("x", 16, lane=0), array(16), out)
    (push,) = r.pushes(1)
    r.answer(push, array(16, 66.0).tobytes(), lane=1)
    r.answer(push, array(16, 4.0).tobytes())
    handle.wait(20)
    assert (out == 4).all()


def test_an_error_ends_the_handle_with_its_exception_and_the_next_round_works(rig):
    r = rig()
    t = r.tensor("x", 16)
    handle = r.core.submit(t, array(16), array(16))
    (push,) = r.pushes(1)
    r.endpoint.inject(0, w.pack(w.Record(w.ERROR, w.INLINE, 3, 7, push.key, 4, 0, 9, 0, 2, 0, push.cookie)))
    with pytest.raises(errors.MismatchError, match="'x': workers 4 and 9"):
        handle.wait(20)
    handle = r.core.submit(t, array(16), array(16))
    (push,) = r.pushes(1)
    assert push.round == 1
    r.answer(push, bytes(16))
    handle.wait(20)


def test_failing_the_core_ends_everything_present_and_future(rig):
    r = rig()
    t = r.tensor("x", 16)
    under_way = [r.core.submit(t, array(16), array(16)) for _ in range(3)]
    r.core.fail(-1, "server 0 (somewhere, pid 1) is gone")
    for handle in [*under_way, r.core.submit(t, array(16), array(16)), r.core.submit(r.tensor("y", 8), array(8), array(8))]:
        with pytest.raises(errors.PeerLostError, match="server 0"):
            handle.wait(20)
    assert r.core.outstanding == 0


def test_failing_a_tensor_leaves_the_others_alone(rig):
    r = rig()
    bad, good = r.tensor("bad", 16), r.tensor("good", 16)
    h_bad, h_good = r.core.submit(bad, array(16), array(16)), r.core.submit(good, array(16), array(16))
    pushes = {p.key: p for p in r.pushes(2)}
    r.core.fail_tensor(bad, -2, "worker 0 has this, worker 1 has that")
    with pytest.raises(errors.MismatchError, match="worker 1 has that"):
        h_bad.wait(20)
    with pytest.raises(errors.MismatchError):
        r.core.submit(bad, array(16), array(16)).wait(20)
    for p in pushes.values():
        r.answer(p, bytes(16))          # too late for one of them, and harmless
    h_good.wait(20)


def test_close_ends_what_is_under_way(rig):
    r = rig()
    handle = r.core.submit(r.tensor("x", 16), array(16), array(16))
    r.core.close()
    with pytest.raises(errors.ShutdownError):
        handle.wait(20)


def test_a_submission_after_close_ends_at_once(rig):
    r = rig()
    t = r.tensor("x", 16)
    r.core.close()
    handle = r.core.submit(t, array(16), array(16))
    assert handle.done() and r.core.outstanding == 0
    with pytest.raises(errors.ShutdownError):
        handle.wait(20)


def test_a_lane_that_cannot_be_reached_fails_everything(rig):
    r = rig()
    handle = r.core.submit(r.tensor("x", 16), array(16), array(16))
    lost = Tensor("far", 3, [(99, 0, 1, 0, 16)], stages_for("cpu"))
    r.take()
    r.endpoint.disconnect(0)
    far = r.core.submit(lost, array(16), array(16))
    for h in (handle, far):
        with pytest.raises(errors.TransportError):
            h.wait(20)


def test_wait_times_out_and_can_be_repeated(rig):
    r = rig()
    handle = r.core.submit(r.tensor("x", 16), array(16), array(16))
    with pytest.raises(TimeoutError):
        handle.wait(0.05)
    (push,) = r.pushes(1)
    r.answer(push, bytes(16))
    handle.wait(20)


def test_nobody_waits_and_it_still_comes_home(rig):
    r = rig()
    out = array(16, 0.0)
    handle = r.core.submit(r.tensor("x", 16), array(16), out)
    (push,) = r.pushes(1)
    r.answer(push, array(16, 4.0).tobytes())
    done = threading.Event()
    threading.Thread(target=lambda: (handle.wait(20), done.set())).start()
    assert done.wait(20) and (out == 4).all()


def test_many_threads_submit_and_wait(rig):
    r = rig()
    stop = threading.Event()

    def echo() -> None:
        while not stop.is_set():
            message = r.lanes[0].sent(0.05)
            for p in w.unpack(message[1], message[2]) if message else []:
                if p.kind == w.PUSH:
                    r.answer(p, p.body)

    server = threading.Thread(target=echo)
    server.start()
    failures: list[BaseException] = []

    def work(i: int) -> None:
        try:
            t = r.tensor_locked(i)
            for k in range(100):
                a = np.full(64, i * 1000 + k, np.float32)
                out = np.zeros_like(a)
                r.core.submit(t, a, out, will_wait=k % 2 == 0).wait(20)
                assert (out == a).all()
        except BaseException as e:
            failures.append(e)

    made = {i: r.tensor(f"t{i}", 256) for i in range(6)}
    r.tensor_locked = made.__getitem__
    threads = [threading.Thread(target=work, args=(i,)) for i in range(6)]
    for t in threads:
        t.start()
    for t in threads:
        t.join(60)
    stop.set()
    server.join(20)
    assert not failures, failures


def test_memory_is_held_until_home_and_written_out_and_not_longer(rig):
    r = rig(hold_done=True)
    t = r.tensor("x", BIG)

    class Tracked(np.ndarray):
        pass

    a = array(BIG).view(Tracked)
    gone = weakref.ref(a)
    handle = r.core.submit(t, a, array(BIG))
    (push,) = r.pushes(1)
    r.answer(push, bytes(BIG))
    handle.wait(20)
    del a, handle
    gc.collect()
    r.core.reap()
    assert gone() is not None, "the transport still reads it"
    r.endpoint.complete()
    r.core.reap()
    gc.collect()
    assert gone() is None


@pytest.mark.parametrize(("source", "target"), [(8, 16), (16, 8)])
def test_wrong_sizes_are_refused(rig, source, target):
    r = rig()
    with pytest.raises(ValueError, match="16 expected"):
        r.core.submit(r.tensor("x", 16), array(source), array(target))


def test_waiting_names_what_is_old(rig):
    r = rig()
    handle = r.core.submit(r.tensor("slow", 16), array(16), array(16))
    (push,) = r.pushes(1)
    ((name, generation, round_, age),) = r.core.waiting(0.0)
    assert (name, generation, round_) == ("slow", 0, 0) and age > 0
    assert r.core.waiting(3600) == []
    r.answer(push, bytes(16))
    handle.wait(20)
    assert r.core.waiting(0.0) == []
