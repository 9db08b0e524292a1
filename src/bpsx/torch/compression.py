"""Gradient compression for the wire. A compressor is a class with two static methods; choose one through :class:`Compression`."""

from __future__ import annotations

from typing import Any

import torch

from bpsx.errors import ConfigError


class Compressor:
    """What a compressor provides. Both methods are pure: they never write to the tensor that they are given."""

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """The tensor to send, and a context for :meth:`decompress`. May return ``tensor`` itself: then it is sent as it is."""
        raise NotImplementedError

    @staticmethod
    def decompress(tensor: torch.Tensor, ctx: Any) -> torch.Tensor:
        """The received ``tensor`` in the form that the matching :meth:`compress` was given."""
        raise NotImplementedError


class NoneCompressor(Compressor):
    """Sends tensors as they are."""

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        return tensor, None

    @staticmethod
    def decompress(tensor: torch.Tensor, ctx: Any) -> torch.Tensor:
        return tensor


class FP16Compressor(Compressor):
    """Sends float32 and float64 as float16; other dtypes as they are (bfloat16 is as small already, and reaches further).

    Values beyond 65504 become infinite. The sum itself is made in float32 and rounded once.
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
    """Raise :class:`ConfigError` unless ``compression`` is a compressor."""
    if not (isinstance(compression, type) and issubclass(compression, Compressor)):
        raise ConfigError(f"{verb}: compression={compression!r}: allowed are bpsx.torch.Compression.none and .fp16, and other classes derived from "
                          "bpsx.torch.compression.Compressor")
