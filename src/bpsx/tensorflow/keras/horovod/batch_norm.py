"""SyncBatchNormalization: means and variances over the batches of all workers."""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf

from bpsx.errors import ConfigError
from bpsx.plugin import adapter
from bpsx.tensorflow.horovod.reductions import allreduce


@keras.saving.register_keras_serializable(package="bpsx")
class SyncBatchNormalization(keras.layers.BatchNormalization):  # type: ignore[misc]
    """:class:`keras.layers.BatchNormalization` over all workers' batches, which must have one size.

    ``fused``: False, Horovod's only choice. Raises :class:`~bpsx.errors.ConfigError` for another.
    """

    def __init__(self, fused: bool = False, **kwargs: Any) -> None:
        if fused is not False:
            raise ConfigError(f"SyncBatchNormalization: fused={fused!r}: expected False")
        super().__init__(**kwargs)

    def _moments(self, inputs: Any, mask: Any) -> tuple[Any, Any]:
        """Return the moments of this worker's batch, averaged over workers."""
        mean, variance = super()._moments(inputs, mask)
        # A lost worker would count in the moments of a step and not in its gradients.
        adapter.session().require_all("SyncBatchNormalization")
        if adapter.session().size == 1:
            return mean, variance
        own = tf.stack([mean, variance + tf.square(mean)])
        mean, of_squares = tf.unstack(allreduce(own, name=f"SyncBatchNormalization.{self.path}"))
        return mean, of_squares - tf.square(mean)
