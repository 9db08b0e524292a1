"""PyTorch's tensors for :mod:`bpsx.plugin`."""

from __future__ import annotations

import torch

from bpsx.dtypes import BY_NAME
from bpsx.plugin.framework import Framework
from bpsx.plugin.startup import stride_of

#: Names of the dtypes that can be summed.
SUMMED: dict[torch.dtype, str] = {getattr(torch, name): name for name in BY_NAME}


class Torch(Framework[torch.Tensor]):
    """Dense tensors on the CPU or a GPU."""

    module = "bpsx.torch"
    instead = {
        "bool": "send tensor.to(torch.uint8); its sum is the number of workers with True",
        **dict.fromkeys(
            ("complex32", "complex64", "complex128"),
            "send torch.view_as_real(tensor), which shares its memory",
        ),
    }

    def dtype_of(self, tensor: torch.Tensor) -> str:
        return SUMMED.get(tensor.dtype) or str(tensor.dtype).removeprefix("torch.")

    def shape_of(self, tensor: torch.Tensor) -> tuple[int, ...]:
        return tuple(tensor.shape)

    def cast(self, tensor: torch.Tensor, dtype: str) -> torch.Tensor:
        return tensor.to(getattr(torch, dtype))

    def sample(self, tensor: torch.Tensor) -> bytes:
        """As the contract says; elements are in logical order, whatever the strides."""
        n = tensor.numel()
        step = stride_of(n)
        with torch.no_grad():
            if tensor.is_contiguous():
                flat = tensor.as_strided((-(-n // step),), (step,), tensor.storage_offset())
            else:
                flat = tensor.take(torch.arange(0, n, step, device=tensor.device))
            flat = torch.view_as_real(flat).reshape(-1) if flat.is_complex() else flat
            return bytes(flat.contiguous().view(torch.uint8).cpu().numpy())


TORCH = Torch()
