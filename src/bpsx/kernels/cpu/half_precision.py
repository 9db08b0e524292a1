"""Numba intrinsics that widen elements for summing and narrow the result.

Numba has no 16-bit floats, so integers hold their bits: int16 stands for float16, uint16 for
bfloat16. 8-bit integers widen to int32; all other types are their own wide type.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.core.errors import TypingError
from numba.extending import intrinsic

from bpsx.kernels.cpu.float16 import alike, constant, from_float16, to_float16

_F32 = ir.FloatType()
_I16 = ir.IntType(16)
_I32 = ir.IntType(32)


#: Processors that execute AVX-512 instructions in units of 256 bits. There each instruction counts,
#: and converting a whole register takes longer than converting two halves. docs/decisions/0007 has
#: the figures.
_HALF_AS_WIDE = {"znver4"}


def _is_half_as_wide(context: Any) -> bool:
    """Whether code is compiled for such a processor, with all of its AVX-512."""
    _, cpu, features = context.codegen().magic_tuple()
    return cpu in _HALF_AS_WIDE and "+avx512bw" in features


def wide_type(element: types.Type) -> types.Type:
    """Return the Numba type in which elements of type ``element`` are summed."""
    if element in (types.int16, types.uint16):
        return types.float32
    if element in (types.int8, types.uint8):
        return types.int32
    return element


def _bfloat16_rounded(builder: ir.IRBuilder, value: ir.Value) -> ir.Value:
    """Return float32 bits whose upper half is the nearest bfloat16, ties to even; also for vectors.

    NaN needs no care here: all NaNs were widened from a bfloat16 or made by the addition. Their low
    16 bits are zero, so nothing is carried into the upper half.
    """
    words = alike(_I32, value.type)
    bits = builder.bitcast(value, words)
    odd = builder.and_(builder.lshr(bits, constant(words, 16)), constant(words, 1))
    return builder.add(builder.add(bits, constant(words, 0x7FFF)), odd)


@intrinsic
def widen(typingctx: Any, x: types.Type) -> Any:
    """Return ``x`` in the type in which it is summed."""
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
    """Return the sum ``x`` in the type of ``like``, rounded once; integers wrap."""
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
    """Return ``x + y`` in their own type: Numba's ``+`` would widen 32-bit integers."""
    if x != y:
        raise TypingError(f"plus: {x} and {y} differ")

    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> ir.Value:
        return builder.fadd(*args) if isinstance(x, types.Float) else builder.add(*args)

    return x(x, y), codegen


@intrinsic
def over(typingctx: Any, x: types.Type, divisor: types.Type) -> Any:
    """Return ``x / divisor``; integers round down like ``//``.

    The divisor is a positive int64.
    """

    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> ir.Value:
        value, d = args
        if isinstance(x, types.Float):
            return builder.fdiv(value, context.cast(builder, d, divisor, x))
        d = context.cast(builder, d, divisor, x)
        quotient = builder.sdiv(value, d)
        below = builder.icmp_signed("<", builder.srem(value, d), ir.Constant(d.type, 0))
        return builder.sub(quotient, builder.zext(below, d.type))

    return x(x, divisor), codegen


#: Elements that :func:`add_block_bfloat16` takes at once: one AVX-512 register.
WORDS = 32


def _rounded_apart(builder: ir.IRBuilder, even: ir.Value, odd: ir.Value) -> ir.Value:
    """Round two float32 vectors to bfloat16, ties to even, and interleave them, ``even`` first."""
    words = alike(_I32, even.type)
    low, high = (_bfloat16_rounded(builder, value) for value in (even, odd))
    return builder.or_(
        builder.lshr(low, constant(words, 16)), builder.and_(high, constant(words, 0xFFFF0000))
    )


