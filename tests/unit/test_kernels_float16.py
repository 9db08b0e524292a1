"""float16 on processors without float16 instructions: equal bits to processors that have them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

#: Every float16 and its sum with some others, and their averages; float32 values between two
#: float16, and their neighbours.
CODE = """
import ctypes, sys, numpy as np
from bpsx.dtypes import BY_NAME
from bpsx.kernels import load
from bpsx.kernels.codecs import load_codec, load_conversion

P, N = ctypes.c_void_p, ctypes.c_int64
every, found = np.arange(65536, dtype=np.uint16), []
k = load(BY_NAME["float16"].code)
for partner in (0, 1, 0x8000, 0x3C00, 0x7BFF, 0x7C00, 0xFC00, 0x7E00, 0x7D01, 0x0400, 0x03FF):
    for divisor in (1, 3):
        for size in (65536, 65529):
            a, b = every[:size].copy(), np.full(size, partner, np.uint16)
            ctypes.CFUNCTYPE(None, P, P, N, N)(k.pair)(a.ctypes.data, b.ctypes.data, size, divisor)
            found.append(a)
widen, narrow = (
    ctypes.CFUNCTYPE(None, P, P, N)(address) for address in load_conversion("float16")[:2]
)
wide = np.empty(65536, np.float32)
widen(wide.ctypes.data, every.ctypes.data, 65536)
found.append(wide)
ties = (
    wide.view(np.uint32)[:, None] + np.array([0, 1, 0xFFF, 0x1000, 0x1001, 0x1FFF], np.uint32)
).ravel()
values = np.concatenate(
    [
        ties,
        np.random.default_rng(0).integers(0, 2**32, 300_000, dtype=np.uint32),
        np.arange(0x33000000, 0x38900000, 997, np.uint32),
    ]
)
halves = np.empty(len(values), np.uint16)
narrow(halves.ctypes.data, values.ctypes.data, len(values))
found.append(halves)
load_codec("half", "float32", False, False)
np.savez(sys.argv[1], *found)
"""


@pytest.mark.parametrize("cpu", ["generic", "ivybridge"])
def test_the_same_bits(cpu: str, tmp_path: Path) -> None:
    import numpy as np

    for name, more in (("own", {}), ("other", {"NUMBA_CPU_NAME": cpu, "NUMBA_CPU_FEATURES": ""})):
        done = subprocess.run(
            [sys.executable, "-c", CODE, tmp_path / name],
            env={**os.environ, **more},
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr
    own, other = (np.load(tmp_path / f"{name}.npz") for name in ("own", "other"))
    for key in own:
        x, y = own[key], other[key]
        nan = np.isnan(x.view(np.float16) if x.dtype == np.uint16 else x)
        assert (np.isnan(y.view(np.float16) if y.dtype == np.uint16 else y) == nan).all()
        assert (
            (x[~nan] == y[~nan]).all()
            if x.dtype == np.uint16
            else (x.view(np.uint32)[~nan] == y.view(np.uint32)[~nan]).all()
        )
        assert key != "arr_45" or (x == y).all(), "narrowed NaN too"
