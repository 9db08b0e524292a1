"""Horovod's allreduce in all its forms, on top of push_pull."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from bpsx.errors import ConfigError
from bpsx.plugin import adapter
from bpsx.plugin.adapter import check_name
from bpsx.plugin.framework import UnsupportedTensor
from bpsx.plugin.horovod import How, ProcessSet, ReduceOp, check_adds, global_process_set
from bpsx.session.refusals import counted
from bpsx.torch.all_gather import all_gather_async
from bpsx.torch.compression import Compression, Compressor, check_compression
from bpsx.torch.dynamo import eager
from bpsx.torch.horovod.job import HOROVOD
from bpsx.torch.horovod.pending import Pending, group_names, needs_gradient, wire_name
from bpsx.torch.ops import push_pull
from bpsx.torch.sparse import SparseSum, check_sparse
from bpsx.torch.submit import submit
from bpsx.torch.tensors import check_replaceable, mark_written, summable, unnamed

#: Reductions that servers do not compute: every worker gathers, and reduces in the order of ranks.
_HERE = {ReduceOp.Min: torch.minimum, ReduceOp.Max: torch.maximum, ReduceOp.Product: torch.mul}


_scaled, _averages_here = HOROVOD.scaled, HOROVOD.averages_here


def _how(called: str, *arguments: Any) -> How:
    """Check the arguments of the verb ``called``; names on the wire begin with the plain verb's."""
    return HOROVOD.how_to(called, *arguments)._replace(verb="allreduce")


def _begin(tensor: torch.Tensor, output: torch.Tensor, wire: str, how: How) -> Pending:
    """Begin to reduce ``tensor`` into ``output``, which is the result and may be ``tensor`` itself.

    Without autograd.
    """
    source = tensor if how.prescale == 1.0 else _scaled(tensor.detach(), how.prescale)
    size = adapter.session().size

    def finish(results: list[Any]) -> torch.Tensor:
        target = output.detach()
        if how.op in _HERE:
            target.copy_(functools.reduce(_HERE[how.op], results[0]))
        elif _averages_here(target, how):
            target.div_(size, rounding_mode="trunc")
        if how.postscale != 1.0:
            target.copy_(_scaled(target, how.postscale))
        return output

    if how.op in _HERE:
        summable(source, how.verb)
        places = [
            torch.empty(source.shape, dtype=source.dtype, device=source.device) for _ in range(size)
        ]
        return Pending([all_gather_async(places, source.detach(), wire)], finish)
    if _averages_here(source, how):
        adapter.session().require_all("an average of integers")
    average = how.op is ReduceOp.Average and not _averages_here(source, how)
    return Pending([submit(source, output, wire, average=average)], finish)


def begin_new(tensor: torch.Tensor, name: str | None, how: How) -> Pending:
    return _begin(
        tensor,
        torch.empty_like(tensor, requires_grad=False),
        wire_name(how.verb, name, tensor),
        how,
    )


def begin_inplace(tensor: torch.Tensor, name: str | None, how: How) -> Pending:
    wire = wire_name(how.verb, name, tensor)
    check_replaceable(tensor, wire, "allreduce()")
    pending = _begin(tensor, tensor, wire, how)
    mark_written(tensor)
    return pending


class _WithoutDerivative(torch.autograd.Function):  # type: ignore[misc]
    """A result that depends on ``tensor`` but has no derivative here."""

    @staticmethod
    def forward(
        ctx: Any, tensor: torch.Tensor, result: Callable[[], torch.Tensor], what: str
    ) -> torch.Tensor:
        """Return what ``result`` returns."""
        ctx.what = what
        return result()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        """Raise :class:`ConfigError`."""
        raise ConfigError(f"{ctx.what} has no derivative; give tensor.detach()")


def reduced(
    tensor: torch.Tensor, name: str | None, how: How, compression: type[Compressor]
) -> torch.Tensor:
    """Return the reduction as a new tensor; a sum or average is differentiable."""
    check_compression(compression, how.verb)
    wire = wire_name(how.verb, name, tensor)
    if how.op in _HERE:
        small, ctx = compression.compress(tensor.detach())
        pending = _begin(small, torch.empty_like(small), wire, how)
        result: torch.Tensor = _WithoutDerivative.apply(
            tensor,
            lambda: compression.decompress(pending.wait(), ctx),
            f"{how.verb} with op=hvd.{how.op.name}",
        )
        return result
    if _averages_here(tensor, how):
        adapter.session().require_all("an average of integers")
    total = push_pull(
        _scaled(tensor, how.prescale),
        how.op is ReduceOp.Average and tensor.is_floating_point(),
        wire,
        compression=compression,
    )
    if _averages_here(tensor, how):
        total = torch.div(total, adapter.session().size, rounding_mode="trunc")
    return _scaled(total, how.postscale)


def reduced_group(
    tensors: Sequence[torch.Tensor], name: str | None, how: How, compression: type[Compressor]
) -> list[torch.Tensor]:
    """Reduce all tensors, at once unless one requires a gradient."""
    check_compression(compression, how.verb)
    named = list(zip(tensors, group_names(how.verb, name, tensors)))
    if needs_gradient(tensors):
        return [reduced(t, n, how, compression) for t, n in named]
    begun = []
    for tensor, each in named:
        small, ctx = compression.compress(tensor.detach())
        begun.append((begin_new(small, each, how), ctx))
    return [compression.decompress(pending.wait(), ctx) for pending, ctx in begun]


