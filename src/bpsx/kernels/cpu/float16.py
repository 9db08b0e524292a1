"""Conversion of float16 to float32 and back, as LLVM IR.

Uses the processor's instructions (F16C and its like) or, where it has none, integer arithmetic.
Without such instructions LLVM's own conversion calls functions of the compiler's library. Numba
does not have these, and the process would abort. Both ways give the same bits, NaN included. All
functions take single values and vectors alike.
"""

from __future__ import annotations

import functools

import llvmlite.binding as llvm
from llvmlite import ir

_F32, _I16, _I32 = ir.FloatType(), ir.IntType(16), ir.IntType(32)
_PROBE = """
define float @widen(half %x) {
  %y = fpext half %x to float
  ret float %y
}
define half @narrow(float %x) {
  %y = fptrunc float %x to half
  ret half %y
}
"""


@functools.cache
def _in_hardware(triple: str, cpu: str, features: str) -> bool:
    """Whether code for this processor converts without calls to library functions."""
    machine = llvm.Target.from_triple(triple).create_target_machine(cpu=cpu, features=features)
    text: str = machine.emit_assembly(llvm.parse_assembly(_PROBE))
    return not any(
        name in text
        for name in ("__extendhfsf2", "__truncsfhf2", "__gnu_h2f_ieee", "__gnu_f2h_ieee")
    )


def alike(kind: ir.Type, like: ir.Type) -> ir.Type:
    """Return ``kind``, or a vector of it as long as ``like`` if that is a vector."""
    return ir.VectorType(kind, like.count) if isinstance(like, ir.VectorType) else kind


def constant(kind: ir.Type, value: float) -> ir.Constant:
    """Return ``value`` as a constant of type ``kind``, in every lane of a vector."""
    return ir.Constant(kind, [value] * kind.count if isinstance(kind, ir.VectorType) else value)


def from_float16(context: object, builder: ir.IRBuilder, bits: ir.Value) -> ir.Value:
    """Convert float16 bits (i16) to float32."""
    floats, words = alike(_F32, bits.type), alike(_I32, bits.type)
    if _in_hardware(*context.codegen().magic_tuple()):  # type: ignore[attr-defined]
        return builder.fpext(builder.bitcast(bits, alike(ir.HalfType(), bits.type)), floats)
    wide = builder.zext(bits, words)
    sign = builder.shl(builder.and_(wide, constant(words, 0x8000)), constant(words, 16))
    # Shift exponent and mantissa to their places in a float32. Each of the three cases below
    # corrects the exponent's bias.
    moved = builder.shl(builder.and_(wide, constant(words, 0x7FFF)), constant(words, 13))
    exponent = builder.and_(moved, constant(words, 0x1F << 23))
    normal = builder.add(moved, constant(words, (127 - 15) << 23))
    endless = builder.or_(moved, constant(words, 0xFF << 23))
    quiet = builder.or_(endless, constant(words, 1 << 22))
    # An infinity has no mantissa; a NaN becomes quiet.
    endless = builder.select(builder.icmp_unsigned("==", moved, exponent), endless, quiet)
    # 2^-14 (1 + m) - 2^-14 is 2^-14 m, the value of a float16 with an exponent of 0.
    lifted = builder.bitcast(builder.add(moved, constant(words, (127 - 14) << 23)), floats)
    small = builder.bitcast(builder.fsub(lifted, constant(floats, 2.0**-14)), words)
    found = builder.select(builder.icmp_unsigned("==", exponent, constant(words, 0)), small, normal)
    found = builder.select(
        builder.icmp_unsigned("==", exponent, constant(words, 0x1F << 23)), endless, found
    )
    return builder.bitcast(builder.or_(found, sign), floats)


def to_float16(context: object, builder: ir.IRBuilder, value: ir.Value) -> ir.Value:
    """Convert float32 to the bits (i16) of the nearest float16, ties to even."""
    floats, words, halves = value.type, alike(_I32, value.type), alike(_I16, value.type)
    if _in_hardware(*context.codegen().magic_tuple()):  # type: ignore[attr-defined]
        return builder.bitcast(builder.fptrunc(value, alike(ir.HalfType(), value.type)), halves)
    bits = builder.bitcast(value, words)
    sign = builder.lshr(builder.and_(bits, constant(words, 0x80000000)), constant(words, 16))
    size = builder.and_(bits, constant(words, 0x7FFFFFFF))
    odd = builder.and_(builder.lshr(size, constant(words, 13)), constant(words, 1))
    rounded = builder.add(
        builder.add(size, constant(words, (((15 - 127) << 23) + 0xFFF) & 0xFFFFFFFF)), odd
    )
    normal = builder.lshr(rounded, constant(words, 13))
    # The last bit of the sum with 0.5 is worth 2^-24, like the last bit of a float16 with an
    # exponent of 0: the addition rounds.
    small = builder.sub(
        builder.bitcast(builder.fadd(builder.bitcast(size, floats), constant(floats, 0.5)), words),
        constant(words, 126 << 23),
    )
    payload = builder.and_(builder.lshr(size, constant(words, 13)), constant(words, 0x1FF))
    nan = builder.or_(payload, constant(words, 0x7E00))
    found = builder.select(
        builder.icmp_unsigned("<", size, constant(words, (127 - 14) << 23)), small, normal
    )
    found = builder.select(
        builder.icmp_unsigned(">=", size, constant(words, (127 + 16) << 23)),
        constant(words, 0x7C00),
        found,
    )
    found = builder.select(
        builder.icmp_unsigned(">", size, constant(words, 0xFF << 23)), nan, found
    )
    return builder.trunc(builder.or_(found, sign), halves)
