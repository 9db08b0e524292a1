"""DistributedOptimizer, for optimizers of Keras and of TensorFlow 1."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from bpsx.plugin.compression_params import Params
from bpsx.plugin.momentum import has_momentum
from bpsx.system.tracebacks import public
from bpsx.tensorflow import v1
from bpsx.tensorflow.compression import Compression, Compressor
from bpsx.tensorflow.exchange import Exchange
from bpsx.tensorflow.reductions import averages


@public
def DistributedOptimizer(
    optimizer: Any,
    name: str | None = None,
    use_locking: bool = False,
    device_dense: str = "",
    device_sparse: str = "",
    compression: type[Compressor] = Compression.none,
    sparse_as_dense: bool = False,
    backward_passes_per_step: int = 1,
    op: Any = None,
    compression_params: Params = None,
) -> Any:
    """Return an optimizer that uses the averages (``op=Sum``: sums) of all workers' gradients.

    ``optimizer``: of Keras, for which see :func:`bpsx.tensorflow.keras.DistributedOptimizer`; or of
    ``tf.compat.v1.train``, whose ``compute_gradients`` then gives the averages. For the latter,
    ``backward_passes_per_step`` adds up the gradients of so many ``minimize`` calls; the last one
    exchanges and applies the sums. ``name`` and ``use_locking``: arguments of such optimizers.
    ``compression_params``: as for :func:`bpsx.torch.DistributedOptimizer`, one for all or by
    variables' names. ``device_dense`` and ``device_sparse`` are BytePS's and ignored.

    In asynchronous training the weights' changes travel, see ``docs/train/async.md``. Raises
    :class:`~bpsx.errors.ConfigError`.
    """
    if isinstance(optimizer, tf.compat.v1.train.Optimizer):
        exchange = Exchange(
            "DistributedOptimizer",
            averages(op, None, "DistributedOptimizer"),
            compression,
            compression_params,
            sparse_as_dense,
            has_momentum=has_momentum(optimizer, "_momentum"),
        )
        return v1.distributed(optimizer, name, use_locking, exchange, backward_passes_per_step)
    from bpsx.tensorflow.keras import optimizer as of_keras  # Keras takes seconds to import

    return of_keras.DistributedOptimizer(
        optimizer,
        name,
        device_dense,
        device_sparse,
        compression,
        sparse_as_dense,
        op,
        backward_passes_per_step,
        compression_params,
    )
