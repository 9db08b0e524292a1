"""Compiles a codec's Python functions to C functions with Numba, through the cache on disk."""

from __future__ import annotations

from typing import Any

from numba import types

from bpsx.kernels.codec import Codec, Compiled
from bpsx.kernels.cpu.compiled import compiled

_WIDE = {"float32": types.float32, "float64": types.float64}


def _signatures(element: types.Type) -> tuple[Any, Any]:
    elements, raw = types.CPointer(element), types.CPointer(types.uint8)
    state, options = types.CPointer(types.float64), types.CPointer(types.int64)
    encode = types.int64(
        elements,
        elements,
        elements,
        raw,
        raw,
        state,
        options,
        types.int64,
        types.uint64,
        types.float64,
        types.float64,
    )
    return encode, types.int64(raw, types.int64, elements, raw, options, types.int64, types.int64)


def load(codec: Codec, wide: str, residual: bool, momentum: bool) -> Compiled:
    """Implement :func:`bpsx.kernels.codecs.load_codec`, whose lock admits one thread at a time."""
    encode, decode = _signatures(_WIDE[wide])
    made = [
        compiled(signature, function)
        for signature, function in (
            (encode, codec.encoder(residual, momentum)),
            (decode, codec.decoder()),
        )
    ]
    return Compiled(made[0].address, made[1].address, tuple(made))
