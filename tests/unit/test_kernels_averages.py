"""Averages of bfloat16, whose accumulator has the same range as bfloat16.

They must be finite if the mean is, and otherwise have the same bits as before.
"""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bpsx.dtypes import BY_NAME
from bpsx.kernels.reference import bfloat16_to_float32, float32_to_bfloat16
from unit.test_kernels import kernel

DTYPE = BY_NAME["bfloat16"]


def averaged(pushes: list[np.ndarray]) -> np.ndarray:
    """Return a server's average of bfloat16 values, as uint16."""
    at, n, of = [p.ctypes.data for p in pushes], pushes[0].size, len(pushes)
    if of == 2:
        kernel(DTYPE, "pair")(at[0], at[1], n, 2)
        return pushes[0]
    acc, shift = np.empty(n, np.float32), (of - 1).bit_length()
    kernel(DTYPE, "start")(acc.ctypes.data, at[0], at[1], n, shift)
    for place in at[2:-1]:
        kernel(DTYPE, "add")(acc.ctypes.data, place, n, shift)
    kernel(DTYPE, "finish")(at[0], acc.ctypes.data, at[-1], n, of, shift)
    return pushes[0]


@pytest.mark.parametrize("of", [2, 3, 4, 5, 17, 300])
@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    low=st.sampled_from([0, 1, 100, 200, 230, 252, 254]),
    n=st.sampled_from([1, 33, 1000]),
)
def test_the_mean_in_float64(of: int, seed: int, low: int, n: int) -> None:
    """Averages equal the mean in float64, for exponents from ``low`` (0: smallest) upwards."""
    rng = np.random.default_rng(seed)
    exponents = rng.integers(low, min(low + rng.integers(1, 256), 255), (of, n))
    pushes = (
        rng.integers(0, 2, (of, n)) << 15 | exponents << 7 | rng.integers(0, 128, (of, n))
    ).astype(np.uint16)
    values = bfloat16_to_float32(pushes)
    with np.errstate(all="ignore"):
        plain = values[0]
        finite = np.ones(n, bool)
        for value in values[1:]:
            plain = plain + value
            finite &= np.isfinite(plain)
        plain_bits = float32_to_bfloat16(plain / np.float32(of))
    got = averaged([p.copy() for p in pushes])
    assert (got[finite] == plain_bits[finite]).all()
    mean = values.astype(np.float64).mean(0)
    found = bfloat16_to_float32(got).astype(np.float64)
    # Half a unit in the last place of bfloat16, plus float32's rounding of each addition.
    bound = 2.0**-8 * abs(mean) + of * 2.0**-24 * abs(values.astype(np.float64)).max(0) + 2.0**-134
    assert (abs(found - mean) <= bound * 1.001).all()


def test_the_largest_of_all() -> None:
    for of in (2, 3, 5, 1000):
        for bits in (0x7F7F, 0xFF7F):
            assert (averaged([np.full(35, bits, np.uint16) for _ in range(of)]) == bits).all()
