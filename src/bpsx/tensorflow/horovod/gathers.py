"""Horovod's allgather, broadcast and alltoall, built on broadcasts."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import tensorflow as tf

from bpsx.errors import ConfigError
from bpsx.plugin import adapter
from bpsx.plugin.adapter import checked_root
from bpsx.plugin.horovod import ProcessSet, checked_splits, global_process_set, group_names
from bpsx.tensorflow.horovod.errors import verb
from bpsx.tensorflow.horovod.job import check_process_set
from bpsx.tensorflow.horovod.names import checked_tensor, wire_name, with_gradient_times
from bpsx.tensorflow.names import names_of
from bpsx.tensorflow.ops import check_bytes
from bpsx.tensorflow.primitives import copies, sums
from bpsx.tensorflow.rows import capacities, counts_of, filled, gathered

# ---- allgather


def _gathered(tensor: tf.Tensor, wire: str) -> tf.Tensor:
    """Return the rows of all workers, by rank. Gradient: this worker's rows of the average."""
    rank = adapter.session().rank

    @tf.custom_gradient  # type: ignore[untyped-decorator]
    def made(given: tf.Tensor) -> Any:
        counts = counts_of(tf.shape(given, tf.int64)[0], f"{wire}.counts")
        (parts,) = gathered([given], [wire], counts)

        def gradient(ours: tf.Tensor) -> tf.Tensor:
            rows = filled(ours, capacities(tf.reduce_sum(counts)[None]))
            (mean,) = sums([rows], [f"{wire}.grad"], average=True)
            begin = tf.reduce_sum(counts[:rank])
            return mean[begin : begin + counts[rank]]

        return tf.concat(parts, 0), gradient

    return made(tensor)


def _rows(name: str, tensor: Any, named: str | None) -> tuple[tf.Tensor, str]:
    """Return a tensor whose number of rows may differ between workers, and its name on the wire.

    Raises :class:`ConfigError` in asynchronous training, where no sum can count the rows.
    """
    if adapter.session().config.asynchronous:
        raise ConfigError(
            f"{name}: cannot be used with BYTEPS_ENABLE_ASYNC=1, because servers add to values"
            " that they keep, so workers cannot exchange their numbers of rows; use broadcast from"
            " each worker in turn"
        )
    dense = checked_tensor(name, tensor, named, rows=True)
    wire = wire_name(name, named, dense, rows=True)
    check_bytes(dense, wire)
    return dense, wire


@verb
def allgather(
    tensor: Any,
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
) -> tf.Tensor:
    """Return the rows of all workers' ``tensor``, in the order of their ranks.

    ``tensor``: dense, of any dtype but strings, of one dimension or more. Workers may have
    different numbers of rows, also none, and must agree on the other dimensions, the dtype and
    ``name``. Differentiable; the gradient is Horovod's: this worker's rows of the average of all
    workers' gradients. Names, graphs and errors as in :func:`bpsx.tensorflow.push_pull`.
    ``ignore_name_scope`` is Horovod's and ignored.

    Raises :class:`~bpsx.errors.ConfigError` for other arguments.
    """
    check_process_set(process_set)
    return _gathered(*_rows("allgather", tensor, name))


@verb
def grouped_allgather(
    tensors: Sequence[Any],
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
) -> list[tf.Tensor]:
    """:func:`allgather` each of ``tensors``, which are called ``name.0``, ``name.1``, …"""
    check_process_set(process_set)
    names = group_names("grouped_allgather", name, tensors)
    known = [_rows("allgather", t, n) for t, n in zip(tensors, names, strict=True)]
    return [_gathered(dense, wire) for dense, wire in known]


# ---- broadcast


@verb
def broadcast(
    tensor: Any,
    root_rank: int,
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
) -> tf.Tensor:
    """Return worker ``root_rank``'s ``tensor``, bit for bit; ``tensor`` is not changed.

    Shape and dtype, any but strings, must agree. Differentiable; the gradient is Horovod's: on the
    root the average of all workers' gradients, elsewhere zero. Otherwise as :func:`allgather`.
    """
    check_process_set(process_set)
    size = adapter.session().size
    root = checked_root(root_rank, "broadcast", size)
    dense = checked_tensor("broadcast", tensor, name)
    wire = wire_name("broadcast", name, dense)
    check_bytes(dense, wire)
    return copies([with_gradient_times(dense, 1 / size)], [wire], root)[0]


