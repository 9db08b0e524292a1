"""The worker's core against a scripted peer.

The tests check what the core sends, in which order, and how it handles valid and invalid answers.
"""

from __future__ import annotations

import contextlib
import gc
import threading
import weakref

import numpy as np
import pytest

from bpsx import errors
from core.cores import BIG, Rig, array, push_pull  # noqa: F401  (Rig is what the fixture makes)
from support import wire as w


def test_first_push_registers_and_carries_everything(rig):
    r = rig()
    t = r.tensor("weight", 16)
    a, out = array(16, 2.0), array(16, 0.0)
    handle = push_pull(r.core, t, a, out, divisor=2, priority=-3)
    register, push = r.take()
    assert (register.kind, register.body, register.cookie, register.key) == (
        w.REGISTER,
        b"weight",
        16,
        push.key,
    )
    assert (push.kind, push.divisor, push.priority, push.round, push.dtype, push.body) == (
        w.PUSH,
        2,
        -3,
        0,
        3,
        a.tobytes(),
    )
    r.answer(push, array(16, 5.0).tobytes())
    handle.wait(60)
    assert (out == 5).all()


def test_second_round_registers_no_more_and_counts_on(rig):
    r = rig()
    t = r.tensor("x", 16)
    for i in range(3):
        handle = push_pull(r.core, t, array(16), array(16))
        (push,) = r.pushes(1)
        assert push.round == i
        r.answer(push, bytes(16))
        handle.wait(60)


def test_large_partition_travels_as_second_frame_uncopied(rig):
    r = rig()
    a = array(BIG, 3.0)
    handle = push_pull(r.core, r.tensor("big", BIG), a, a)
    _, frame, second = r.lanes[0].sent(20)
    assert second == a.tobytes() and len(frame) < 256
    push = w.unpack(frame, second)[-1]
    r.endpoint.inject(
        0,
        w.pack(w.Record(w.ANSWER, 0, 3, 7, push.key, 0, 0, 0, 0, 0, 0, push.cookie, BIG)),
        array(BIG, 9.0).tobytes(),
    )
    handle.wait(60)
    assert (a == 9).all()


