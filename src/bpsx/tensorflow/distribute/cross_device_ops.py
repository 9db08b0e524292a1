"""Reductions of :class:`MirroredStrategy`: TensorFlow reduces over devices, bpsx over workers."""

from __future__ import annotations

import weakref
from typing import Any, NamedTuple

import tensorflow as tf

from bpsx.plugin import adapter
from bpsx.plugin.async_training import refuse_gradients
from bpsx.plugin.compression_params import Params
from bpsx.plugin.owners import next_ordinal
from bpsx.tensorflow.compression import Compression, Compressor
from bpsx.tensorflow.exchange import Exchange


class _Source(NamedTuple):
    """A gradient's place in its batch, for when TensorFlow does not say which variable it is of."""

    path: str


def _source(path: str, destination: Any) -> Any:
    """Return the source of a gradient: optimizers reduce gradients to their variables."""
    return destination if isinstance(destination, tf.Variable) else _Source(path)


class CrossDeviceOps(tf.distribute.CrossDeviceOps):  # type: ignore[misc]
    """Reduces batches over this worker's devices, then averages them over workers.

    Optimizers reduce gradients in batches. All other reductions stay within the worker, as with
    ``local``. A *sum* over devices is averaged over workers, too: TensorFlow divides losses by the
    number of devices that it knows, which are one worker's.

    ``local``: the reduction over devices, by default :class:`tf.distribute.ReductionToOneDevice`.
    ``compression``, ``compression_params``: as for :func:`bpsx.tensorflow.DistributedOptimizer`.
    TensorFlow does not say whose gradients it reduces. So with ``compression_params``, which keep
    state of them, each network needs a strategy of its own. Raises
    :class:`~bpsx.errors.ConfigError`.
    """

    def __init__(
        self,
        local: Any = None,
        compression: type[Compressor] = Compression.none,
        compression_params: Params = None,
    ) -> None:
        super().__init__()
        self._local = local or tf.distribute.ReductionToOneDevice()
        self._exchange = Exchange("CrossDeviceOps", True, compression, compression_params, False)
        # By session: the number of this object in the order of their first reductions.
        self._numbers: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()

    @property
    def _num_between_graph_workers(self) -> int:
        """Number of workers. If it is 1, TensorFlow does not reduce a single device's value."""
        return int(adapter.session().size)

    def reduce_implementation(
        self, reduce_op: Any, per_replica_value: Any, destinations: Any, options: Any
    ) -> Any:
        """Reduce over this worker's devices only.

        Metrics and ``strategy.reduce`` come here, which one worker may call without the others.
        """
        return self._local.reduce_implementation(
            reduce_op, per_replica_value, destinations, options
        )

    def batch_reduce_implementation(
        self, reduce_op: Any, value_destination_pairs: Any, options: Any
    ) -> list[Any]:
        """Reduce over devices and workers. All workers must reduce the same batches."""
        pairs = list(value_destination_pairs)
        reduced = self._local.batch_reduce_implementation(reduce_op, pairs, options)
        ours = [
            (
                value.values[0]
                if hasattr(value, "values") and not isinstance(value, tf.IndexedSlices)
                else value
            )
            for value in reduced
        ]
        refuse_gradients("MirroredStrategy")
        session = adapter.session()
        if session not in self._numbers:
            self._numbers[session] = next_ordinal(session, "CrossDeviceOps", lambda _: False)
        number = self._numbers[session]
        kind = f"mirrored.{number}" if number else "mirrored"
        found = self._exchange(
            ours, [_source(f"{kind}.{len(ours)}.{i}", where) for i, (_, where) in enumerate(pairs)]
        )
        return [
            self._local.broadcast_implementation(value, destinations)
            for value, (_, destinations) in zip(found, pairs, strict=True)
        ]

    def broadcast_implementation(self, tensor: Any, destinations: Any) -> Any:
        """Broadcast to this worker's devices."""
        return self._local.broadcast_implementation(tensor, destinations)

    def _gather_implementation(
        self, per_replica_value: Any, destinations: Any, axis: int, options: Any
    ) -> Any:
        return self._local._gather_implementation(per_replica_value, destinations, axis, options)
