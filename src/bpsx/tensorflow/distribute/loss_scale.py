"""Makes all workers agree whether a step's gradients are finite.

Keras's LossScaleOptimizer looks at gradients before they are reduced, and reduces none if one is
not finite. Workers that decided by themselves would be a step apart from then on.
"""

from __future__ import annotations

import functools
from typing import Any

import tensorflow as tf

from bpsx.tensorflow.primitives import sums
from bpsx.tensorflow.tracing import as_it_is

_NAME = "Not finite under MirroredStrategy"
#: Attribute of a strategy whose workers have to agree.
AGREES = "_bpsx_agrees"


@as_it_is
def _everywhere(strategy: Any, finite: Any) -> tf.Tensor:
    """Whether ``finite`` holds on all of this worker's devices and on all workers."""
    own = [
        tf.cast(tf.logical_not(one), tf.int32)
        for one in strategy.experimental_local_results(finite)
    ]
    (total,) = sums([tf.add_n(own)], [_NAME], average=False)
    return tf.equal(total, 0)


def agree_on_finiteness() -> None:
    """Have LossScaleOptimizer ask all workers, under a strategy that has :data:`AGREES`."""
    import keras  # takes seconds

    cls = keras.optimizers.LossScaleOptimizer
    check = cls.check_finite
    if hasattr(check, AGREES):
        return

    @functools.wraps(check)
    @as_it_is
    def check_finite(optimizer: Any, grads: Any) -> Any:
        found = check(optimizer, grads)
        context = tf.distribute.get_replica_context()
        if context is None or not hasattr(context.strategy, AGREES):
            return found
        return context.merge_call(_everywhere, args=(found,))

    setattr(check_finite, AGREES, True)
    cls.check_finite = check_finite
