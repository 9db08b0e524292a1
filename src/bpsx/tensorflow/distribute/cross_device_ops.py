"""What :class:`MirroredStrategy` reduces gradients with: the worker's devices by TensorFlow, then
the workers by bpsx.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import tensorflow as tf

from bpsx.plugin import adapter
from bpsx.plugin.compression_params import Params
from bpsx.tensorflow.async_training import refuse_gradients
from bpsx.tensorflow.compression import Compression, Compressor
from bpsx.tensorflow.exchange import Exchange


class _Source(NamedTuple):
    """A gradient's place in its batch, where TensorFlow does not say of which variable it is."""

    path: str


def _source(path: str, destination: Any) -> Any:
    """What a gradient is of: optimizers have them reduced to where the variable is."""
    return destination if isinstance(destination, tf.Variable) else _Source(path)


class CrossDeviceOps(tf.distribute.CrossDeviceOps):  # type: ignore[misc]
    """Reduces batches, which is how optimizers reduce gradients, over this worker's devices and
    then averages over workers; all else is the worker's own affair, as it is with ``local``.

    A *sum* over devices is averaged over workers, too: TensorFlow divides losses by the number of
    devices that it knows, which are one worker's.

    ``local``: what reduces over devices, by default :class:`tf.distribute.ReductionToOneDevice`.
    ``compression``, ``compression_params``: as for :func:`bpsx.tensorflow.DistributedOptimizer`.
    Raises :class:`~bpsx.errors.ConfigError`.
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

    @property
    def _num_between_graph_workers(self) -> int:
        """TensorFlow leaves out to reduce a value of a single device, unless several workers do
        it.
        """
        return int(adapter.session().size)

    def reduce_implementation(
        self, reduce_op: Any, per_replica_value: Any, destinations: Any, options: Any
    ) -> Any:
        """Over this worker's devices: metrics and ``strategy.reduce``, which one worker may do
        without the others.
        """
        return self._local.reduce_implementation(
            reduce_op, per_replica_value, destinations, options
        )

    def batch_reduce_implementation(
        self, reduce_op: Any, value_destination_pairs: Any, options: Any
    ) -> list[Any]:
        """Over devices and workers. All workers have to reduce the same batches."""
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
        found = self._exchange(
            ours,
            [_source(f"mirrored.{len(ours)}.{i}", where) for i, (_, where) in enumerate(pairs)],
        )
        return [
            self._local.broadcast_implementation(value, destinations)
            for value, (_, destinations) in zip(found, pairs, strict=True)
        ]

    def broadcast_implementation(self, tensor: Any, destinations: Any) -> Any:
        """To this worker's devices."""
        return self._local.broadcast_implementation(tensor, destinations)

    def _gather_implementation(
        self, per_replica_value: Any, destinations: Any, axis: int, options: Any
    ) -> Any:
        return self._local._gather_implementation(per_replica_value, destinations, axis, options)
