"""Shared parts of encoders on a GPU: momentum, residual, and which thread has which elements.

A warp takes EACH times 32 adjacent elements, 32 at a time. It first loads everything that it needs
and stores results at the end, so that many loads are in flight at once. A compiler could not
reorder them: it cannot know that a store does not change the next load.
"""

from __future__ import annotations

import functools
from typing import Any

from bpsx.kernels.cuda.device import (
    SIMULATED,
    THREADS,
    Kernel,
    at,
    block,
    blocks,
    device,
    element,
    kernel,
    plus,
    thread,
    times,
)

#: Elements of a thread, and of all threads of a block.
EACH = 4 if SIMULATED else 8
TILE = EACH * THREADS


@device
def place(begin: int, thread: int, j: int) -> Any:
    """Return the index of a thread's element ``j`` in the tile that starts at ``begin``."""
    return begin + (thread >> 5) * (32 * EACH) + 32 * j + (thread & 31)


@device
def fetch(to: Any, p: Any, begin: int, thread: int, n: int) -> None:
    """Load a thread's elements of p.

    Elements beyond the last one are undefined: another thread may change the memory read for them.
    """
    first = place(begin, thread, 0)
    if first + 32 * (EACH - 1) < n:
        for j in range(EACH):
            to[j] = p[first + 32 * j]
    else:
        for j in range(EACH):
            to[j] = p[min(first + 32 * j, n - 1)]


@device
def keep(p: Any, values: Any, begin: int, thread: int, n: int) -> None:
    """Store a thread's elements into p, without those beyond the last one."""
    first = place(begin, thread, 0)
    if first + 32 * (EACH - 1) < n:
        for j in range(EACH):
            p[first + 32 * j] = values[j]
    else:
        for j in range(EACH):
            if first + 32 * j < n:
                p[first + 32 * j] = values[j]


@device
def add_up(
    p: Any, left: Any, momenta: Any, factor: Any, mu: Any, residual: bool, momentum: bool
) -> None:
    """Update p from the gradient to what is to be sent, and ``momenta`` to the new momentum."""
    for j in range(EACH):
        if momentum:
            momenta[j] = plus(times(mu, momenta[j]), p[j])
            p[j] = plus(p[j], times(mu, momenta[j]))
        if residual:
            p[j] = plus(p[j], times(factor, left[j]))


@functools.cache
def clearer(wide: str) -> Kernel:
    """Return a kernel of (out, n) that sets n elements to zero."""
    real = element(wide)

    @kernel(addresses=1, integers=1)
    def clear(out: Any, n: int) -> None:
        p, t = at(out, 0, real), thread()
        for begin in range(block() * TILE, n, blocks() * TILE):
            for j in range(EACH):
                i = place(begin, t, j)
                if i < n:
                    p[i] = real(0)

    return clear
