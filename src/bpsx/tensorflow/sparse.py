"""Sum of :class:`tf.IndexedSlices`: the rows of all workers."""

from __future__ import annotations

import tensorflow as tf

from bpsx.plugin import adapter
from bpsx.tensorflow.compression import Compressor
from bpsx.tensorflow.rows import counts_of, gathered


def sum_of_slices(
    slices: tf.IndexedSlices, name: str, average: bool, compression: type[Compressor]
) -> tf.IndexedSlices:
    """Return the rows of all workers with their indices, in the order of ranks.

    For an average, the values are divided by the number of workers. On the wire:
    ``name + ".counts"``, one small push_pull, then ``name + ".values.R"`` and ``".indices.R"``, a
    broadcast of each for each worker R with rows.
    """
    size = adapter.session().size
    wire, ctx = compression.compress(tf.convert_to_tensor(slices.values))
    indices = tf.cast(slices.indices, tf.int64)
    counts = counts_of(tf.shape(indices, out_type=tf.int64)[0], f"{name}.counts")
    values, where = gathered([wire, indices], [f"{name}.values", f"{name}.indices"], counts)
    total = compression.decompress(tf.concat(values, 0), ctx)
    if average:
        total = total // size if total.dtype.is_integer else total / tf.cast(size, total.dtype)
    return tf.IndexedSlices(
        total, tf.cast(tf.concat(where, 0), slices.indices.dtype), slices.dense_shape
    )
