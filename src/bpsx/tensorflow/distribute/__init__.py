"""BytePS's MirroredStrategy: the GPUs of a worker as TensorFlow mirrors them, and bpsx between
workers.
"""

from bpsx.tensorflow.distribute.cross_device_ops import CrossDeviceOps
from bpsx.tensorflow.distribute.mirrored_strategy import MirroredStrategy

__all__ = ["CrossDeviceOps", "MirroredStrategy"]
