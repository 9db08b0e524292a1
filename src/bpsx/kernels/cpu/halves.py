"""Numba intrinsics that widen an element for summing and narrow the result.

Numba has no 16-bit floats, so their bits travel as integers, and the integer type says which: int16 is a float16, uint16 a
bfloat16. All other types stand for themselves, except that 8-bit integers widen to int32.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.core.errors import TypingError
from numba.extending import intrinsic

from bpsx.kernels.cpu.float16 import from_float16, to_float16

_F32 = ir.FloatType()
_I16 = ir.IntType(16)
_I32 = ir.IntType(32)


def wide_type(element: types.Type) -> types.Type:
    """The Numba type in which elements of ``element`` are summed."""
    if element in (types.int16, types.uint16):
        return types.float32
    if element in (types.int8, types.uint8):
        return types.int32
    return element


def _bfloat16_rounded(builder: ir.IRBuilder, value: ir.Value) -> ir.Value:
    """The bits of a float32 whose upper half is the nearest bfloat16, ties to even.

    NaN needs no care here: those that reach us were widened from a bfloat16 or made by the addition, so their low 16 bits are zero and
    nothing is carried into the rest.
    """
    bits = builder.bitcast(value, _I32)
    odd = builder.and_(builder.lshr(bits, _I32(16)), _I32(1))
    return builder.add(builder.add(bits, _I32(0x7FFF)), odd)


@intrinsic
def widen(typingctx: Any, x: types.Type) -> Any:
    """``x`` in the type in which it is summed."""
    result = wide_type(x)

    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> ir.Value:
        (value,) = args
        if x == types.int16:
            return from_float16(context, builder, value)
        if x == types.uint16:
            return builder.bitcast(builder.shl(builder.zext(value, _I32), _I32(16)), _F32)
        return context.cast(builder, value, x, result)

    return result(x), codegen


@intrinsic
def narrow(typingctx: Any, x: types.Type, like: types.Type) -> Any:
    """The sum ``x`` as an element of the type of ``like``, rounded once; integers wrap."""
    if wide_type(like) != x:
        raise TypingError(f"narrow: {x} is not the wide type of {like}")

    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> ir.Value:
        value = args[0]
        if like == types.int16:
            return to_float16(context, builder, value)
        if like == types.uint16:
            return builder.trunc(builder.lshr(_bfloat16_rounded(builder, value), _I32(16)), _I16)
        if like in (types.int8, types.uint8):
            return builder.trunc(value, ir.IntType(8))
        return value

    return like(x, like), codegen


@intrinsic
def plus(typingctx: Any, x: types.Type, y: types.Type) -> Any:
    """``x + y`` in their own type: Numba's ``+`` would widen 32-bit integers."""
    if x != y:
        raise TypingError(f"plus: {x} and {y} differ")

    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> ir.Value:
        return builder.fadd(*args) if isinstance(x, types.Float) else builder.add(*args)

    return x(x, y), codegen


@intrinsic
def over(typingctx: Any, x: types.Type, divisor: types.Type) -> Any:
    """``x / divisor``: floating point divides, integers round down as ``//`` does. The divisor is a positive int64."""

    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> ir.Value:
        value, d = args
        if isinstance(x, types.Float):
            return builder.fdiv(value, context.cast(builder, d, divisor, x))
        d = context.cast(builder, d, divisor, x)
        quotient = builder.sdiv(value, d)
        below = builder.icmp_signed("<", builder.srem(value, d), ir.Constant(d.type, 0))
        return builder.sub(quotient, builder.zext(below, d.type))

    return x(x, divisor), codegen


@intrinsic
def add_two_bfloat16(typingctx: Any, x: types.Type, y: types.Type, scale: types.Type, divisor: types.Type) -> Any:
    """Two bfloat16 in a 32-bit word at once: the sums of both halves of ``x`` and ``y``, times ``scale`` first, then divided and rounded.

    Shifts and masks within a word where widening and narrowing would move elements between words: vectorised, this is twice as fast.
    """

    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> ir.Value:
        def halves(word: ir.Value) -> tuple[ir.Value, ir.Value]:
            low, high = builder.shl(word, _I32(16)), builder.and_(word, _I32(0xFFFF0000))
            return builder.bitcast(low, _F32), builder.bitcast(high, _F32)

        scale, d = args[2:]
        sums = [builder.fdiv(builder.fadd(builder.fmul(a, scale), builder.fmul(b, scale)), d) for a, b in zip(halves(args[0]), halves(args[1]))]
        low, high = (_bfloat16_rounded(builder, s) for s in sums)
        return builder.or_(builder.lshr(low, _I32(16)), builder.and_(high, _I32(0xFFFF0000)))

    return types.uint32(x, y, scale, divisor), codegen


@intrinsic
def as_uint16(typingctx: Any, pointer: types.Type) -> Any:
    """The same address, of 16-bit elements."""

    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> ir.Value:
        return builder.bitcast(args[0], context.get_value_type(signature.return_type))

    return types.CPointer(types.uint16)(pointer), codegen


#: Elements that :func:`add_block_float16` takes at once: one AVX-512 register of float32.
BLOCK = 16


@intrinsic
def add_block_float16(typingctx: Any, a: types.Type, b: types.Type, at: types.Type, divisor: types.Type) -> Any:
    """``a[at:at + BLOCK] = (a + b) / divisor`` on float16 (as int16), each block a vector of its own.

    Left to itself LLVM joins two narrowed vectors before it stores them, and that move costs a tenth of the whole.
    """

    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> ir.Value:
        halves, floats = ir.VectorType(_I16, BLOCK), ir.VectorType(_F32, BLOCK)

        def place(pointer: ir.Value) -> ir.Value:
            return builder.bitcast(builder.gep(pointer, [args[2]]), halves.as_pointer())

        def load(pointer: ir.Value) -> ir.Value:
            return from_float16(context, builder, builder.load(place(pointer), align=2))

        lane = builder.insert_element(ir.Constant(floats, ir.Undefined), args[3], _I32(0))
        spread = builder.shuffle_vector(lane, ir.Constant(floats, ir.Undefined), ir.Constant(ir.VectorType(_I32, BLOCK), [0] * BLOCK))
        mean = builder.fdiv(builder.fadd(load(args[0]), load(args[1])), spread)
        builder.store(to_float16(context, builder, mean), place(args[0]), align=2)
        return context.get_dummy_value()

    return types.void(a, b, at, divisor), codegen
