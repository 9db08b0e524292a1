"""Scenarios for tests of the pretend NCCL: ``python -m gpus.nccl_scenarios name rank n folder``.

There is one process per rank; the processes find each other in the folder.
"""

from __future__ import annotations

import ctypes
import faulthandler
import itertools
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from gpus.pretend.driver import CudaError, driver
from gpus.pretend.memory import PretendArray

DTYPES = [
    np.dtype(t) for t in ("i1", "u1", "i4", "u4", "i8", "u8", "f2", "f4", "f8", ml_dtypes.bfloat16)
]  # in the order of NCCL's numbers
SUM, PROD, MAX, MIN, AVG = range(5)
F32 = 7
SCENARIOS: dict[str, Callable[[Rank], None]] = {}
Array = npt.NDArray[Any]


def scenario(function: Callable[[Rank], None]) -> Callable[[Rank], None]:
    SCENARIOS[function.__name__] = function
    return function


class Id(ctypes.Structure):
    _fields_ = [("path", ctypes.c_char * 128)]


class Rank:
    """One rank's process: its GPU, a stream, and a communicator after ``meet`` was called."""

    def __init__(self, rank: int, n: int, folder: Path) -> None:
        self.rank, self.n, self.folder, self.comm = rank, n, folder, 0
        driver().enter()
        self.stream = driver().stream()
        self.nccl = ctypes.CDLL("libnccl.so.2")

    def told(self) -> Id:
        """Rank 0's unique id, made only once, because another rank may have read it already."""
        unique, path = Id(), self.folder / "id"
        if self.rank == 0 and not path.exists():
            self.call("ncclGetUniqueId", ctypes.byref(unique))
            path.with_suffix(".new").write_bytes(bytes(unique))
            path.with_suffix(".new").rename(path)
        while not path.exists():
            time.sleep(0.002)
        return Id.from_buffer_copy(path.read_bytes())

    def meet(self) -> int:
        """Make the communicator; return NCCL's code."""
        comm = ctypes.c_uint64()
        code = int(self.nccl.ncclCommInitRank(ctypes.byref(comm), self.n, self.told(), self.rank))
        self.comm = comm.value
        return code

    def code(self, name: str, *arguments: Any) -> int:
        return int(
            getattr(self.nccl, name)(
                *(
                    ctypes.c_uint64(a & (1 << 64) - 1) if isinstance(a, int) else a
                    for a in arguments
                )
            )
        )

    def call(self, name: str, *arguments: Any) -> None:
        code = self.code(name, *arguments)
        if code:
            raise CudaError(name, code)

    def queue(self, name: str, *arguments: Any, stream: int = 0) -> None:
        """Queue a collective on the stream (default: the rank's)."""
        self.call(name, *arguments, self.comm, stream or self.stream)

    def array(self, values: Array) -> PretendArray:
        return PretendArray(values, self.stream)


def main() -> None:
    faulthandler.dump_traceback_later(30, exit=True)
    SCENARIOS[sys.argv[1]](Rank(int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4])))


def values(rank: int, n: int, dtype: np.dtype[Any], seed: int) -> Array:
    """Return a rank's input; every rank can compute the inputs of all."""
    random = np.random.default_rng([seed, rank])
    if dtype.kind in "iu":
        info = np.iinfo(dtype)
        return random.integers(info.min, info.max, n, dtype, endpoint=True)
    return (random.standard_normal(n) * 8).astype(dtype)


