"""The cores of one machine's processes, here in one process.

The tests check what the cores post to each other, and how they handle invalid posts.
"""

from __future__ import annotations

import mmap
import os
import struct
import time

import numpy as np
import pytest

from bpsx import errors
from bpsx._core import Core
from bpsx.core._tensor import Tensor
from bpsx.local._machine import Machine, QuietEndpoint, head_bytes
from bpsx.planning.stages import MachineRole, stages_for
from bpsx.transports.loopback.endpoint import LoopbackEndpoint
from core.cores import push_pull
from support import wire as w

# Written from core/local/ring.pxd, independently of the code under test.
_POST = struct.Struct("<QQIIIIiIIIQQQIIIi")
HAS_BODY, IS_BROADCAST, IS_RESULT, IS_SHARE = 1, 2, 4, 8
RING_POSTS, COUNTER_APART = 4096, 64
_RING_BYTES = 2 * COUNTER_APART + RING_POSTS * _POST.size


class Ours:
    """The cores of all processes of a machine. ``lane``: the server's side, if there is one."""

    def __init__(
        self,
        size: int = 2,
        with_server: bool = False,
        only: set[int] | None = None,
        room: int = 1 << 26,
    ) -> None:
        self.size, self.with_server = size, with_server
        self.machines = [
            Machine(
                size=size, me=i, first_rank=size, alone=not with_server, name=f"test-{i}", room=room
            )
            for i in range(size)
        ]
        self.lane = LoopbackEndpoint()
        self.endpoints: list[QuietEndpoint | LoopbackEndpoint] = [
            QuietEndpoint() for _ in range(size)
        ]
        if with_server:
            root = self.endpoints[-1] = LoopbackEndpoint()
            root.link(0, self.lane, 0)
            self.lane.link(0, root, 0)
        for i, machine in enumerate(self.machines):
            for j, other in enumerate(self.machines):
                if i != j and not with_server:
                    machine.meet(j, other.descriptor, os.dup(self.endpoints[j].wake_descriptor))
                elif i != j:
                    # The scripted server's endpoint sleeps on a condition variable, so the test
                    # wakes it itself.
                    machine.meet(j, other.descriptor, os.eventfd(0))
        self.cores = [
            Core(
                e,
                rank=1,
                job=7,
                lanes=[0] * (with_server and i == size - 1),
                credit=0,
                spin_us=0,
                machine=m,
            )
            for i, (e, m) in enumerate(zip(self.endpoints, self.machines))
        ]
        for i, core in enumerate(self.cores):
            if only is None or i in only:
                core.start()

    def tensor(self, who: int, *lengths: int, number: int = 0, dtype: int = 3) -> Tensor:
        place = (
            MachineRole.MEMBER
            if who < self.size - 1
            else MachineRole.ROOT
            if self.with_server
            else MachineRole.ONLY_ROOT
        )
        parts, at = [], 0
        for i, length in enumerate(lengths):
            parts.append(((number << 20) + i, 0, i, at, length))
            at += length
        return Tensor(f"t{number}", dtype, parts, stages_for("cpu", place=place))

    def post(self, to: int, sender: int, *fields: int, wake: bool = True) -> None:
        """Write a post of ``sender`` into a ring.

        ``fields``: key, offset, owner, round, flags, divisor, status, a, b.
        """
        with mmap.mmap(self.machines[to].descriptor, head_bytes(self.size)) as memory:
            at = 64 + sender * _RING_BYTES
            (put,) = struct.unpack_from("<q", memory, at + COUNTER_APART)
            _POST.pack_into(
                memory, at + 2 * COUNTER_APART + put % RING_POSTS * _POST.size, *fields, *[0] * 8
            )
            struct.pack_into("<q", memory, at + COUNTER_APART, put + 1)
        if wake:
            self.endpoints[to].wake()

    def taken(self, to: int, sender: int, so_many: int | None = None) -> int:
        """Return how many posts of ``sender`` the reader has taken.

        ``so_many``: set this number first.
        """
        with mmap.mmap(self.machines[to].descriptor, head_bytes(self.size)) as memory:
            if so_many is not None:
                struct.pack_into("<q", memory, 64 + sender * _RING_BYTES, so_many)
            return int(struct.unpack_from("<q", memory, 64 + sender * _RING_BYTES)[0])

    def posted(self, to: int, sender: int, n: int) -> tuple[int, ...]:
        """Return the n-th post that ``sender`` has put into the ring of ``to``."""
        with mmap.mmap(self.machines[to].descriptor, head_bytes(self.size)) as memory:
            return _POST.unpack_from(
                memory, 64 + sender * _RING_BYTES + 2 * COUNTER_APART + n % RING_POSTS * _POST.size
            )

    def posts(self, to: int, sender: int) -> int:
        """Return how many posts ``sender`` has put into the ring of ``to``."""
        with mmap.mmap(self.machines[to].descriptor, head_bytes(self.size)) as memory:
            return int(
                struct.unpack_from("<q", memory, 64 + sender * _RING_BYTES + COUNTER_APART)[0]
            )

    def close(self) -> None:
        for core in self.cores:
            core.close()
        for endpoint in self.endpoints:
            endpoint.close()
        for core, machine in zip(self.cores, self.machines):
            core.reap()
            machine.close()


