"""cupy.cuda.nccl: importing it loads the pretend NCCL into the process, and has bpsx use that
one.
"""

import ctypes
import os

from bpsx.local import _cuda

_path = os.environ["PRETEND_NCCL"]
# By its path: the name alone stands for the first libnccl.so.2 that the process has loaded.
_library = ctypes.CDLL(_path, ctypes.RTLD_GLOBAL)
if not hasattr(_library, "pretend_groups"):
    raise RuntimeError(
        f"{_path} is not the pretend NCCL: a real one has no place beside the pretend driver"
    )
_cuda.NCCL = _path


def get_version() -> int:
    """NCCL's version, as 22304 for 2.23.4."""
    version = ctypes.c_int()
    assert _library.ncclGetVersion(ctypes.byref(version)) == 0
    return version.value
