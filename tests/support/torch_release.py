"""Features of the installed PyTorch, for tests that use a feature only if it exists."""

from __future__ import annotations

import pytest
import torch

#: Unsigned integers, new in PyTorch 2.3.
UINT16: list[torch.dtype] = [getattr(torch, "uint16")] if hasattr(torch, "uint16") else []  # noqa: B009
HAS_GRAD_SCALER = hasattr(torch.amp, "GradScaler")
needs_grad_scaler = pytest.mark.skipif(
    not HAS_GRAD_SCALER, reason="PyTorch before 2.3 has a GradScaler for GPUs only"
)
needs_jagged = pytest.mark.skipif(
    not hasattr(torch, "jagged"), reason="PyTorch before 2.3 has no layout torch.jagged"
)


def _fuses() -> bool:
    try:
        torch.optim.AdamW([torch.zeros(1, requires_grad=True)], fused=True)
    except RuntimeError:
        return False
    return True


#: Fused optimizer steps for CPU tensors, new in PyTorch 2.4.
HAS_FUSED = _fuses()
needs_fused = pytest.mark.skipif(not HAS_FUSED, reason="this PyTorch fuses steps on GPUs only")


def _keeps_gradients() -> bool:
    """Whether autograd still holds a gradient's memory when a post-accumulation hook runs."""
    uses: list[int] = []
    parameter = torch.ones(2, requires_grad=True)

    def hook(p: torch.Tensor) -> None:
        assert p.grad is not None
        uses.append(torch._C._storage_Use_Count(p.grad.untyped_storage()._cdata))

    parameter.register_post_accumulate_grad_hook(hook)
    (parameter * 2).sum().backward()
    assert parameter.grad is not None
    after = torch._C._storage_Use_Count(parameter.grad.untyped_storage()._cdata)
    return uses[0] > after


#: If so, bpsx cannot know whether other code reads that memory, and pushes a copy.
GRADIENTS_ARE_HELD = _keeps_gradients()
