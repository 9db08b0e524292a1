"""Smaller types on the wire, as BytePS has them: classes with two static methods.

What plugins share of them.
"""

from __future__ import annotations

from typing import Any

from bpsx.errors import ConfigError


class Compressor:
    """What a compressor provides, for tensors of its framework.

    Both methods are pure: they never write to the tensor that they are given.
    """

    @staticmethod
    def compress(tensor: Any) -> tuple[Any, Any]:
        """The tensor to send, and a context for :meth:`decompress`.

        May return ``tensor`` itself: then it is sent as it is.
        """
        raise NotImplementedError

    @staticmethod
    def decompress(tensor: Any, ctx: Any) -> Any:
        """The received ``tensor`` in the form that the matching :meth:`compress` was given."""
        raise NotImplementedError


class NoneCompressor(Compressor):
    """Sends tensors as they are."""

    @staticmethod
    def compress(tensor: Any) -> tuple[Any, Any]:
        return tensor, None

    @staticmethod
    def decompress(tensor: Any, ctx: Any) -> Any:
        return tensor


def check_compression(compression: Any, verb: str, plugin: str) -> None:
    """Raise :class:`~bpsx.errors.ConfigError` unless ``compression`` is a compressor.

    ``plugin``: ``bpsx.torch`` and the like.
    """
    if not (isinstance(compression, type) and issubclass(compression, Compressor)):
        raise ConfigError(
            f"{verb}: compression={compression!r}: allowed are {plugin}.Compression.none and .fp16,"
            f" and other classes derived from {plugin}.compression.Compressor"
        )
