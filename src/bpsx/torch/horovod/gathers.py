"""Horovod's allgather, broadcast and alltoall, on top of broadcasts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import torch

from bpsx.errors import ConfigError
from bpsx.plugin import adapter
from bpsx.plugin.adapter import checked_root
from bpsx.plugin.horovod import ProcessSet, checked_splits, global_process_set
from bpsx.session.refusals import counted
from bpsx.torch.all_gather import RowGathering, all_gather_async, gathered_rows
from bpsx.torch.broadcast import Overwriting
from bpsx.torch.dynamo import eager
from bpsx.torch.horovod.job import check_process_set
from bpsx.torch.horovod.pending import Pending, group_names, needs_gradient, wire_name
from bpsx.torch.ops import push_pull
from bpsx.torch.tensors import check_replaceable

# ---- allgather


def _begin_allgather(tensor: torch.Tensor, name: str | None) -> Pending:
    rows = RowGathering([tensor], wire_name("allgather", name, tensor, rows=True))
    return Pending([rows], lambda results: torch.cat(results[0][0]))


def _allgather(tensor: torch.Tensor, name: str | None) -> torch.Tensor:
    return gathered_rows(tensor, wire_name("allgather", name, tensor, rows=True), average=True)


@eager
@counted("allgather", "allgather.{}", several=True)
def allgather(
    tensor: torch.Tensor, name: str | None = None, process_set: ProcessSet = global_process_set
) -> torch.Tensor:
    """Return the rows of all workers' ``tensor``, as :func:`bpsx.torch.all_gather`.

    The rows are in the order of ranks. Differentiable; the gradient is Horovod's: this worker's
    rows of the average of all workers' gradients, where bpsx.torch has the sum. Raises
    :class:`ConfigError`, and as :func:`bpsx.torch.all_gather`.
    """
    check_process_set(process_set)
    return _allgather(tensor, name)


@eager
@counted("allgather", "allgather.{}", several=True)
def allgather_async(
    tensor: torch.Tensor, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Pending:
    """Begin :func:`allgather`, without autograd. ``tensor`` must not change until the end.

    The workers first exchange their numbers of rows. The rows follow at the next :func:`poll` or
    :func:`synchronize` after that.
    """
    check_process_set(process_set)
    return _begin_allgather(tensor, name)


@eager
@counted("allgather", "allgather.{}", several=True)
def grouped_allgather(
    tensors: Sequence[torch.Tensor],
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> list[torch.Tensor]:
    """Same as :func:`allgather` for each of ``tensors``, under the names ``name.0``, ``name.1``, …

    All are in flight at once, unless one requires a gradient.
    """
    check_process_set(process_set)
    named = list(zip(tensors, group_names("allgather", name, tensors)))
    if needs_gradient(tensors):
        return [_allgather(t, n) for t, n in named]
    return list(Pending([_begin_allgather(t, n) for t, n in named]).wait())


@eager
@counted("allgather", "allgather.{}", several=True)
def grouped_allgather_async(
    tensors: Sequence[torch.Tensor],
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Pending:
    """Begin :func:`grouped_allgather`, without autograd."""
    check_process_set(process_set)
    return Pending(
        [_begin_allgather(t, n) for t, n in zip(tensors, group_names("allgather", name, tensors))]
    )


# ---- broadcast


def _begin_broadcast(
    tensor: torch.Tensor, root_rank: int, name: str | None, inplace: bool, process_set: ProcessSet
) -> Pending:
    check_process_set(process_set)
    wire = wire_name("broadcast", name, tensor)
    root = checked_root(root_rank, "broadcast", adapter.session().size)
    if inplace:
        check_replaceable(tensor, wire, "broadcast()")
    target = tensor if inplace else tensor.detach().clone()
    return Pending([Overwriting(target, root, wire)], lambda results: results[0])


class _Broadcast(torch.autograd.Function):  # type: ignore[misc]
    """See :func:`broadcast`."""

    @staticmethod
    def forward(
        ctx: Any, tensor: torch.Tensor, root_rank: int, name: str | None, process_set: ProcessSet
    ) -> torch.Tensor:
        """Return the root's tensor."""
        ctx.is_root, ctx.name = (
            adapter.session().rank == root_rank,
            f"{wire_name('broadcast', name, tensor)}.grad",
        )
        result: torch.Tensor = _begin_broadcast(tensor, root_rank, name, False, process_set).wait()
        return result

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        """Return the average of all gradients on the root, and zero elsewhere.

        Other workers' tensors have no influence on the result.
        """
        average = push_pull(gradient, average=True, name=ctx.name)
        return average if ctx.is_root else torch.zeros_like(gradient), None, None, None


