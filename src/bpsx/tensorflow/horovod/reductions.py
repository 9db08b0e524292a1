"""Horovod's allreduce and reducescatter, built on sums."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from bpsx.errors import ConfigError
from bpsx.plugin import adapter
from bpsx.plugin.adapter import check_name
from bpsx.plugin.horovod import (
    How,
    ProcessSet,
    ReduceOp,
    check_adds,
    checked_op,
    global_process_set,
    group_names,
)
from bpsx.tensorflow.compression import Compression, Compressor, check_compression
from bpsx.tensorflow.horovod.errors import verb
from bpsx.tensorflow.horovod.job import HOROVOD
from bpsx.tensorflow.horovod.names import checked_tensor, wire_name, with_gradient_times
from bpsx.tensorflow.ops import check_summable
from bpsx.tensorflow.primitives import copies, sums
from bpsx.tensorflow.sparse import sum_of_slices

#: Reductions that no server computes: every worker gathers, and computes in the order of ranks.
_HERE = {ReduceOp.Min: tf.minimum, ReduceOp.Max: tf.maximum, ReduceOp.Product: tf.multiply}


_how, _scaled, _averages_here = HOROVOD.how_to, HOROVOD.scaled, HOROVOD.averages_here


def _reduced_here(tensor: tf.Tensor, wire: str, how: How) -> tf.Tensor:
    """Return Min, Max or Product of all workers' tensors; every worker gathers them.

    Not differentiable.
    """

    @tf.custom_gradient  # type: ignore[untyped-decorator]
    def made(given: tf.Tensor) -> Any:
        adapter.session().require_all(f"{how.verb} with op=hvd.{how.op.name}")
        size = adapter.session().size
        told = [copies([given], [f"{wire}.{root}"], root)[0] for root in range(size)]

        def refuse(_: Any) -> Any:
            raise ConfigError(
                f"{how.verb} with op=hvd.{how.op.name} has no derivative; give "
                "tf.stop_gradient(tensor)"
            )

        return functools.reduce(_HERE[how.op], told), refuse

    return made(tensor)


def _reduced(
    tensors: Sequence[tf.Tensor], wires: Sequence[str], how: How, compression: type[Compressor]
) -> list[tf.Tensor]:
    """Return the reductions of dense tensors, all under way at once."""
    for tensor, wire in zip(tensors, wires, strict=True):
        check_summable(tensor, wire)
    wired = [compression.compress(_scaled(tensor, how.prescale)) for tensor in tensors]
    found: list[Any] = [None] * len(tensors)
    if how.here:
        pairs = zip(wired, wires, strict=True)
        found = [_reduced_here(small, wire, how) for (small, _), wire in pairs]
    else:
        by_servers = [how.op is ReduceOp.Average and not _averages_here(t, how) for t in tensors]
        for average in (True, False):
            places = [i for i, mean in enumerate(by_servers) if mean is average]
            given, names = [wired[i][0] for i in places], [wires[i] for i in places]
            for i, total in zip(places, sums(given, names, average=average), strict=True):
                found[i] = total
    results = []
    for tensor, total, (_, ctx) in zip(tensors, found, wired, strict=True):
        whole = compression.decompress(total, ctx)
        if _averages_here(tensor, how):
            adapter.session().require_all("an average of integers")
            whole = tf.truncatediv(whole, tf.cast(adapter.session().size, whole.dtype))
        results.append(_scaled(whole, how.postscale))
    return results


def _reduced_slices(
    slices: tf.IndexedSlices, name: str | None, how: How, compression: type[Compressor]
) -> tf.IndexedSlices:
    """Return the rows of all workers. The gradient is Horovod's for allgather: the average."""
    if how.here:
        raise ConfigError(
            f"{how.verb}: op=hvd.{how.op.name} is not possible for tf.IndexedSlices; expected"
            " hvd.Average and hvd.Sum, or give tf.convert_to_tensor(slices)"
        )
    check_name(name, how.verb)
    values = tf.convert_to_tensor(slices.values)
    check_summable(values, f"{how.verb} of {name!r}" if name else how.verb)
    wire = wire_name(f"{how.verb}.sparse", name, values, rows=True)
    own = with_gradient_times(_scaled(values, how.prescale), 1 / adapter.session().size)
    rows = tf.IndexedSlices(own, slices.indices, slices.dense_shape)
    total = sum_of_slices(rows, wire, how.op is ReduceOp.Average, compression)
    return tf.IndexedSlices(_scaled(total.values, how.postscale), total.indices, total.dense_shape)


def _reduced_any(
    tensors: Sequence[Any], names: Sequence[str | None], how: How, compression: type[Compressor]
) -> list[Any]:
    """Return the reductions of dense tensors and of IndexedSlices."""
    check_compression(compression, how.verb)
    found: list[Any] = [None] * len(tensors)
    places = [i for i, t in enumerate(tensors) if not isinstance(t, tf.IndexedSlices)]
    dense = [checked_tensor(how.verb, tensors[i], names[i]) for i in places]
    wires = [wire_name(how.verb, names[i], t) for i, t in zip(places, dense, strict=True)]
    for i, total in zip(places, _reduced(dense, wires, how, compression), strict=True):
        found[i] = total
    for i, tensor in enumerate(tensors):
        if isinstance(tensor, tf.IndexedSlices):
            found[i] = _reduced_slices(tensor, names[i], how, compression)
    return found


