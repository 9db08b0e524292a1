"""Base classes of compressors that send tensors in smaller types; all plugins share them.

As in BytePS, a compressor is a class with two static methods.
"""

from __future__ import annotations

from typing import Any

from bpsx.errors import ConfigError


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


def check_compression(compression: Any, verb: str, plugin: str) -> None:
    """Raise :class:`~bpsx.errors.ConfigError` unless ``compression`` is a compressor.

    ``plugin``: the plugin's module, such as ``bpsx.torch``, for the message.
    """
    if not (isinstance(compression, type) and issubclass(compression, Compressor)):
        raise ConfigError(
            f"{verb}: compression={compression!r}: allowed are {plugin}.Compression.none and .fp16,"
            f" and other classes derived from {plugin}.compression.Compressor"
        )
