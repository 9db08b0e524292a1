"""BytePS's second name for :mod:`bpsx.tensorflow.keras`."""

from bpsx.tensorflow.keras import *  # noqa: F403
from bpsx.tensorflow.keras import __all__  # noqa: F401
