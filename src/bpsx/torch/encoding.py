"""Python values as JSON and tensors: what can be read back without running anything that came over the network."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import numpy as np
import torch

from bpsx.errors import BpsxError
from bpsx.torch.ops import check_tensor, dtype_name

#: Kinds of NumPy's element types whose bytes are all there is to them.
_NUMPY_KINDS = "biufcSUmM"
_SEQUENCES: dict[str, Any] = {"tuple": tuple, "list": list, "set": set, "frozenset": frozenset}
#: JSON readers stop at integers of some thousand digits; from this many bits on they travel as hexadecimal text.
_MOST_BITS = 64


class StateError(BpsxError, ValueError):
    """A value cannot travel between workers, or does not fit where it has arrived."""


class Encoder:
    """Python values to JSON without losing their types; tensors are put aside, in :attr:`tensors`, and described in :attr:`described`.

    ``verb`` begins every error. ``exact``: refuse what would come back as another type (a subclass of ``dict``, an ``IntEnum``); otherwise
    subclasses come back as what they are derived from.
    """

    def __init__(self, verb: str = "broadcast_optimizer_state", exact: bool = False) -> None:
        self.tensors: list[torch.Tensor] = []
        self.described: list[dict[str, Any]] = []
        self._verb, self._exact = verb, exact

    def encode(self, value: Any, where: str) -> Any:
        """``value`` as JSON. ``where`` names it in errors and on the wire. Raises :class:`StateError`."""
        if value is None or type(value) in (bool, float, str):
            return value
        if type(value) is int:
            return value if value.bit_length() < _MOST_BITS else {"int": hex(value)}
        if type(value) is torch.Tensor or isinstance(value, torch.Tensor) and not self._exact:
            return {"tensor": self._put_aside(value, where)}
        for kind, of in _SEQUENCES.items():
            if type(value) is of or isinstance(value, of) and not self._exact:
                return {kind: [self.encode(v, f"{where}.{i}") for i, v in enumerate(value)]}
        if type(value) is dict or isinstance(value, dict) and not self._exact:
            return {"dict": self._items(value, where)}
        if type(value) is OrderedDict:      # a module's state_dict, which has attributes of its own
            return {"ordered": [self._items(value, where), self._items(vars(value), where)]}
        return self._rarer(value, where)

    def _items(self, value: dict[Any, Any], where: str) -> list[Any]:
        return [[self.encode(k, where), self.encode(v, f"{where}.{k}")] for k, v in value.items()]

    def _rarer(self, value: Any, where: str) -> Any:
        if type(value) is bytes or type(value) is bytearray:
            return {type(value).__name__: self._bytes_aside(value, where)}
        if type(value) is complex:
            return {"complex": [value.real, value.imag]}
        if not self._exact and isinstance(value, (int, float, str)):        # a NumPy float64, an IntEnum
            return next(kind(value) for kind in (int, float, str) if isinstance(value, kind))
        if (type(value) is np.ndarray or isinstance(value, np.generic)) and value.dtype.kind in _NUMPY_KINDS:
            kind = "array" if isinstance(value, np.ndarray) else "scalar"
            return {kind: [value.dtype.str, list(value.shape), self._bytes_aside(value.tobytes(), where)]}
        raise StateError(f"{self._verb}: {where} is a {type(value).__name__}; allowed are tensors, NumPy arrays and scalars, None, bool, int, "
                         "float, complex, str, bytes, and tuples, lists, sets, dicts of these")

    def _bytes_aside(self, value: bytes | bytearray, where: str) -> int:
        empty = torch.zeros(0, dtype=torch.uint8, device="cpu")
        return self._put_aside(torch.frombuffer(bytearray(value), dtype=torch.uint8) if value else empty, where)

    def _put_aside(self, tensor: torch.Tensor, where: str) -> int:
        check_tensor(tensor, f"{self._verb}: {where}")
        self.tensors.append(tensor)
        self.described.append({"name": where, "dtype": dtype_name(tensor), "shape": list(tensor.shape)})
        return len(self.tensors) - 1


def decode(value: Any, tensors: list[torch.Tensor]) -> Any:
    """The reverse of :meth:`Encoder.encode`."""
    if not isinstance(value, dict):
        return value
    (kind, body), = value.items()
    if kind == "tensor":
        return tensors[body]
    if kind == "dict":
        return {decode(k, tensors): decode(v, tensors) for k, v in body}
    if kind == "ordered":
        ordered = OrderedDict((decode(k, tensors), decode(v, tensors)) for k, v in body[0])
        vars(ordered).update(decode({"dict": body[1]}, tensors))
        return ordered
    if kind in _SEQUENCES:
        return _SEQUENCES[kind](decode(v, tensors) for v in body)
    if kind == "int":
        return int(body, 16)
    if kind == "complex":
        return complex(*body)
    if kind in ("bytes", "bytearray"):
        return (bytes if kind == "bytes" else bytearray)(tensors[body].numpy().tobytes())
    if kind in ("array", "scalar"):
        array = np.frombuffer(bytearray(tensors[body[2]].numpy().tobytes()), np.dtype(body[0])).reshape(body[1])
        return array if kind == "array" else array[()]
    raise StateError(f"a value of the unknown kind {kind[:40]!r} has arrived")


def empty_for(described: dict[str, Any]) -> torch.Tensor:
    """Memory for a tensor that the sender has described."""
    dtype = getattr(torch, described["dtype"], None)
    if not isinstance(dtype, torch.dtype):
        raise StateError(f"a tensor of the unknown dtype {described['dtype'][:40]!r} has arrived")
    return torch.zeros(described["shape"], dtype=dtype, device="cpu")
