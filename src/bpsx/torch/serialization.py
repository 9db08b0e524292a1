"""PyTorch tensors in :mod:`bpsx.plugin.encoding`: kept aside unencoded, and bytes as tensors."""

from __future__ import annotations

from typing import Any

import torch

from bpsx.plugin import encoding
from bpsx.plugin.encoding import StateError
from bpsx.torch.tensors import check_tensor, dtype_name

__all__ = ["Encoder", "StateError", "decode", "device_for", "empty_for"]


class Encoder(encoding.Encoder):
    """Encoder that keeps tensors in :attr:`tensors`, with descriptions in :attr:`described`.

    Bytes are kept there too, as tensors. ``param``: position of the parameter to which what is
    encoded next belongs, or -1.
    """

    def __init__(self) -> None:
        super().__init__("broadcast_optimizer_state")
        self.param = -1
        self.tensors: list[torch.Tensor] = []
        self.described: list[dict[str, Any]] = []

    def _tensor(self, value: Any, where: str) -> int | None:
        return self._tensor_aside(value, where) if isinstance(value, torch.Tensor) else None

    def _put_aside(self, value: bytes | bytearray, where: str) -> int:
        empty = torch.zeros(0, dtype=torch.uint8, device="cpu")
        return self._tensor_aside(
            torch.frombuffer(bytearray(value), dtype=torch.uint8) if value else empty, where
        )

    def _tensor_aside(self, tensor: torch.Tensor, where: str) -> int:
        check_tensor(tensor, f"{self._verb}: {where}")
        self.tensors.append(tensor)
        self.described.append(
            {
                "name": where,
                "dtype": dtype_name(tensor),
                "shape": list(tensor.shape),
                "device": tensor.device.type,
                "param": self.param,
            }
        )
        return len(self.tensors) - 1


def decode(value: Any, tensors: list[torch.Tensor]) -> Any:
    """Reverse :meth:`Encoder.encode`."""
    return encoding.decode(value, lambda i: tensors[i].numpy().tobytes(), lambda i: tensors[i])


def empty_for(dtype: str, shape: list[int], device: torch.device | str = "cpu") -> torch.Tensor:
    """Allocate the tensor that the sender has described."""
    found = getattr(torch, dtype, None)
    if not isinstance(found, torch.dtype):
        raise StateError(f"received a tensor of the unknown dtype {dtype[:40]!r}")
    return torch.zeros(shape, dtype=found, device=device)


def device_for(described: dict[str, Any], params: list[torch.Tensor]) -> torch.device:
    """Return where a tensor of the sender's optimizer belongs here.

    On the device of its parameter if the sender's is on a device of that type, as moments are; else
    on the host, as Adam's count of steps is.
    """
    host = torch.device("cpu")
    own = params[described["param"]].device if described["param"] >= 0 else host
    return own if own.type == described["device"] else host
