"""Horovod's reducescatter: a reduction of whole tensors, of which each worker keeps its rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from bpsx.plugin import adapter
from bpsx.plugin.horovod import How, ProcessSet, ReduceOp, check_adds, global_process_set
from bpsx.session.refusals import counted
from bpsx.torch.compression import Compression, Compressor
from bpsx.torch.dynamo import eager
from bpsx.torch.horovod.job import HOROVOD
from bpsx.torch.horovod.pending import Pending, group_names, wire_name
from bpsx.torch.horovod.reductions import begin_new, reduced, reduced_group

_VERB = "reducescatter"


class _Rows(torch.autograd.Function):  # type: ignore[misc]
    """A copy of some of a tensor's rows, whose gradient is multiplied by ``factor``."""

    @staticmethod
    def forward(ctx: Any, whole: torch.Tensor, rows: slice, factor: int) -> torch.Tensor:
        """Return the rows."""
        ctx.shape, ctx.rows, ctx.factor = whole.shape, rows, factor
        return whole[rows].clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        """Return the gradient of the whole tensor, zero for all other rows."""
        whole = gradient.new_zeros(ctx.shape)
        whole[ctx.rows] = gradient * ctx.factor
        return whole, None, None


def _own(whole: torch.Tensor) -> torch.Tensor:
    """Return this worker's rows.

    Rows are divided evenly; the first workers have one more if they do not divide. The sum from
    which the rows are taken has the gradient of the total of all workers' losses. Horovod's
    gradient of a reducescatter is size() times that.
    """
    ours = adapter.session()
    rows, more = divmod(len(whole), ours.size)
    begin = ours.rank * rows + min(ours.rank, more)
    result: torch.Tensor = _Rows.apply(
        whole, slice(begin, begin + rows + (ours.rank < more)), ours.size
    )
    return result


def _how(op: ReduceOp, prescale: float, postscale: float, process_set: ProcessSet) -> How:
    how = HOROVOD.how_to(_VERB, op, None, prescale, postscale, process_set)
    check_adds(_VERB, how.op)
    return how


def _begin(tensor: torch.Tensor, name: str | None, how: How) -> Pending:
    wire_name(_VERB, name, tensor, rows=True)  # raises for a tensor without rows
    return Pending([begin_new(tensor, name, how)], lambda results: _own(results[0]))


@eager
@counted("reducescatter", "reducescatter.{}")
def reducescatter(
    tensor: torch.Tensor,
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: ReduceOp = ReduceOp.Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> torch.Tensor:
    """Return this worker's rows of the sum or average of all workers' ``tensor``.

    Of n rows each worker has n // size(), and the first n % size() workers one more.
    Differentiable; the gradient is Horovod's: size() times that of the total of all workers'
    losses. All rows travel to all workers. Otherwise as :func:`allreduce`; ``op`` is Average or
    Sum.
    """
    how = _how(op, prescale_factor, postscale_factor, process_set)
    wire_name(_VERB, name, tensor, rows=True)
    return _own(reduced(tensor, name, how, compression))


@eager
@counted("reducescatter", "reducescatter.{}")
def reducescatter_async(
    tensor: torch.Tensor,
    name: str | None = None,
    op: ReduceOp = ReduceOp.Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Pending:
    """Begin :func:`reducescatter`, without autograd. ``tensor`` must not change until the end."""
    return _begin(tensor, name, _how(op, prescale_factor, postscale_factor, process_set))


@eager
@counted("reducescatter", "reducescatter.{}", several=True)
def grouped_reducescatter(
    tensors: Sequence[torch.Tensor],
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: ReduceOp = ReduceOp.Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> list[torch.Tensor]:
    """Same as :func:`reducescatter` for each of ``tensors``.

    All are in flight at once, unless one requires a gradient.
    """
    how = _how(op, prescale_factor, postscale_factor, process_set)
    for tensor, each in zip(tensors, group_names(_VERB, name, tensors)):
        wire_name(_VERB, each, tensor, rows=True)
    return [_own(whole) for whole in reduced_group(tensors, name, how, compression)]


@eager
@counted("reducescatter", "reducescatter.{}", several=True)
def grouped_reducescatter_async(
    tensors: Sequence[torch.Tensor],
    name: str | None = None,
    op: ReduceOp = ReduceOp.Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Pending:
    """Begin :func:`grouped_reducescatter`, without autograd."""
    how = _how(op, prescale_factor, postscale_factor, process_set)
    return Pending([_begin(t, n, how) for t, n in zip(tensors, group_names(_VERB, name, tensors))])
