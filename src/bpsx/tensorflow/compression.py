"""Gradient compression for the wire. A compressor is a class with two static methods; choose one through :class:`Compression`."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from bpsx.errors import ConfigError


class Compressor:
    """What a compressor provides. Both methods make tensors out of tensors and can be traced into a graph."""

    @staticmethod
    def compress(tensor: tf.Tensor) -> tuple[tf.Tensor, Any]:
        """The tensor to send, and a context for :meth:`decompress`."""
        raise NotImplementedError

    @staticmethod
    def decompress(tensor: tf.Tensor, ctx: Any) -> tf.Tensor:
        """The received ``tensor`` in the form that the matching :meth:`compress` was given."""
        raise NotImplementedError


class NoneCompressor(Compressor):
    """Sends tensors as they are."""

    @staticmethod
    def compress(tensor: tf.Tensor) -> tuple[tf.Tensor, Any]:
        return tensor, None

    @staticmethod
    def decompress(tensor: tf.Tensor, ctx: Any) -> tf.Tensor:
        return tensor


class FP16Compressor(Compressor):
    """Sends float32 and float64 as float16; other dtypes as they are (bfloat16 is as small already, and reaches further).

    Values beyond 65504 become infinite. The sum itself is made in float32 and rounded once.
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
    """The compressors to choose from."""

    none = NoneCompressor
    fp16 = FP16Compressor


def check_compression(compression: Any, verb: str) -> None:
    """Raise :class:`ConfigError` unless ``compression`` is a compressor."""
    if not (isinstance(compression, type) and issubclass(compression, Compressor)):
        raise ConfigError(f"{verb}: compression={compression!r}: allowed are bpsx.tensorflow.Compression.none and .fp16, and other classes derived "
                          "from bpsx.tensorflow.compression.Compressor")