@eager
@counted("broadcast", "broadcast.{}")
def broadcast(
    tensor: torch.Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor:
    """Return worker ``root_rank``'s ``tensor``, bit for bit, as a new tensor.

    ``tensor`` itself is unchanged. Workers must agree on shape and dtype; any dtype is allowed.

    Differentiable; the gradient is Horovod's: on the root the average of all workers' gradients,
    elsewhere zero. Raises :class:`ConfigError`, also for a root that does not exist, and as
    :func:`bpsx.torch.synchronize`.
    """
    result: torch.Tensor = _Broadcast.apply(tensor, root_rank, name, process_set)
    return result


@eager
@counted("broadcast", "broadcast.{}")
def broadcast_(
    tensor: torch.Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor:
    """Same as :func:`broadcast`, in place; return ``tensor``. Without autograd."""
    result: torch.Tensor = _begin_broadcast(tensor, root_rank, name, True, process_set).wait()
    return result


@eager
@counted("broadcast", "broadcast.{}")
def broadcast_async(
    tensor: torch.Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Pending:
    """Begin :func:`broadcast`, without autograd."""
    return _begin_broadcast(tensor, root_rank, name, False, process_set)


@eager
@counted("broadcast", "broadcast.{}")
def broadcast_async_(
    tensor: torch.Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Pending:
    """Begin :func:`broadcast_`. Do not use ``tensor`` until :func:`synchronize` has returned."""
    return _begin_broadcast(tensor, root_rank, name, True, process_set)


# ---- alltoall

_Splits: TypeAlias = torch.Tensor | Sequence[int] | None


def _checked_splits(tensor: torch.Tensor, splits: _Splits) -> list[int]:
    """Return the number of rows for each worker. Raises :class:`ConfigError`."""
    if isinstance(splits, torch.Tensor) and (splits.dim() != 1 or splits.is_floating_point()):
        raise ConfigError(
            f"alltoall: splits is a tensor of shape {tuple(splits.shape)} and "
            f"{splits.dtype}; expected one dimension of integers"
        )
    given = splits.tolist() if isinstance(splits, torch.Tensor) else splits
    return checked_splits(given, adapter.session().size, len(tensor), splits)


def _begin_alltoall(
    tensor: torch.Tensor, splits: list[int], dtype: torch.dtype, wire: str
) -> Pending:
    """Begin to send all rows and all splits to all workers; each keeps its own rows.

    ``tensor`` has as many rows as ``splits`` sum up to.
    """
    ours = adapter.session()
    mine = torch.tensor(splits, dtype=torch.int64, device="cpu")
    told = all_gather_async(
        [torch.empty_like(mine) for _ in range(ours.size)], mine, f"{wire}.splits"
    )

    def finish(results: list[Any]) -> tuple[torch.Tensor, torch.Tensor]:
        parts = [
            rows.split(each.tolist())[ours.rank]
            for each, rows in zip(results[0], results[1][0], strict=True)
        ]
        return torch.cat(parts), torch.tensor(
            [len(part) for part in parts], dtype=dtype, device="cpu"
        )

    return Pending([told, RowGathering([tensor], wire)], finish)


class _AllToAll(torch.autograd.Function):  # type: ignore[misc]
    """See :func:`alltoall`."""

    @staticmethod
    def forward(
        ctx: Any, tensor: torch.Tensor, splits: list[int], dtype: torch.dtype, wire: str
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the other workers' rows for this one, and the number of rows from each worker."""
        output, received = _begin_alltoall(tensor, splits, dtype, wire).wait()
        ctx.received, ctx.dtype, ctx.wire = received.tolist(), dtype, wire
        ctx.mark_non_differentiable(received)
        return output, received

    @staticmethod
    def backward(
        ctx: Any, gradient: torch.Tensor, _: object
    ) -> tuple[torch.Tensor, None, None, None]:
        """Send the gradients back to where the rows came from."""
        return (
            _AllToAll.apply(gradient, ctx.received, ctx.dtype, f"{ctx.wire}.grad")[0],
            None,
            None,
            None,
        )


def _prepared(
    tensor: torch.Tensor, splits: _Splits, name: str | None, process_set: ProcessSet
) -> tuple[torch.Tensor, list[int], torch.dtype, str]:
    check_process_set(process_set)
    wire = wire_name("alltoall", name, tensor, rows=True)
    numbers = _checked_splits(tensor, splits)
    return (
        tensor[: sum(numbers)],
        numbers,
        splits.dtype if isinstance(splits, torch.Tensor) else torch.int32,
        wire,
    )


@eager
@counted("alltoall", "alltoall.{}", several=True)
def alltoall(
    tensor: torch.Tensor,
    splits: _Splits = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Return all workers' rows for this one, in the order of ranks.

    ``splits``: number of rows of ``tensor`` for each worker. With it, also returns the number of
    rows received from each worker (int32, or the dtype of ``splits``). Without it the rows are
    divided evenly.

    Differentiable: gradients go back to where the rows came from. All rows travel to all workers.
    Raises :class:`ConfigError`, and as :func:`allgather`.
    """
    output, received = _AllToAll.apply(*_prepared(tensor, splits, name, process_set))
    return output if splits is None else (output, received)


@eager
@counted("alltoall", "alltoall.{}", several=True)
def alltoall_async(
    tensor: torch.Tensor,
    splits: _Splits = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Pending:
    """Begin :func:`alltoall`, without autograd; the result is always (output, received splits).

    As with :func:`allgather_async`, the rows follow the numbers at a :func:`poll` or
    :func:`synchronize`.
    """
    return _begin_alltoall(*_prepared(tensor, splits, name, process_set))
