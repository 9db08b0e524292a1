"""bfloat16 sums of two, for this processor and for others, bit for bit.

Each sum is rounded once, ties to even.
"""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

#: Adds to every bfloat16: zeros, infinities, NaN, denormals and random numbers. Half of the sums of
#: numbers with close exponents are ties. Sizes and addresses are not multiples of a block.
CODE = """
import ctypes, ml_dtypes, numpy as np
from bpsx.dtypes import BY_NAME
from bpsx.kernels import load

P, N = ctypes.c_void_p, ctypes.c_int64
pair = ctypes.CFUNCTYPE(None, P, P, N, N)(load(BY_NAME["bfloat16"].code).pair)
every, ties = np.arange(65536, dtype=np.uint16), 0
some = [
    0,
    0x8000,
    1,
    0x8001,
    0x7F,
    0x80,
    0x3F80,
    0xBF80,
    0x7F7F,
    0xFF7F,
    0x7F80,
    0xFF80,
    0x7FC0,
    0xFFC1,
]
for partner in [*some, *np.random.default_rng(1).integers(0, 65536, 60)]:
    for divisor in (1, 2, 3):
        size, begin = 65536 - int(partner) % 37, int(partner) % 5
        a = every[begin:size].copy()
        b = np.full(len(a), partner, np.uint16)
        x, y = (v.view(ml_dtypes.bfloat16).astype(np.float32) for v in (a, b))
        with np.errstate(all="ignore"):
            half = np.float32(1 if divisor == 1 else 0.5)
            wide = (x * half + y * half) / (np.float32(divisor) * half)
            expected = wide.astype(ml_dtypes.bfloat16).view(np.uint16)
        ties += int(((wide.view(np.uint32) & 0xFFFF) == 0x8000).sum())
        room = np.zeros(len(a) + 1, np.uint16)
        place = room[begin % 2 :][: len(a)]
        place[:] = a
        pair(place.ctypes.data, b.ctypes.data, len(a), divisor)
        nan = np.isnan(wide)
        assert (np.isnan(place.view(ml_dtypes.bfloat16)) == nan).all(), (partner, divisor)
        assert (place[~nan] == expected[~nan]).all(), (partner, divisor)
assert ties > 1000
"""
#: Processor names and features; empty: this processor's.
PROCESSORS = {"own": {}, "generic": {"NUMBA_CPU_NAME": "generic", "NUMBA_CPU_FEATURES": ""}}


@pytest.mark.parametrize("processor", PROCESSORS)
def test_each_sum_is_rounded_once(processor: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", CODE],
        env={**os.environ, **PROCESSORS[processor]},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
