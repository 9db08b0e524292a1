"""Alias of :mod:`bpsx.tensorflow.keras`, under the name that BytePS also has for it."""

from bpsx.tensorflow.keras import *  # noqa: F403
from bpsx.tensorflow.keras import __all__  # noqa: F401
