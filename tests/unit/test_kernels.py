"""The summation kernels against the NumPy oracle, bit for bit.

Covers every element type, every kernel, odd sizes and unaligned memory.
"""

from __future__ import annotations

import ctypes as C

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bpsx.dtypes import DTYPES
from bpsx.kernels import load
from bpsx.kernels.reference import bfloat16_to_float32, float32_to_bfloat16, reduce

P, N = C.c_void_p, C.c_int64
SIGNATURES = {
    "pair": (P, P, N, N),
    "add": (P, P, N, N),
    "start": (P, P, P, N, N),
    "finish": (P, P, P, N, N, N),
    "divide": (P, N, N),
}
NUMPY = {d.name: np.dtype(np.uint16 if d.name == "bfloat16" else d.name) for d in DTYPES}
WIDE = {
    d.name: np.dtype(
        {"float16": "float32", "bfloat16": "float32", "uint8": "int32", "int8": "int32"}.get(
            d.name, d.name
        )
    )
    for d in DTYPES
}


def kernel(dtype, name):
    return C.CFUNCTYPE(None, *SIGNATURES[name])(getattr(load(dtype.code), name))


def unaligned(values: np.ndarray) -> np.ndarray:
    """Return the same values at an address that is aligned to no element size."""
    raw = np.empty(values.nbytes + 1, np.uint8)
    view = raw[1:].view() if values.nbytes else raw[:0]
    view[:] = np.ascontiguousarray(values).view(np.uint8).reshape(-1)
    return view


def draw(dtype, n: int, seed: int) -> np.ndarray:
    """Return random elements: any bits for 16-bit floats and integers, all magnitudes for floats.

    The bits include NaN, infinities and denormals.
    """
    rng = np.random.default_rng(seed)
    if dtype.itemsize <= 2 or "int" in dtype.name:
        return rng.integers(0, 256, n * dtype.itemsize, dtype=np.uint8).view(NUMPY[dtype.name])
    return (rng.normal(size=n) * 10.0 ** rng.integers(-30, 30, n)).astype(dtype.name)


def assert_same(got: np.ndarray, want: np.ndarray, dtype) -> None:
    """Check that bits are equal.

    A NaN only has to be a NaN, since its payload depends on the processor.
    """
    if "float" not in dtype.name:
        assert (got == want).all()
        return
    as_float = (
        (lambda x: x.view(ml_dtypes.bfloat16).astype(np.float32))
        if dtype.name == "bfloat16"
        else (lambda x: x)
    )
    nan = np.isnan(as_float(want))
    assert (np.isnan(as_float(got)) == nan).all()
    bits = np.dtype(f"u{dtype.itemsize}")
    assert (got.view(bits)[~nan] == want.view(bits)[~nan]).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: d.name)
@settings(max_examples=60, deadline=None)
@given(
    n=st.one_of(st.integers(0, 70), st.sampled_from([1023, 1024, 1025, 100_003])),
    divisor=st.sampled_from([1, 2, 3, 7, 1000]),
    seed=st.integers(0, 99),
)
def test_sums_of_two_and_quotients_are_the_oracles(dtype, n, divisor, seed):
    a, b = draw(dtype, n, seed), draw(dtype, n, seed + 1000)
    with np.errstate(all="ignore"):
        want = reduce([a, b], dtype.name, divisor)
        alone = reduce([a], dtype.name, divisor)
    x, y = unaligned(a), unaligned(b)
    kernel(dtype, "pair")(x.ctypes.data, y.ctypes.data, n, divisor)
    assert_same(x.copy().view(NUMPY[dtype.name]), want, dtype)
    assert (y == unaligned(b)).all()
    x = unaligned(a)
    kernel(dtype, "divide")(x.ctypes.data, n, divisor)
    assert_same(x.copy().view(NUMPY[dtype.name]), alone, dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: d.name)
@settings(max_examples=40, deadline=None)
@given(
    n=st.one_of(st.integers(0, 70), st.just(10_007)),
    workers=st.integers(3, 6),
    average=st.booleans(),
    seed=st.integers(0, 99),
)
def test_sums_of_three_and_more_are_the_oracles(dtype, n, workers, average, seed):
    pushes = [draw(dtype, n, seed * 10 + i) for i in range(workers)]
    divisor = workers if average else 1
    with np.errstate(all="ignore"):
        want = reduce(pushes, dtype.name, divisor)
    held = [unaligned(p) for p in pushes]
    at = [h.ctypes.data for h in held]
    shift = (workers - 1).bit_length() if average else 0
    if load(dtype.code).start:
        acc = np.empty(n, WIDE[dtype.name])
        kernel(dtype, "start")(acc.ctypes.data, at[0], at[1], n, shift)
        for i in range(2, workers - 1):
            kernel(dtype, "add")(acc.ctypes.data, at[i], n, shift)
        kernel(dtype, "finish")(at[0], acc.ctypes.data, at[-1], n, divisor, shift)
    else:
        for i in range(1, workers - 1):
            kernel(dtype, "add")(at[0], at[i], n, shift)
        kernel(dtype, "pair")(at[0], at[-1], n, divisor)
    assert_same(held[0].copy().view(NUMPY[dtype.name]), want, dtype)


@pytest.mark.parametrize("name", ["float16", "bfloat16"])
@pytest.mark.parametrize(
    "partner",
    [0, 1, 0x8000, 0x3C00, 0x3F80, 0x7BFF, 0x7F7F, 0x7C00, 0x7F80, 0xFC00, 0x7E00, 0x7FC0, 0x0400],
)
def test_all_halves(name, partner):
    """Every 16-bit float plus zeros, ones, the largest, infinities, NaN and the smallest."""
    dtype = next(d for d in DTYPES if d.name == name)
    a = np.arange(65536, dtype=np.uint16).view(NUMPY[name])
    b = np.full(65536, partner, np.uint16).view(NUMPY[name])
    with np.errstate(all="ignore"):
        want = reduce([a, b], name)
    x, y = a.copy(), b.copy()
    kernel(dtype, "pair")(x.ctypes.data, y.ctypes.data, 65536, 1)
    assert_same(x, want, dtype)


def test_the_oracles_bfloat16_is_ml_dtypes():
    bits = np.arange(65536, dtype=np.uint16)
    np.testing.assert_array_equal(
        bfloat16_to_float32(bits), bits.view(ml_dtypes.bfloat16).astype(np.float32)
    )
    values = np.random.default_rng(0).integers(0, 2**32, 200_000, dtype=np.uint32).view(np.float32)
    values = values[~np.isnan(values)]
    np.testing.assert_array_equal(
        float32_to_bfloat16(values), values.astype(ml_dtypes.bfloat16).view(np.uint16)
    )


def test_an_unknown_code_is_a_key_error():
    with pytest.raises(KeyError):
        load(99)


def test_the_cache_is_used_by_the_next_process(tmp_path):
    import os
    import subprocess
    import sys

    code = "from bpsx.kernels import load; load(3)"
    env = {**os.environ, "BPSX_CACHE_DIR": str(tmp_path)}
    subprocess.run([sys.executable, "-c", code], env=env, check=True)
    first = {p: p.stat().st_mtime_ns for p in tmp_path.rglob("*.nbc")}
    subprocess.run([sys.executable, "-c", code], env=env, check=True)
    assert first and first == {p: p.stat().st_mtime_ns for p in tmp_path.rglob("*.nbc")}
