"""cupy.cuda.nccl: importing it loads NCCL's library into the process."""

import ctypes

_library = ctypes.CDLL("libnccl.so.2", ctypes.RTLD_GLOBAL)


def get_version() -> int:
    """NCCL's version, as 22304 for 2.23.4."""
    version = ctypes.c_int()
    assert _library.ncclGetVersion(ctypes.byref(version)) == 0
    return version.value
