"""Gradient compression for the wire.

A compressor is a class with two static methods; choose one through :class:`Compression`.
"""

from __future__ import annotations

import functools

from bpsx.plugin import compression
from bpsx.plugin.compression import Compressor, NoneCompressor
from bpsx.tensorflow.framework import TENSORFLOW

__all__ = ["Compression", "Compressor", "FP16Compressor", "NoneCompressor", "check_compression"]


class FP16Compressor(compression.FP16Compressor):
    """Sends float32 and float64 as float16, and other dtypes unchanged."""

    framework = TENSORFLOW


class Compression:
    """The compressors to choose from."""

    none = NoneCompressor
    fp16 = FP16Compressor


#: Raises :class:`~bpsx.errors.ConfigError` unless its first argument is a compressor; the second is
#: the verb.
check_compression = functools.partial(compression.check_compression, framework=TENSORFLOW)
