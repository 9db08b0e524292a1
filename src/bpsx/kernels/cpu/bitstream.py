"""Bit streams, and planes of bits out of and into bytes, 64 bits at a time.

Bit b of a stream is bit b % 8 of byte b // 8, the lowest bit first. A writer's state is two
numbers: the count of bits written, and the bits of the incomplete last word, which :func:`end`
stores. A writer touches up to 8 bytes beyond its last bit, a reader up to 16. Callers must provide
that room, and must not read more bits than there are.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from bpsx.kernels.cpu.bit_ops import _load, _splat

_I8, _I64 = ir.IntType(8), ir.IntType(64)


def _word_at(builder: ir.IRBuilder, pointer: ir.Value, offset: ir.Value) -> ir.Value:
    return builder.bitcast(builder.gep(pointer, [offset]), _I64.as_pointer())


@intrinsic
def load_word(typingctx: Any, pointer: types.CPointer, offset: types.Type) -> Any:
    """Load the 64-bit word ``offset`` bytes beyond ``pointer``, at any alignment."""

    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> ir.Value:
        return builder.load(_word_at(builder, args[0], args[1]), align=1)

    return types.uint64(types.CPointer(types.uint8), types.int64), codegen


@intrinsic
def store_word(
    typingctx: Any, pointer: types.CPointer, offset: types.Type, word: types.Type
) -> Any:
    """Store ``word`` ``offset`` bytes beyond ``pointer``, at any alignment."""

    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> ir.Value:
        builder.store(args[2], _word_at(builder, args[0], args[1]), align=1)
        return context.get_dummy_value()

    return types.void(types.CPointer(types.uint8), types.int64, types.uint64), codegen


@numba.njit
def put(to: Any, written: int, held: Any, word: Any, count: int) -> Any:
    """Append the lowest ``count`` (0 to 64) bits of ``word``, whose other bits must be 0.

    Returns the writer's state (written, held).
    """
    used = np.uint64(written & 63)
    held |= word << used
    store_word(to, (written >> 6) << 3, held)
    if (written & 63) + count >= 64:
        held = (word >> np.uint64(1)) >> (np.uint64(63) - used)  # a shift by 64 would do nothing
    return written + count, held


@numba.njit
def end(to: Any, written: int, held: Any) -> Any:
    """Store the held bits and return the number of bytes; zeros fill the last byte."""
    store_word(to, (written >> 6) << 3, held)
    return (written + 7) >> 3


@numba.njit
def get(of: Any, position: int) -> Any:
    """Return the 64 bits from ``position`` on."""
    used = np.uint64(position & 7)
    first, second = load_word(of, position >> 3), load_word(of, (position >> 3) + 8)
    return (first >> used) | ((second << np.uint64(1)) << (np.uint64(63) - used))


@intrinsic
def holding(typingctx: Any, pointer: types.CPointer, i: types.Type, bit: types.Type) -> Any:
    """Return a mask of the 64 bytes from index ``i`` on that, less 1, have the bit of ``bit`` set.

    ``bit``: a byte with a single one. The first byte is the mask's lowest bit.
    """

    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> ir.Value:
        vector = _load(builder, args[0], args[1], types.uint8, 64)
        less = builder.sub(vector, ir.Constant(vector.type, [1] * 64))
        found = builder.and_(less, _splat(builder, args[2], 64))
        return builder.bitcast(
            builder.icmp_unsigned("!=", found, ir.Constant(vector.type, [0] * 64)), _I64
        )

    return types.uint64(types.CPointer(types.uint8), types.int64, types.uint8), codegen


@intrinsic
def raise_bytes(
    typingctx: Any, pointer: types.CPointer, i: types.Type, word: types.Type, amount: types.Type
) -> Any:
    """Add ``amount`` to those of the 64 bytes from index ``i`` on whose bit in ``word`` is set."""

    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> ir.Value:
        vector = _load(builder, args[0], args[1], types.uint8, 64)
        mask = builder.bitcast(args[2], ir.VectorType(ir.IntType(1), 64))
        added = builder.select(
            mask, _splat(builder, args[3], 64), ir.Constant(vector.type, [0] * 64)
        )
        place = builder.bitcast(builder.gep(args[0], [args[1]]), vector.type.as_pointer())
        builder.store(builder.add(vector, added), place, align=1)
        return context.get_dummy_value()

    return types.void(types.CPointer(types.uint8), types.int64, types.uint64, types.uint8), codegen
