"""Steps of PowerSGD on one matrix (arXiv 1905.13727), as C functions for Numba to compile.

The matrix M = G + E of n rows and m columns is the gradient plus the residual. It is row-major; P
and Q lie transposed, so that each of their columns is contiguous: P as rank rows of n elements, Q
as rank rows of m.

The result has the same bits on every processor and with any division of the work. Each element is
summed in an order that depends only on n and m: in lanes that are written out as vectors, and
without fused multiply-adds.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numba
import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from bpsx.kernels.cpu.bit_ops import at, cast, like, width
from bpsx.kernels.cpu.half_precision import narrow, wide_type, widen
from bpsx.kernels.cpu.jit import compile_with_numba
from bpsx.kernels.cpu.randomk import GAMMA, mixed
from bpsx.kernels.cpu.sum import ELEMENTS
from bpsx.kernels.low_rank import CHUNK, ROWS

#: Lanes of a vector, and elements that :func:`_blocks` takes at once: two vectors.
_LANES = 16
_BLOCK = 2 * _LANES


@intrinsic
def _blocks(
    typingctx: Any,
    x: types.CPointer,
    first: types.Type,
    y: types.CPointer,
    start: types.Type,
    count: types.Type,
    total: types.Float,
) -> Any:
    """Return the sum of x[first + i] * y[start + i] over ``count`` blocks, in ``total``'s type."""
    element, sums = x.dtype, total

    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> ir.Value:
        narrow_vector = ir.VectorType(context.get_value_type(element), _LANES)
        vector = ir.VectorType(context.get_value_type(sums), _LANES)
        zero = ir.Constant(vector, [0.0] * _LANES)
        lanes = [cgutils.alloca_once_value(builder, zero) for _ in range(2)]

        def load(pointer: ir.Value, index: ir.Value) -> ir.Value:
            place = builder.bitcast(builder.gep(pointer, [index]), narrow_vector.as_pointer())
            found = builder.load(place, align=element.bitwidth // 8)
            return found if element == sums else builder.fpext(found, vector)

        with cgutils.for_range(builder, args[4]) as loop:
            for which, lane in enumerate(lanes):
                index = builder.add(
                    builder.mul(loop.index, ir.Constant(loop.index.type, _BLOCK)),
                    ir.Constant(loop.index.type, which * _LANES),
                )
                product = builder.fmul(
                    load(args[0], builder.add(args[1], index)),
                    load(args[2], builder.add(args[3], index)),
                )
                builder.store(builder.fadd(builder.load(lane), product), lane)
        return _folded(builder, builder.fadd(*(builder.load(lane) for lane in lanes)))

    return sums(x, types.int64, y, types.int64, types.int64, total), codegen


def _folded(builder: ir.IRBuilder, vector: ir.Value) -> ir.Value:
    """Return the sum of a vector's lanes: the upper half is added to the lower, and so on."""
    size = _LANES
    while size > 1:
        size //= 2
        order = ir.VectorType(ir.IntType(32), size)
        lower, upper = (
            builder.shuffle_vector(
                vector, vector, ir.Constant(order, list(range(begin, begin + size)))
            )
            for begin in (0, size)
        )
        vector = builder.fadd(lower, upper)
    return builder.extract_element(vector, ir.Constant(ir.IntType(32), 0))


@numba.njit(error_model="numpy")
def _dot(x: Any, first: int, y: Any, start: int, n: int, zero: Any) -> Any:
    """Return the sum of n products in the type of ``zero``."""
    whole = n // _BLOCK
    total = _blocks(x, first, y, start, whole, zero)
    for i in range(whole * _BLOCK, n):
        total += type(zero)(x[first + i]) * type(zero)(y[start + i])
    return total


@numba.njit(error_model="numpy")
def _fill(row: Any, g: Any, e: Any, begin: int, size: int, feedback: int) -> None:
    """Set ``row`` to ``size`` elements of M from ``begin`` on."""
    if feedback:
        for j in range(size):
            row[j] = widen(g[begin + j]) + e[begin + j]
    else:
        for j in range(size):
            row[j] = widen(g[begin + j])


def _project(
    g: Any,
    e: Any,
    q: Any,
    p: Any,
    scratch: Any,
    n: int,
    m: int,
    rank: int,
    begin: int,
    end: int,
    feedback: int,
) -> None:
    """Set rows ``begin`` to ``end`` of P = M Q."""
    row, sums = like(scratch, q), at(scratch, CHUNK * width(q), np.float64)
    for i in range(begin, end):
        for k in range(rank):
            sums[k] = 0.0
        for first in range(0, m, CHUNK):
            size = min(CHUNK, m - first)
            _fill(row, g, e, i * m + first, size, feedback)
            for k in range(rank):
                sums[k] += np.float64(_dot(row, 0, q, k * m + first, size, cast(0.0, q)))
        for k in range(rank):
            p[k * n + i] = cast(sums[k], p)


def _project_back(
    g: Any,
    e: Any,
    p: Any,
    own: Any,
    scratch: Any,
    n: int,
    m: int,
    rank: int,
    begin: int,
    end: int,
    feedback: int,
) -> None:
    """Set columns ``begin`` to ``end`` of this worker's Q = M^T P; at most CHUNK.

    Adds ROWS rows by themselves: one after the other, thousands of alike elements would lose
    thousands of rounding errors of one sign.
    """
    row, size = like(scratch, p), end - begin
    sums = like(at(scratch, CHUNK * width(p), np.uint8), p)
    for k in range(rank):
        for j in range(size):
            own[k * m + begin + j] = 0
    for first in range(0, n, ROWS):
        for j in range(rank * size):
            sums[j] = 0
        for i in range(first, min(first + ROWS, n)):
            _fill(row, g, e, i * m + begin, size, feedback)
            for k in range(rank):
                factor = p[k * n + i]
                for j in range(size):
                    sums[k * size + j] += factor * row[j]
        for k in range(rank):
            for j in range(size):
                own[k * m + begin + j] += sums[k * size + j]


def _restore(
    g: Any,
    e: Any,
    p: Any,
    sums: Any,
    own: Any,
    out: Any,
    scratch: Any,
    n: int,
    m: int,
    rank: int,
    begin: int,
    end: int,
    feedback: int,
    broken: int,
) -> None:
    """Set rows ``begin`` to ``end`` of the result P Q^T, and of the residual E = M - P Q^T.

    The result has the summed Q (``sums``), the residual this worker's (``own``). ``broken``: the
    result is NaN, and the residual 0. ``out`` may be ``g``.
    """
    row = like(scratch, p)
    result = like(at(scratch, CHUNK * width(p), np.uint8), p)
    for i in range(begin, end):
        for first in range(0, m, CHUNK):
            size, here = min(CHUNK, m - first), i * m + first
            _fill(row, g, e, here, size, feedback)
            for j in range(size):
                result[j] = 0
            for k in range(rank):
                factor, there = p[k * n + i], k * m + first
                for j in range(size):
                    result[j] += factor * sums[there + j]
                if feedback:
                    for j in range(size):
                        row[j] -= factor * own[there + j]
            if broken:
                for j in range(size):
                    result[j] = np.nan
                    row[j] = 0
            for j in range(size):
                out[here + j] = narrow(result[j], out[here + j])
            if feedback:
                for j in range(size):
                    e[here + j] = row[j] if abs(row[j]) < np.inf else cast(0.0, e)


@numba.njit(error_model="numpy")
def _scale(v: Any, begin: int, n: int, factor: float) -> None:
    for j in range(n):
        v[begin + j] = cast(np.float64(v[begin + j]) * factor, v)


@numba.njit(error_model="numpy")
def _norm(v: Any, begin: int, n: int) -> Any:
    return np.sqrt(_dot(v, begin, v, begin, n, 0.0))


@numba.njit(error_model="numpy")
def _is_finite(v: Any, n: int, rank: int) -> bool:
    """Whether the norms of all columns are finite."""
    fine = True
    for k in range(rank):
        fine &= _norm(v, k * n, n) < np.inf
    return fine


@numba.njit(error_model="numpy")
def _straighten(v: Any, k: int, n: int) -> Any:
    """Make column k a unit vector, orthogonal to those before it (Gram-Schmidt, twice).

    Returns False, with the column zero, if it depends on them or is zero.
    """
    here, least = k * n, 1e-6 if width(v) == 4 else 1e-14
    norm = _norm(v, here, n)
    alive = norm > 0
    if alive:
        _scale(v, here, n, 1.0 / norm)
    for _ in range(2):
        if alive:
            for before in range(k):
                share = _dot(v, here, v, before * n, n, 0.0)
                for j in range(n):
                    v[here + j] = cast(
                        np.float64(v[here + j]) - share * np.float64(v[before * n + j]), v
                    )
            norm = _norm(v, here, n)
            alive = norm > least
            if alive:
                _scale(v, here, n, 1.0 / norm)
    if not alive:
        for j in range(n):
            v[here + j] = 0
    return alive


def _orthogonalise(p: Any, n: int, rank: int) -> None:
    """Make the columns of P orthonormal; those that depend on earlier ones become zero.

    All become NaN if one is not finite.
    """
    if _is_finite(p, n, rank):
        for k in range(rank):
            _straighten(p, k, n)
    else:
        for j in range(n * rank):
            p[j] = np.nan


def _refresh(q: Any, sums: Any, m: int, rank: int, seed: int, counter: int) -> int:
    """Set Q of the next step to an orthonormal basis of the summed Q.

    Columns that depend on earlier ones are replaced by random ones. Returns 1, with Q as it was, if
    an element is not finite; else 0.
    """
    if not _is_finite(sums, m, rank):
        return 1
    start = mixed(np.uint64(seed) + mixed(np.uint64(counter) + GAMMA))
    for j in range(m * rank):
        q[j] = sums[j]
    for k in range(rank):
        if not _straighten(q, k, m):
            for j in range(k * m, (k + 1) * m):
                word = mixed(start + np.uint64(j + 1) * GAMMA)
                q[j] = cast(np.float64(word >> np.uint64(11)) * 2.0**-52 - 1.0, q)
            _straighten(q, k, m)
    return 0


def compile_step(step: str, dtype: str) -> tuple[Any, Callable[[], bytes]]:
    """Compile one of :data:`bpsx.kernels.low_rank.STEPS` for gradients of ``dtype``."""
    element = ELEMENTS[dtype]
    elements, wide = types.CPointer(element), types.CPointer(wide_type(element))
    raw, n = types.CPointer(types.uint8), types.int64
    known: dict[str, tuple[Any, Callable[..., Any]]] = {
        "project": (types.void(elements, wide, wide, wide, raw, *[n] * 6), _project),
        "orthogonalise": (types.void(wide, n, n), _orthogonalise),
        "project_back": (types.void(elements, wide, wide, wide, raw, *[n] * 6), _project_back),
        "restore": (
            types.void(elements, wide, wide, wide, wide, elements, raw, *[n] * 7),
            _restore,
        ),
        "refresh": (n(wide, wide, n, n, n, types.uint64), _refresh),
    }
    return compile_with_numba(*known[step])
