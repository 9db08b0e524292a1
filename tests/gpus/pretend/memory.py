"""Arrays on the pretend GPU."""

from __future__ import annotations

import weakref
from typing import Any

import numpy as np
import numpy.typing as npt

from gpus.pretend.driver import driver

# All memory of any array so far. It is not freed, because a stream may still use it, and a test
# should then see garbage instead of crashing.
_ever: list[npt.NDArray[Any]] = []


def _gone(memory: npt.NDArray[Any]) -> None:
    driver().forget(memory.ctypes.data)
    memory[:] = 0xA5


class PretendArray:
    """An array in memory that the pretend driver takes for the current GPU's.

    It has ``__cuda_array_interface__`` and nothing of NumPy's. When it is collected, its memory
    stops being the GPU's and is filled with 0xA5, so that code which uses it for too long computes
    garbage. ``stream``: the stream that makes its content, as in the interface; None: there is none
    to wait for.
    """

    def __init__(self, values: npt.NDArray[Any], stream: int | None = None) -> None:
        memory = np.zeros(max(values.nbytes, 1), np.uint8)
        _ever.append(memory)
        self._array: npt.NDArray[Any] = (
            memory[: values.nbytes].view(values.dtype).reshape(values.shape)
        )
        self._array[...] = values
        self.stream = stream
        driver().device_memory(self.address, memory.nbytes)
        weakref.finalize(self, _gone, memory).atexit = False

    @property
    def shape(self) -> tuple[int, ...]:
        return self._array.shape

    @property
    def dtype(self) -> np.dtype[Any]:
        return self._array.dtype

    @property
    def nbytes(self) -> int:
        return self._array.nbytes

    @property
    def address(self) -> int:
        return int(self._array.ctypes.data)

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        """Version 3. The default stream has number 1, because 0 is not allowed."""
        stream = 1 if self.stream == 0 else self.stream
        return {
            "shape": self.shape,
            "typestr": self.dtype.str,
            "data": (self.address, False),
            "strides": None,
            "version": 3,
            "stream": stream,
        }

    def get(self) -> npt.NDArray[Any]:
        """Return a copy of the content, after the queued operations of ``stream``."""
        if self.stream is not None:
            driver().sync(self.stream)
        return self._array.copy()

    def set(self, values: npt.NDArray[Any]) -> None:
        """Replace the content at once, without waiting for queued operations."""
        self._array[...] = values
