"""Numba intrinsics for codecs: casts of pointers, and comparisons of many elements at once.

A comparison gives one bit per element, in a single word. LLVM compiles it to a few vector
instructions of the machine. It does not vectorise the corresponding loop over elements.
"""

from __future__ import annotations

from typing import Any

import llvmlite.binding as llvm
import numba
import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.core.errors import TypingError
from numba.extending import intrinsic

_I1, _I8, _I32, _I64 = ir.IntType(1), ir.IntType(8), ir.IntType(32), ir.IntType(64)
#: Whether the processor gathers and scatters bits in one instruction (BMI2).
_HAS_BMI2 = bool(llvm.get_host_cpu_features().get("bmi2"))


@intrinsic
def at(
    typingctx: Any, pointer: types.CPointer, offset: types.Type, element: types.NumberClass
) -> Any:
    """Return ``pointer`` plus ``offset`` bytes as a pointer to ``element`` (``np.uint32``, say)."""
    if not isinstance(pointer, types.CPointer) or not isinstance(element, types.NumberClass):
        raise TypingError(f"at: {pointer}, {element}")
    result = types.CPointer(element.dtype)

    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> ir.Value:
        moved = builder.gep(builder.bitcast(args[0], _I8.as_pointer()), [args[1]])
        return builder.bitcast(moved, context.get_value_type(result))

    return result(pointer, types.int64, element), codegen


def _bits_of(kind: types.Type) -> ir.IntType:
    if not isinstance(kind, (types.Integer, types.Float)):
        raise TypingError(f"no bits of {kind}")
    return ir.IntType(kind.bitwidth)


@intrinsic
def bits(typingctx: Any, x: types.Type) -> Any:
    """Return a float's bits as an unsigned integer of its size."""
    result = {types.float32: types.uint32, types.float64: types.uint64}[x]

    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> ir.Value:
        return builder.bitcast(args[0], _bits_of(x))

    return result(x), codegen


@intrinsic
def width(typingctx: Any, pointer: types.CPointer) -> Any:
    """Return the bytes of an element that ``pointer`` points to."""
    size = pointer.dtype.bitwidth // 8

    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> ir.Value:
        return ir.Constant(_I64, size)

    return types.int64(pointer), codegen


@intrinsic
def magnitude(typingctx: Any, x: types.Float) -> Any:
    """Return a float's bits without the sign, as a uint64.

    These integers are ordered like the magnitudes; infinity and then NaN are the largest.
    """

    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> ir.Value:
        kind = _bits_of(x)
        absolute = builder.and_(
            builder.bitcast(args[0], kind), ir.Constant(kind, (1 << (kind.width - 1)) - 1)
        )
        return builder.zext(absolute, _I64) if kind.width < 64 else absolute

    return types.uint64(x), codegen


@intrinsic
def signed(typingctx: Any, x: types.Float, sign: types.Float) -> Any:
    """Return the magnitude of ``x`` with the sign of ``sign``; both have the same type."""

    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> ir.Value:
        kind = args[0].type
        return builder.call(
            builder.module.declare_intrinsic(
                "llvm.copysign", [kind], ir.FunctionType(kind, [kind, kind])
            ),
            args,
        )

    return x(x, x), codegen


@intrinsic
def cast(typingctx: Any, x: types.Type, like: types.CPointer) -> Any:
    """Return the number ``x`` in the type that ``like`` points to."""
    result = like.dtype

    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> ir.Value:
        return context.cast(builder, args[0], x, result)

    return result(x, like), codegen


@intrinsic
def like(typingctx: Any, pointer: types.CPointer, other: types.CPointer) -> Any:
    """Return ``pointer`` as a pointer to the type that ``other`` points to."""

    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> ir.Value:
        return builder.bitcast(args[0], context.get_value_type(other))

    return other(pointer, other), codegen


