"""Shared parts of encoders: momentum and residual, which come before encoding, and sign bits."""

from __future__ import annotations

from typing import Any

import numba
import numpy as np

from bpsx.kernels.cpu.bit_ops import cast, signed, signs

#: Elements of a block, which stays in the L1 cache while an encoder works on it.
BLOCK = 1024


@numba.njit
def add_up(
    p: Any,
    first: int,
    g: Any,
    e: Any,
    m: Any,
    begin: int,
    size: int,
    factor: Any,
    mu: Any,
    residual: bool,
    momentum: bool,
) -> None:
    """Set p[first:first + size] to what is to be sent of elements begin to begin + size.

    p may be e. Updates the momentum.
    """
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
    """Clear a residual or momentum after an overflow."""
    for i in range(n):
        p[i] = 0


@numba.njit
def sign_words(words: Any, place: int, p: Any, first: int, size: int) -> None:
    """Set the 32-bit words from words[place] on to the signs of p[first:first + size]."""
    for j in range(size // 32):
        words[place + j] = signs(p, first + 32 * j)
    if size % 32:
        word = np.uint32(0)
        for i in range(size // 32 * 32, size):
            if signed(cast(1.0, p), p[first + i]) < 0:
                word |= np.uint32(1) << np.uint32(i % 32)
        words[place + size // 32] = word
