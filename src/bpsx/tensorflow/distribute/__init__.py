"""BytePS's MirroredStrategy: TensorFlow mirrors a worker's GPUs, bpsx connects the workers."""

from bpsx.tensorflow.distribute.cross_device_ops import CrossDeviceOps
from bpsx.tensorflow.distribute.mirrored_strategy import MirroredStrategy

__all__ = ["CrossDeviceOps", "MirroredStrategy"]
