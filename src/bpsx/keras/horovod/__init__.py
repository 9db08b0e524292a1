"""Horovod's names for Keras: a second name for :mod:`bpsx.tensorflow.keras.horovod`."""

from bpsx.tensorflow.keras.horovod import *  # noqa: F403
from bpsx.tensorflow.keras.horovod import __all__, __getattr__  # noqa: F401
