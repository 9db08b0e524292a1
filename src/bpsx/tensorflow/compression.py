"""Gradient compression for the wire.

A compressor is a class with two static methods; choose one through :class:`Compression`.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from bpsx.plugin.wire_cast import Compressor, NoneCompressor
from bpsx.plugin.wire_cast import check_compression as _check

__all__ = ["Compression", "Compressor", "FP16Compressor", "NoneCompressor", "check_compression"]


class FP16Compressor(Compressor):
    """Sends float32 and float64 as float16, and other dtypes unchanged.

    bfloat16 is as small already, and has a larger range. Values beyond 65504 become infinite. The
    sum itself is computed in float32 and rounded once.
    """

    @staticmethod
    def compress(tensor: tf.Tensor) -> tuple[tf.Tensor, Any]:
        if tensor.dtype in (tf.float32, tf.float64):
            return tf.cast(tensor, tf.float16), tensor.dtype
        return tensor, None

    @staticmethod
    def decompress(tensor: tf.Tensor, ctx: Any) -> tf.Tensor:
        return tensor if ctx is None else tf.cast(tensor, ctx)


class Compression:
    """The available compressors."""

    none = NoneCompressor
    fp16 = FP16Compressor


def check_compression(compression: Any, verb: str) -> None:
    """Raise :class:`~bpsx.errors.ConfigError` unless ``compression`` is a compressor."""
    _check(compression, verb, "bpsx.tensorflow")
