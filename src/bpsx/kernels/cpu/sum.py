"""Sums on the CPU: the functions of ``abi.pxd`` for every element type, for Numba to compile."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numba import types

from bpsx.kernels.cpu.half_precision import (
    BLOCK,
    WORDS,
    add_block_bfloat16,
    add_block_float16,
    narrow,
    over,
    plus,
    wide_type,
    widen,
)
from bpsx.kernels.cpu.jit import compile_with_numba

# Numba has no 16-bit floats, so integer types stand for them; see half_precision.py.
ELEMENTS: dict[str, types.Type] = {
    "float16": types.int16,
    "bfloat16": types.uint16,
    "float32": types.float32,
    "float64": types.float64,
    "uint8": types.uint8,
    "int8": types.int8,
    "int32": types.int32,
    "int64": types.int64,
}


def _pair(a: Any, b: Any, n: int, divisor: int) -> None:
    if divisor == 1:
        for i in range(n):
            a[i] = narrow(plus(widen(a[i]), widen(b[i])), a[i])
    else:
        for i in range(n):
            a[i] = narrow(over(plus(widen(a[i]), widen(b[i])), divisor), a[i])


def _pair_bfloat16(a: Any, b: Any, n: int, divisor: int) -> None:
    """Like :func:`_pair`, a block of elements at a time."""
    blocks = n // WORDS
    scale = np.float32(1.0) if divisor == 1 else np.float32(0.5)
    d = np.float32(divisor) * scale
    if divisor == 1:
        one = np.float32(1.0)
        for i in range(blocks):
            add_block_bfloat16(a, b, i * WORDS, one, one)
    else:
        half = np.float32(0.5)
        for i in range(blocks):
            add_block_bfloat16(a, b, i * WORDS, half, d)
    for i in range(blocks * WORDS, n):
        a[i] = narrow((widen(a[i]) * scale + widen(b[i]) * scale) / d, a[i])


def _pair_float16(a: Any, b: Any, n: int, divisor: int) -> None:
    """Like :func:`_pair`, a block of elements at a time."""
    blocks = n // BLOCK
    if divisor == 1:
        one = np.float32(1.0)
        for i in range(blocks):
            add_block_float16(a, b, i * BLOCK, one)
    else:
        d = np.float32(divisor)
        for i in range(blocks):
            add_block_float16(a, b, i * BLOCK, d)
    for i in range(blocks * BLOCK, n):
        a[i] = narrow(over(plus(widen(a[i]), widen(b[i])), divisor), a[i])


def _add(acc: Any, src: Any, n: int, shift: int) -> None:
    for i in range(n):
        acc[i] = plus(acc[i], widen(src[i]))


def _start(acc: Any, a: Any, b: Any, n: int, shift: int) -> None:
    for i in range(n):
        acc[i] = plus(widen(a[i]), widen(b[i]))


def _finish(out: Any, acc: Any, src: Any, n: int, divisor: int, shift: int) -> None:
    if divisor == 1:
        for i in range(n):
            out[i] = narrow(plus(acc[i], widen(src[i])), src[i])
    else:
        for i in range(n):
            out[i] = narrow(over(plus(acc[i], widen(src[i])), divisor), src[i])


def _add_bfloat16(acc: Any, src: Any, n: int, shift: int) -> None:
    scale = np.float32(1.0) / np.float32(1 << shift)
    for i in range(n):
        acc[i] = acc[i] + widen(src[i]) * scale


def _start_bfloat16(acc: Any, a: Any, b: Any, n: int, shift: int) -> None:
    scale = np.float32(1.0) / np.float32(1 << shift)
    for i in range(n):
        acc[i] = widen(a[i]) * scale + widen(b[i]) * scale


def _finish_bfloat16(out: Any, acc: Any, src: Any, n: int, divisor: int, shift: int) -> None:
    scale = np.float32(1.0) / np.float32(1 << shift)
    d = np.float32(divisor) * scale
    for i in range(n):
        out[i] = narrow((acc[i] + widen(src[i]) * scale) / d, src[i])


def _divide(a: Any, n: int, divisor: int) -> None:
    for i in range(n):
        a[i] = narrow(over(widen(a[i]), divisor), a[i])


_BODIES: dict[str, dict[str, Callable[..., None]]] = {
    "": {"pair": _pair, "add": _add, "divide": _divide, "start": _start, "finish": _finish},
    "float16": {"pair": _pair_float16},
    "bfloat16": {
        "pair": _pair_bfloat16,
        "add": _add_bfloat16,
        "start": _start_bfloat16,
        "finish": _finish_bfloat16,
    },
}


def compile_sum(dtype: str, step: str) -> tuple[Any, Callable[[], bytes]]:
    """Compile a kernel: see :func:`bpsx.kernels.load`."""
    element, count = ELEMENTS[dtype], types.int64
    data, acc = types.CPointer(element), types.CPointer(wide_type(element))
    arguments = {
        "pair": (data, data, count, count),
        "add": (acc, data, count, count),
        "divide": (data, count, count),
        "start": (acc, data, data, count, count),
        "finish": (data, acc, data, count, count, count),
    }
    bodies = _BODIES[""] | _BODIES.get(dtype, {})
    return compile_with_numba(types.void(*arguments[step]), bodies[step])
