"""Horovod's names for Keras: an alias of :mod:`bpsx.tensorflow.keras.horovod`."""

from bpsx.tensorflow.keras.horovod import *  # noqa: F403
from bpsx.tensorflow.keras.horovod import __all__  # noqa: F401
