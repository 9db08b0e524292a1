"""``bench compress``: the compressors' CPU kernels on partitions of normal float32, one thread.

The peer is memcpy in the same run. Partitions take turns, more than caches hold: a real gradient
has just been made, and the caches are full of the data that made it. memcpy copies the same
partitions, also in turn. Rates are GB/s of uncompressed input (for decoding: of output).

Rows ``lane-*`` are a server's work: :mod:`bench.compress_sum`.

``--end-to-end`` trains a network on slow links instead: :mod:`bench.end_to_end`.
"""

from __future__ import annotations

import argparse
import importlib
import itertools
import statistics
import time
from collections.abc import Callable

import numpy as np

from bench import compress_gpu, compress_sum, end_to_end
from bench.codec_partition import BYTES, N, Partition, copies
from bench.compress_gpu import Row
from bench.jobs import progress
from bench.report import BenchError, Case, Draw, median_case

#: Number of partitions that take turns.
_MANY = 16


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
    loops: dict[str, Callable[[], object]] = {"memcpy": copies(_MANY)}
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
            note=f"{_MANY} partitions of {BYTES:,} B in turn, one thread; each byte counted once",
        )
    ]
    cases += [
        median_case(
            row.case,
            rates[row.case],
            "GB/s",
            peer=copied,
            target=row.target,
            note=f"{100 * sizes[row.case] / BYTES:.3g} % of the bytes; memcpy",
        )
        for row in rows
    ]
    return cases + compress_sum.cases(lanes, turns)


def _gradients() -> list[np.ndarray]:
    return [np.random.default_rng(i).standard_normal(N).astype(np.float32) for i in range(_MANY)]


def _loop(row: Row) -> tuple[Callable[[], object], int]:
    partitions = [
        Partition(row.compressor, row.options, g, row.residual, row.momentum) for g in _gradients()
    ]
    sizes = [p.encode() for p in partitions]

    def decoding(p: Partition, size: int) -> Callable[[], object]:
        return lambda: p.decode(p.wire, size)

    turns = itertools.cycle(
        [decoding(p, n) if row.decode else p.encode for p, n in zip(partitions, sizes)]
    )
    return lambda: next(turns)(), sizes[0]


def _measure(loops: dict[str, Callable[[], object]], turns: int) -> dict[str, list[float]]:
    """Return samples in GB/s of each loop, one per turn; all loops take turns."""
    rates: dict[str, list[float]] = {name: [] for name in loops}
    for _ in range(turns):
        for name, loop in loops.items():
            before = time.perf_counter()
            for _ in range(_MANY):
                loop()
            rates[name].append(BYTES * _MANY / (time.perf_counter() - before) / 1e9)
    return rates
