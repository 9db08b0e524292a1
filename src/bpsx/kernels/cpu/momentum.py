"""Nesterov's momentum for gradients that no encoder adds it to: those that travel as they are."""

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
    if not fine:  # an overflow passes, and is forgotten
        for i in range(n):
            m[i] = 0


def load(dtype: str) -> tuple[int, object]:
    """The address of f(out, g, m, n, mu): m = mu m + g, out = g + mu m; m is of the wide type, out
    and g of ``dtype``.

    And what keeps it alive.
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
