"""Steps of PowerSGD on a GPU, with the bits of ``cpu/low_rank.py``, where layouts are explained.

A warp sums a row of M Q in the order of the CPU's vectors: its threads are their 32 lanes. A thread
sums a column of M^T P, some rows at a time, and a second kernel adds these sums in order.
"""

from __future__ import annotations

import functools
from typing import Any

from numba import cuda

from bpsx.kernels.cuda.device import (
    THREADS,
    WARPS,
    Kernel,
    at,
    block,
    blocks,
    device,
    fold,
    grid,
    kernel,
    lane_of,
    np,
    only_building,
    plus,
    thread,
    times,
)
from bpsx.kernels.cuda.half_precision import form
from bpsx.kernels.low_rank import CHUNK, RANKS, ROWS, TALL

#: Rows that a thread of :func:`gatherer` loads at once.
AHEAD = 8


def _reader(dtype: str, feedback: bool) -> Any:
    """Return a device function of (g, e, i) for element i of M."""
    widened = form(dtype).widen
    if not feedback:
        return device(lambda g, e, i: widened(g[i]))
    return device(lambda g, e, i: plus(widened(g[i]), e[i]))


@functools.cache
def projector(dtype: str, feedback: bool) -> Kernel:
    """Return the kernel (g, e, q, p, n, m, rank) that sets P = M Q; a warp takes a row."""
    half, real, _, _ = form(dtype)
    element = _reader(dtype, feedback)

    @kernel(addresses=4, integers=3)
    def project(g_: Any, e_: Any, q_: Any, p_: Any, n: int, m: int, rank: int) -> None:
        g, e, q, p = at(g_, 0, half), at(e_, 0, real), at(q_, 0, real), at(p_, 0, real)
        t = thread()
        lane = t & 31
        some, sums = cuda.local.array(RANKS, real), cuda.local.array(RANKS, np.float64)
        for i in range(block() * WARPS + (t >> 5), n, blocks() * WARPS):
            for group in range(0, rank, RANKS):
                for k in range(RANKS):
                    sums[k] = 0.0
                for first in range(0, m, CHUNK):
                    size = min(CHUNK, m - first)
                    rest = size & 31
                    for k in range(RANKS):
                        some[k] = real(0)
                    for j in range(first + lane, first + size - rest, 32):
                        x = element(g, e, i * m + j)
                        for k in range(RANKS):
                            y = q[min(group + k, rank - 1) * m + j]
                            some[k] = plus(some[k], times(x, y))
                    for k in range(RANKS):
                        some[k] = fold(some[k])
                    if rest:
                        j = first + size - rest + min(lane, rest - 1)
                        x = element(g, e, i * m + j)
                        for k in range(RANKS):
                            product = times(x, q[min(group + k, rank - 1) * m + j])
                            for one in range(rest):
                                some[k] = plus(some[k], lane_of(product, one))
                    for k in range(RANKS):
                        sums[k] += np.float64(some[k])
                if lane == 0:
                    for k in range(RANKS):
                        if group + k < rank:
                            p[(group + k) * n + i] = real(sums[k])

    return project


