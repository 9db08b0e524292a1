"""Compressors that send tensors in smaller types.

As in BytePS, a compressor is a class with two static methods.
"""

from __future__ import annotations

from typing import Any, ClassVar

from bpsx.errors import ConfigError
from bpsx.plugin.framework import Framework


class Compressor:
    """Interface of a compressor for tensors of one framework.

    Both methods are pure: they never write to the tensor that they are given.
    """

    @staticmethod
    def compress(tensor: Any) -> tuple[Any, Any]:
        """Return the tensor to send, and a context for :meth:`decompress`.

        May return ``tensor`` itself: then it is sent unchanged.
        """
        raise NotImplementedError

    @staticmethod
    def decompress(tensor: Any, ctx: Any) -> Any:
        """Return the received ``tensor`` in the form that the matching :meth:`compress` got."""
        raise NotImplementedError


class NoneCompressor(Compressor):
    """Sends tensors unchanged."""

    @staticmethod
    def compress(tensor: Any) -> tuple[Any, Any]:
        return tensor, None

    @staticmethod
    def decompress(tensor: Any, ctx: Any) -> Any:
        return tensor


class FP16Compressor(Compressor):
    """Sends float32 and float64 as float16, and other dtypes unchanged.

    bfloat16 is as small already, and has a larger range. Values beyond 65504 become infinite. The
    sum itself is computed in float32 and rounded once. A plugin derives its own class, with its
    ``framework``.
    """

    framework: ClassVar[Framework[Any]]

    @classmethod
    def compress(cls, tensor: Any) -> tuple[Any, Any]:
        dtype = cls.framework.dtype_of(tensor)
        if dtype in ("float32", "float64"):
            return cls.framework.cast(tensor, "float16"), dtype
        return tensor, None

    @classmethod
    def decompress(cls, tensor: Any, ctx: Any) -> Any:
        return tensor if ctx is None else cls.framework.cast(tensor, ctx)


def check_compression(compression: Any, verb: str, framework: Framework[Any]) -> None:
    """Raise :class:`~bpsx.errors.ConfigError` unless ``compression`` is a compressor."""
    if not (isinstance(compression, type) and issubclass(compression, Compressor)):
        plugin = framework.module
        raise ConfigError(
            f"{verb}: compression={compression!r}: expected {plugin}.Compression.none, .fp16,"
            f" or another class derived from {plugin}.compression.Compressor"
        )


def check_not_both(compression: type[Compressor], params: Any, verb: str) -> None:
    """Raise :class:`~bpsx.errors.ConfigError` if a tensor were to be compressed in two ways."""
    if params and compression is not NoneCompressor:
        raise ConfigError(
            f"{verb}: compression={compression.__name__} and compression_params exclude each"
            " other; give only one of them (fp16=True is a key of compression_params)"
        )
