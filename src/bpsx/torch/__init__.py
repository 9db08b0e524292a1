"""bpsx for PyTorch: ``import bpsx.torch as bps``.

Names and arguments are BytePS's: a script for ``byteps.torch`` runs with only the import changed.
Tensors may be on the CPU or on a CUDA device. Gradients are pushed during the backward pass.
"""

from __future__ import annotations

try:
    import torch as _torch
except ModuleNotFoundError as _error:
    if _error.name != "torch":
        raise
    raise ImportError(
        "bpsx.torch needs PyTorch 2.1 or newer: pip install torch", name="torch"
    ) from None
if not hasattr(_torch.Tensor, "register_post_accumulate_grad_hook"):
    raise ImportError(
        f"bpsx.torch needs PyTorch 2.1 or newer, this is {_torch.__version__}: pip install"
        " --upgrade torch",
        name="torch",
    )

from bpsx.api.verbs import (  # noqa: E402
    barrier,
    get_pushpull_speed,
    join,
    local_rank,
    local_size,
    rank,
    shutdown,
    size,
    suspend,
)
from bpsx.plugin.framework import UnsupportedTensor  # noqa: E402
from bpsx.torch.all_gather import all_gather  # noqa: E402
from bpsx.torch.batch_norm import SyncBatchNorm  # noqa: E402
from bpsx.torch.broadcast import broadcast_optimizer_state, broadcast_parameters  # noqa: E402
from bpsx.torch.compression import Compression  # noqa: E402
from bpsx.torch.exchange import GradientOrderError  # noqa: E402
from bpsx.torch.objects import ObjectError, all_gather_object, broadcast_object  # noqa: E402
from bpsx.torch.ops import (  # noqa: E402
    declare,
    poll,
    push_pull,
    push_pull_async,
    push_pull_async_inplace,
    push_pull_inplace,
    synchronize,
)
from bpsx.torch.optimizer import DistributedOptimizer  # noqa: E402

from bpsx.torch import elastic  # noqa: E402  isort: skip

if _torch.distributed.is_available():
    from bpsx.torch import process_group as _process_group
    from bpsx.torch import rendezvous as _rendezvous
    from bpsx.torch.collectives import UnsupportedCollective
    from bpsx.torch.ddp_hook import DDPHookState, ddp_comm_hook
    from bpsx.torch.rendezvous import init, resume
    from bpsx.torch.work import GroupTimeoutError

    _rendezvous.register()
    _process_group.register()
else:
    from bpsx.api.verbs import init, resume

#: BytePS's name for :func:`push_pull_async_inplace`.
byteps_push_pull = push_pull_async_inplace

__all__ = [
    "Compression",
    "DDPHookState",
    "DistributedOptimizer",
    "GradientOrderError",
    "GroupTimeoutError",
    "ObjectError",
    "SyncBatchNorm",
    "UnsupportedCollective",
    "UnsupportedTensor",
    "all_gather",
    "all_gather_object",
    "barrier",
    "broadcast_object",
    "broadcast_optimizer_state",
    "broadcast_parameters",
    "byteps_push_pull",
    "ddp_comm_hook",
    "declare",
    "elastic",
    "get_pushpull_speed",
    "init",
    "join",
    "local_rank",
    "local_size",
    "poll",
    "push_pull",
    "push_pull_async",
    "push_pull_async_inplace",
    "push_pull_inplace",
    "rank",
    "resume",
    "shutdown",
    "size",
    "suspend",
    "synchronize",
]


def __dir__() -> list[str]:
    """List only the public names."""
    return sorted({*__all__, *(name for name in globals() if name.startswith("__"))})
