"""``bench compress``: the compressors' CPU kernels on partitions of normal float32, one thread.

The peer is memcpy in the same run. Partitions take turns, more than caches hold: a real gradient
has just been made, and the caches are full of the data that made it. memcpy copies the same
partitions, also in turn. Rates are GB/s of uncompressed input (for decoding: of output).

Rows ``lane-*`` are a server's work: :mod:`bench.compress_sum`.

``--end-to-end`` trains a network on slow links instead: :mod:`bench.end_to_end`.
"""

from __future__ import annotations

import argparse
import ctypes
import importlib
import itertools
import statistics
import time
from collections.abc import Callable

import numpy as np

from bench import compress_gpu, compress_sum, end_to_end
from bench.compress_gpu import Row
from bench.jobs import progress
from bench.report import BenchError, Case, Draw, median_case
from bpsx.kernels.codecs import N_OPTIONS, N_STATE, SLACK, codec, load_codec

_N = 1_024_000
_BYTES = 4 * _N
#: Number of partitions that take turns.
_MANY = 16
_MU = 0.9
_ENCODE = ctypes.CFUNCTYPE(
    ctypes.c_int64,
    *[ctypes.c_void_p] * 7,
    ctypes.c_int64,
    ctypes.c_uint64,
    ctypes.c_double,
    ctypes.c_double,
)
_DECODE = ctypes.CFUNCTYPE(
    ctypes.c_int64,
    ctypes.c_void_p,
    ctypes.c_int64,
    *[ctypes.c_void_p] * 3,
    ctypes.c_int64,
    ctypes.c_int64,
)


