"""Widening and narrowing of elements on a GPU: see ``cpu/half_precision.py``.

A uint16 holds the bits of a half.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from bpsx.kernels.cuda.device import bits, device, float_of, magnitude, narrow, np, widen

_INFINITY = 0x7F800000
_QUIET = 0x00400000


class Form(NamedTuple):
    """An element type's forms in memory and in computations, and functions to convert them."""

    stored: Any
    wide: Any
    widen: Any
    narrow: Any


@device
def widen_bfloat16(half: Any) -> Any:
    """Return the float32 value of bfloat16 bits."""
    return float_of(np.uint64(half) << np.uint64(16), np.float32(0))


@device
def narrow_bfloat16(value: Any) -> Any:
    """Return the bits of the bfloat16 nearest to a float32, ties to even.

    NaN needs care here, unlike on the CPU: the NaNs that a GPU makes have all bits but the sign
    set, so rounding would carry into the sign.
    """
    x = bits(value)
    odd = np.uint32(np.uint32(x >> np.uint32(16)) & np.uint32(1))
    rounded = np.uint32(np.uint32(x + np.uint32(0x7FFF)) + odd)
    if magnitude(value) > np.uint64(_INFINITY):
        rounded = np.uint32(x | np.uint32(_QUIET))
    return np.uint16(rounded >> np.uint32(16))


@device
def _itself(value: Any) -> Any:
    return value


_FORMS = {
    "float16": Form(np.uint16, np.float32, widen, narrow),
    "bfloat16": Form(np.uint16, np.float32, widen_bfloat16, narrow_bfloat16),
    "float32": Form(np.float32, np.float32, _itself, _itself),
    "float64": Form(np.float64, np.float64, _itself, _itself),
}
HALVES = ("float16", "bfloat16")


def form(dtype: str) -> Form:
    """Return the form of ``float16``, ``bfloat16``, ``float32`` or ``float64``."""
    return _FORMS[dtype]
