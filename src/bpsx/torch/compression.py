"""Gradient compression for the wire.

A compressor is a class with two static methods; choose one through :class:`Compression`.
"""

from __future__ import annotations

from typing import Any

import torch

from bpsx.plugin.wire_cast import Compressor, NoneCompressor
from bpsx.plugin.wire_cast import check_compression as _check

__all__ = ["Compression", "Compressor", "FP16Compressor", "NoneCompressor", "check_compression"]


class FP16Compressor(Compressor):
    """Send float32 and float64 as float16, other dtypes unchanged.

    bfloat16 is as small already and has a larger range. Values beyond 65504 become infinite. The
    sum itself is computed in float32 and rounded once.
    """

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        if tensor.dtype in (torch.float32, torch.float64):
            return tensor.to(torch.float16), tensor.dtype
        return tensor, None

    @staticmethod
    def decompress(tensor: torch.Tensor, ctx: Any) -> torch.Tensor:
        return tensor if ctx is None else tensor.to(ctx)


class Compression:
    """The compressors to choose from."""

    none = NoneCompressor
    fp16 = FP16Compressor


def check_compression(compression: Any, verb: str) -> None:
    """Raise :class:`~bpsx.errors.ConfigError` unless ``compression`` is a compressor."""
    _check(compression, verb, "bpsx.torch")