@eager
@counted("allreduce", "allreduce.{}")
def allreduce(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor:
    """Return the reduction of all workers' ``tensor``, by default the average, as a new tensor.

    ``tensor`` and names as in :func:`bpsx.torch.push_pull_async`. ``op``: Average, Sum, Min, Max or
    Product; ``average`` is its deprecated form. An average of integers is truncated towards zero.
    ``prescale_factor`` and ``postscale_factor`` multiply before and after the reduction.
    Differentiable for Average and Sum, like :func:`bpsx.torch.push_pull`. Min, Max and Product
    gather all tensors on every worker.

    Raises :class:`ConfigError` for other arguments, and as :func:`bpsx.torch.push_pull`.
    """
    how = _how("allreduce", op, average, prescale_factor, postscale_factor, process_set)
    return reduced(tensor, name, how, compression)


@eager
@counted("allreduce", "allreduce.{}")
def allreduce_(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor:
    """Same as :func:`allreduce`, in place; return ``tensor``. Without autograd."""
    how = _how("allreduce_", op, average, prescale_factor, postscale_factor, process_set)
    result: torch.Tensor = begin_inplace(tensor, name, how).wait()
    return result


@eager
@counted("allreduce", "allreduce.{}")
def allreduce_async(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Pending:
    """Begin :func:`allreduce`, without autograd. ``tensor`` must not change until the end."""
    how = _how("allreduce_async", op, average, prescale_factor, postscale_factor, process_set)
    return begin_new(tensor, name, how)


@eager
@counted("allreduce", "allreduce.{}")
def allreduce_async_(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Pending:
    """Begin :func:`allreduce_`. The values are complete once :func:`synchronize` has returned."""
    how = _how("allreduce_async_", op, average, prescale_factor, postscale_factor, process_set)
    return begin_inplace(tensor, name, how)


@eager
@counted("allreduce", "allreduce.{}", several=True)
def grouped_allreduce(
    tensors: Sequence[torch.Tensor],
    average: bool | None = None,
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> list[torch.Tensor]:
    """Same as :func:`allreduce` for each of ``tensors``, under the names ``name.0``, ``name.1``, …

    All are in flight at once, unless one requires a gradient.
    """
    how = _how("grouped_allreduce", op, average, prescale_factor, postscale_factor, process_set)
    return reduced_group(tensors, name, how, compression)


@eager
@counted("allreduce", "allreduce.{}", several=True)
def grouped_allreduce_(
    tensors: Sequence[torch.Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> list[torch.Tensor]:
    """Same as :func:`allreduce_` for each of ``tensors``, all in flight at once."""
    how = _how("grouped_allreduce_", op, average, prescale_factor, postscale_factor, process_set)
    return list(_group(begin_inplace, tensors, name, how).wait())


@eager
@counted("allreduce", "allreduce.{}", several=True)
def grouped_allreduce_async(
    tensors: Sequence[torch.Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Pending:
    """Begin :func:`grouped_allreduce`, without autograd."""
    how = _how(
        "grouped_allreduce_async", op, average, prescale_factor, postscale_factor, process_set
    )
    return _group(begin_new, tensors, name, how)


@eager
@counted("allreduce", "allreduce.{}", several=True)
def grouped_allreduce_async_(
    tensors: Sequence[torch.Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Pending:
    """Begin :func:`grouped_allreduce_`."""
    how = _how(
        "grouped_allreduce_async_", op, average, prescale_factor, postscale_factor, process_set
    )
    return _group(begin_inplace, tensors, name, how)


def _group(
    begin: Callable[[torch.Tensor, str | None, How], Pending],
    tensors: Sequence[torch.Tensor],
    name: str | None,
    how: How,
) -> Pending:
    return Pending(
        [begin(t, n, how) for t, n in zip(tensors, group_names(how.verb, name, tensors))]
    )


@eager
@counted("sparse_allreduce_async", "sparse_allreduce_async.{}", several=True)
def sparse_allreduce_async(
    tensor: torch.Tensor,
    name: str | None,
    op: ReduceOp | None,
    process_set: ProcessSet = global_process_set,
) -> Pending:
    """Begin to sum or average ``tensor``, a ``torch.sparse_coo`` tensor, without autograd.

    To get the coalesced result, call the returned handle, or :func:`synchronize`. Values and
    indices travel; their number may differ between workers.

    Raises :class:`ConfigError`, :class:`~bpsx.torch.UnsupportedTensor`. The wait also raises
    :class:`~bpsx.errors.MismatchError`.
    """
    verb = "sparse_allreduce_async"
    how = HOROVOD.how_to(verb, op, None, 1.0, 1.0, process_set)
    check_adds(verb, how.op)
    check_name(name, verb)
    if not isinstance(tensor, torch.Tensor) or tensor.layout != torch.sparse_coo:
        raise UnsupportedTensor(
            f"{verb}: expected a torch.sparse_coo tensor; for a dense one use allreduce_async"
        )
    check_sparse(tensor, verb)
    wire = f"{verb}.{name}" if name else unnamed(verb, tensor)
    return Pending(
        [SparseSum(tensor, how.op is ReduceOp.Average, wire, Compression.none)],
        lambda results: results[0],
    )