@pytest.fixture
def make():
    made: list[Ours] = []

    def build(*args, **more) -> Ours:
        made.append(Ours(*args, **more))
        return made[-1]

    yield build
    for ours in made:
        ours.close()


def submit(ours: Ours, who: int, tensor: Tensor, values: np.ndarray, **more):
    out = np.empty_like(values)
    return push_pull(ours.cores[who], tensor, values, out, result=out, **more)


@pytest.mark.parametrize("size", [2, 3, 5])
@pytest.mark.parametrize("dtype, code", [("float32", 3), ("float16", 1), ("int8", 6)])
def test_rounds_of_sums(make, size, dtype, code):
    ours = make(size)
    tensors = [ours.tensor(i, 4096, 100, dtype=code) for i in range(size)]
    n = 4196 // np.dtype(dtype).itemsize
    for round in range(5):
        handles = [
            submit(
                ours, i, tensors[i], np.full(n, i + round, dtype), divisor=size if round % 2 else 1
            )
            for i in range(size)
        ]
        total = sum(i + round for i in range(size)) / (size if round % 2 else 1)
        want = np.floor(total) if dtype == "int8" else total
        for handle in handles:
            np.testing.assert_allclose(handle.wait(60).astype(float), want, rtol=1e-3)


def test_the_input_is_left_alone(make):
    ours = make()
    given = [np.full(1000, 1.0 + i, np.float32) for i in range(2)]
    handles = [submit(ours, i, ours.tensor(i, 4000), given[i]) for i in range(2)]
    assert all((h.wait(60) == 3).all() for h in handles)
    assert (given[0] == 1).all() and (given[1] == 2).all()


def test_a_share_may_come_before_the_root_knows_the_tensor(make):
    ours = make(only={0})
    first = submit(ours, 0, ours.tensor(0, 4000), np.ones(1000, np.float32))
    ours.cores[1].start()
    second = submit(ours, 1, ours.tensor(1, 4000), np.ones(1000, np.float32))
    assert (first.wait(60) == 2).all() and (second.wait(60) == 2).all()


def test_a_departed_process_is_named_whether_root_or_not(make):
    for leaver in (0, 1):
        ours = make()
        stays = 1 - leaver
        tensor = ours.tensor(stays, 4000)
        handle = submit(ours, stays, tensor, np.ones(1000, np.float32))
        ours.machines[stays].left(leaver)
        ours.cores[stays].notify()
        with pytest.raises(errors.PeerLeftError, match=f"worker {2 + leaver} "):
            handle.wait(60)
        with pytest.raises(errors.PeerLeftError, match=f"worker {2 + leaver} "):
            submit(ours, stays, tensor, np.ones(1000, np.float32)).wait(60)


def test_a_result_posted_before_the_root_left_counts(make):
    ours = make(only={0})
    handle = submit(ours, 0, ours.tensor(0, 4000), np.ones(1000, np.float32))
    while not ours.posts(1, 0):
        os.sched_yield()
    ours.post(0, 1, 0, head_bytes(2), 0, 0, IS_RESULT, 0, 0, 0, 0, wake=False)
    ours.machines[0].left(1)
    ours.cores[0].notify()
    assert (handle.wait(60) == 1).all()


def until(true) -> None:
    """Wait until a condition set by another thread holds."""
    end = time.monotonic() + 20
    while not true():
        assert time.monotonic() < end
        time.sleep(0.001)


