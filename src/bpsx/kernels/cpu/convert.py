"""Conversion of halves to float32 and back, since codecs handle float32 and float64 only."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from numba import types

from bpsx.kernels.cpu.half_precision import narrow, widen
from bpsx.kernels.cpu.jit import compile_with_numba
from bpsx.kernels.cpu.sum import ELEMENTS


def _widen_all(out: Any, elements: Any, n: int) -> None:
    for i in range(n):
        out[i] = widen(elements[i])


def _narrow_all(out: Any, elements: Any, n: int) -> None:
    for i in range(n):
        out[i] = narrow(elements[i], out[i])


def compile_conversion(dtype: str, widens: bool) -> tuple[Any, Callable[[], bytes]]:
    """Compile a function that widens elements of ``dtype``, a half, or narrows to them."""
    half, wide = types.CPointer(ELEMENTS[dtype]), types.CPointer(types.float32)
    if widens:
        return compile_with_numba(types.void(wide, half, types.int64), _widen_all)
    return compile_with_numba(types.void(half, wide, types.int64), _narrow_all)
