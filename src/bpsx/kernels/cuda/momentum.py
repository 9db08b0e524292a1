"""Nesterov's momentum on a GPU, for gradients that have no encoder to add it.

It gives the same bits as ``cpu/momentum.py``.
"""

from __future__ import annotations

import functools
from typing import Any

from numba import cuda

from bpsx.kernels.cuda.device import (
    Kernel,
    at,
    atomic_or,
    block,
    blocks,
    forget,
    kernel,
    last,
    magnitude,
    np,
    sync,
    thread,
)
from bpsx.kernels.cuda.feedback import EACH, TILE, add_up, fetch, keep, place
from bpsx.kernels.cuda.half_precision import form

#: Number of int32 in the kernel's private state.
N_STATE = 2
_TICKET, _SEEN = 0, 1


@functools.cache
def nesterov(dtype: str) -> Kernel:
    """Return the kernel of (g, m, out, state, n, mu): m = mu m + g, out = g + mu m.

    ``dtype``: one of the four floating-point types. m is of the wide type, out and g are of
    ``dtype``, n elements each; out may be g. After an overflow, which shows in out, all of m is 0.
    For this the blocks share ``state``: N_STATE int32, which must be 0 before the first launch, and
    are 0 again after each. Launches with the same state or m must not overlap. Any number of blocks
    is valid; ``grid(-(-n // TILE))`` are enough.
    """
    stored, real, widen, narrow = form(dtype)

    @kernel(addresses=4, integers=1, floats=1)
    def add(g_: Any, m_: Any, out_: Any, state_: Any, n: int, mu: float) -> None:
        g, m, out, state = (
            at(g_, 0, stored),
            at(m_, 0, real),
            at(out_, 0, stored),
            at(state_, 0, np.int32),
        )
        ticket = cuda.shared.array(1, np.int32)
        elements, p, momenta = (
            cuda.local.array(EACH, stored),
            cuda.local.array(EACH, real),
            cuda.local.array(EACH, real),
        )
        t, u, bound, overflow = thread(), real(mu), magnitude(real(np.inf)), False
        for begin in range(block() * TILE, n, blocks() * TILE):
            fetch(elements, g, begin, t, n)
            fetch(momenta, m, begin, t, n)
            for j in range(EACH):
                p[j] = widen(elements[j])
            add_up(p, p, momenta, u, u, False, True)
            keep(m, momenta, begin, t, n)
            for j in range(EACH):
                # p is undefined beyond the last element.
                overflow |= place(begin, t, j) < n and magnitude(p[j]) >= bound
                elements[j] = narrow(p[j])
            keep(out, elements, begin, t, n)
        if overflow:
            atomic_or(state, _SEEN, np.int32(1))
        if not last(state, _TICKET, ticket):
            return
        found = state[_SEEN]
        sync()
        if found:
            if t == 0:
                state[_SEEN] = 0
            forget(m, n)

    return add
