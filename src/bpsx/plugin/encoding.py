"""Encodes Python values as JSON and bytes; decoding never runs code from the network.

A plugin derives from :class:`Encoder` to send its framework's tensors as well.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import numpy as np

from bpsx.errors import BpsxError

#: Kinds of NumPy dtypes whose elements are nothing but their bytes.
_NUMPY_KINDS = "biufcSUmM"
_SEQUENCES: dict[str, Any] = {"tuple": tuple, "list": list, "set": set, "frozenset": frozenset}
#: Integers from this many bits on travel as hexadecimal text: JSON readers refuse integers of some
#: thousand digits.
_MOST_BITS = 64


class StateError(BpsxError, ValueError):
    """A value cannot be sent between workers, or does not fit where it has arrived."""


class Encoder:
    """Encodes Python values as JSON without losing their types; bytes go to :attr:`blobs`.

    ``verb`` begins every error. ``exact``: refuse values that would be decoded as another type (a
    subclass of ``dict``, an ``IntEnum``); otherwise subclasses are decoded as their base type.
    """

    def __init__(self, verb: str, exact: bool = False) -> None:
        self.blobs: list[bytes] = []
        self._verb, self._exact = verb, exact

    def encode(self, value: Any, where: str) -> Any:
        """Return ``value`` as JSON. ``where`` names it in errors and on the wire.

        Raises :class:`StateError`.
        """
        if value is None or type(value) in (bool, float, str):
            return value
        if type(value) is int:
            return value if value.bit_length() < _MOST_BITS else {"int": hex(value)}
        tensor = self._tensor(value, where)
        if tensor is not None:
            return {"tensor": tensor}
        for kind, of in _SEQUENCES.items():
            if type(value) is of or isinstance(value, of) and not self._exact:
                return {kind: [self.encode(v, f"{where}.{i}") for i, v in enumerate(value)]}
        if type(value) is dict or isinstance(value, dict) and not self._exact:
            return {"dict": self._items(value, where)}
        # A module's state_dict, for example, has attributes of its own.
        if type(value) is OrderedDict:
            return {"ordered": [self._items(value, where), self._items(vars(value), where)]}
        return self._rarer(value, where)

    def _tensor(self, value: Any, where: str) -> Any:
        """Return a JSON description of ``value`` if it is a framework's tensor, else None."""
        return None

    def _items(self, value: dict[Any, Any], where: str) -> list[Any]:
        return [[self.encode(k, where), self.encode(v, f"{where}.{k}")] for k, v in value.items()]

    def _rarer(self, value: Any, where: str) -> Any:
        if type(value) is bytes or type(value) is bytearray:
            return {type(value).__name__: self._put_aside(value, where)}
        if type(value) is complex:
            return {"complex": [value.real, value.imag]}
        # A NumPy float64 or an IntEnum, for example.
        if not self._exact and isinstance(value, (int, float, str)):
            return next(kind(value) for kind in (int, float, str) if isinstance(value, kind))
        if (
            type(value) is np.ndarray or isinstance(value, np.generic)
        ) and value.dtype.kind in _NUMPY_KINDS:
            kind = "array" if isinstance(value, np.ndarray) else "scalar"
            return {
                kind: [value.dtype.str, list(value.shape), self._put_aside(value.tobytes(), where)]
            }
        raise StateError(
            f"{self._verb}: {where} is a {type(value).__name__}; expected a tensor, a NumPy "
            "array or scalar, None, bool, int, float, complex, str, bytes, or a tuple, list, set "
            "or dict of these"
        )

    def _put_aside(self, value: bytes | bytearray, where: str) -> int:
        """Append ``value`` to the blobs and return its index."""
        self.blobs.append(bytes(value))
        return len(self.blobs) - 1


def decode(value: Any, raw: Callable[[int], bytes], tensor: Callable[[Any], Any]) -> Any:
    """Reverse :meth:`Encoder.encode`.

    ``raw``: returns the blob with an index. ``tensor``: returns the tensor for a description that
    the encoder made. Raises :class:`StateError`.
    """
    if not isinstance(value, dict):
        return value

    def inner(encoded: Any) -> Any:
        return decode(encoded, raw, tensor)

    ((kind, body),) = value.items()
    if kind == "tensor":
        return tensor(body)
    if kind == "dict":
        return {inner(k): inner(v) for k, v in body}
    if kind == "ordered":
        ordered = OrderedDict((inner(k), inner(v)) for k, v in body[0])
        vars(ordered).update(inner({"dict": body[1]}))
        return ordered
    if kind in _SEQUENCES:
        return _SEQUENCES[kind](inner(v) for v in body)
    if kind == "int":
        return int(body, 16)
    if kind == "complex":
        return complex(*body)
    if kind in ("bytes", "bytearray"):
        return (bytes if kind == "bytes" else bytearray)(raw(body))
    if kind in ("array", "scalar"):
        array = np.frombuffer(bytearray(raw(body[2])), np.dtype(body[0])).reshape(body[1])
        return array if kind == "array" else array[()]
    raise StateError(f"received a value of the unknown kind {kind[:40]!r}")
