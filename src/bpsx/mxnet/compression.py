"""Gradient compression for the wire.

A compressor is a class with two static methods; choose one through :class:`Compression`.
"""

from __future__ import annotations

from bpsx.mxnet.framework import MXNET
from bpsx.plugin import compression
from bpsx.plugin.compression import Compressor, NoneCompressor

__all__ = ["Compression", "Compressor", "FP16Compressor", "NoneCompressor"]


class FP16Compressor(compression.FP16Compressor):
    """Sends float32 and float64 as float16, and other dtypes unchanged."""

    framework = MXNET


class Compression:
    """The compressors to choose from."""

    none = NoneCompressor
    fp16 = FP16Compressor
