"""The summation kernels with special floats; and that they write only to the output."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_kernels import NUMPY, WIDE, assert_same, kernel

from bpsx.dtypes import BY_NAME, DTYPES
from bpsx.kernels import load
from bpsx.kernels.reference import bfloat16_to_float32, reduce

HALVES = ["float16", "bfloat16"]
EVERY = np.arange(65536, dtype=np.uint16)
# Zero, smallest denormal, largest denormal, smallest normal, one, largest, infinity, quiet and
# signalling NaN: of both 16-bit types, both signs.
PARTNERS = sorted(
    {
        p | sign
        for sign in (0, 0x8000)
        for p in (
            0,
            1,
            0x3FF,
            0x7F,
            0x400,
            0x80,
            0x3C00,
            0x3F80,
            0x7BFF,
            0x7F7F,
            0x7C00,
            0x7F80,
            0x7E00,
            0x7FC0,
            0x7D00,
            0x7F81,
        )
    }
)
GUARD = 0xA5


class Guarded:
    """Elements with guard bytes around them, at an odd address."""

    def __init__(self, values: np.ndarray) -> None:
        self.dtype, self.n = values.dtype, values.size
        self._raw = np.full(values.nbytes + 129, GUARD, np.uint8)
        self._inside = slice(65, 65 + values.nbytes)
        self._raw[self._inside] = np.ascontiguousarray(values).view(np.uint8).reshape(-1)
        self.address = self._raw.ctypes.data + 65

    def values(self) -> np.ndarray:
        """Return the current elements; fail if a guard byte has changed."""
        assert (self._raw[:65] == GUARD).all() and (
            self._raw[self._inside.stop :] == GUARD
        ).all(), "written outside"
        return self._raw[self._inside].copy().view(self.dtype)


def widened(values: np.ndarray, name: str) -> np.ndarray:
    return bfloat16_to_float32(values) if name == "bfloat16" else values.astype(WIDE[name])


@pytest.mark.parametrize("name", HALVES)
@pytest.mark.parametrize("divisor", [1, 2, 3])
def test_every_half_with_every_kind_of_partner(name, divisor):
    dtype = BY_NAME[name]
    a = EVERY.view(NUMPY[name])
    for partner in PARTNERS:
        b = np.full(65536, partner, np.uint16).view(NUMPY[name])
        with np.errstate(all="ignore"):
            want = reduce([a, b], name, divisor)
            wide = widened(a, name) + widened(b, name)
        left, right = a.copy(), b.copy()
        kernel(dtype, "pair")(left.ctypes.data, right.ctypes.data, 65536, divisor)
        assert_same(left, want, dtype)
        acc, out = np.empty(65536, np.float32), a.copy()
        kernel(dtype, "start")(acc.ctypes.data, a.ctypes.data, b.ctypes.data, 65536, 0)
        assert_same(acc, wide, BY_NAME["float32"])
        shift = 1 if name == "bfloat16" and divisor != 1 else 0
        with np.errstate(invalid="ignore"):
            acc = widened(a, name) * np.float32(0.5**shift)
        kernel(dtype, "finish")(
            out.ctypes.data, acc.ctypes.data, b.ctypes.data, 65536, divisor, shift
        )
        assert_same(out, want, dtype)


@pytest.mark.parametrize("name", HALVES)
def test_every_half_alone(name):
    dtype = BY_NAME[name]
    a = EVERY.view(NUMPY[name])
    for divisor in (1, 2, 3, 7, 1000, 65535):
        with np.errstate(all="ignore"):
            want = reduce([a], name, divisor)
        got = a.copy()
        kernel(dtype, "divide")(got.ctypes.data, 65536, divisor)
        assert_same(got, want, dtype)
    acc = np.zeros(65536, np.float32)
    kernel(dtype, "add")(acc.ctypes.data, a.ctypes.data, 65536, 0)
    with np.errstate(invalid="ignore"):
        assert_same(acc, widened(a, name) + np.float32(0), BY_NAME["float32"])


@pytest.mark.parametrize("name", ["float32", "float64"])
@pytest.mark.parametrize("divisor", [1, 3])
def test_strange_floats_pairwise(name, divisor):
    dtype, info = BY_NAME[name], np.finfo(name)
    some = [
        0.0,
        1.0,
        1 / 3,
        info.max,
        info.tiny,
        info.smallest_subnormal,
        info.tiny - info.smallest_subnormal,
        info.eps,
        np.inf,
        np.nan,
    ]
    pairs = np.array(
        list(itertools.product([s * v for v in some for s in (1, -1)], repeat=2)), name
    )
    a, b = np.ascontiguousarray(pairs[:, 0]), np.ascontiguousarray(pairs[:, 1])
    with np.errstate(all="ignore"):
        want, total = reduce([a, b], name, divisor), a + b
    got, acc = a.copy(), a.copy()
    kernel(dtype, "pair")(got.ctypes.data, b.ctypes.data, a.size, divisor)
    assert_same(got, want, dtype)
    kernel(dtype, "add")(acc.ctypes.data, b.ctypes.data, a.size, 0)
    assert_same(acc, total, dtype)


@pytest.mark.parametrize("name", ["uint8", "int8", "int32", "int64"])
@pytest.mark.parametrize("divisor", [1, 2, 3, 65535])
def test_integers_at_their_ends(name, divisor):
    dtype, info = BY_NAME[name], np.iinfo(name)
    pairs = np.array(
        list(itertools.product([info.min, info.min + 1, 0, 1, info.max - 1, info.max], repeat=2)),
        name,
    )
    a, b = np.ascontiguousarray(pairs[:, 0]), np.ascontiguousarray(pairs[:, 1])
    with np.errstate(over="ignore"):
        want = reduce([a, b], name, divisor)
    kernel(dtype, "pair")(a.ctypes.data, b.ctypes.data, a.size, divisor)
    assert_same(a, want, dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: d.name)
@settings(max_examples=50, deadline=None)
@given(n=st.integers(0, 130), divisor=st.sampled_from([1, 3]))
def test_nothing_is_written_outside_the_output_or_into_inputs(dtype, n, divisor):
    ones = np.ones(n).astype(NUMPY[dtype.name])
    a, b = Guarded(ones), Guarded(ones)
    kernel(dtype, "pair")(a.address, b.address, n, divisor)
    kernel(dtype, "divide")(a.address, n, divisor)
    acc = Guarded(np.ones(n).astype(WIDE[dtype.name]))
    kernel(dtype, "add")(acc.address, b.address, n, 0)
    if load(dtype.code).start:
        kernel(dtype, "start")(acc.address, a.address, b.address, n, 0)
        kernel(dtype, "finish")(a.address, acc.address, b.address, n, divisor, 0)
    for held in (a, acc):
        held.values()
    assert (b.values() == ones).all()
