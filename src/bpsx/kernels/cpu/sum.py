"""Sums on the CPU: the functions of ``abi.pxd`` for every element type, compiled by Numba.

Compiled code is cached in a folder of the user's (``BPSX_CACHE_DIR``), so only the first server
ever started on a machine compiles.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numba import types

from bpsx.dtypes import BY_CODE
from bpsx.kernels.addresses import Kernels
from bpsx.kernels.cpu.compiled import compiled
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


def _compile(body: Callable[..., None], *arguments: types.Type) -> Any:
    return compiled(types.void(*arguments), body)


def load(code: int) -> Kernels:
    """Implement :func:`bpsx.kernels.load`, whose lock admits one thread at a time."""
    dtype = BY_CODE[code]
    element = ELEMENTS[dtype.name]
    data = types.CPointer(element)
    acc = types.CPointer(wide_type(element))
    count = types.int64
    steps = (_add, _start, _finish)
    if dtype.name == "bfloat16":
        steps = (_add_bfloat16, _start_bfloat16, _finish_bfloat16)
        pair = _compile(_pair_bfloat16, data, data, count, count)
    elif dtype.name == "float16":
        pair = _compile(_pair_float16, data, data, count, count)
    else:
        pair = _compile(_pair, data, data, count, count)
    add = _compile(steps[0], acc, data, count, count)
    divide = _compile(_divide, data, count, count)
    owners = [pair, add, divide]
    if dtype.wide_itemsize != dtype.itemsize:
        owners += [
            _compile(steps[1], acc, data, data, count, count),
            _compile(steps[2], data, acc, data, count, count, count),
        ]
    start, finish = (owners[3].address, owners[4].address) if len(owners) > 3 else (0, 0)
    return Kernels(
        dtype.itemsize,
        dtype.wide_itemsize,
        pair.address,
        add.address,
        start,
        finish,
        divide.address,
        tuple(owners),
    )
