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


def sum_of_slices(slices: tf.IndexedSlices, name: str, average: bool, compression: type[Compressor]) -> tf.IndexedSlices:
    """The rows of all workers with their indices, in the order of ranks; for an average their values are divided by the number of workers.

    On the wire: ``name + ".counts"``, one small push_pull, then ``name + ".values.R"`` and ``".indices.R"``, a broadcast of each for each worker R.
    """
    ours = _adapter.session()
    wire, ctx = compression.compress(tf.convert_to_tensor(slices.values))
    indices = tf.cast(slices.indices, tf.int64)
    own = tf.one_hot(ours.rank, ours.size, dtype=tf.int64) * tf.shape(indices, out_type=tf.int64)
    counts, = sums([own], [f"{name}.counts"], average=False)
    steps = tf.constant(_capacities(), tf.int64)
    lengths = tf.gather(steps, tf.searchsorted(steps, counts))
    parts, names = [], []
    for root in range(ours.size):
        length = lengths[root:root + 1]
        for what, rows in (("values", wire), ("indices", indices)):
            parts.append((root, _filled(rows, length) if root == ours.rank else _filled(rows[:0], length)))
            names.append(f"{name}.{what}.{root}")
    got = [copies([part], [known], root)[0] for (root, part), known in zip(parts, names, strict=True)]
    values = compression.decompress(tf.concat([rows[:counts[r]] for r, rows in enumerate(got[0::2])], 0), ctx)
    if average:
        values = values // ours.size if values.dtype.is_integer else values / tf.cast(ours.size, values.dtype)
    where = tf.concat([rows[:counts[r]] for r, rows in enumerate(got[1::2])], 0)
    return tf.IndexedSlices(values, tf.cast(where, slices.indices.dtype), slices.dense_shape)