@intrinsic
def flipped(typingctx: Any, x: types.Float, word: types.Type, lane: types.Type) -> Any:
    """Return the float ``x``, negated if bit ``lane`` of the 32-bit ``word`` is set.

    An intrinsic, because Numba would widen 32-bit integers to 64 bits on the way.
    """

    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> ir.Value:
        kind = _bits_of(x)
        wide = (
            [builder.zext(args[1], kind), args[2]]
            if kind.width > 32
            else [args[1], builder.trunc(args[2], kind)]
        )
        top = builder.shl(builder.lshr(*wide), ir.Constant(kind, kind.width - 1))
        return builder.bitcast(builder.xor(builder.bitcast(args[0], kind), top), args[0].type)

    return x(x, types.uint32, types.int64), codegen


def _load(
    builder: ir.IRBuilder, pointer: ir.Value, i: ir.Value, element: types.Type, lanes: int
) -> ir.Value:
    """Load ``lanes`` elements from index ``i`` on as a vector of their bits, at any alignment."""
    number = _bits_of(element)
    first = builder.bitcast(builder.gep(pointer, [i]), ir.VectorType(number, lanes).as_pointer())
    return builder.load(first, align=1)


def _splat(builder: ir.IRBuilder, value: ir.Value, lanes: int) -> ir.Value:
    vector = ir.VectorType(value.type, lanes)
    one = builder.insert_element(ir.Constant(vector, ir.Undefined), value, ir.Constant(_I32, 0))
    return builder.shuffle_vector(
        one, ir.Constant(vector, ir.Undefined), ir.Constant(ir.VectorType(_I32, lanes), [0] * lanes)
    )


def _with_signed(builder: ir.IRBuilder, args: Any, add: bool) -> None:
    """Set 32 floats, or add to them. ``args``: pointer, index, word of signs, magnitude."""
    pointer, i, word, x = args
    negative = builder.bitcast(word, ir.VectorType(_I1, 32))
    values = builder.select(negative, _splat(builder, builder.fneg(x), 32), _splat(builder, x, 32))
    first = builder.bitcast(builder.gep(pointer, [i]), values.type.as_pointer())
    if add:
        values = builder.fadd(builder.load(first, align=1), values)
    builder.store(values, first, align=1)


@intrinsic
def set_signed(
    typingctx: Any, pointer: types.CPointer, i: types.Type, word: types.Type, x: types.Float
) -> Any:
    """Set the 32 floats from index ``i`` on to ``x``, negated where a bit of ``word`` is set."""

    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> ir.Value:
        _with_signed(builder, args, add=False)
        return context.get_dummy_value()

    return types.void(pointer, types.int64, types.uint32, pointer.dtype), codegen


@intrinsic
def add_signed(
    typingctx: Any, pointer: types.CPointer, i: types.Type, word: types.Type, x: types.Float
) -> Any:
    """Add to the 32 floats from index ``i`` on what :func:`set_signed` would set them to."""

    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> ir.Value:
        _with_signed(builder, args, add=True)
        return context.get_dummy_value()

    return types.void(pointer, types.int64, types.uint32, pointer.dtype), codegen


@intrinsic
def signs(typingctx: Any, pointer: types.CPointer, i: types.Type) -> Any:
    """Return the sign bits of the 32 floats from index ``i`` on, the first in the lowest bit."""
    element = pointer.dtype

    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> ir.Value:
        vector = _load(builder, args[0], args[1], element, 32)
        negative = builder.icmp_signed("<", vector, ir.Constant(vector.type, [0] * 32))
        return builder.bitcast(negative, _I32)

    return types.uint32(pointer, types.int64), codegen


@intrinsic
def reaching(typingctx: Any, pointer: types.CPointer, i: types.Type, threshold: types.Type) -> Any:
    """Return a mask of the 32 floats from index ``i`` on whose magnitude is at least ``threshold``.

    ``threshold``: a magnitude's bits. The first float is the lowest bit.
    """
    element = pointer.dtype
    number = _bits_of(element)
    unsigned = {32: types.uint32, 64: types.uint64}[number.width]

    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> ir.Value:
        vector = _load(builder, args[0], args[1], element, 32)
        magnitude = builder.and_(
            vector, ir.Constant(vector.type, [(1 << (number.width - 1)) - 1] * 32)
        )
        return builder.bitcast(
            builder.icmp_unsigned(">=", magnitude, _splat(builder, args[2], 32)), _I32
        )

    return types.uint32(pointer, types.int64, unsigned), codegen


