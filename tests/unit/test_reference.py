"""The oracle itself, against exact arithmetic: Python's integers and fractions."""

from __future__ import annotations

from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bpsx.kernels.reference import reduce


def nearest(exact: Fraction, kind: type) -> float:
    """Return the value of a 16-bit type nearest to ``exact`` (ties to even).

    Tries all neighbours of a first guess.
    """
    guess = int(np.array([float(exact)]).astype(kind).view(np.uint16)[0])
    near = (
        np.array([(guess + step) & 0xFFFF for step in (-1, 0, 1)], np.uint16)
        .view(kind)
        .astype(np.float64)
    )
    odd = [(guess + step) & 1 for step in (-1, 0, 1)]
    finite = [
        (abs(Fraction(float(v)) - exact), o, float(v)) for v, o in zip(near, odd) if np.isfinite(v)
    ]
    return min(finite)[2]


@pytest.mark.parametrize(
    ("name", "kind"), [("float16", np.float16), ("bfloat16", ml_dtypes.bfloat16)]
)
@given(seed=st.integers(0, 2**32 - 1))
def test_halves_are_rounded_once(name, kind, seed):
    """Two 16-bit floats of similar size.

    Their float32 sum is exact, so the result must be the nearest 16-bit float.
    """
    rng = np.random.default_rng(seed)
    values = (rng.integers(-255, 256, (2, 8)) / 2.0 ** rng.integers(0, 5)).astype(kind)
    got = reduce([v.view(np.uint16) if name == "bfloat16" else v for v in values], name)
    as_float = got.view(kind).astype(np.float64)
    for a, b, c in zip(*values.astype(np.float64), as_float):
        assert c == nearest(Fraction(float(a)) + Fraction(float(b)), kind)


@pytest.mark.parametrize("name", ["uint8", "int8", "int32", "int64"])
@given(data=st.data(), workers=st.integers(2, 5), average=st.booleans())
def test_integers_wrap_and_round_down(name, data, workers, average):
    low, high = int(np.iinfo(name).min), int(np.iinfo(name).max)
    values = data.draw(
        st.lists(
            st.lists(st.integers(low, high), min_size=3, max_size=3),
            min_size=workers,
            max_size=workers,
        )
    )
    divisor = workers if average else 1
    with np.errstate(over="ignore"):
        got = reduce([np.array(v, name) for v in values], name, divisor)
    wide = 32 if name != "int64" else 64
    for column, result in zip(zip(*values), got):
        total = (sum(column) + 2 ** (wide - 1)) % 2**wide - 2 ** (
            wide - 1
        )  # the accumulator's value
        assert (total // divisor - int(result)) % 2 ** (8 * np.dtype(name).itemsize) == 0


def test_the_sum_of_one_push_is_that_push_unchanged():
    for name in ("float16", "float32", "float64", "uint8", "int8", "int32", "int64"):
        given_ = np.arange(5).astype(name)
        assert (reduce([given_], name) == given_).all() and (given_ == np.arange(5)).all()
