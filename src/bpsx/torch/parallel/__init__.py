"""BytePS's ``byteps.torch.parallel``: a module that averages its gradients itself."""

from __future__ import annotations

from bpsx.torch.parallel.distributed import DistributedDataParallel

__all__ = ["DistributedDataParallel"]