@pytest.mark.parametrize("operation", ["sum", "broadcast"])
def test_a_result_stays_until_all_have_copied_it_out(make, operation):
    """A result stays in memory until a slow process has copied it out.

    The test plays local rank 1, which is slow; local rank 0 is a round ahead.
    """
    ours = make(3, only={0, 2})
    broadcast = operation == "broadcast"
    # the workers of this machine have ranks 3 to 5
    more = {"divisor": 3 if broadcast else 1, "broadcast": broadcast}
    tensors = {i: ours.tensor(i, 4000) for i in (0, 2)}
    handles = [
        submit(ours, i, tensors[i], np.full(1000, 1 + i, np.float32), **more) for i in (0, 2)
    ]
    os.pwrite(ours.machines[1].descriptor, np.full(1000, 10, np.float32).tobytes(), head_bytes(3))
    ours.post(
        2,
        1,
        0,
        head_bytes(3),
        1,
        0,
        IS_SHARE | HAS_BODY | broadcast * IS_BROADCAST,
        more["divisor"],
        0,
        0,
        0,
    )
    total = 1 if broadcast else 1 + 3 + 10
    assert all((h.wait(60) == total).all() for h in handles)
    submit(ours, 0, tensors[0], np.full(1000, 77, np.float32), **more)
    until(lambda: ours.posts(2, 0) == 2)
    _, offset, owner, *_ = ours.posted(1, 2, 0)
    assert (
        np.frombuffer(os.pread(ours.machines[owner].descriptor, 4000, offset), np.float32) == total
    ).all()


def test_broadcasts_from_everybody(make):
    ours = make(3)
    tensors = [ours.tensor(i, 4096, 100) for i in range(3)]
    for root in (0, 1, 2, 0, 0, 2, 1):
        outs = [np.full(1049, 10 * root + i, np.float32) for i in range(3)]
        handles = [
            push_pull(
                ours.cores[i],
                tensors[i],
                outs[i] if i == root else None,
                outs[i],
                divisor=3 + root,
                broadcast=True,
                result=outs[i],
            )
            for i in range(3)
        ]
        assert all((h.wait(60) == 11 * root).all() for h in handles)


def test_results_without_space_in_the_ring_are_posted_later(make):
    """Results that found the ring full are posted once there is room, even by an idle root."""
    n = RING_POSTS + 900
    ours = make(only={1})
    handle = submit(ours, 1, ours.tensor(1, *[4] * n), np.ones(n, np.float32))
    for i in range(n):
        if i % 1000 == 0:
            ours.endpoints[1].wake()
            until(lambda i=i: ours.taken(1, 0) == i)
        ours.post(1, 0, i, head_bytes(2) + 4 * i, 0, 0, IS_SHARE | HAS_BODY, 1, 0, 0, 0, wake=False)
    ours.endpoints[1].wake()
    assert (handle.wait(60) == 1).all() and ours.posts(0, 1) == RING_POSTS
    # The driver has completed the handle; wait until it has also tried to post the results.
    until(lambda: ours.cores[1].outstanding == 1)
    ours.taken(0, 1, RING_POSTS)
    until(lambda: ours.posts(0, 1) == n)
    until(lambda: ours.cores[1].outstanding == 0)


