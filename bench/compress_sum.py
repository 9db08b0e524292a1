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

from bench.report import BenchError, Case, median_case
from bpsx.kernels.codecs import N_OPTIONS, N_STATE, SLACK, codec, load_codec, load_summer

_N = 1_024_000
_BYTES = 4 * _N
#: Partitions that a core works on in turn: more than its caches hold.
_MANY = max(4, min(16, 64 // len(os.sched_getaffinity(0))))
_P, _I = ctypes.c_void_p, ctypes.c_int64
_ENCODE = ctypes.CFUNCTYPE(_I, *[_P] * 7, _I, ctypes.c_uint64, ctypes.c_double, ctypes.c_double)
_DECODE = ctypes.CFUNCTYPE(_I, _P, _I, *[_P] * 3, _I, _I)
_SUM = ctypes.CFUNCTYPE(_I, _P, *[_I] * 3, *[_P] * 5, _I, ctypes.c_uint64, ctypes.c_double)


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
    LaneRow("lane-topk-8", "topk", {"k": 0.01}, 8),
    LaneRow("lane-dithering-8", "dithering", {"k": 2}, 8),
)


class _Key:
    """A partition as a lane keeps it, and the pushes of a round."""

    def __init__(self, row: LaneRow, seed: int) -> None:
        made = codec(row.compressor)
        numbers = made.numbers(made.options(row.options))
        self._compiled = load_codec(row.compressor, "float32", True, False)
        self._encode, self._decode = _ENCODE(self._compiled.encode), _DECODE(self._compiled.decode)
        self._options = np.array([*numbers, *[0] * (N_OPTIONS - 1 - len(numbers)), 1], np.int64)
        capacity = made.capacity(_N, numbers)
        self._stride, self._wire = (
            (capacity + SLACK + 63) // 64 * 64,
            np.zeros(capacity + SLACK, np.uint8),
        )
        scratch = np.zeros(made.scratch(_N, numbers) + 64, np.uint8)
        self._scratch = scratch[-scratch.ctypes.data % 64 :]
        self._residual, self._sum = np.zeros(_N, np.float32), np.empty(_N, np.float32)
        self._state, self._counter, self._workers = np.zeros(N_STATE), 0, row.workers
        self._pushes = np.zeros((row.workers, self._stride), np.uint8)
        self._sizes = []
        rng = np.random.default_rng(seed)
        for push in self._pushes:
            self._sum[:] = rng.standard_normal(_N, np.float32)
            self._sizes.append(self._encoded())
            push[: self._sizes[-1]] = self._wire[: self._sizes[-1]]
        address, self._owner = load_summer(row.compressor, "float32", True)
        self._summer = _SUM(address) if address else None

    @property
    def traffic(self) -> int:
        """Bytes that a round reads from memory or writes there, at least."""
        return 2 * _BYTES + sum(self._sizes) + self._sizes[0]

    def round(self) -> None:
        """Sum the pushes, and encode the sum."""
        if self._summer is None:
            self._decode_all()
            self._encoded()
            return
        self._counter += 1
        self._summer(
            self._pushes.ctypes.data,
            self._stride,
            self._workers,
            1,
            self._residual.ctypes.data,
            self._wire.ctypes.data,
            self._scratch.ctypes.data,
            self._state.ctypes.data,
            self._options.ctypes.data,
            _N,
            self._counter,
            1.0,
        )

    def _decode_all(self) -> None:
        for i, push in enumerate(self._pushes):
            refused = self._decode(
                push.ctypes.data,
                self._sizes[i],
                self._sum.ctypes.data,
                self._scratch.ctypes.data,
                self._options.ctypes.data,
                _N,
                i > 0,
            )
            if refused:
                raise BenchError("a codec rejects its own encoded bytes")

    def _encoded(self) -> int:
        self._counter += 1
        return int(
            self._encode(
                self._sum.ctypes.data,
                self._residual.ctypes.data,
                None,
                self._wire.ctypes.data,
                self._scratch.ctypes.data,
                self._state.ctypes.data,
                self._options.ctypes.data,
                _N,
                self._counter,
                1.0,
                0.0,
            )
        )


def _copies() -> Callable[[], None]:
    pairs = [(np.ones(_N, np.float32), np.empty(_N, np.float32)) for _ in range(_MANY)]
    turns = itertools.cycle(pairs)

    def copy() -> None:
        source, target = next(turns)
        ctypes.memmove(target.ctypes.data, source.ctypes.data, _BYTES)

    return copy


def _seconds(works: list[Callable[[], None]]) -> float:
    """Return the seconds of one call, while each thread makes _MANY of its own; no GIL is held."""
    start = threading.Barrier(len(works) + 1)

    def run(work: Callable[[], None]) -> None:
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
    copies = [_copies() for _ in range(cores)] if rows else []
    return [case for row in rows for case in _cases_of(row, copies, turns)]


def _cases_of(row: LaneRow, copies: list[Callable[[], None]], turns: int) -> list[Case]:
    cores = len(copies)
    keys = [[_Key(row, i * _MANY + j) for j in range(_MANY)] for i in range(cores)]
    traffic, lanes = keys[0][0].traffic, [_in_turn(one) for one in keys]
    what = f"{row.workers} workers, with error feedback"
    one: list[tuple[float, float]] = []
    all_: list[tuple[float, float]] = []
    for _ in range(turns):
        one.append((_BYTES / _seconds(lanes[:1]) / 1e9, _BYTES / _seconds(copies[:1]) / 1e9))
        all_.append(
            (cores * traffic / _seconds(lanes) / 1e9, cores * 2 * _BYTES / _seconds(copies) / 1e9)
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
                note=f"{what}; {traffic / _N:.1f} bytes of memory per element; memcpy",
            )
        )
    return made


def _in_turn(keys: list[_Key]) -> Callable[[], None]:
    turns = itertools.cycle(keys)
    return lambda: next(turns).round()
