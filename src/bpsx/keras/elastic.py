"""Alias of :mod:`bpsx.tensorflow.keras.elastic`."""

from bpsx.tensorflow.keras.elastic import *  # noqa: F403
from bpsx.tensorflow.keras.elastic import __all__  # noqa: F401
