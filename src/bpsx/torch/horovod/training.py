"""Horovod's API for weights, optimizer state, objects and the optimizer."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import torch

from bpsx.plugin.horovod import (
    ProcessSet,
    ReduceOp,
    check_groups,
    checked_training_op,
    global_process_set,
)
from bpsx.system.tracebacks import public
from bpsx.torch import broadcast, objects
from bpsx.torch.compression import Compression, Compressor
from bpsx.torch.horovod.job import check_process_set
from bpsx.torch.optimizer import distribute

_Groups: TypeAlias = int | Sequence[Sequence[torch.Tensor]] | None


@public
def broadcast_parameters(params: Any, root_rank: int) -> None:
    """Same as :func:`bpsx.torch.broadcast_parameters`, also for tensors without names.

    Such tensors, from ``model.parameters()``, are named by their position.
    """
    if isinstance(params, Iterable) and not isinstance(params, (Mapping, str, bytes, torch.Tensor)):
        params = [
            (f"noname.{i}", p) if isinstance(p, torch.Tensor) else p for i, p in enumerate(params)
        ]
    broadcast.broadcast_parameters(params, root_rank)


@public
def broadcast_optimizer_state(
    optimizer: torch.optim.Optimizer, root_rank: int, model: object = None
) -> None:
    """Same as :func:`bpsx.torch.broadcast_optimizer_state`.

    ``model`` is accepted for Horovod and ignored: missing state need not be created first.
    """
    broadcast.broadcast_optimizer_state(optimizer, root_rank)


@public
def broadcast_object(
    obj: Any,
    root_rank: int = 0,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Same as :func:`bpsx.torch.broadcast_object`."""
    check_process_set(process_set)
    return objects.broadcast_object(obj, root_rank, name)


@public
def allgather_object(
    obj: Any, name: str | None = None, process_set: ProcessSet = global_process_set
) -> list[Any]:
    """Same as :func:`bpsx.torch.all_gather_object`."""
    check_process_set(process_set)
    return objects.all_gather_object(obj, name)


@public
def DistributedOptimizer(  # noqa: N802  (Horovod's name)
    optimizer: torch.optim.Optimizer,
    named_parameters: Iterable[tuple[str, torch.Tensor]] | None = None,
    compression: type[Compressor] = Compression.none,
    backward_passes_per_step: int = 1,
    op: ReduceOp = ReduceOp.Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: _Groups = None,
    sparse_as_dense: bool = False,
    process_set: ProcessSet = global_process_set,
) -> torch.optim.Optimizer:
    """Same as :func:`bpsx.torch.DistributedOptimizer`; ``op=Sum`` sums gradients instead.

    These arguments are accepted and have no effect: ``gradient_predivide_factor`` (half types are
    summed in float32 and divided before rounding), ``num_groups`` and ``groups`` (tensors are cut
    into partitions and sent by urgency). With ``sparse_as_dense`` gradients stay dense, except for
    SparseAdam, which accepts only sparse ones.

    Raises :class:`ConfigError` for another ``op``, invalid factors and groups, Sum with a factor or
    in asynchronous training, and as :func:`bpsx.torch.DistributedOptimizer`.
    """
    verb = "DistributedOptimizer"
    check_process_set(process_set)
    kind = checked_training_op(verb, op, gradient_predivide_factor)
    check_groups(verb, num_groups, groups, lambda p: isinstance(p, torch.Tensor))
    return distribute(
        optimizer,
        named_parameters,
        compression,
        backward_passes_per_step,
        sparse_as_dense,
        average=kind is ReduceOp.Average,
    )
