"""``bench sum``: the servers' kernels on one partition, and the time to load them.

The peers are numpy.add and the kernels of other dtypes. Half types cannot reach 0.8 of float32's
rate in the cache on every processor: docs/decisions/0007 has the bounds of AMD's Zen 4.
"""

from __future__ import annotations

import argparse
import ctypes
import itertools
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable

import numpy as np

from bench.jobs import ROOT, progress
from bench.report import BenchError, Case, median_case
from bpsx.config import child_environment
from bpsx.dtypes import BY_NAME
from bpsx.kernels import load

_BYTES = 4_096_000
_NAMES = ("float32", "float16", "bfloat16", "float64", "int8")
_HALVES = ("float16", "bfloat16")
#: Pairs of partitions that the rows ``*-many`` use in turn: more than caches hold, as when many
#: tensors are in flight.
_MANY = 16
_PAIR = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64)
# Prints the seconds from a running interpreter to callable kernels.
_LOAD = (
    "import time; b = time.perf_counter(); from bpsx.kernels import load; load({code});"
    " print(time.perf_counter() - b)"
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add nothing: this benchmark has no options of its own."""


def run(options: argparse.Namespace) -> list[Case]:
    """Return all cases. Raises :class:`BenchError` if one cannot run."""
    turns, repeats, starts = (5, 20, 1) if options.quick else (25, 40, 3)
    progress("kernels")
    rates = _measure(_loops(), turns, repeats)
    float32 = statistics.median(rates["float32"])
    cases = [
        median_case(
            "float32",
            rates["float32"],
            "GB/s",
            peer=statistics.median(rates["numpy.add"]),
            target=">= 0.95",
            note="dst += src on 4,096,000 B, bytes of dst per second; numpy.add in place",
        )
    ]
    for name in _NAMES[1:]:
        target = ">= 0.8" if name in _HALVES else None
        cases.append(
            median_case(
                name, rates[name], "GB/s", peer=float32, target=target, note="the same; our float32"
            )
        )
    cases.append(
        median_case(
            "float32-average",
            rates["float32-average"],
            "GB/s",
            peer=float32,
            note="dst = (dst + src) / 2; our float32",
        )
    )
    many = statistics.median(rates["float32-many"])
    for name in ("float32", *_HALVES):
        cases.append(
            median_case(
                f"{name}-many",
                rates[f"{name}-many"],
                "GB/s",
                peer=many if name in _HALVES else float32,
                note=f"{_MANY} pairs of partitions in turn; "
                + ("float32-many" if name in _HALVES else "our float32"),
            )
        )
    return cases + _starts(starts)


def _aligned(name: str, seed: int) -> np.ndarray:
    """Return a partition of random elements (bfloat16 as uint16) at the start of a cache line.

    So no dtype has a better alignment than another.
    """
    raw = np.empty(_BYTES + 64, np.uint8)
    raw = raw[-raw.ctypes.data % 64 :][:_BYTES]
    random = np.random.default_rng(seed)
    if name == "int8":
        raw[:] = random.integers(0, 256, _BYTES, np.uint8)
        return raw.view(np.int8)
    values = random.standard_normal(_BYTES // BY_NAME[name].itemsize)
    if name == "bfloat16":
        raw.view(np.uint16)[:] = values.astype(np.float32).view(np.uint32) >> 16
        return raw.view(np.uint16)
    array = raw.view(name)
    array[:] = values
    return array


def _pair(name: str, divisor: int = 1, pairs: int = 1) -> Callable[[], object]:
    """Return a function that runs the kernel of a server of two workers on the next pair of
    partitions.

    It takes ``pairs`` pairs in turn.
    """
    kernels = load(BY_NAME[name].code)
    call = _PAIR(kernels.pair)
    arrays = [(_aligned(name, 1), _aligned(name, 2)) for _ in range(pairs)]
    turns = itertools.cycle(
        [
            (target.ctypes.data, source.ctypes.data, target.size, divisor)
            for target, source in arrays
        ]
    )

    def loop(keep: object = (kernels, arrays)) -> None:
        """Run the kernel once; ``keep`` holds the memory that the addresses point to."""
        call(*next(turns))

    return loop


def _loops() -> dict[str, Callable[[], object]]:
    target, source = _aligned("float32", 1), _aligned("float32", 2)
    loops: dict[str, Callable[[], object]] = {
        "numpy.add": lambda: np.add(target, source, out=target)
    }
    loops.update({name: _pair(name) for name in _NAMES})
    loops["float32-average"] = _pair("float32", 2)
    loops.update({f"{name}-many": _pair(name, pairs=_MANY) for name in ("float32", *_HALVES)})
    return loops


def _measure(
    loops: dict[str, Callable[[], object]], turns: int, repeats: int
) -> dict[str, list[float]]:
    """Return samples in GB/s of each loop, one per turn; all loops take turns."""
    rates: dict[str, list[float]] = {name: [] for name in loops}
    for _ in range(turns):
        for name, loop in loops.items():
            loop()
            before = time.perf_counter()
            for _ in range(repeats):
                loop()
            rates[name].append(_BYTES * repeats / (time.perf_counter() - before) / 1e9)
    return rates


def _starts(count: int) -> list[Case]:
    """Measure how long a fresh process loads the float32 kernels: compiled, and from the cache."""
    progress("time to load")
    cold, warm = [], []
    for _ in range(count):
        with tempfile.TemporaryDirectory(prefix="bpsx-bench-") as folder:
            cold.append(_load_seconds(folder))
            warm.append(_load_seconds(folder))
    return [
        median_case(
            "load-cold",
            cold,
            "s",
            note="fresh process, empty BPSX_CACHE_DIR: import Numba, compile float32",
        ),
        median_case(
            "load-warm",
            warm,
            "s",
            peer=statistics.median(cold),
            note="fresh process, kernels cached; load-cold",
        ),
    ]


def _load_seconds(cache: str) -> float:
    code = _LOAD.format(code=BY_NAME["float32"].code)
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
        env=child_environment(BPSX_CACHE_DIR=cache),
        check=False,
    )
    if done.returncode:
        raise BenchError(
            f"loading kernels in a fresh process failed (exit status {done.returncode})"
        )
    return float(done.stdout)