def _rounded_together(builder: ir.IRBuilder, even: ir.Value, odd: ir.Value) -> ir.Value:
    """Do the same in fewer instructions, for processors that compare and move 32 halves at a time.

    The upper halves of all elements go into one vector, the lower halves into another. Rounding
    carries from a lower half of more than 0x8000, and from 0x8000 below an odd upper half.
    """
    halves, order = ir.VectorType(_I16, WORDS), ir.VectorType(_I32, WORDS)
    low, high = builder.bitcast(even, halves), builder.bitcast(odd, halves)

    def every_second(first: int) -> ir.Value:
        return builder.shuffle_vector(
            low,
            high,
            ir.Constant(order, [i - i % 2 + first + WORDS * (i % 2) for i in range(WORDS)]),
        )

    upper, lower = every_second(1), every_second(0)
    bound = builder.not_(
        builder.or_(builder.and_(upper, constant(halves, 1)), constant(halves, 0x7FFE))
    )
    carries = builder.icmp_unsigned(">=", lower, bound)
    return builder.bitcast(
        builder.select(carries, builder.add(upper, constant(halves, 1)), upper),
        alike(_I32, even.type),
    )


@intrinsic
def add_block_bfloat16(
    typingctx: Any,
    a: types.Type,
    b: types.Type,
    at: types.Type,
    scale: types.Type,
    divisor: types.Type,
) -> Any:
    """Set ``a[at:at + WORDS]`` to ``(a * scale + b * scale) / divisor``, in bfloat16 (as uint16).

    Two elements form a 32-bit word, in which shifts and masks widen them: moving elements between
    words would take twice as long.
    """

    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> ir.Value:
        words, floats = ir.VectorType(_I32, WORDS // 2), ir.VectorType(_F32, WORDS // 2)

        def place(pointer: ir.Value) -> ir.Value:
            return builder.bitcast(builder.gep(pointer, [args[2]]), words.as_pointer())

        def mean(first: ir.Value, second: ir.Value) -> ir.Value:
            parts = [builder.fmul(builder.bitcast(x, floats), factor) for x in (first, second)]
            return builder.fdiv(builder.fadd(*parts), by)

        factor, by = (_spread(builder, value, floats) for value in args[3:])
        both = [builder.load(place(pointer), align=2) for pointer in args[:2]]
        even = mean(*(builder.shl(x, constant(words, 16)) for x in both))
        odd = mean(*(builder.and_(x, constant(words, 0xFFFF0000)) for x in both))
        rounded = _rounded_together if _is_half_as_wide(context) else _rounded_apart
        builder.store(rounded(builder, even, odd), place(args[0]), align=2)
        return context.get_dummy_value()

    return types.void(a, b, at, scale, divisor), codegen


def _spread(builder: ir.IRBuilder, value: ir.Value, kind: ir.VectorType) -> ir.Value:
    """Return a vector with ``value`` in every lane."""
    undefined = ir.Constant(kind, ir.Undefined)
    first = builder.insert_element(undefined, value, _I32(0))
    return builder.shuffle_vector(
        first, undefined, ir.Constant(ir.VectorType(_I32, kind.count), [0] * kind.count)
    )


#: Elements that :func:`add_block_float16` takes at once: one AVX-512 register of float32.
BLOCK = 16


@intrinsic
def add_block_float16(
    typingctx: Any, a: types.Type, b: types.Type, at: types.Type, divisor: types.Type
) -> Any:
    """Set ``a[at:at + BLOCK]`` to ``(a + b) / divisor``, in float16 (as int16), vector by vector.

    On its own LLVM would join two narrowed vectors before it stores them, and that move costs a
    tenth of the whole.
    """

    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> ir.Value:
        size = BLOCK // 2 if _is_half_as_wide(context) else BLOCK
        halves, floats = ir.VectorType(_I16, size), ir.VectorType(_F32, size)
        by = _spread(builder, args[3], floats)
        for begin in range(0, BLOCK, size):
            at = builder.add(args[2], ir.Constant(args[2].type, begin))
            places = [
                builder.bitcast(builder.gep(pointer, [at]), halves.as_pointer())
                for pointer in args[:2]
            ]
            first, second = (
                from_float16(context, builder, builder.load(place, align=2)) for place in places
            )
            mean = builder.fdiv(builder.fadd(first, second), by)
            builder.store(to_float16(context, builder, mean), places[0], align=2)
        return context.get_dummy_value()

    return types.void(a, b, at, divisor), codegen
