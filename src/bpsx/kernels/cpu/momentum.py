"""Nesterov's momentum for gradients that have no encoder to add it, like uncompressed ones."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import types

from bpsx.kernels.cpu.compiled import compiled
from bpsx.kernels.cpu.half_precision import narrow, wide_type, widen
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


def load(dtype: str) -> tuple[int, object]:
    """Return the address of f(out, g, m, n, mu), and the object that keeps it alive.

    f computes m = mu m + g, out = g + mu m. m is of the wide type, out and g of ``dtype``.
    """
    element = ELEMENTS[dtype]
    elements = types.CPointer(element)
    made = compiled(
        types.void(
            elements, elements, types.CPointer(wide_type(element)), types.int64, types.float64
        ),
        _nesterov,
    )
    return made.address, made
