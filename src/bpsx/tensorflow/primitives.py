"""Sums and copies of lists of checked tensors, in an order that all workers share.

Eager code gets one operation for all tensors of a list, a graph one for each. In a job that goes on
without lost workers the sums of a list count as a whole, so a graph gets one more, which ends them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from bpsx.plugin import adapter
from bpsx.tensorflow import op_library, xla
from bpsx.tensorflow.op_order import in_graph
from bpsx.tensorflow.tracing import gradient_of


@functools.cache
def _no_rate() -> tf.Tensor:
    """Return the tensor that means no learning rate; it is made once.

    TensorFlow's way to make a tensor of a number ends the process if Python ends meanwhile.
    """
    with tf.device("CPU:0"):
        return tf.constant(-1.0, tf.float64)


def sums(
    tensors: Sequence[tf.Tensor],
    names: Sequence[str],
    *,
    average: bool,
    priorities: Sequence[int] | None = None,
    rate: Any = None,
    final: bool = False,
) -> list[tf.Tensor]:
    """Return the sums or averages of checked tensors.

    In eager code, where a call blocks, one operation serves all tensors. In a graph each tensor has
    an operation of its own, which starts when the tensor is complete. ``final``: ``names`` have
    been through :func:`bpsx.tensorflow.op_order.in_graph`.
    """
    known = list(names) if final else in_graph(names)
    urgent = list(priorities) if priorities is not None else [0] * len(tensors)
    if xla.is_compiled():
        return _compiled(
            tensors,
            lambda given: xla.call(given, known, urgent, rate, average, -1),
            lambda gradients: _sums_of_gradients(gradients, known, average, urgent),
        )
    if rate is None:
        rate = _no_rate() if tf.executing_eagerly() else -1.0
    else:  # tf.cast alone would first make a float32 of a number
        rate = (
            tf.constant(rate, tf.float64)
            if isinstance(rate, (int, float))
            else tf.cast(rate, tf.float64)
        )

    def of(part: slice) -> list[tf.Tensor]:
        return op_library.push_pull(list(tensors[part]), rate, known[part], urgent[part], average)

    together = len(tensors) > 1 and not tf.executing_eagerly() and adapter.initialised()
    if together and adapter.session().config.may_lose_workers:
        return op_library.push_pull_together(list(tensors), rate, known, urgent, average)
    return _begun(len(tensors), of)


def copies(
    tensors: Sequence[tf.Tensor], names: Sequence[str], root_rank: int, final: bool = False
) -> list[tf.Tensor]:
    """Return worker ``root_rank``'s checked tensors; operations as in :func:`sums`."""
    known = list(names) if final else in_graph(names)
    if xla.is_compiled():
        return _compiled(
            tensors,
            lambda given: xla.call(given, known, [0] * len(tensors), None, False, root_rank),
            lambda gradients: _copies_of_gradients(gradients, known, root_rank),
        )

    def of(part: slice) -> list[tf.Tensor]:
        return op_library.broadcast(list(tensors[part]), known[part], root_rank)

    return _begun(len(tensors), of)


def _begun(count: int, of: Callable[[slice], list[tf.Tensor]]) -> list[tf.Tensor]:
    """Return the results of ``of``: of all tensors at once in eager code, else of each."""
    if tf.executing_eagerly():
        return of(slice(None)) if count else []
    return [result for i in range(count) for result in of(slice(i, i + 1))]


def _compiled(
    tensors: Sequence[tf.Tensor],
    call: Callable[[list[tf.Tensor]], list[tf.Tensor]],
    gradient: Callable[[Sequence[Any]], list[tf.Tensor]],
) -> list[tf.Tensor]:
    """Return ``call`` of ``tensors``, with a gradient: XLA's foreign calls have none."""

    @tf.custom_gradient  # type: ignore[untyped-decorator]
    def made(*given: tf.Tensor) -> Any:
        return call(list(given)), lambda *gradients: gradient(gradients)

    return list(made(*tensors)) if tensors else []


def _sums_of_gradients(
    gradients: Sequence[Any], names: Sequence[str], average: bool, priorities: Sequence[int]
) -> list[tf.Tensor]:
    """Return the sums or averages of the gradients, under names of their own."""
    dense = [tf.convert_to_tensor(g) for g in gradients]
    return sums(dense, [f"{name}.grad" for name in names], average=average, priorities=priorities)


def _copies_of_gradients(
    gradients: Sequence[Any], names: Sequence[str], root_rank: int
) -> list[tf.Tensor]:
    """Return the gradients of copies: their sum on the root, zeros elsewhere.

    All workers' losses count, and all of them depend on the root's values.
    """
    adapter.session().require_all("the gradient of a broadcast")
    totals = _sums_of_gradients(gradients, names, False, [0] * len(names))
    if root_rank == adapter.session().rank:
        return totals
    # Zeros of a known shape need no input. Without this dependency a session would leave out the
    # exchange, for which the root waits.
    with tf.control_dependencies(totals):
        return [tf.identity(tf.zeros_like(total)) for total in totals]


@gradient_of(op_library.PUSH_PULL)
def _gradient_of_sums(op: tf.Operation, *gradients: Any) -> list[Any]:
    """Gradient of the push_pull operation. Its last input, the learning rate, has none."""
    return [
        *_sums_of_gradients(
            gradients, _texts(op), bool(op.get_attr("average")), list(op.get_attr("priorities"))
        ),
        None,
    ]


@gradient_of(op_library.BEGIN)
def _gradient_of_beginning(op: tf.Operation, pending: Any, _: Any) -> list[Any]:
    """Gradient of a tensor whose sum is ended elsewhere. The learning rate has none."""
    return [pending, None]


@gradient_of(op_library.END)
def _gradient_of_ending(op: tf.Operation, *gradients: Any) -> list[Any]:
    return [*_gradient_of_sums(op, *gradients)[:-1], *[None] * len(gradients)]


@gradient_of(op_library.BROADCAST)
def _gradient_of_copies(op: tf.Operation, *gradients: Any) -> list[tf.Tensor]:
    return _copies_of_gradients(gradients, _texts(op), op.get_attr("root_rank"))


def _texts(op: tf.Operation) -> list[str]:
    return [name.decode() if isinstance(name, bytes) else name for name in op.get_attr("names")]
