"""Horovod's optimizer, of Keras or of TensorFlow 1."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from bpsx.plugin.adapter import checked_passes
from bpsx.plugin.horovod import ProcessSet, ReduceOp, global_process_set
from bpsx.tensorflow import v1
from bpsx.tensorflow.compression import Compression, Compressor
from bpsx.tensorflow.horovod.training import Groups, made_exchange


def DistributedOptimizer(  # noqa: N802  (Horovod's name)
    optimizer: Any,
    name: str | None = None,
    use_locking: bool = False,
    device_dense: str = "",
    device_sparse: str = "",
    compression: type[Compressor] = Compression.none,
    sparse_as_dense: bool = False,
    backward_passes_per_step: int = 1,
    op: ReduceOp = ReduceOp.Average,
    gradient_predivide_factor: float = 1.0,
    average_aggregated_gradients: bool = False,
    num_groups: int = 0,
    groups: Groups = None,
    process_set: ProcessSet = global_process_set,
    scale_local_gradients: bool = True,
) -> Any:
    """:func:`bpsx.tensorflow.DistributedOptimizer`, with Horovod's arguments.

    ``optimizer``: of Keras, for which see
    :func:`bpsx.tensorflow.keras.horovod.DistributedOptimizer`, or of ``tf.compat.v1.train``. With
    ``backward_passes_per_step`` the sums of so many passes are averaged over workers, and with
    ``average_aggregated_gradients`` also over passes. Both kinds have ``register_local_var``, for a
    variable whose gradients stay the worker's own. Other arguments are as for
    :func:`DistributedGradientTape`. Raises :class:`ConfigError`.
    """
    verb_ = "DistributedOptimizer"
    if not isinstance(optimizer, tf.compat.v1.train.Optimizer):
        # Keras takes seconds to import.
        from bpsx.tensorflow.keras.horovod import optimizer as of_keras

        return of_keras.DistributedOptimizer(
            optimizer,
            name,
            device_dense,
            device_sparse,
            compression,
            sparse_as_dense,
            gradient_predivide_factor,
            op,
            backward_passes_per_step,
            average_aggregated_gradients,
            num_groups,
            groups,
            process_set,
            scale_local_gradients,
        )
    passes = checked_passes(backward_passes_per_step, verb_)
    factor = 1 / passes if average_aggregated_gradients else 1.0
    exchange = made_exchange(
        verb_,
        compression,
        sparse_as_dense,
        op,
        gradient_predivide_factor,
        num_groups,
        groups,
        process_set,
        scale_local_gradients,
        factor=factor,
    )
    made = v1.distributed(optimizer, name, use_locking, exchange, passes)
    made.register_local_var = exchange.keep_local
    return made