@verb
def allreduce(
    tensor: Any,
    average: bool | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: type[Compressor] = Compression.none,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
    ignore_name_scope: bool = False,
) -> Any:
    """Return the reduction of all workers' ``tensor``, by default the average.

    The result has the shape and dtype of ``tensor``; for ``tf.IndexedSlices`` it has the rows of
    all workers. ``tensor``, names, graphs and errors as in :func:`bpsx.tensorflow.push_pull`.
    ``op``: Average, Sum, Min, Max or Product; ``average`` is its deprecated form. Averages of
    integers are cut off towards zero. ``prescale_factor`` multiplies before the reduction,
    ``postscale_factor`` after it. Differentiable for Average and Sum. Min, Max and Product gather
    all tensors on every worker. ``device_dense``, ``device_sparse`` and ``ignore_name_scope`` are
    Horovod's and ignored: names have no scopes here.

    Raises :class:`~bpsx.errors.ConfigError` for other arguments.
    """
    how = _how("allreduce", op, average, prescale_factor, postscale_factor, process_set)
    return _reduced_any([tensor], [name], how, compression)[0]


@verb
def grouped_allreduce(
    tensors: Sequence[Any],
    average: bool | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: type[Compressor] = Compression.none,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
    ignore_name_scope: bool = False,
    name: str | None = None,
) -> list[Any]:
    """:func:`allreduce` each of ``tensors``, which are called ``name.0``, ``name.1``, …

    All dense ones are under way at once.
    """
    how = _how("allreduce", op, average, prescale_factor, postscale_factor, process_set)
    return _reduced_any(tensors, group_names("grouped_allreduce", name, tensors), how, compression)


# ---- reducescatter


def _own_rows(whole: tf.Tensor) -> tf.Tensor:
    """Return this worker's rows: an even share, and one more for the first workers if needed.

    The gradient of the sum is that of all workers' losses together. Horovod's gradient of a
    reducescatter is size() times that.
    """
    ours = adapter.session()
    ours.require_all("reducescatter")
    count = whole.shape[0] if whole.shape[0] is not None else tf.shape(whole)[0]
    first, end = (_first_row(count, rank, ours.size) for rank in (ours.rank, ours.rank + 1))
    return with_gradient_times(whole[first:end], ours.size)


def _first_row(count: Any, rank: int, size: int) -> Any:
    """Return the number of rows of lower ranks; an integer if ``count`` is one."""
    more = count % size
    extra = min(rank, more) if isinstance(count, int) else tf.minimum(rank, more)
    return count // size * rank + extra


def _scattered(
    tensors: Sequence[Any], names: Sequence[str | None], how: How, compression: type[Compressor]
) -> list[tf.Tensor]:
    check_adds(how.verb, how.op)
    check_compression(compression, how.verb)
    dense = [checked_tensor(how.verb, t, n, rows=True) for t, n in zip(tensors, names, strict=True)]
    wires = [wire_name(how.verb, n, t) for t, n in zip(dense, names, strict=True)]
    return [_own_rows(whole) for whole in _reduced(dense, wires, how, compression)]


@verb
def reducescatter(
    tensor: Any,
    device_dense: str = "",
    compression: type[Compressor] = Compression.none,
    op: ReduceOp = ReduceOp.Average,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
    ignore_name_scope: bool = False,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> tf.Tensor:
    """Return this worker's rows of the sum or average of all workers' ``tensor``.

    Of n rows each worker has n // size(), and the first n % size() workers one more.
    Differentiable; the gradient is Horovod's: size() times that of all workers' losses together.
    All rows travel to all workers. Otherwise as :func:`allreduce`; ``op`` is Average or Sum.
    """
    how = _how("reducescatter", op, None, prescale_factor, postscale_factor, process_set)
    return _scattered([tensor], [name], how, compression)[0]


@verb
def grouped_reducescatter(
    tensors: Sequence[Any],
    device_dense: str = "",
    compression: type[Compressor] = Compression.none,
    op: ReduceOp = ReduceOp.Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> list[tf.Tensor]:
    """:func:`reducescatter` each of ``tensors``, all under way at once."""
    how = _how("reducescatter", op, None, prescale_factor, postscale_factor, process_set)
    names = group_names("grouped_reducescatter", None, tensors)
    return _scattered(tensors, names, how, compression)


def handle_average_backwards_compatibility(op: Any, average: Any) -> ReduceOp:
    """Return the reduction that ``op`` and the deprecated ``average`` ask for together.

    Raises :class:`~bpsx.errors.ConfigError` for both at once.
    """
    return checked_op("handle_average_backwards_compatibility", op, average)
