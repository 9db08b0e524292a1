"""A server's lane against scripted workers: sums, rounds, refusals."""

from __future__ import annotations

import os
import subprocess
import sys
import threading

import ml_dtypes
import numpy as np
import pytest

from bpsx.dtypes import BY_NAME, DTYPES
from bpsx.kernels.reference import reduce
from bpsx.server._engine import Lane
from bpsx.transports.loopback.endpoint import LoopbackEndpoint
from support import wire as w

BIG = 50_000


class Rig:
    """A lane with scripted workers."""

    def __init__(self, workers: int = 2, wrap=lambda endpoint: endpoint, **options) -> None:
        self.endpoint = LoopbackEndpoint()
        self.workers = [LoopbackEndpoint() for _ in range(workers)]
        for rank, worker in enumerate(self.workers):
            worker.link(0, self.endpoint, rank)
            self.endpoint.link(rank, worker, 0)
        self.log: list[str] = []
        self.lane = Lane(
            wrap(self.endpoint), job=7, senders=workers, log=self.log.append, **options
        )
        self.thread = threading.Thread(target=self.lane.run)
        self.thread.start()

    def register(
        self, slot: int, nbytes: int, dtype: str = "float32", key: int | None = None
    ) -> None:
        for rank in range(len(self.workers)):
            self.send(
                rank,
                w.Record(
                    w.REGISTER,
                    w.INLINE,
                    BY_NAME[dtype].code,
                    7,
                    slot + 100 if key is None else key,
                    slot,
                    rank,
                    cookie=nbytes,
                    length=4,
                    body=b"name",
                ),
            )

    def send(self, rank: int, *records: w.Record, body: bytes | None = None) -> None:
        self.endpoint.inject(rank, b"".join(w.pack(r) for r in records), body)

    def push(
        self,
        rank: int,
        at: int,
        data: bytes,
        *,
        dtype: str = "float32",
        round_: int = 0,
        divisor: int = 1,
        flags: int = 0,
        **changes,
    ) -> None:
        inline = len(data) <= 32768
        r = w.Record(
            w.PUSH,
            flags | (w.INLINE if inline else 0),
            BY_NAME[dtype].code,
            7,
            at + 100,
            at,
            rank,
            0,
            round_,
            divisor,
            0,
            1000 + rank,
            len(data),
            data if inline else None,
        )
        self.send(rank, r._replace(**changes), body=None if inline else data)

    def take(self, rank: int, timeout: float = 60) -> list[w.Record]:
        message = self.workers[rank].sent(timeout)
        assert message is not None, f"the lane has sent nothing to worker {rank}; log: {self.log}"
        return w.unpack(message[1], message[2])

    def assert_nothing_for(self, rank: int) -> None:
        """Check, after a round trip, that the lane has sent nothing else to this worker."""
        self.send(rank, w.Record(w.PING, w.INLINE, sender=rank, length=32, body=bytes(32)))
        assert [r.kind for r in self.take(rank)] == [w.PONG]

    def close(self) -> None:
        self.lane.stop()
        self.thread.join()
        self.endpoint.close()
        for worker in self.workers:
            worker.close()


def values(dtype: str, n: int, seed: int) -> np.ndarray:
    """Return arrays as they are on the wire: bfloat16 as uint16."""
    rng = np.random.default_rng(seed)
    if "int" in dtype:
        info = np.iinfo(dtype)
        return rng.integers(info.min, info.max, n, dtype=dtype, endpoint=True)
    if dtype == "bfloat16":
        return rng.normal(size=n).astype(ml_dtypes.bfloat16).view(np.uint16)
    return rng.normal(size=n).astype(dtype)


@pytest.mark.parametrize("fixed_order", [False, True])
@pytest.mark.parametrize("workers", [1, 2, 3, 5])
@pytest.mark.parametrize("dtype", [d.name for d in DTYPES])
def test_sum_and_average_of_every_dtype(rig, dtype, workers, fixed_order):
    r = rig(workers, fixed_order=fixed_order)
    slot = 0
    for n in (1, 7, 33_001):
        for divisor in (1, workers):
            pushes = [values(dtype, n, rank) for rank in range(workers)]
            r.register(slot, pushes[0].nbytes, dtype)
            for rank in range(workers):
                r.push(rank, slot, pushes[rank].tobytes(), dtype=dtype, divisor=divisor)
            want = reduce(pushes, dtype, divisor)
            for rank in range(workers):
                (answer,) = r.take(rank)
                assert (answer.kind, answer.cookie, answer.round, answer.key) == (
                    w.ANSWER,
                    1000 + rank,
                    0,
                    slot + 100,
                )
                assert answer.body == want.tobytes()
            slot += 1


