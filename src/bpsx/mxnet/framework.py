"""MXNet's NDArrays for :mod:`bpsx.plugin`."""

from __future__ import annotations

import ctypes
from typing import Any

import mxnet as mx
import numpy as np

from bpsx.plugin.framework import Framework
from bpsx.plugin.startup import sample_of

#: Kinds of devices whose memory is the host's.
HOST = ("cpu", "cpu_pinned", "cpu_shared")


class MXNet(Framework[Any]):
    """Dense NDArrays."""

    module = "bpsx.mxnet"

    def dtype_of(self, tensor: Any) -> str:
        dtype = np.dtype(tensor.dtype)
        # bfloat16 is a structured dtype with one field of that name
        return str(dtype.names[0] if dtype.names else dtype.name)

    def shape_of(self, tensor: Any) -> tuple[int, ...]:
        return tuple(tensor.shape)

    def cast(self, tensor: Any, dtype: str) -> Any:
        return tensor.astype(dtype)

    def sample(self, tensor: Any) -> bytes:
        """As the contract says; waits for the array. Empty if it is sparse or empty."""
        if tensor.stype != "default" or not tensor.size:
            return b""
        here = tensor if tensor.context.device_type in HOST else tensor.as_in_context(mx.cpu())
        here.wait_to_read()
        where = ctypes.c_void_p()
        mx.base.check_call(mx.base._LIB.MXNDArrayGetData(here.handle, ctypes.byref(where)))
        size = np.dtype(here.dtype).itemsize
        memory = (ctypes.c_char * (size * here.size)).from_address(where.value or 0)
        return sample_of(np.frombuffer(memory, f"V{size}"))


MXNET = MXNet()
