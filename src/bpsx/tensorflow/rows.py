"""Gathers the rows of all workers, whose numbers of rows may differ."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import tensorflow as tf

from bpsx.plugin import adapter
from bpsx.tensorflow.primitives import copies, sums


@functools.cache
def _capacities() -> tuple[int, ...]:
    """Return all lengths to which rows are padded.

    A name is never forgotten, so it must need few shapes.
    """
    found = [0]
    while found[-1] < 2**31:
        found.append(adapter.padded_length(found[-1] + 1))
    return tuple(found)


def capacities(counts: tf.Tensor) -> tf.Tensor:
    """Return the lengths to which ``counts`` rows are padded; int64."""
    steps = tf.constant(_capacities(), tf.int64)
    return tf.gather(steps, tf.searchsorted(steps, counts))


def filled(rows: tf.Tensor, length: tf.Tensor) -> tf.Tensor:
    """Return ``rows``, padded with zeros to ``length`` rows."""
    shape = tf.shape(rows, out_type=tf.int64)
    missing = tf.maximum(length - shape[:1], 0)
    return tf.concat([rows, tf.zeros(tf.concat([missing, shape[1:]], 0), rows.dtype)], 0)


def counts_of(own: tf.Tensor, name: str) -> tf.Tensor:
    """Return every worker's ``own``, an int64 scalar or vector, by rank. One small push_pull."""
    ours = adapter.session()
    # Rows of the result belong to workers in the order of their ranks.
    ours.require_all("allgather, alltoall and push_pull of tf.IndexedSlices")
    mine = tf.one_hot(ours.rank, ours.size, dtype=tf.int64)
    mine = tf.reshape(mine, [-1, *[1] * own.shape.rank]) * own[None]
    return sums([mine], [name], average=False)[0]


def gathered(
    parts: Sequence[tf.Tensor], names: Sequence[str], counts: tf.Tensor
) -> list[list[tf.Tensor]]:
    """Return for each of ``parts`` the rows of all workers, by rank.

    ``parts``: tensors with as many rows as ``counts`` has for this worker. ``counts``: int64, of
    all workers, as :func:`counts_of` returns it. On the wire: ``name + ".R"`` for each worker R
    with rows.
    """
    ours = adapter.session()
    lengths = capacities(counts)
    found: list[list[tf.Tensor]] = [[] for _ in parts]
    for root in range(ours.size):
        own = parts if root == ours.rank else [rows[:0] for rows in parts]
        full = [filled(rows, lengths[root : root + 1]) for rows in own]
        got = _rows_of(root, counts[root], full, [f"{name}.{root}" for name in names])
        for each, rows in zip(found, got, strict=True):
            each.append(rows[: counts[root]])
    return found


def _rows_of(
    root: int, count: tf.Tensor, parts: list[tf.Tensor], names: list[str]
) -> list[tf.Tensor]:
    """Return worker ``root``'s ``parts``.

    No worker exchanges anything for a root without rows: it may have called ``join()``.
    """
    return list(
        tf.cond(
            count > 0,
            lambda: copies(parts, names, root),
            lambda: [tf.identity(part) for part in parts],
        )
    )