def test_fixed_order_gives_the_same_bits_whatever_the_order_of_arrival(rig):
    r = rig(4, fixed_order=True)
    pushes = [np.float32([1e8]), np.float32([1.0]), np.float32([-1e8]), np.float32([0.5])]
    want = reduce(pushes, "float32").tobytes()
    for slot, order in enumerate([(0, 1, 2, 3), (3, 2, 1, 0), (2, 0, 3, 1), (1, 3, 0, 2)]):
        r.register(slot, 4)
        for rank in order:
            r.push(rank, slot, pushes[rank].tobytes())
        assert all(r.take(rank)[0].body == want for rank in range(4))


def test_fixed_order_with_large_partitions(rig):
    r = rig(3, fixed_order=True)
    pushes = [values("float16", BIG // 2, rank) for rank in range(3)]
    r.register(0, BIG, "float16")
    for round_ in range(3):
        for rank in (2, 1, 0):
            r.push(rank, 0, pushes[rank].tobytes(), dtype="float16", round_=round_, divisor=3)
        assert all(
            r.take(rank)[0].body == reduce(pushes, "float16", 3).tobytes() for rank in range(3)
        )


def test_halves_are_summed_in_float32_and_rounded_once(rig):
    r = rig(3)
    pushes = [np.float16([60000.0])] * 3  # their sum overflows float16, their average does not
    r.register(0, 2, "float16")
    for rank in range(3):
        r.push(rank, 0, pushes[rank].tobytes(), dtype="float16", divisor=3)
    assert r.take(0)[0].body == np.float16([60000.0]).tobytes()


def test_special_values_survive(rig):
    r = rig(2)
    a = np.float32([np.inf, -np.inf, np.nan, -0.0, 1e-45])
    r.register(0, a.nbytes)
    for rank in range(2):
        r.push(rank, 0, a.tobytes())
    got = np.frombuffer(r.take(0)[0].body, np.float32)
    np.testing.assert_array_equal(got, a + a)


@pytest.mark.parametrize("n", [16, BIG])
def test_rounds_follow_each_other_and_a_fast_worker_may_be_one_ahead(rig, n):
    r = rig(2)
    r.register(0, n)
    for round_ in range(4):
        a = np.full(n // 4, round_, np.float32)
        r.push(0, 0, a.tobytes(), round_=round_)
        r.push(1, 0, a.tobytes(), round_=round_)
        assert r.take(0)[0].body == (a + a).tobytes()
    for round_ in range(4):
        (answer,) = r.take(1)
        assert answer.round == round_


@pytest.mark.parametrize("n", [16, BIG])
@pytest.mark.parametrize("root", [0, 1, 2])
def test_broadcast_gives_everybody_the_roots_bits(rig, n, root):
    r = rig(3)
    r.register(0, n, "uint8")
    data = bytes(i % 256 for i in range(n))
    for rank in range(3):
        r.push(
            rank, 0, data if rank == root else b"", dtype="uint8", divisor=root, flags=w.BROADCAST
        )
    assert all(r.take(rank)[0].body == data for rank in range(3))


def test_no_bytes_is_a_round_too(rig):
    r = rig(2)
    r.register(0, 0, "uint8")
    for rank in range(2):
        r.push(rank, 0, b"", dtype="uint8")
    assert all(r.take(rank)[0].length == 0 for rank in range(2))


def test_a_repeated_push_is_counted_not_summed(rig):
    r = rig(2)
    r.register(0, 4)
    one = np.float32([1]).tobytes()
    for _ in range(3):
        r.push(0, 0, one)
    r.assert_nothing_for(0)
    r.push(1, 0, one)
    assert r.take(1)[0].body == np.float32([2]).tobytes()
    r.push(1, 0, one, round_=0)  # a push for the round that has closed
    assert r.take(0)[0].body == np.float32([2]).tobytes()
    r.assert_nothing_for(0), r.assert_nothing_for(1)
    assert r.lane.counters()["repeated"] == 3


@pytest.mark.parametrize(
    "change",
    [
        {"key": 5},
        {"slot": 3},
        {"slot": 1 << 30},
        {"term": 1},
        {"round": 2},
        {"divisor": 0},
        {"flags": w.INLINE | w.BROADCAST, "divisor": 9},
        {"length": 8, "body": bytes(8)},
    ],
)
def test_an_invalid_push_is_refused_and_the_round_continues(rig, change):
    r = rig(2)
    r.register(0, 4)
    one = np.float32([1]).tobytes()
    r.push(0, 0, one, **change)
    (refusal,) = r.take(0)
    assert (refusal.kind, refusal.divisor, refusal.cookie) == (w.ERROR, 5, 1000)
    r.push(0, 0, one)
    r.push(1, 0, one)
    assert r.take(0)[0].body == r.take(1)[0].body == np.float32([2]).tobytes()
    assert r.lane.counters()["malformed"] == 1


@pytest.mark.parametrize("change", [{"job": 8}, {"sender": 1}, {"kind": 77}, {"length": 1 << 40}])
def test_a_forged_record_is_dropped(rig, change):
    r = rig(2)
    r.register(0, 4)
    r.push(0, 0, bytes(4), **change)
    r.assert_nothing_for(0)
    assert r.lane.counters()["malformed"] == 1


def test_strangers_and_garbage_are_dropped(rig):
    r = rig(2)
    for data in (b"", b"\0", b"\xff" * 63, b"\0" * 64, b"\xff" * 640):
        r.endpoint.inject(0, data)
    r.endpoint.inject(9, w.pack(w.Record(w.PING)))
    r.assert_nothing_for(0)
    assert r.lane.counters()["malformed"] == 5


@pytest.mark.parametrize(
    "change", [{"slot": 1 << 23}, {"dtype": 31}, {"dtype": 200}, {"cookie": 1 << 50}, {"cookie": 3}]
)
def test_a_registration_out_of_bounds_is_refused(rig, change):
    r = rig(2)
    r.send(
        0,
        w.Record(w.REGISTER, w.INLINE, 3, 7, 100, 0, 0, cookie=4, length=4, body=b"name")._replace(
            **change
        ),
    )
    r.assert_nothing_for(0)
    assert r.lane.counters()["malformed"] == 1
    r.register(0, 4)
    for rank in range(2):
        r.push(rank, 0, np.float32([1]).tobytes())
    assert r.take(0)[0].body == np.float32([2]).tobytes()


def test_a_slot_cannot_be_taken_over(rig):
    r = rig(2)
    r.register(0, 4)
    r.register(0, 8, key=5)
    for rank in range(2):
        r.push(rank, 0, np.float32([1]).tobytes())
    assert r.take(0)[0].body == np.float32([2]).tobytes()
    assert r.lane.counters()["malformed"] == 2


@pytest.mark.parametrize("second", [{"divisor": 2}, {"flags": w.BROADCAST, "divisor": 1}])
@pytest.mark.parametrize("n", [4, BIG])
def test_different_operations_fail_the_round_for_all_and_the_next_works(rig, second, n):
    r = rig(3)
    r.register(0, n)
    one = np.ones(n // 4, np.float32).tobytes()
    for round_ in (0, 2):
        r.push(0, 0, one, round_=round_)
        r.push(1, 0, one, round_=round_, **second)
        r.assert_nothing_for(0)  # the third worker must get the error in the same round
        r.push(2, 0, one, round_=round_)
        for rank in range(3):
            (e,) = r.take(rank)
            assert (e.kind, e.divisor, e.slot, e.term, e.round) == (w.ERROR, 2, 0, 1, round_)
        for rank in range(3):
            r.push(rank, 0, one, round_=round_ + 1)
        assert all(
            r.take(rank)[0].body == np.full(n // 4, 3, np.float32).tobytes() for rank in range(3)
        )


def test_rounds_that_lack_a_departed_worker_fail(rig):
    r = rig(3)
    r.register(0, 4)
    r.register(1, 4)
    one = np.float32([1]).tobytes()
    r.push(0, 0, one)
    r.push(2, 1, one)
    r.lane.gone(2)
    (e,) = r.take(0)
    assert (e.kind, e.divisor, e.slot) == (w.ERROR, 3, 2)
    r.push(1, 0, one)
    assert r.take(1)[0].divisor == 3
    # All later rounds fail too, whatever round the worker counts.
    for round_ in (1, 2):
        r.push(0, 0, one, round_=round_)
        (e,) = r.take(0)
        assert (e.divisor, e.slot, e.round) == (3, 2, round_)
    # worker 2 had pushed this one before it left, so it can close
    r.push(0, 1, one), r.push(1, 1, one)
    assert r.take(0)[0].body == r.take(1)[0].body == np.float32([3]).tobytes()


def test_the_server_schedule_takes_urgent_messages_first(rig):
    r = rig(2, scheduled=True)
    for slot in range(20):
        r.register(slot, BIG)
    for slot in range(20):
        for rank in range(2):
            r.push(rank, slot, bytes(BIG), priority=slot)
    got = [r.take(0)[0].key for _ in range(20)]
    assert sorted(got) == [100 + s for s in range(20)]


def test_a_message_is_not_read_after_its_round_has_released_it():
    """A message is not read after its round has released it.

    The C library overwrites freed memory here, so a late read would fail.
    """
    subprocess.run(
        [
            sys.executable,
            "-c",
            f"""
import sys
sys.path[:0] = {sys.path!r}
from core.test_lane import BIG, Rig
rig = Rig(1)
rig.register(0, BIG)
for i in range(20):
    rig.push(0, 0, bytes(BIG), round_=i)
    assert rig.take(0)[0].round == i
malformed = rig.lane.counters()["malformed"]
rig.close()
sys.exit(malformed)
    """,
        ],
        check=True,
        timeout=120,
        env={
            **os.environ,
            "GLIBC_TUNABLES": "glibc.malloc.tcache_count=0:glibc.malloc.perturb=165",
        },
    )
