"""Conversion of halves to float32 and back, since codecs handle float32 and float64 only."""

from __future__ import annotations

from typing import Any

from numba import types

from bpsx.kernels.cpu.compiled import compiled
from bpsx.kernels.cpu.half_precision import narrow, widen
from bpsx.kernels.cpu.sum import ELEMENTS


def _widen_all(out: Any, elements: Any, n: int) -> None:
    for i in range(n):
        out[i] = widen(elements[i])


def _narrow_all(out: Any, elements: Any, n: int) -> None:
    for i in range(n):
        out[i] = narrow(elements[i], out[i])


def load(dtype: str) -> tuple[int, int, tuple[object, ...]]:
    """Return the addresses of functions that widen and narrow elements of ``dtype``.

    The third item keeps them alive. Both addresses are 0 if ``dtype`` is a wide type.
    """
    if dtype not in ("float16", "bfloat16"):
        return 0, 0, ()
    half, wide = types.CPointer(ELEMENTS[dtype]), types.CPointer(types.float32)
    made = [
        compiled(types.void(out, elements, types.int64), body)
        for body, out, elements in ((_widen_all, wide, half), (_narrow_all, half, wide))
    ]
    return made[0].address, made[1].address, tuple(made)
