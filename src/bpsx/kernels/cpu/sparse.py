"""Shared parts of topk and randomk: the number of elements to send, and detection of overflows."""

from __future__ import annotations

from typing import Any

import numba
import numpy as np

from bpsx.kernels.cpu.bit_ops import at, cast, magnitude


@numba.njit
def amount(options: Any, n: int) -> Any:
    """Return the number of elements to send, as :func:`bpsx.kernels.codecs.amount_of`."""
    wanted = np.int64(at(options, 0, np.float64)[0] * n) if options[1] else options[0]
    return min(max(wanted, 1), n)


@numba.njit
def infinity(p: Any) -> Any:
    """Return the magnitude of infinity; those of NaN are above it."""
    return magnitude(cast(np.inf, p))


@numba.njit
def clear(out: Any, n: int) -> None:
    """Set n elements to zero."""
    for i in range(n):
        out[i] = 0
