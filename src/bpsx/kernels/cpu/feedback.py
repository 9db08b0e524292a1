"""What all encoders do before they look at elements: momentum and residual."""

from __future__ import annotations

from typing import Any

import numba

#: Elements that are worked on while they are in the nearest cache.
BLOCK = 1024


@numba.njit
def add_up(p: Any, first: int, g: Any, e: Any, m: Any, begin: int, size: int, factor: Any, mu: Any, residual: bool, momentum: bool) -> None:
    """p[first:first + size] = what is to be sent of elements begin to begin + size; p may be e. Momentum is brought up to date."""
    if momentum:
        for i in range(size):
            m[begin + i] = mu * m[begin + i] + g[begin + i]
            change = g[begin + i] + mu * m[begin + i]
            p[first + i] = change + factor * e[begin + i] if residual else change
    elif residual:
        for i in range(size):
            p[first + i] = g[begin + i] + factor * e[begin + i]


@numba.njit
def forget(p: Any, n: int) -> None:
    """After an overflow."""
    for i in range(n):
        p[i] = 0