def test_partitions_arriving_in_any_order_reach_their_place(rig):
    r = rig()
    t = r.tensor("cut", 4096, 4096, 100)
    out = array(8292, 0.0)
    handle = push_pull(r.core, t, array(8292), out)
    pushes = r.pushes(3)
    for value, push in reversed(list(enumerate(pushes))):
        assert not handle.done()
        r.answer(push, np.full(push.length // 4, value, np.float32).tobytes())
    handle.wait(60)
    assert (out[:1024] == 0).all() and (out[1024:2048] == 1).all() and (out[2048:] == 2).all()


def test_small_partitions_share_a_message(rig):
    r = rig(start=False)
    tensors = [r.tensor(f"t{i}", 16) for i in range(50)]
    handles = [push_pull(r.core, t, array(16), array(16)) for t in tensors]
    r.core.start()
    pushes = [p for p in r.take() if p.kind == w.PUSH]
    assert len(pushes) == 50
    for p in pushes:
        r.answer(p, bytes(16))
    for h in handles:
        h.wait(60)


def test_same_tensor_twice_runs_one_round_after_the_other(rig):
    r = rig()
    t = r.tensor("again", 16)
    out1, out2 = array(16, 0.0), array(16, 0.0)
    h1, h2 = push_pull(r.core, t, array(16, 1.0), out1), push_pull(r.core, t, array(16, 2.0), out2)
    (p1,) = r.pushes(1)
    assert r.lanes[0].sent(0.05) is None
    r.answer(p1, array(16, 10.0).tobytes())
    (p2,) = r.pushes(1)
    assert (p1.round, p2.round) == (0, 1) and p2.body == array(16, 2.0).tobytes()
    r.answer(p2, array(16, 20.0).tobytes())
    h1.wait(60), h2.wait(60)
    assert (out1 == 10).all() and (out2 == 20).all()


@pytest.mark.parametrize(
    "changes",
    [
        {"key": 999},
        {"round": 5},
        {"cookie": 999},
        {"job": 8},
        {"sender": 3},
        {"kind": 99},
        {"length": 8, "body": bytes(8)},
        {"kind": w.PUSH},
    ],
)
def test_a_reply_without_a_push_is_dropped_and_counted(rig, changes):
    r = rig()
    out = array(16, 0.0)
    handle = push_pull(r.core, r.tensor("x", 16), array(16), out)
    (push,) = r.pushes(1)
    r.answer(push, array(16, 66.0).tobytes(), **changes)
    r.answer(push, array(16, 4.0).tobytes())
    handle.wait(60)
    assert (out == 4).all() and r.core.counters()["malformed"] == 1


@pytest.mark.parametrize("garbage", [b"", b"x", b"\0" * 64, b"\xff" * 64, b"\xff" * 1000])
def test_garbage_is_dropped(rig, garbage):
    r = rig()
    handle = push_pull(r.core, r.tensor("x", 16), array(16), array(16))
    (push,) = r.pushes(1)
    r.endpoint.inject(0, garbage)
    r.endpoint.inject(0, w.pack(w.Record(w.ANSWER, w.INLINE, length=1 << 60))[:64])
    r.answer(push, bytes(16))
    handle.wait(60)
    assert r.core.counters()["malformed"] == (2 if garbage else 1)


def test_a_reply_from_the_wrong_lane_is_dropped(rig):
    r = rig(lanes=2)
    out = array(16, 0.0)
    handle = push_pull(r.core, r.tensor("x", 16, lane=0), array(16), out)
    (push,) = r.pushes(1)
    r.answer(push, array(16, 66.0).tobytes(), lane=1)
    r.answer(push, array(16, 4.0).tobytes())
    handle.wait(60)
    assert (out == 4).all()


def test_an_error_ends_the_handle_with_its_exception_and_the_next_round_works(rig):
    r = rig()
    t = r.tensor("x", 16)
    handle = push_pull(r.core, t, array(16), array(16))
    (push,) = r.pushes(1)
    r.endpoint.inject(
        0, w.pack(w.Record(w.ERROR, w.INLINE, 3, 7, push.key, 4, 0, 9, 0, 2, 0, push.cookie))
    )
    with pytest.raises(errors.MismatchError, match="'x': workers 4 and 9"):
        handle.wait(60)
    handle = push_pull(r.core, t, array(16), array(16))
    (push,) = r.pushes(1)
    assert push.round == 1
    r.answer(push, bytes(16))
    handle.wait(60)


def test_failing_the_core_fails_present_and_later_exchanges(rig):
    r = rig()
    t = r.tensor("x", 16)
    under_way = [push_pull(r.core, t, array(16), array(16)) for _ in range(3)]
    r.core.fail(-1, "server 0 (somewhere, pid 1) is gone")
    for handle in [
        *under_way,
        push_pull(r.core, t, array(16), array(16)),
        push_pull(r.core, r.tensor("y", 8), array(8), array(8)),
    ]:
        with pytest.raises(errors.PeerLostError, match="server 0"):
            handle.wait(60)
    assert r.core.outstanding == 0


def test_failing_a_tensor_leaves_the_others_alone(rig):
    r = rig()
    bad, good = r.tensor("bad", 16), r.tensor("good", 16)
    h_bad, h_good = (
        push_pull(r.core, bad, array(16), array(16)),
        push_pull(r.core, good, array(16), array(16)),
    )
    pushes = {p.key: p for p in r.pushes(2)}
    r.core.fail_tensor(bad, -2, "worker 0 has this, worker 1 has that")
    with pytest.raises(errors.MismatchError, match="worker 1 has that"):
        h_bad.wait(60)
    with pytest.raises(errors.MismatchError):
        push_pull(r.core, bad, array(16), array(16)).wait(60)
    for p in pushes.values():
        r.answer(p, bytes(16))  # too late for the failed tensor, and must do no harm
    h_good.wait(60)


def test_a_tensor_may_fail_twice_before_the_driver_sees_it(rig):
    r = rig(start=False)
    bad, good = r.tensor("bad", 16), r.tensor("good", 16)
    failing = push_pull(r.core, bad, array(16), array(16))
    r.core.fail_tensor(bad, -2, "the first failure")
    r.core.fail_tensor(bad, -4, "the second failure")
    r.core.start()
    with pytest.raises(errors.MismatchError, match="the first failure"):
        failing.wait(60)
    handle = push_pull(r.core, good, array(16), array(16))
    r.answer(r.pushes(1)[0], bytes(16))
    handle.wait(60)


def test_close_ends_exchanges_under_way(rig):
    r = rig()
    handle = push_pull(r.core, r.tensor("x", 16), array(16), array(16))
    r.core.close()
    with pytest.raises(errors.ShutdownError):
        handle.wait(60)


def test_a_submission_after_close_ends_at_once(rig):
    r = rig()
    t = r.tensor("x", 16)
    r.core.close()
    handle = push_pull(r.core, t, array(16), array(16))
    assert handle.done() and r.core.outstanding == 0
    with pytest.raises(errors.ShutdownError):
        handle.wait(60)


def test_wait_times_out_and_can_be_repeated(rig):
    r = rig()
    handle = push_pull(r.core, r.tensor("x", 16), array(16), array(16))
    with pytest.raises(TimeoutError):
        handle.wait(0.05)
    (push,) = r.pushes(1)
    r.answer(push, bytes(16))
    handle.wait(60)


def test_a_result_arrives_while_no_thread_waits(rig):
    r = rig()
    out = array(16, 0.0)
    handle = push_pull(r.core, r.tensor("x", 16), array(16), out)
    (push,) = r.pushes(1)
    r.answer(push, array(16, 4.0).tobytes())
    done = threading.Event()
    threading.Thread(target=lambda: (handle.wait(60), done.set())).start()
    assert done.wait(60) and (out == 4).all()


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
                push_pull(r.core, t, a, out, will_wait=k % 2 == 0).wait(60)
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
    server.join(60)
    assert not failures, failures


def test_memory_is_held_until_the_result_arrived_and_the_push_was_written(rig):
    r = rig(hold_done=True)
    t = r.tensor("x", BIG)

    class Tracked(np.ndarray):
        pass

    a = array(BIG).view(Tracked)
    gone = weakref.ref(a)
    handle = push_pull(r.core, t, a, array(BIG))
    (push,) = r.pushes(1)
    r.answer(push, bytes(BIG))
    handle.wait(60)
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
        push_pull(r.core, r.tensor("x", 16), array(source), array(target))


def test_waiting_lists_old_exchanges(rig):
    r = rig()
    handle = push_pull(r.core, r.tensor("slow", 16), array(16), array(16))
    (push,) = r.pushes(1)
    ((name, generation, round_, age, waited),) = r.core.waiting(0.0)
    # under way, and no thread waits for it
    assert (name, generation, round_) == ("slow", 0, 0) and age > 0 and waited == -1
    assert not handle.done()
    ((*_, age, waited),) = r.core.waiting(0.0)
    assert age >= waited >= 0
    assert r.core.waiting(3600) == []
    r.answer(push, bytes(16))
    handle.wait(60)
    assert r.core.waiting(0.0) == []


@pytest.mark.parametrize("size", [16, BIG])
def test_after_a_lane_is_unreachable_handles_wait_until_the_lost_process_is_known(rig, size):
    """While a lane is unreachable, no handle ends before the core is told which process is gone.

    The transport reports broken connections to another part. Until its report arrives, the core
    sends nothing, and no handle ends with a less precise error.
    """
    r = rig()
    handles = [push_pull(r.core, r.tensor("before", 16), array(16), array(16))]
    lost = r.tensor("lost", size)
    r.take()
    r.endpoint.disconnect(0)
    handles.append(push_pull(r.core, lost, array(size), array(size)))
    while r.core.mute < 0:
        with contextlib.suppress(TimeoutError):
            handles[0].wait(0.01)
    handles.append(push_pull(r.core, r.tensor("late", 16), array(16), array(16)))
    assert r.core.mute == 0 and not any(h.done() for h in handles)
    r.core.fail(-1, "server 0 is gone")
    for handle in handles:
        with pytest.raises(errors.PeerLostError, match="server 0 is gone"):
            handle.wait(60)
