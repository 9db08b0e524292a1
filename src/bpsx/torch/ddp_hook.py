"""A DDP comm hook: PyTorch's DistributedDataParallel with gradients averaged by bpsx.

No ``from __future__ import annotations`` here: DistributedDataParallel compares the hook's
annotations with the types themselves.
"""

from typing import Any

import torch
import torch.distributed as dist

from bpsx.errors import ConfigError
from bpsx.plugin import adapter
from bpsx.torch.compression import Compression, Compressor, check_compression
from bpsx.torch.ddp_models import name_of
from bpsx.torch.dynamo import eager
from bpsx.torch.futures import COMPLETER
from bpsx.torch.profiling import profiled, recorded
from bpsx.torch.submit import submit
from bpsx.torch.tensors import check_tensor, mark_written


class DDPHookState:
    """Options of :func:`ddp_comm_hook` for one model. Immutable; thread-safe.

    ``name``: wire name of the model's buckets, the same on all workers. With None, the name
    contains the model's number among the process's DistributedDataParallel modules, which all
    workers create in the same order. Two live models cannot have one name. ``compression``: one of
    :class:`~bpsx.torch.Compression`, for the wire only. Raises :class:`~bpsx.errors.ConfigError`.
    """

    def __init__(
        self, name: str | None = None, compression: type[Compressor] = Compression.none
    ) -> None:
        if name is not None and (not isinstance(name, str) or not name):
            raise ConfigError(f"DDPHookState: name={name!r}; expected a string that is not empty")
        check_compression(compression, "DDPHookState")
        self.name, self.compression = name, compression


_DEFAULT = DDPHookState()


@eager
def ddp_comm_hook(
    state: DDPHookState | None, bucket: dist.GradBucket
) -> torch.futures.Future[torch.Tensor]:
    """Average a bucket of gradients over all workers of bpsx, in place.

    Register it with ``model.register_comm_hook(None, bps.ddp_comm_hook)``. The model is a
    ``torch.nn.parallel.DistributedDataParallel`` over any process group of the same processes. That
    process group sets the model up and broadcasts its buffers; gradients go through bpsx. Call
    :func:`bpsx.torch.init` first.

    ``state``: None, or a :class:`DDPHookState` to give the model a name or to compress its
    gradients. ``bucket``: PyTorch's bucket. Returns a future of the averaged buffer.

    Buckets are summed as backward fills them. The buckets filled last are the most urgent, since
    the next forward pass needs them first. A failure ends ``backward()`` with a
    :class:`RuntimeError` that holds bpsx's text. An average divides by ``size()``, also under
    ``torch.distributed.algorithms.Join``.

    Raises :class:`~bpsx.errors.NotInitializedError`, :class:`~bpsx.errors.ConfigError` (another
    state; asynchronous training; the name of another live model),
    :class:`~bpsx.torch.UnsupportedTensor` and :class:`~bpsx.dtypes.UnsupportedDType`.
    """
    options = _DEFAULT if state is None else state
    if not isinstance(options, DDPHookState):
        raise ConfigError(
            "ddp_comm_hook: state must be None or a bpsx.torch.DDPHookState, not"
            f" {type(options).__name__}"
        )
    ours = adapter.session()
    ours.require_all("ddp_comm_hook")
    if ours.size == 1 < dist.get_world_size():
        raise ConfigError(
            "ddp_comm_hook: bpsx's job is this process alone, but PyTorch's process group has"
            f" {dist.get_world_size()} processes, so nothing would be averaged. Call"
            " init_process_group before bpsx.torch.init(), or start the script with bpsx-run or"
            " torchrun"
        )
    if ours.config.asynchronous:
        raise ConfigError(
            "ddp_comm_hook: DistributedDataParallel needs averaged gradients, but with"
            " BYTEPS_ENABLE_ASYNC=1 there are no averages; use bpsx.torch.DistributedOptimizer"
        )
    buffer = bucket.buffer()
    # DistributedDataParallel rebuilds its buckets after the first step. A bucket keeps its index
    # then, and its new contents are declared again.
    name = f"{name_of(bucket.parameters()[0], options.name)}.bucket.{bucket.index()}"
    check_tensor(buffer, name)
    wire, ctx = options.compression.compress(buffer.detach())

    def received(value: Any) -> torch.Tensor:
        if ctx is not None:
            with torch.no_grad():
                buffer.copy_(options.compression.decompress(value, ctx))
        return buffer

    def begin() -> torch.futures.Future[torch.Tensor]:
        handle = submit(wire, wire, name, average=True, priority=bucket.index())
        mark_written(buffer)
        return COMPLETER.future_of(handle, received, device=buffer.device)

    return (
        recorded("bpsx::push_pull", "push_pull", [wire], begin, lambda future: future)
        if profiled()
        else begin()
    )
