"""Sums and copies of lists of tensors that have been checked: one operation for each or for all, in an order that all workers share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from bpsx import _adapter
from bpsx.tensorflow import library
from bpsx.tensorflow.tracing import gradient_of

#: The attribute of a graph that holds its latest operation of each name.
_LATEST = "_bpsx_latest"


def in_turn(names: Sequence[str], make: Callable[[], list[tf.Tensor]]) -> list[tf.Tensor]:
    """Make an operation that comes, in its graph, after those of the same names: they have to meet their like on other workers in one order."""
    if tf.executing_eagerly():
        return make()
    graph = tf.compat.v1.get_default_graph()
    latest: dict[str, tf.Operation] | None = getattr(graph, _LATEST, None)
    if latest is None:
        latest = {}
        setattr(graph, _LATEST, latest)
    with tf.control_dependencies([latest[n] for n in names if n in latest]):
        made = make()
    if made:
        latest.update(dict.fromkeys(names, made[0].op))
    return made


def sums(tensors: Sequence[tf.Tensor], names: Sequence[str], *, average: bool, priorities: Sequence[int] | None = None,
         rate: Any = None) -> list[tf.Tensor]:
    """The sums or averages of checked tensors: one operation for all in eager code, where a call blocks; one for each in a graph, where each leaves
    when it is there."""
    urgent = list(priorities) if priorities is not None else [0] * len(tensors)
    rate = -1.0 if rate is None else tf.cast(rate, tf.float64)

    def of(part: slice) -> list[tf.Tensor]:
        known = list(names[part])
        return in_turn(known, lambda: library.push_pull(list(tensors[part]), rate, known, urgent[part], average))

    if tf.executing_eagerly():
        return of(slice(None)) if tensors else []
    return [total for i in range(len(tensors)) for total in of(slice(i, i + 1))]


def copies(tensors: Sequence[tf.Tensor], names: Sequence[str], root_rank: int) -> list[tf.Tensor]:
    """What checked tensors are on worker ``root_rank``: one operation in eager code, as in :func:`sums`."""
    def of(part: slice) -> list[tf.Tensor]:
        known = list(names[part])
        return in_turn(known, lambda: library.broadcast(list(tensors[part]), known, root_rank))

    if tf.executing_eagerly():
        return of(slice(None)) if tensors else []
    return [copy for i in range(len(tensors)) for copy in of(slice(i, i + 1))]


@gradient_of(library.PUSH_PULL)
def _gradient_of_sums(op: tf.Operation, *gradients: Any) -> list[Any]:
    """The same of the gradients, under names of their own. The last input is the learning rate."""
    names = [_text(name) + ".grad" for name in op.get_attr("names")]
    dense = [tf.convert_to_tensor(g) for g in gradients]
    return [*sums(dense, names, average=bool(op.get_attr("average")), priorities=list(op.get_attr("priorities"))), None]


@gradient_of(library.BROADCAST)
def _gradient_of_copies(op: tf.Operation, *gradients: Any) -> list[tf.Tensor]:
    """Everybody's loss counts, and all of it depends on what the root had."""
    names = [_text(name) + ".grad" for name in op.get_attr("names")]
    totals = sums([tf.convert_to_tensor(g) for g in gradients], names, average=False)
    root = op.get_attr("root_rank") == _adapter.session().rank
    return totals if root else [tf.zeros_like(total) for total in totals]


def _text(name: bytes | str) -> str:
    return name.decode() if isinstance(name, bytes) else name