@intrinsic
def above(typingctx: Any, pointer: types.CPointer, i: types.Type, level: types.Type) -> Any:
    """Return a mask of the 64 bytes from index ``i`` on above ``level``; the first is bit 0."""
    if pointer != types.CPointer(types.uint8):
        raise TypingError(f"above: {pointer}")

    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> ir.Value:
        vector = _load(builder, args[0], args[1], types.uint8, 64)
        return builder.bitcast(
            builder.icmp_unsigned(">", vector, _splat(builder, args[2], 64)), _I64
        )

    return types.uint64(pointer, types.int64, types.uint8), codegen


@intrinsic
def ones(typingctx: Any, x: types.Type) -> Any:
    """Return the number of set bits of a word."""

    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> ir.Value:
        return (
            builder.zext(builder.ctpop(args[0]), _I64)
            if x.bitwidth < 64
            else builder.ctpop(args[0])
        )

    return types.int64(x), codegen


@intrinsic
def lowest(typingctx: Any, x: types.Type) -> Any:
    """Return the index of a word's lowest set bit; the word's width if none is set."""

    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> ir.Value:
        found = builder.cttz(args[0], _I1(0))
        return builder.zext(found, _I64) if x.bitwidth < 64 else found

    return types.int64(x), codegen


@intrinsic
def leading(typingctx: Any, x: types.Type) -> Any:
    """Return the number of leading zeros of a 64-bit word."""

    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> ir.Value:
        return builder.ctlz(args[0], _I1(0))

    return types.int64(types.uint64), codegen


@intrinsic
def high(typingctx: Any, x: types.Type, y: types.Type) -> Any:
    """Return the upper 64 bits of x times y: for a random word x, a number below y."""

    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> ir.Value:
        wide = ir.IntType(128)
        product = builder.mul(*(builder.zext(a, wide) for a in args))
        return builder.trunc(builder.lshr(product, ir.Constant(wide, 64)), _I64)

    return types.uint64(types.uint64, types.uint64), codegen


def _two_words(name: str) -> Any:
    def typed(typingctx: Any, x: types.Type, mask: types.Type) -> Any:
        def codegen(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> ir.Value:
            kind = ir.FunctionType(_I64, [_I64, _I64])
            return builder.call(
                cgutils.get_or_insert_function(builder.module, kind, f"llvm.x86.bmi.{name}.64"),
                args,
            )

        return types.uint64(types.uint64, types.uint64), codegen

    return typed


def _gather_bits(word: Any, mask: Any) -> Any:
    found = np.uint64(0)
    place = np.uint64(0)
    one = np.uint64(1)
    while mask != np.uint64(0):
        lowest_one = mask & (~mask + one)
        if word & lowest_one:
            found |= one << place
        place += one
        mask ^= lowest_one
    return found


def _scatter_bits(word: Any, mask: Any) -> Any:
    spread = np.uint64(0)
    one = np.uint64(1)
    while mask != np.uint64(0):
        lowest_one = mask & (~mask + one)
        if word & one:
            spread |= lowest_one
        word >>= one
        mask ^= lowest_one
    return spread


#: gather_bits(word, mask): the bits of a 64-bit word where ``mask`` has ones, packed from the
#: lowest bit on; scatter_bits is the inverse. Without BMI2 they are loops.
gather_bits = intrinsic(_two_words("pext")) if _HAS_BMI2 else numba.njit(_gather_bits)
scatter_bits = intrinsic(_two_words("pdep")) if _HAS_BMI2 else numba.njit(_scatter_bits)