@verb
def broadcast_(
    variables: Iterable[Any],
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> list[tf.Tensor]:
    """Assign worker ``root_rank``'s values to ``variables``; return their new values.

    In a v1 graph they are assigned when a returned value is computed. Raises
    :class:`~bpsx.errors.ConfigError` for anything but variables.
    """
    check_process_set(process_set)
    root = checked_root(root_rank, "broadcast_", adapter.session().size)
    listed = isinstance(variables, Iterable) and not hasattr(variables, "assign")
    given: list[Any] = list(variables) if listed else [None]
    for i, variable in enumerate(given):
        if not hasattr(variable, "assign"):
            raise ConfigError(
                f"broadcast_: variables: element {i} is not a variable; expected a list of"
                " variables"
            )
    values = [checked_tensor("broadcast_", v, name) for v in given]
    wires = [f"broadcast_.{name + '.' if name else ''}{own}" for own in names_of(given)]
    for value, wire in zip(values, wires, strict=True):
        check_bytes(value, wire)
    found = []
    for variable, copy in zip(given, copies(values, wires, root), strict=True):
        assigned = variable.assign(copy)
        after = [] if tf.executing_eagerly() or assigned is None else [assigned]
        with tf.control_dependencies(after):
            found.append(tf.identity(copy))
    return found


# ---- alltoall


def _checked_splits(tensor: tf.Tensor, splits: Any) -> tf.Tensor:
    """Return how many rows go to each worker; int64. Raises :class:`ConfigError`.

    In a graph, splits and rows that are not known yet are checked when the graph is executed.
    """
    size, rows = adapter.session().size, tensor.shape[0]
    if tf.is_tensor(splits):
        static = splits.shape
        if static.rank not in (None, 1) or not splits.dtype.is_integer:
            raise ConfigError(
                f"alltoall: splits is a tensor of shape {static} and "
                f"{splits.dtype.name}; expected one dimension of integers"
            )
        if tf.is_symbolic_tensor(splits):
            return _checked_later(tensor, tf.cast(splits, tf.int64), size)
        known = checked_splits(splits.numpy().tolist(), size, rows, splits)
    elif splits is None and rows is None:
        even = tf.fill([size], tf.shape(tensor, tf.int64)[0] // size)
        whole = tf.equal(tf.reduce_sum(even), tf.shape(tensor, tf.int64)[0])
        check = tf.debugging.Assert(
            whole, ["alltoall: the rows cannot be divided evenly among the workers; give splits"]
        )
        with tf.control_dependencies([check]):
            return tf.identity(even)
    else:
        known = checked_splits(splits, size, rows)
    return tf.constant(known, tf.int64)


def _checked_later(tensor: tf.Tensor, splits: tf.Tensor, size: int) -> tf.Tensor:
    fits = (
        tf.equal(tf.size(splits), size)
        & tf.reduce_all(splits >= 0)
        & (tf.reduce_sum(splits) <= tf.shape(tensor, tf.int64)[0])
    )
    text = (
        f"alltoall: splits must be {size} integers from 0, whose sum is at most the number of"
        " rows, not"
    )
    with tf.control_dependencies([tf.debugging.Assert(fits, [text, splits])]):
        return tf.ensure_shape(splits, [size])


def _exchanged(tensor: tf.Tensor, splits: tf.Tensor, wire: str) -> tuple[tf.Tensor, tf.Tensor]:
    """Send all rows and all splits to all workers; each worker keeps its own rows."""
    rank = adapter.session().rank

    @tf.custom_gradient  # type: ignore[untyped-decorator]
    def made(given: tf.Tensor) -> Any:
        told = counts_of(splits, f"{wire}.splits")  # rows by sender, by receiver
        (parts,) = gathered([given[: tf.reduce_sum(splits)]], [wire], tf.reduce_sum(told, 1))
        begins, received = tf.cumsum(told, axis=1, exclusive=True)[:, rank], told[:, rank]
        own = [rows[begins[r] : begins[r] + received[r]] for r, rows in enumerate(parts)]

        def gradient(ours: tf.Tensor, _: Any) -> tf.Tensor:
            back, _ = _exchanged(ours, received, f"{wire}.grad")
            return filled(back, tf.shape(given, tf.int64)[:1])

        return (tf.concat(own, 0), tf.cast(received, tf.int32)), gradient

    output, received = made(tensor)
    return output, received


@verb
def alltoall(
    tensor: Any,
    splits: Any = None,
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
) -> tf.Tensor | tuple[tf.Tensor, tf.Tensor]:
    """Return the rows that all workers have for this one, in the order of their ranks.

    ``splits``: how many rows of ``tensor`` go to each worker, as integers or a tensor of them; then
    the second result is how many rows have come from each, int32. Without ``splits`` the rows are
    divided evenly. Differentiable: gradients go back to where the rows came from. All rows travel
    to all workers. Otherwise as :func:`allgather`.
    """
    check_process_set(process_set)
    dense, wire = _rows("alltoall", tensor, name)
    output, received = _exchanged(dense, _checked_splits(dense, splits), wire)
    return output if splits is None else (output, received)
