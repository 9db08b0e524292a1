"""TensorFlow's MirroredStrategy, in every worker of a job."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from bpsx.tensorflow.distribute.cross_device_ops import CrossDeviceOps
from bpsx.tensorflow.distribute.loss_scale import AGREES, agree_on_finiteness


class MirroredStrategy(tf.distribute.MirroredStrategy):  # type: ignore[misc]
    """Mirrors variables on this worker's ``devices`` (by default its GPUs) and keeps workers equal.

    Gradients are reduced over devices, then averaged over workers. Variables must be made equal
    first: :func:`bpsx.tensorflow.broadcast_variables`, or its Keras callback.
    ``num_replicas_in_sync`` counts this worker's devices. ``cross_device_ops``: the object that
    reduces, by default a :class:`CrossDeviceOps`; any other reduces in this worker only, and is
    wrapped. Under mixed_float16, a gradient that is not finite on one device of one worker makes
    all workers leave out the step.
    """

    def __init__(self, devices: Sequence[str] | None = None, cross_device_ops: Any = None) -> None:
        ours = (
            cross_device_ops
            if isinstance(cross_device_ops, CrossDeviceOps)
            else CrossDeviceOps(cross_device_ops)
        )
        super().__init__(devices=devices, cross_device_ops=ours)
        setattr(self, AGREES, True)
        agree_on_finiteness()
