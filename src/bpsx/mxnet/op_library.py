"""Looks up the functions of MXNet's loaded C library that bpsx's operations need."""

from __future__ import annotations

import ctypes
from typing import Any

import mxnet as mx

from bpsx.mxnet import _pushes

VERSION = "1.9.1"
#: Names of functions in ``_pushes.pyx``, with their names in MXNet's library.
_FUNCTIONS = {
    "copy": "MXShallowCopyNDArray",
    "free": "MXNDArrayFree",
    "wait": "MXNDArrayWaitToRead",
    "data": "MXNDArrayGetData",
    "shape": "MXNDArrayGetShapeEx64",
    "dtype": "MXNDArrayGetDType",
    "push": "MXEnginePushAsyncND",
    "last_error": "MXGetLastError",
    # NDArray::Reorder2DefaultAsync() const
    "reorder": "_ZNK5mxnet7NDArray20Reorder2DefaultAsyncEv",
    # std::runtime_error
    "make_error": "_ZNSt13runtime_errorC1EPKc",
    "drop_error": "_ZNSt13runtime_errorD1Ev",
}


def load() -> None:
    """Look up the functions. Raises :class:`ImportError`, which names what is missing."""
    if mx.__version__ != VERSION:
        raise ImportError(
            f"bpsx.mxnet needs MXNet {VERSION}, the last release, but this is {mx.__version__}:"
            f" pip install mxnet=={VERSION}",
            name="mxnet",
        )
    library: Any = mx.base._LIB
    found = {}
    for ours, name in _FUNCTIONS.items():
        try:
            found[ours] = ctypes.cast(getattr(library, name), ctypes.c_void_p).value or 0
        except AttributeError:
            raise ImportError(
                f"bpsx.mxnet: this build of MXNet {VERSION} does not have {name}, which bpsx needs",
                name="mxnet",
            ) from None
    _pushes.load(found)