def reduced(parts: list[Array], op: int) -> Array:
    """Sums go in the order of ranks; integers wrap; small floats are added in float32."""
    dtype, n = parts[0].dtype, len(parts)
    floating = dtype.kind not in "iu"
    wide = [p.astype(np.float32) if floating and dtype.itemsize == 2 else p for p in parts]
    if op == AVG and floating:
        share = wide[0].dtype.type(1) / wide[0].dtype.type(n)
        wide = [p * share for p in wide]
    step = {SUM: np.add, PROD: np.multiply, MAX: np.maximum, MIN: np.minimum, AVG: np.add}[op]
    total = wide[0]
    for part in wide[1:]:
        with np.errstate(over="ignore"):
            total = step(total, part)
    if op == AVG and not floating:
        total = np.array([abs(int(x)) // n * (1 if x >= 0 else -1) for x in total], dtype)
    with np.errstate(over="ignore"):
        return total.astype(dtype)


def equal(array: PretendArray, expected: Array) -> bool:
    return array.get().tobytes() == expected.tobytes()


@scenario
def collectives(r: Rank) -> None:
    """Every type and operation, in place and not; each rank is the root once."""
    assert r.meet() == 0
    n, k, count = r.n, r.rank, 37
    for (code, dtype), op in itertools.product(enumerate(DTYPES), range(5)):
        parts = [values(i, n * count, dtype, 10 * code + op) for i in range(n)]
        total, root = reduced(parts, op), (code + op) % n
        x, y, z = r.array(parts[k]), r.array(parts[k]), r.array(np.zeros(n * count, dtype))
        size = count * dtype.itemsize
        r.queue("ncclAllReduce", x.address, z.address, n * count, code, op)
        assert equal(z, total) and equal(x, parts[k]), (dtype, op)
        r.queue("ncclReduce", x.address, z.address if k == root else 0, n * count, code, op, root)
        r.queue("ncclAllReduce", y.address, y.address, n * count, code, op)
        assert equal(y, total) and equal(z, total), (dtype, op)
        r.queue("ncclReduceScatter", x.address, z.address, count, code, op)
        r.queue("ncclReduceScatter", x.address, x.address + k * size, count, code, op)
        mine = total[k * count :][:count]
        assert equal(z, np.concatenate([mine, total[count:]])), (dtype, op)
        assert equal(
            x, np.concatenate([parts[k][: k * count], mine, parts[k][(k + 1) * count :]])
        ), (dtype, op)
        r.queue("ncclAllGather", z.address, y.address, count, code)
        r.queue("ncclAllGather", x.address + k * size, x.address, count, code)
        assert equal(x, total) and equal(y, total), (dtype, op)
        x.set(parts[k])
        r.queue("ncclBroadcast", x.address if k == root else 0, z.address, count, code, root)
        r.queue("ncclBroadcast", x.address, x.address, n * count, code, root)
        assert equal(x, parts[root]) and equal(
            z, np.concatenate([parts[root][:count], total[count:]])
        ), (dtype, op)
    r.call("ncclCommDestroy", r.comm)


@scenario
def large(r: Rank) -> None:
    """Grouped collectives larger than one chunk, and empty ones; two streams run them in the order
    of the calls.
    """
    assert r.meet() == 0
    n, count, other = r.n, 300_001, driver().stream()
    parts = [values(i, n * count, np.dtype("f4"), 1) for i in range(n)]
    total, x, y = (
        reduced(parts, SUM),
        r.array(parts[r.rank]),
        r.array(np.zeros(n * count, np.float32)),
    )
    mine = r.rank * count * 4
    driver().hold(r.stream)
    r.call("ncclGroupStart")
    r.queue("ncclReduceScatter", x.address, y.address + mine, count, F32, SUM)
    r.queue("ncclAllReduce", x.address, x.address, 0, F32, SUM)
    r.call("ncclGroupStart")
    r.queue("ncclAllReduce", x.address, x.address, n * count, F32, SUM)
    r.call("ncclGroupEnd")
    assert driver().groups() == []
    r.call("ncclGroupEnd")
    r.queue("ncclAllGather", y.address + mine, y.address, count, F32, stream=other)
    time.sleep(0.05)
    assert not driver().idle(other)  # it waits for its turn although the stream is free
    driver().release(r.stream)
    driver().sync(other)
    assert equal(x, total) and equal(y, total)
    r.call("ncclGroupStart")
    r.call("ncclGroupEnd")
    assert driver().groups() == [3] and driver().count("ncclAllReduce") == 2


@scenario
def sends(r: Rank) -> None:
    """All ranks send to all, also to themselves, in one group, more than one chunk."""
    assert r.meet() == 0
    count = 200_003
    parts = [
        [values(10 * i + j, count, np.dtype("f4"), 2) for j in range(r.n)] for i in range(r.n)
    ]  # from i to j
    out, into = (
        [r.array(p) for p in parts[r.rank]],
        [r.array(np.zeros(count, np.float32)) for _ in range(r.n)],
    )
    r.call("ncclGroupStart")
    r.queue("ncclSend", out[0].address, count, F32, 0)
    r.code("ncclRecv", 1, 1, F32, 0, 5, 0)  # no such communicator, so the whole group is not queued
    assert r.code("ncclGroupEnd") == 4 and driver().idle(r.stream)
    r.call("ncclGroupStart")
    for other in range(r.n):
        for size in (count, 5):  # the second must not receive the first's data
            r.queue("ncclRecv", into[other].address, size, F32, other)
            r.queue("ncclSend", out[other].address, size, F32, other)
    r.call("ncclGroupEnd")
    assert all(equal(into[i], parts[i][r.rank]) for i in range(r.n))


@scenario
def another_order(r: Rank) -> None:
    """Ranks queue two collectives in different orders: detected by their number of elements, and
    likewise by their roots.
    """
    assert r.meet() == 0
    x = r.array(np.ones(64, np.float32))
    r.queue("ncclAllReduce", x.address, x.address, 64, F32, SUM)
    for count in (16, 32) if r.rank == 0 else (32, 16):
        r.queue("ncclAllReduce", x.address, x.address, count, F32, SUM)
    driver().sync(r.stream)


@scenario
def another_root(r: Rank) -> None:
    """The last rank never comes: the other two still get an error."""
    assert r.meet() == 0
    x = r.array(np.ones(64, np.float32))
    if r.rank == 2:
        os._exit(0)
    r.queue("ncclBroadcast", x.address, x.address, 64, F32, r.rank)
    driver().sync(r.stream)


@scenario
def another_size_sent(r: Rank) -> None:
    assert r.meet() == 0
    x = r.array(np.ones(64, np.float32))
    r.queue("ncclSend" if r.rank == 0 else "ncclRecv", x.address, 32 + r.rank, F32, 1 - r.rank)
    driver().sync(r.stream)


@scenario
def aborted(r: Rank) -> None:
    """Rank 1 dies.

    Rank 0's collectives hang on several streams until the abort. Then the streams continue, and the
    communicator no longer exists.
    """
    assert r.meet() == 0
    x = r.array(np.ones(8, np.float32))
    if r.rank == 1:
        os._exit(0)
    other, event = driver().stream(), driver().event()
    r.queue("ncclAllReduce", x.address, x.address, 8, F32, SUM)
    r.queue("ncclSend", x.address, 8, F32, 1, stream=other)
    driver().record(event, other)
    time.sleep(0.2)
    assert not driver().come(event) and not driver().idle(r.stream)
    r.call("ncclCommAbort", r.comm)
    driver().sync(r.stream)
    driver().call("cuEventSynchronize", event)
    assert r.code("ncclCommCount", r.comm, ctypes.byref(ctypes.c_int())) == 4


@scenario
def one_gpu_twice(r: Rank) -> None:
    assert r.meet() == 5
    error = ctypes.cast(r.nccl.ncclGetLastError, ctypes.CFUNCTYPE(ctypes.c_char_p, ctypes.c_void_p))
    assert error(None) == b"Duplicate GPU detected"


@scenario
def asked(r: Rank) -> None:
    """A communicator's properties, and the calls that it refuses."""
    driver().fail("ncclCommInitRank", 2)
    assert r.meet() == 2 and r.comm == 0
    assert r.meet() == 0
    found = ctypes.c_int()
    for name, expected in (
        ("ncclCommCount", r.n),
        ("ncclCommUserRank", r.rank),
        ("ncclCommCuDevice", 0),
        ("ncclCommGetAsyncError", 0),
    ):
        r.call(name, r.comm, ctypes.byref(found))
        assert found.value == expected, name
    r.call("pretend_async_error", r.comm, 6)
    r.call("ncclCommGetAsyncError", r.comm, ctypes.byref(found))
    assert found.value == 6
    plain, x = np.ones(8, np.float32), r.array(np.ones(8, np.float32))
    tries = [
        (plain.ctypes.data, 8, F32, SUM),
        (x.address, 9, F32, SUM),
        (x.address, 8, 10, SUM),
        (x.address, 8, F32, 5),
    ]
    assert [r.code("ncclAllReduce", a, a, *rest, r.comm, r.stream) for a, *rest in tries] == [4] * 4
    assert r.code("ncclGroupEnd") == 5
    driver().capture(r.stream)
    assert r.code("ncclAllReduce", x.address, x.address, 8, F32, SUM, r.comm, r.stream) == 1
    driver().capture(r.stream, False)
    driver().call("cuCtxPopCurrent_v2", 0)
    assert r.code("ncclAllReduce", x.address, x.address, 8, F32, SUM, r.comm, r.stream) == 1
    driver().enter()
    r.queue("ncclAllReduce", x.address, x.address, 8, F32, SUM)
    assert equal(x, np.full(8, r.n, np.float32))


if __name__ == "__main__":
    main()
