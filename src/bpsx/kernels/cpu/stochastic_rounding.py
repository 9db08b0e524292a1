"""Stochastic rounding of magnitudes to levels, and back, for dithering; many elements at once.

Level 0 is 0. Linear: level l of k is l / k of the norm. Natural: 2^(l - k) of the norm.

The random number of element i is a hash of i and a 64-bit key, so any device can draw it
independently. The hash is Wellons' lowbias32 ("Prospecting for hash functions", nullprogram.com,
2018, in the public domain). One half of the key is added before it, the other half is mixed in
midway. The key is a hash of seed and counter by Stafford's variant 13 of MurmurHash3's finalizer,
as in SplitMix64 (Steele et al., OOPSLA 2014).

The only floating-point operations are single multiplications, multiplications by powers of two, and
minima. A compiler has nothing to fuse, so all devices get the same bits. The rest is integers. With
z in units of 2^-23 of a level, and 23 random bits r, the level is (z + r) >> 23. It rounds up with
a probability equal to the fraction. Between powers of two a float's own bits are such a z.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from bpsx.kernels.cpu.bit_ops import _load, _splat, cast, signed

_I8, _I32 = ir.IntType(8), ir.IntType(32)
_FRACTION = 23
#: Bits to subtract from those of a float32 z, which leave 2^23, level 1, for z = 2^23.
_EXPONENT = (127 + _FRACTION - 1) << _FRACTION


@intrinsic
def magnitude(typingctx: Any, x: types.Float) -> Any:
    """Return the bits of abs(x) as a signed integer.

    These integers are ordered like the magnitudes; infinity and then NaN are the largest.
    """
    result = types.int32 if x == types.float32 else types.int64

    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> ir.Value:
        kind = ir.IntType(x.bitwidth)
        return builder.and_(
            builder.bitcast(args[0], kind), ir.Constant(kind, (1 << (x.bitwidth - 1)) - 1)
        )

    return result(x), codegen


@intrinsic
def from_magnitude(typingctx: Any, x: types.Integer) -> Any:
    """Return the float that has these bits."""
    result = {types.int32: types.float32, types.int64: types.float64}[x]

    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> ir.Value:
        return builder.bitcast(args[0], context.get_value_type(result))

    return result(x), codegen


@intrinsic
def noise(typingctx: Any, index: types.Type, key: types.Type) -> Any:
    """Return 32 random bits for element ``index``."""

    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> ir.Value:
        low, high = (
            builder.trunc(args[1], _I32),
            builder.trunc(builder.lshr(args[1], ir.Constant(args[1].type, 32)), _I32),
        )

        def folded(x: ir.Value, bits: int) -> ir.Value:
            return builder.xor(x, builder.lshr(x, ir.Constant(_I32, bits)))

        x = builder.add(builder.trunc(args[0], _I32), low)
        x = builder.xor(builder.mul(folded(x, 16), ir.Constant(_I32, 0x7FEB352D)), high)
        return folded(builder.mul(folded(x, 15), ir.Constant(_I32, 0x846CA68B)), 16)

    return types.uint32(types.int64, types.uint64), codegen


def _rounding(natural: bool) -> Any:
    def typed(typingctx: Any, z: types.Type, random: types.Type) -> Any:
        def codegen(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> ir.Value:
            fixed = builder.fptosi(args[0], _I32)
            if natural:
                small = builder.fcmp_ordered(
                    "<", args[0], ir.Constant(args[0].type, float(1 << _FRACTION))
                )
                fixed = builder.select(
                    small,
                    fixed,
                    builder.sub(builder.bitcast(args[0], _I32), ir.Constant(_I32, _EXPONENT)),
                )
            total = builder.add(fixed, builder.lshr(args[1], ir.Constant(_I32, 32 - _FRACTION)))
            return builder.trunc(builder.lshr(total, ir.Constant(_I32, _FRACTION)), _I8)

        return types.uint8(types.float32, types.uint32), codegen

    return intrinsic(typed)


#: (z, random bits) -> level. z is at most that of the highest level.
_linear_level, _natural_level = _rounding(False), _rounding(True)


@intrinsic
def power(typingctx: Any, level: types.Type, k: types.Type, other: types.Float) -> Any:
    """Return 2^(level - k), or 0 for level 0, in the type of ``other``."""

    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> ir.Value:
        return _power(builder, args[0], args[1], args[2].type)

    return other(types.uint8, types.int64, other), codegen


def _power(
    builder: ir.IRBuilder, level: ir.Value, k: ir.Value, element: ir.Type, lanes: int = 0
) -> ir.Value:
    number, fraction, bias = (
        (ir.IntType(32), 23, 127)
        if isinstance(element, ir.FloatType)
        else (ir.IntType(64), 52, 1023)
    )
    less = builder.sub(ir.Constant(k.type, bias), k)
    less = builder.trunc(less, number) if number.width < 64 else less
    kind: ir.Type = ir.VectorType(number, lanes) if lanes else number

    def constant(value: int) -> ir.Constant:
        return ir.Constant(kind, [value] * lanes if lanes else value)

    exponent = builder.add(
        builder.zext(level, kind), _splat(builder, less, lanes) if lanes else less
    )
    none = builder.icmp_unsigned("==", level, ir.Constant(level.type, [0] * lanes if lanes else 0))
    found = builder.select(none, constant(0), builder.shl(exponent, constant(fraction)))
    return builder.bitcast(found, ir.VectorType(element, lanes) if lanes else element)


def _spreading(natural: bool, add: bool) -> Any:
    def typed(
        typingctx: Any,
        out: types.CPointer,
        i: types.Type,
        levels: types.CPointer,
        j: types.Type,
        negative: types.Type,
        unit: types.Float,
        k: types.Type,
    ) -> Any:
        def codegen(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> ir.Value:
            element = args[5].type
            vector, number = ir.VectorType(element, 32), ir.IntType(unit.bitwidth)
            integers, top = ir.VectorType(number, 32), unit.bitwidth - 1
            level = _load(builder, args[2], args[3], types.uint8, 32)
            value = (
                _power(builder, level, args[6], element, 32)
                if natural
                else builder.uitofp(builder.zext(level, integers), vector)
            )
            value = builder.bitcast(builder.fmul(value, _splat(builder, args[5], 32)), integers)
            word = args[4] if number.width == 32 else builder.zext(args[4], number)
            flags = builder.shl(
                _splat(builder, word, 32), ir.Constant(integers, [top - lane for lane in range(32)])
            )
            value = builder.bitcast(
                builder.xor(value, builder.and_(flags, ir.Constant(integers, [1 << top] * 32))),
                vector,
            )
            place = builder.bitcast(builder.gep(args[0], [args[1]]), vector.as_pointer())
            builder.store(
                builder.fadd(builder.load(place, align=1), value) if add else value, place, align=1
            )
            return context.get_dummy_value()

        return types.void(
            out, types.int64, levels, types.int64, types.uint32, unit, types.int64
        ), codegen

    return intrinsic(typed)


#: (out, i, levels, j, negative, unit, k): set out[i:i + 32] to the values of levels[j:j + 32], or
#: add them. ``negative``: mask of the elements to negate.
_set_linear, _set_natural, _add_linear, _add_natural = (
    _spreading(n, a) for a in (False, True) for n in (False, True)
)


@numba.njit
def _mixed(z: Any) -> Any:
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


@numba.njit
def key_of(seed: int, counter: int) -> Any:
    """Return the key of the random numbers."""
    return _mixed(_mixed(np.uint64(seed)) + np.uint64(counter))


@numba.njit
def largest(p: Any, begin: int, size: int, top: Any) -> Any:
    """Return the largest of ``top`` and the magnitudes, as integers of :func:`magnitude`."""
    for i in range(begin, begin + size):
        found = magnitude(p[i])
        top = found if found > top else top
    return top


@numba.njit(fastmath={"reassoc"})
def squares(p: Any, begin: int, size: int) -> float:
    """Return the sum of squares."""
    total = 0.0
    for i in range(begin, begin + size):
        total += np.float64(p[i]) * np.float64(p[i])
    return total


@numba.njit
def to_levels(
    levels: Any,
    place: int,
    p: Any,
    first: int,
    size: int,
    begin: int,
    scales: Any,
    key: Any,
    natural: bool,
) -> None:
    """Set the levels from levels[place] on to those of p[first:first + size].

    ``begin``: index of the first element in the partition. ``scales``: two factors that scale a
    magnitude to z, and the largest z.
    """
    a, b, top = scales
    if natural:
        for i in range(size):
            z = np.float32(abs(p[first + i]) * a * b)
            levels[place + i] = _natural_level(z if z < top else top, noise(begin + i, key))
    else:
        for i in range(size):
            z = np.float32(abs(p[first + i]) * a * b)
            levels[place + i] = _linear_level(z if z < top else top, noise(begin + i, key))


@numba.njit
def take_off(
    e: Any, begin: int, levels: Any, place: int, size: int, unit: Any, k: int, natural: bool
) -> None:
    """Subtract the values of levels[place:] from e[begin:begin + size].

    The sign of a zero that is left may differ from the oracle's; the wire never shows it.
    """
    if natural:
        for i in range(size):
            e[begin + i] -= signed(power(levels[place + i], k, unit) * unit, e[begin + i])
    else:
        for i in range(size):
            e[begin + i] -= signed(cast(levels[place + i], e) * unit, e[begin + i])


@numba.njit
def spread(
    out: Any,
    begin: int,
    levels: Any,
    words: Any,
    size: int,
    unit: Any,
    k: int,
    natural: bool,
    add: bool,
) -> None:
    """Set out[begin:begin + size] to the values of the levels, or add them."""
    for j in range(size // 32):
        if natural:
            if add:
                _add_natural(out, begin + 32 * j, levels, 32 * j, words[j], unit, k)
            else:
                _set_natural(out, begin + 32 * j, levels, 32 * j, words[j], unit, k)
        elif add:
            _add_linear(out, begin + 32 * j, levels, 32 * j, words[j], unit, k)
        else:
            _set_linear(out, begin + 32 * j, levels, 32 * j, words[j], unit, k)
    for i in range(size // 32 * 32, size):
        value = power(levels[i], k, unit) * unit if natural else cast(levels[i], out) * unit
        value = -value if (words[i // 32] >> np.uint32(i % 32)) & np.uint32(1) else value
        out[begin + i] = out[begin + i] + value if add else value
