"""The sum of :class:`tf.IndexedSlices`: the rows of all workers, of which every worker may have another number."""

from __future__ import annotations

import functools

import tensorflow as tf

from bpsx import _adapter
from bpsx.tensorflow.compression import Compressor
from bpsx.tensorflow.raw import copies, sums


@functools.cache
def _capacities() -> tuple[int, ...]:
    """All lengths that rows are filled up to. A name is never forgotten, so it has to get along with few shapes."""
    found = [0]
    while found[-1] < 2**31:
        found.append(_adapter.capacity(found[-1] + 1))
    return tuple(found)


def _filled(rows: tf.Tensor, length: tf.Tensor) -> tf.Tensor:
    """``rows``, and zeros up to ``length`` of them."""
    missing = tf.maximum(length - tf.shape(rows, out_type=tf.int64)[:1], 0)
    return tf.concat([rows, tf.zeros(tf.concat([missing, tf.shape(rows, out_type=tf.int64)[1:]], 0), rows.dtype)], 0)


def _rows_of(root: int, count: tf.Tensor, parts: list[tf.Tensor], names: list[str]) -> list[tf.Tensor]:
    """What ``parts`` are on worker ``root``. Where it has no rows nobody asks it for any: it may have called ``join()``."""
    return list(tf.cond(count > 0, lambda: copies(parts, names, root), lambda: [tf.identity(part) for part in parts]))


def sum_of_slices(slices: tf.IndexedSlices, name: str, average: bool, compression: type[Compressor]) -> tf.IndexedSlices:
    """The rows of all workers with their indices, in the order of ranks; for an average their values are divided by the number of workers.

    On the wire: ``name + ".counts"``, one small push_pull, then ``name + ".values.R"`` and ``".indices.R"``, a broadcast of each for each worker R
    with rows.
    """
    ours = _adapter.session()
    wire, ctx = compression.compress(tf.convert_to_tensor(slices.values))
    indices = tf.cast(slices.indices, tf.int64)
    own = tf.one_hot(ours.rank, ours.size, dtype=tf.int64) * tf.shape(indices, out_type=tf.int64)
    counts, = sums([own], [f"{name}.counts"], average=False)
    steps = tf.constant(_capacities(), tf.int64)
    lengths = tf.gather(steps, tf.searchsorted(steps, counts))
    values: list[tf.Tensor] = []
    where: list[tf.Tensor] = []
    for root in range(ours.size):
        parts = [_filled(rows if root == ours.rank else rows[:0], lengths[root:root + 1]) for rows in (wire, indices)]
        got = _rows_of(root, counts[root], parts, [f"{name}.values.{root}", f"{name}.indices.{root}"])
        for found, rows in zip((values, where), got, strict=True):
            found.append(rows[:counts[root]])
    total = compression.decompress(tf.concat(values, 0), ctx)
    if average:
        total = total // ours.size if total.dtype.is_integer else total / tf.cast(ours.size, total.dtype)
    return tf.IndexedSlices(total, tf.cast(tf.concat(where, 0), slices.indices.dtype), slices.dense_shape)
