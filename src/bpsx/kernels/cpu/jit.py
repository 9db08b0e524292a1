"""Compiles Python functions to C functions with Numba."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import llvmlite.binding as llvm
import numba
from numba import types
from numba.core.registry import cpu_target

from bpsx.kernels.object_code import SYMBOL

_WIDE = {"float32": types.float32, "float64": types.float64}


def compile_with_numba(signature: Any, body: Callable[..., Any]) -> tuple[Any, Callable[[], bytes]]:
    """Return the C function, at ``.address``, and a function that returns its object code.

    That raises :class:`ValueError` for code that contains addresses of this process.
    """
    made = numba.cfunc(signature, error_model="numpy")(body)
    return made, lambda: _object_code(made)


def _object_code(made: Any) -> bytes:
    if made._library.has_dynamic_globals:
        raise ValueError(f"{made.__name__} contains addresses of this process")
    # Optimized by Numba for the processor and its features, which may be set.
    module = llvm.parse_assembly(made.inspect_llvm())
    module.get_function(made.native_name).name = SYMBOL
    triple, cpu, features = cpu_target.target_context.codegen().magic_tuple()
    machine = llvm.Target.from_triple(triple).create_target_machine(
        cpu=cpu, features=features, opt=3, codemodel="jitdefault", jit=True
    )
    return bytes(machine.emit_object(module))


def compile_codec(
    wide: str, kind: str, body: Callable[..., int]
) -> tuple[Any, Callable[[], bytes]]:
    """Compile a codec's function. ``kind``: encode, decode, sum, or check."""
    elements, raw = types.CPointer(_WIDE[wide]), types.CPointer(types.uint8)
    state, options = types.CPointer(types.float64), types.CPointer(types.int64)
    whole, counter, number = types.int64, types.uint64, types.float64
    coding = (raw, raw, state, options, whole, counter, number)
    arguments = {
        "encode": (elements, elements, elements, *coding, number),
        "decode": (raw, whole, elements, raw, options, whole, whole),
        "sum": (raw, whole, whole, whole, elements, *coding),
        "check": (raw, options, whole),
    }
    return compile_with_numba(types.int64(*arguments[kind]), body)
