"""DistributedOptimizer: which it is depends on the optimizer."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from bpsx.choices import Params
from bpsx.errors import ConfigError
from bpsx.tensorflow.compression import Compression, Compressor


def DistributedOptimizer(
    optimizer: Any, name: str | None = None, use_locking: bool = False, device_dense: str = "", device_sparse: str = "",
    compression: type[Compressor] = Compression.none, sparse_as_dense: bool = False, backward_passes_per_step: int = 1, op: Any = None,
    compression_params: Params = None,
) -> Any:
    """A Keras optimizer that works with the gradients of all workers: see :func:`bpsx.tensorflow.keras.DistributedOptimizer`.

    ``use_locking`` is BytePS's and ignored. Raises :class:`~bpsx.errors.ConfigError`.
    """
    from bpsx.tensorflow.keras import optimizer as of_keras  # Keras takes seconds to import

    if isinstance(optimizer, tf.compat.v1.train.Optimizer):
        raise ConfigError("DistributedOptimizer: an optimizer of tf.compat.v1.train cannot be used: use one of Keras, or push_pull() what its "
                          "compute_gradients() returns")
    return of_keras.DistributedOptimizer(optimizer, name, device_dense, device_sparse, compression, sparse_as_dense, op, backward_passes_per_step,
                                         compression_params)