@functools.cache
def gatherer(dtype: str, feedback: bool) -> Kernel:
    """Return the kernel (g, e, p, parts, n, m, rank) that sums M^T P over each ROWS rows.

    ``parts`` gets a matrix of Q's layout for each. A block takes a tile.
    """
    half, real, _, _ = form(dtype)
    element = _reader(dtype, feedback)

    @kernel(addresses=4, integers=3)
    def gather(g_: Any, e_: Any, p_: Any, parts_: Any, n: int, m: int, rank: int) -> None:
        g, e, p, parts = at(g_, 0, half), at(e_, 0, real), at(p_, 0, real), at(parts_, 0, real)
        wide = (m + THREADS - 1) // THREADS
        sums, some = cuda.local.array(RANKS, real), cuda.local.array(AHEAD, real)
        for tile in range(block(), wide * ((n + ROWS - 1) // ROWS), blocks()):
            j, part = tile % wide * THREADS + thread(), tile // wide
            first = part * ROWS
            end = min(first + ROWS, n)
            for group in range(0, rank if j < m else 0, RANKS):
                for k in range(RANKS):
                    sums[k] = real(0)
                whole = end - (end - first) % AHEAD
                for begin in range(first, whole, AHEAD):
                    for i in range(AHEAD):  # loads that do not wait for each other
                        some[i] = element(g, e, (begin + i) * m + j)
                    for i in range(AHEAD):
                        for k in range(RANKS):
                            factor = p[min(group + k, rank - 1) * n + begin + i]
                            sums[k] = plus(sums[k], times(factor, some[i]))
                for i in range(whole, end):
                    x = element(g, e, i * m + j)
                    for k in range(RANKS):
                        factor = p[min(group + k, rank - 1) * n + i]
                        sums[k] = plus(sums[k], times(factor, x))
                for k in range(RANKS):
                    if group + k < rank:
                        parts[(part * rank + group + k) * m + j] = sums[k]

    return gather


@functools.cache
def adder(dtype: str) -> Kernel:
    """Return the kernel (parts, own, n, size) that adds what :func:`gatherer` has made of n rows.

    ``size``: elements of Q.
    """
    real = form(dtype).wide

    @kernel(addresses=2, integers=2)
    def add(parts_: Any, own_: Any, n: int, size: int) -> None:
        parts, own = at(parts_, 0, real), at(own_, 0, real)
        count = (n + ROWS - 1) // ROWS
        for i in range(block() * THREADS + thread(), size, blocks() * THREADS):
            total = real(0)
            for part in range(count):
                total = plus(total, parts[part * size + i])
            own[i] = total

    return add


@functools.cache
def restorer(dtype: str, feedback: bool) -> Kernel:
    """Return the kernel (g, e, p, sums, own, out, n, m, rank, broken) that sets the result and E.

    A block takes a tile of TALL rows. ``out`` may be ``g``.
    """
    half, real, _, narrowed = form(dtype)
    element = _reader(dtype, feedback)

    @kernel(addresses=6, integers=4)
    def restore(
        g_: Any,
        e_: Any,
        p_: Any,
        sums_: Any,
        own_: Any,
        out_: Any,
        n: int,
        m: int,
        rank: int,
        broken: int,
    ) -> None:
        g, e, p, out = at(g_, 0, half), at(e_, 0, real), at(p_, 0, real), at(out_, 0, half)
        sums, own = at(sums_, 0, real), at(own_, 0, real)
        wide = (m + THREADS - 1) // THREADS
        for tile in range(block(), wide * ((n + TALL - 1) // TALL), blocks()):
            j, first = tile % wide * THREADS + thread(), tile // wide * TALL
            for i in range(first, min(first + TALL, n) if j < m else first):
                left, result = element(g, e, i * m + j), real(0)
                for k in range(rank):
                    factor = p[k * n + i]
                    result = plus(result, times(factor, sums[k * m + j]))
                    if feedback:
                        left = plus(left, -times(factor, own[k * m + j]))
                out[i * m + j] = narrowed(real(np.nan) if broken else result)
                if feedback:
                    e[i * m + j] = left if abs(left) < np.inf and not broken else real(0)

    return restore


class Steps:
    """Launches of one matrix's steps; the GPU must be current.

    Arguments but ``stream`` and ``broken`` are addresses on the GPU, with the kernels' names.
    """

    def __init__(self, dtype: str, feedback: bool, rows: int, columns: int, rank: int) -> None:
        self._sizes = rows, columns, rank
        self._project = projector(dtype, feedback)
        self._gather = gatherer(dtype, feedback)
        self._add = adder(dtype)
        self._restore = restorer(dtype, feedback)

    def project(self, stream: int, g: int, e: int, q: int, p: int) -> None:
        """Queue P = M Q."""
        blocks = grid(-(-self._sizes[0] // WARPS))
        self._project.launch(blocks, stream, g, e, q, p, *self._sizes)

    def project_back(self, stream: int, g: int, e: int, p: int, parts: int, own: int) -> None:
        """Queue own Q = M^T P."""
        rows, columns, rank = self._sizes
        self._gather.launch(self._tiles(ROWS), stream, g, e, p, parts, *self._sizes)
        blocks = grid(-(-columns * rank // THREADS))
        self._add.launch(blocks, stream, parts, own, rows, columns * rank)

    def restore(
        self, stream: int, g: int, e: int, p: int, sums: int, own: int, out: int, broken: bool
    ) -> None:
        """Queue the result and the residual. ``broken``: the sums are not finite."""
        blocks = self._tiles(TALL)
        self._restore.launch(blocks, stream, g, e, p, sums, own, out, *self._sizes, int(broken))

    def _tiles(self, rows: int) -> int:
        """Return the number of blocks for tiles of THREADS columns and ``rows`` rows."""
        return grid(-(-self._sizes[0] // rows) * -(-self._sizes[1] // THREADS))


def build(dtype: str, feedback: bool, stream: int) -> None:
    """Compile and load all kernels without queueing any. The GPU must be current.

    Raises any error of compiling or loading a kernel.
    """
    with only_building():
        steps = Steps(dtype, feedback, 0, 0, 0)
        steps.project(stream, 0, 0, 0, 0)
        steps.project_back(stream, 0, 0, 0, 0, 0)
        steps.restore(stream, 0, 0, 0, 0, 0, 0, False)
