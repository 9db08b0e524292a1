"""bpsx for Keras 3 on TensorFlow: ``import bpsx.tensorflow.keras as bps``.

``import bpsx.keras as bps`` does the same.
"""

from __future__ import annotations

from bpsx.tensorflow import (
    Average,
    Compression,
    Sum,
    barrier,
    broadcast_global_variables,
    broadcast_variables,
    get_pushpull_speed,
    init,
    join,
    local_rank,
    local_size,
    rank,
    resume,
    shutdown,
    size,
    suspend,
)
from bpsx.tensorflow.keras import callbacks, elastic
from bpsx.tensorflow.keras.optimizer import DistributedOptimizer
from bpsx.tensorflow.keras.saving import load_model
from bpsx.tensorflow.keras.verbs import broadcast, push_pull

__all__ = [
    "Average",
    "Compression",
    "DistributedOptimizer",
    "Sum",
    "barrier",
    "broadcast",
    "broadcast_global_variables",
    "broadcast_variables",
    "callbacks",
    "elastic",
    "get_pushpull_speed",
    "init",
    "join",
    "load_model",
    "local_rank",
    "local_size",
    "push_pull",
    "rank",
    "resume",
    "shutdown",
    "size",
    "suspend",
]
