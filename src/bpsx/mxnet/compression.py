"""Gradient compression for the wire.

A compressor is a class with two static methods; choose one through :class:`Compression`.
"""

from __future__ import annotations

from typing import Any

import mxnet as mx
import numpy as np

from bpsx.plugin.wire_cast import Compressor, NoneCompressor

__all__ = ["Compression", "Compressor", "FP16Compressor", "NoneCompressor"]


class FP16Compressor(Compressor):
    """Sends float32 and float64 as float16, and other dtypes unchanged.

    Values beyond 65504 become infinite. The sum itself is computed in float32 and rounded once.
    """

    @staticmethod
    def compress(tensor: mx.nd.NDArray) -> tuple[mx.nd.NDArray, Any]:
        if tensor.dtype in (np.float32, np.float64):
            return tensor.astype("float16"), tensor.dtype
        return tensor, None

    @staticmethod
    def decompress(tensor: mx.nd.NDArray, ctx: Any) -> mx.nd.NDArray:
        return tensor if ctx is None else tensor.astype(ctx)


class Compression:
    """The available compressors."""

    none = NoneCompressor
    fp16 = FP16Compressor
