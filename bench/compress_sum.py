"""``bench compress``, its rows ``lane-*``: what a server's lane does with a compressed partition.

It decodes the pushes of all workers, sums them, and encodes the sum, with error feedback. Rates are
GB/s of uncompressed sums. The rows ``*-all-cores`` run a lane's work on each core at once, and give
the bytes that pass between caches and memory: the residual twice, and what is encoded. Their peer
is memcpy on all cores, each byte counted twice.
"""

from __future__ import annotations

import ctypes
import itertools
import os
import statistics
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np

from bench.codec_partition import BYTES, N, Partition, copies
from bench.report import BenchError, Case, median_case
from bpsx.kernels.codecs import load_summer

#: Partitions that a core works on in turn: more than its caches hold.
_MANY = max(4, min(16, 64 // len(os.sched_getaffinity(0))))
_SUM = ctypes.CFUNCTYPE(
    ctypes.c_int64,
    ctypes.c_void_p,
    *[ctypes.c_int64] * 3,
    *[ctypes.c_void_p] * 5,
    ctypes.c_int64,
    ctypes.c_uint64,
    ctypes.c_double,
)
_CHECK = ctypes.CFUNCTYPE(ctypes.c_int64, *[ctypes.c_void_p] * 2, ctypes.c_int64)


class LaneRow(NamedTuple):
    """A case: a compressor with its options, and how many workers push.

    ``target``: as a multiple of memcpy's rate on all cores, for the row of all cores.
    """

    case: str
    compressor: str
    options: Mapping[str, Any]
    workers: int
    target: str | None = None


ROWS = (
    LaneRow("lane-onebit-2", "onebit", {"scaling": True}, 2, ">= 0.6"),
    LaneRow("lane-onebit-8", "onebit", {"scaling": True}, 8, ">= 0.6"),
    LaneRow("lane-onebit-32", "onebit", {"scaling": True}, 32),
    LaneRow("lane-topk-2", "topk", {"k": 0.01}, 2),
    LaneRow("lane-topk-8", "topk", {"k": 0.01}, 8),
    LaneRow("lane-randomk-8", "randomk", {"k": 0.01}, 8),
    LaneRow("lane-dithering-8", "dithering", {"k": 2}, 8),
)


class _Key(Partition):
    """A partition as a lane keeps it, and the pushes of a round."""

    def __init__(self, row: LaneRow, seed: int) -> None:
        super().__init__(row.compressor, row.options, np.empty(N, np.float32), True)
        stride = (len(self.wire) + 63) // 64 * 64
        self._pushes, self._sizes = np.zeros((row.workers, stride), np.uint8), []
        rng = np.random.default_rng(seed)
        for push in self._pushes:
            self.elements[:] = rng.standard_normal(N, np.float32)
            self._sizes.append(self.encode())
            push[: self._sizes[-1]] = self.wire[: self._sizes[-1]]
        self._summing = load_summer(row.compressor, "float32", True)
        self._summer = _SUM(self._summing.sum) if self._summing.sum else None
        self._checker = _CHECK(self._summing.check) if self._summing.check else None

    @property
    def traffic(self) -> int:
        """Bytes that a round reads from memory or writes there, at least."""
        return 2 * BYTES + sum(self._sizes) + self._sizes[0]

    def round(self) -> None:
        """Sum the pushes, and encode the sum."""
        if self._summer is not None:
            workers, stride = self._pushes.shape
            pushes = self._pushes.ctypes.data
            if self._checker is not None:
                options, at = self.options_at, range(pushes, pushes + workers * stride, stride)
                if any(self._checker(push, options, N) for push in at):
                    raise BenchError("a codec rejects its own encoded bytes")
            self._summer(pushes, stride, workers, 1, self.residual_at, *self.coding())
            return
        for i, push in enumerate(self._pushes):
            self.decode(push, self._sizes[i], add=i > 0)
        self.encode()


def _seconds(works: list[Callable[[], object]]) -> float:
    """Return the seconds of one call, while each thread makes _MANY of its own; no GIL is held."""
    start = threading.Barrier(len(works) + 1)

    def run(work: Callable[[], object]) -> None:
        start.wait()
        for _ in range(_MANY):
            work()

    threads = [threading.Thread(target=run, args=(work,)) for work in works]
    for thread in threads:
        thread.start()
    start.wait()
    begin = time.perf_counter()
    for thread in threads:
        thread.join()
    return (time.perf_counter() - begin) / _MANY


def cases(rows: list[LaneRow], turns: int) -> list[Case]:
    """Return the cases of these rows. Each row takes turns with memcpy."""
    cores = len(os.sched_getaffinity(0))
    memory = [copies(_MANY) for _ in range(cores)] if rows else []
    return [case for row in rows for case in _cases_of(row, memory, turns)]


def _cases_of(row: LaneRow, memory: list[Callable[[], object]], turns: int) -> list[Case]:
    cores = len(memory)
    keys = [[_Key(row, i * _MANY + j) for j in range(_MANY)] for i in range(cores)]
    traffic, lanes = keys[0][0].traffic, [_in_turn(one) for one in keys]
    what = f"{row.workers} workers, with error feedback"
    one: list[tuple[float, float]] = []
    all_: list[tuple[float, float]] = []
    for _ in range(turns):
        one.append((BYTES / _seconds(lanes[:1]) / 1e9, BYTES / _seconds(memory[:1]) / 1e9))
        all_.append(
            (cores * traffic / _seconds(lanes) / 1e9, cores * 2 * BYTES / _seconds(memory) / 1e9)
        )
    made = [
        median_case(
            row.case,
            [rate for rate, _ in one],
            "GB/s",
            peer=statistics.median(copied for _, copied in one),
            note=f"{what}; memcpy",
        )
    ]
    if row.target:
        made.append(
            median_case(
                f"{row.case}-all-cores",
                [rate for rate, _ in all_],
                "GB/s",
                peer=statistics.median(copied for _, copied in all_),
                target=row.target,
                note=f"{what}; {traffic / N:.1f} bytes of memory per element; memcpy",
            )
        )
    return made


def _in_turn(keys: list[_Key]) -> Callable[[], object]:
    turns = itertools.cycle(keys)
    return lambda: next(turns).round()
