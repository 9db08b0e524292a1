"""What all encoders do before they look at elements: momentum and residual.

And how elements are shared out to threads.

A warp takes EACH times 32 elements that lie side by side, 32 at a time. What they need is loaded
first and stored at last, so that many loads are on their way at once: a compiler cannot know that a
store does not change what is loaded next.
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
    """Which element a thread's j-th is, of the tile that begins there."""
    return begin + (thread >> 5) * (32 * EACH) + 32 * j + (thread & 31)


@device
def fetch(to: Any, p: Any, begin: int, thread: int, n: int) -> None:
    """A thread's elements of p.

    What stands for those behind the last one is nobody's: another thread may change what is read
    there.
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
    """The other way round, without those behind the last."""
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
    """p, which is the gradient, becomes what is to be sent, and momenta the new ones."""
    for j in range(EACH):
        if momentum:
            momenta[j] = plus(times(mu, momenta[j]), p[j])
            p[j] = plus(p[j], times(mu, momenta[j]))
        if residual:
            p[j] = plus(p[j], times(factor, left[j]))


@functools.cache
def clearer(wide: str) -> Kernel:
    """A kernel that sets all to zero."""
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
