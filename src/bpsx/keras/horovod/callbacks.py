"""Horovod's callbacks: an alias of :mod:`bpsx.tensorflow.keras.horovod.callbacks`."""

from bpsx.tensorflow.keras.horovod.callbacks import *  # noqa: F403
from bpsx.tensorflow.keras.horovod.callbacks import __all__  # noqa: F401
