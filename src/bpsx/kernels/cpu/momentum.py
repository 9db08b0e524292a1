"""Nesterov's momentum for gradients that have no encoder to add it, like uncompressed ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numba import types

from bpsx.kernels.cpu.half_precision import narrow, wide_type, widen
from bpsx.kernels.cpu.jit import compile_with_numba
from bpsx.kernels.cpu.sum import ELEMENTS


def _nesterov(out: Any, g: Any, m: Any, n: int, mu: float) -> None:
    fine = True
    for i in range(n):
        value = widen(g[i])
        factor = type(value)(mu)
        m[i] = factor * m[i] + value
        value += factor * m[i]
        out[i] = narrow(value, out[i])
        fine &= abs(value) < np.inf
    if not fine:  # an overflow shows in the result, but leaves no trace
        for i in range(n):
            m[i] = 0


def compile_momentum(dtype: str) -> tuple[Any, Callable[[], bytes]]:
    """Compile f(out, g, m, n, mu): m = mu m + g, out = g + mu m.

    m is of the wide type, out and g of ``dtype``.
    """
    element = ELEMENTS[dtype]
    elements, wide = types.CPointer(element), types.CPointer(wide_type(element))
    signature = types.void(elements, elements, wide, types.int64, types.float64)
    return compile_with_numba(signature, _nesterov)