def test_queued_rounds_fail_when_the_root_has_left(make):
    ours = make(only={0})
    # Large, so that the first round is still being copied out when the departure is noticed.
    length = 1 << 20
    tensor = ours.tensor(0, length, length)
    handles = [submit(ours, 0, tensor, np.ones(2 * length // 4, np.float32)) for _ in range(4)]
    until(lambda: ours.posts(1, 0) == 2)
    for part in range(2):
        ours.post(
            0, 1, part, head_bytes(2) + part * length, 0, 0, IS_RESULT, 0, 0, 0, 0, wake=False
        )
    ours.machines[0].left(1)
    ours.cores[0].notify()
    assert (handles[0].wait(60) == 1).all()
    for handle in handles[1:]:
        with pytest.raises(errors.PeerLeftError, match="worker 3 "):
            handle.wait(60)


def test_a_round_that_lacks_a_neighbour_fails_at_once(make):
    """A round that lacks a local process fails at once.

    Cases: a round that begins later, and one that was posted to an idle root.
    """
    ours = make(3, only={1, 2})
    tensors = {i: ours.tensor(i, 4000) for i in (1, 2)}
    ours.machines[2].left(0)
    ours.cores[2].notify()
    with pytest.raises(errors.PeerLeftError, match="worker 3 "):
        submit(ours, 2, tensors[2], np.ones(1000, np.float32)).wait(60)
    handle = submit(ours, 1, tensors[1], np.ones(1000, np.float32))
    until(lambda: ours.posts(2, 1) == 1)
    ours.cores[2].notify()  # as the session does once a second
    with pytest.raises(errors.PeerLeftError, match="worker 3 "):
        handle.wait(60)
    ours.machines[1].left(0)
    ours.cores[1].notify()
    with pytest.raises(errors.PeerLeftError, match="worker 3 "):
        submit(ours, 1, tensors[1], np.ones(1000, np.float32)).wait(60)
    assert ours.posts(2, 1) == 1


def test_without_memory_for_a_share_the_job_has_failed(make):
    """If a share gets no memory, the job fails, as the other processes would wait for it."""
    ours = make(only={0}, room=1 << 16)
    with pytest.raises(errors.OutOfMemoryError):
        submit(ours, 0, ours.tensor(0, 1 << 17), np.ones(1 << 15, np.float32)).wait(60)
    assert "memory" in ours.cores[0].failed


def test_a_machine_that_cannot_sum_fails_the_job(make):
    """If a machine cannot sum, the job fails, because the servers would wait for its push.

    Here there are no kernels for the dtype.
    """
    ours = make(with_server=True)
    handles = [
        submit(ours, i, ours.tensor(i, 400, dtype=31), np.ones(100, np.float32)) for i in range(2)
    ]
    ours.endpoints[1].wake()
    with pytest.raises(errors.KernelError):
        handles[1].wait(60)
    assert "element type" in ours.cores[1].failed


NONSENSE = {
    "a share from the root": (0, 1, 0, 0, 1, 0, IS_SHARE, 1, 0, 0, 0),
    "a result from who is not the root": (1, 0, 0, 0, 0, 0, IS_RESULT, 0, 0, 0, 0),
    "a share in another's name": (1, 0, 0, 0, 1, 0, IS_SHARE, 1, 0, 0, 0),
    "a share of another round": (1, 0, 0, 300_000, 0, 3, IS_SHARE, 1, 0, 0, 0),
    "a share beyond the segment": (1, 0, 0, 2**63, 0, 0, IS_SHARE, 1, 0, 0, 0),
    "a share that reaches beyond the segment": (
        1,
        0,
        0,
        (1 << 26) + head_bytes(2) - 100,
        0,
        0,
        IS_SHARE,
        1,
        0,
        0,
        0,
    ),
    "a result for nobody": (0, 1, 5 << 20, 0, 0, 0, IS_RESULT, 0, 0, 0, 0),
    "a result of another round": (0, 1, 0, 0, 0, 7, IS_RESULT, 0, 0, 0, 0),
    "a result beyond the segment": (0, 1, 0, 2**40, 0, 0, IS_RESULT, 0, 0, 0, 0),
    "a result in nobody's segment": (0, 1, 0, 0, 9, 0, IS_RESULT, 0, 0, 0, 0),
}


@pytest.mark.parametrize("name", NONSENSE)
def test_malformed_posts_fail_only_the_job(make, name):
    to, sender, *fields = NONSENSE[name]
    ours = make(only={to})
    handle = submit(ours, to, ours.tensor(to, 4000), np.ones(1000, np.float32))
    ours.post(to, sender, *fields)
    with pytest.raises(errors.ProtocolError):
        handle.wait(60)
    assert ours.cores[to].counters()["malformed"] == 1


def test_with_a_server_the_machine_pushes_once_and_in_its_own_name(make):
    ours = make(with_server=True)
    handles = [
        submit(ours, i, ours.tensor(i, 400), np.full(100, 1 + i, np.float32), divisor=4)
        for i in range(2)
    ]
    ours.endpoints[1].wake()
    message = ours.lane.sent(20)
    assert message is not None
    (push,) = (r for r in w.unpack(message[1], message[2]) if r.kind == w.PUSH)
    assert (
        push.sender == 1 and push.divisor == 4 and (np.frombuffer(push.body, np.float32) == 3).all()
    )
    reply = np.full(100, 2.5, np.float32).tobytes()
    ours.endpoints[1].inject(
        0,
        w.pack(
            w.Record(
                w.ANSWER,
                w.INLINE,
                3,
                7,
                push.key,
                0,
                1,
                0,
                push.round,
                0,
                0,
                push.cookie,
                400,
                reply,
            )
        ),
    )
    assert all((h.wait(60) == 2.5).all() for h in handles)


@pytest.mark.parametrize("root", [0, 1])
def test_an_empty_tensor_without_an_address_is_broadcast(make, root):
    """An empty tensor has no address; it must not be mistaken for a worker that has joined."""
    ours = make()
    handles = [
        push_pull(
            ours.cores[i],
            ours.tensor(i, 0),
            (0, 0) if i == root else None,
            (0, 0),
            divisor=2 + root,
            broadcast=True,
        )
        for i in range(2)
    ]
    for handle in handles:
        handle.wait(60)