_ONEBIT, _SCALED, _TOPK, _RANDOMK = {}, {"scaling": True}, {"k": 0.01}, {"k": 0.01, "seed": 1}
_LINEAR, _NATURAL = {"k": 2}, {"k": 4, "partition": "natural"}
ROWS = (
    Row("onebit-compress", "onebit", _ONEBIT, target=">= 1.2"),
    Row("onebit-scaled-compress", "onebit", _SCALED, target=">= 0.9"),
    Row("onebit-decompress", "onebit", _SCALED, decode=True, target=">= 0.9"),
    Row("onebit-ef-compress", "onebit", _SCALED, True, target=">= 0.5"),
    Row("onebit-ef-nesterov-compress", "onebit", _SCALED, True, True, target=">= 0.35"),
    Row("topk-compress", "topk", _TOPK, target=">= 0.5"),
    Row("topk-ef-compress", "topk", _TOPK, True, target=">= 0.3"),
    Row("topk-decompress", "topk", _TOPK, decode=True),
    Row("randomk-ef-compress", "randomk", _RANDOMK, True, target=">= 0.6"),
    Row("randomk-decompress", "randomk", _RANDOMK, decode=True),
    Row("dithering-linear-compress", "dithering", _LINEAR, target=">= 0.16"),
    Row("dithering-linear-ef-compress", "dithering", _LINEAR, True),
    Row("dithering-natural-compress", "dithering", _NATURAL, target=">= 0.1"),
    Row("dithering-linear-decompress", "dithering", _LINEAR, decode=True, target=">= 0.4"),
    Row("dithering-natural-decompress", "dithering", _NATURAL, decode=True),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options that choose cases."""
    parser.add_argument(
        "--only",
        metavar="PART",
        default="",
        help="run only the cases (with --end-to-end: compressors) whose name contains this text",
    )
    parser.add_argument(
        "--end-to-end",
        action="store_true",
        help="train a network on links of 10 Gbit/s, 1 Gbit/s and 200 Mbit/s; needs root",
    )
    parser.add_argument(
        "--gpu",
        action="store_true",
        help="measure the CUDA kernels, against a copy on the device; needs PyTorch and numba-cuda",
    )


def picture(options: argparse.Namespace) -> Draw:
    """Return the function that draws the cases of ``--end-to-end``.

    Raises :class:`BenchError` without that option or without matplotlib.
    """
    if not options.end_to_end:
        raise BenchError("--plot goes with --end-to-end")
    draw: Draw = importlib.import_module("bench.end_to_end_plot").draw
    return draw


def run(options: argparse.Namespace) -> list[Case]:
    """Return all cases that the options choose. Raises :class:`BenchError` if one cannot run."""
    if options.end_to_end:
        return end_to_end.cases(options.only, options.quick)
    if options.gpu:
        return compress_gpu.run(options.quick, options.only)
    turns = 3 if options.quick else 15
    rows = [row for row in ROWS if options.only in row.case]
    lanes = [row for row in compress_sum.ROWS if options.only in row.case]
    if not rows and not lanes:
        raise BenchError(
            f"--only {options.only!r}: no case has this in its name; cases are"
            f" {', '.join(row.case for row in (*ROWS, *compress_sum.ROWS))}"
        )
    progress("compiling, the first time")
    loops: dict[str, Callable[[], object]] = {"memcpy": _memcpy()}
    sizes = {}
    for row in rows:
        loops[row.case], sizes[row.case] = _loop(row)
    progress("kernels")
    rates = _measure(loops, turns)
    copied = statistics.median(rates["memcpy"])
    cases = [
        median_case(
            "memcpy",
            rates["memcpy"],
            "GB/s",
            note=f"{_MANY} partitions of {_BYTES:,} B in turn, one thread; each byte counted once",
        )
    ]
    return (
        cases
        + [
            median_case(
                row.case,
                rates[row.case],
                "GB/s",
                peer=copied,
                target=row.target,
                note=f"{100 * sizes[row.case] / _BYTES:.3g} % of the bytes; memcpy",
            )
            for row in rows
        ]
        + compress_sum.cases(lanes, turns)
    )


def _gradients() -> list[np.ndarray]:
    return [np.random.default_rng(i).standard_normal(_N).astype(np.float32) for i in range(_MANY)]


def _memcpy() -> Callable[[], object]:
    pairs = [(np.empty_like(g), g) for g in _gradients()]
    turns = itertools.cycle(
        [(target.ctypes.data, source.ctypes.data, _BYTES) for target, source in pairs]
    )

    def loop(keep: object = pairs) -> None:
        """Copy the next partition; ``keep`` holds the memory that the addresses point to."""
        ctypes.memmove(*next(turns))

    return loop


class _Partition:
    """A gradient, and the state that the core keeps of a partition."""

    def __init__(self, row: Row, gradient: np.ndarray) -> None:
        made = codec(row.compressor)
        numbers = made.numbers(made.options(row.options))
        self.compiled = load_codec(row.compressor, "float32", row.residual, row.momentum)
        self.encode, self.decode = _ENCODE(self.compiled.encode), _DECODE(self.compiled.decode)
        self.options = np.array([*numbers, *[0] * (N_OPTIONS - 1 - len(numbers)), 1], np.int64)
        self.gradient, self.residual, self.momentum = (
            gradient,
            np.zeros(_N, np.float32),
            np.zeros(_N, np.float32),
        )
        self.wire = np.zeros(made.capacity(_N, numbers) + SLACK, np.uint8)
        scratch = np.zeros(made.scratch(_N, numbers) + 64, np.uint8)
        self.scratch = scratch[-scratch.ctypes.data % 64 :]
        self.state, self.counter = np.zeros(N_STATE), 0
        self.size = self.compress()

    def compress(self) -> int:
        """Encode the gradient. Returns the number of bytes written."""
        self.counter += 1
        return int(
            self.encode(
                self.gradient.ctypes.data,
                self.residual.ctypes.data,
                self.momentum.ctypes.data,
                self.wire.ctypes.data,
                self.scratch.ctypes.data,
                self.state.ctypes.data,
                self.options.ctypes.data,
                _N,
                self.counter,
                1.0,
                _MU,
            )
        )

    def decompress(self) -> None:
        """Decode into the gradient's memory."""
        if (
            self.decode(
                self.wire.ctypes.data,
                self.size,
                self.gradient.ctypes.data,
                self.scratch.ctypes.data,
                self.options.ctypes.data,
                _N,
                0,
            )
            != 0
        ):
            raise BenchError("a codec rejects its own encoded bytes")


def _loop(row: Row) -> tuple[Callable[[], object], int]:
    partitions = [_Partition(row, g) for g in _gradients()]
    turns = itertools.cycle([p.decompress if row.decode else p.compress for p in partitions])
    return lambda: next(turns)(), partitions[0].size


def _measure(loops: dict[str, Callable[[], object]], turns: int) -> dict[str, list[float]]:
    """Return samples in GB/s of each loop, one per turn; all loops take turns."""
    rates: dict[str, list[float]] = {name: [] for name in loops}
    for _ in range(turns):
        for name, loop in loops.items():
            before = time.perf_counter()
            for _ in range(_MANY):
                loop()
            rates[name].append(_BYTES * _MANY / (time.perf_counter() - before) / 1e9)
    return rates
