"""A partition whose codec's functions are called as the core and lanes call them, in benchmarks."""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from bench.report import BenchError
from bpsx.kernels.codecs import N_OPTIONS, N_STATE, SLACK, codec, load_codec

#: Elements of float32 of each partition, and their bytes.
N = 1_024_000
BYTES = 4 * N
_MU = 0.9
_P, _I = ctypes.c_void_p, ctypes.c_int64
_ENCODE = ctypes.CFUNCTYPE(_I, *[_P] * 7, _I, ctypes.c_uint64, ctypes.c_double, ctypes.c_double)
_DECODE = ctypes.CFUNCTYPE(_I, _P, _I, *[_P] * 3, _I, _I)


class Partition:
    """Elements, and the state that the core keeps of them."""

    def __init__(
        self,
        compressor: str,
        options: Mapping[str, Any],
        elements: np.ndarray,
        residual: bool,
        momentum: bool = False,
    ) -> None:
        made = codec(compressor)
        numbers = made.numbers(made.options(options))
        self._compiled = load_codec(compressor, "float32", residual, momentum)
        self._encode, self._decode = _ENCODE(self._compiled.encode), _DECODE(self._compiled.decode)
        self._options = np.array([*numbers, *[0] * (N_OPTIONS - 1 - len(numbers)), 1], np.int64)
        self.elements, self.wire = elements, np.zeros(made.capacity(N, numbers) + SLACK, np.uint8)
        self._residual, self._momentum = np.zeros(N, np.float32), np.zeros(N, np.float32)
        scratch = np.zeros(made.scratch(N, numbers) + 64, np.uint8)
        self._scratch = scratch[-scratch.ctypes.data % 64 :]
        self._state, self._counter = np.zeros(N_STATE), 0

    def encode(self) -> int:
        """Encode the elements into :attr:`wire`. Returns the number of bytes written."""
        gradient, residual, momentum = self.elements, self._residual, self._momentum
        kept = [array.ctypes.data for array in (gradient, residual, momentum)]
        return int(self._encode(*kept, *self.coding(), _MU))

    def coding(self) -> tuple[Any, ...]:
        """Count an encoding; return the arguments that encoders and summers share, in order."""
        self._counter += 1
        arrays = self.wire, self._scratch, self._state, self._options
        return *(array.ctypes.data for array in arrays), N, self._counter, 1.0

    @property
    def residual_at(self) -> int:
        """The residual's address."""
        return int(self._residual.ctypes.data)

    @property
    def options_at(self) -> int:
        """The options' address."""
        return int(self._options.ctypes.data)

    def decode(self, wire: np.ndarray, size: int, add: bool = False) -> None:
        """Decode ``size`` bytes of ``wire`` into the elements, or add them.

        Raises :class:`BenchError` if the codec refuses them.
        """
        to, scratch, options = (
            array.ctypes.data for array in (self.elements, self._scratch, self._options)
        )
        if self._decode(wire.ctypes.data, size, to, scratch, options, N, add):
            raise BenchError("a codec rejects its own encoded bytes")


def copies(many: int) -> Callable[[], object]:
    """Return a function that copies a partition with memcpy: the next one of ``many``, in turn."""
    pairs = [(np.empty(N, np.float32), np.ones(N, np.float32)) for _ in range(many)]
    turns = itertools.cycle(
        [(target.ctypes.data, source.ctypes.data, BYTES) for target, source in pairs]
    )

    def copy(keep: object = pairs) -> None:
        """Copy the next partition; ``keep`` holds the memory that the addresses point to."""
        ctypes.memmove(*next(turns))

    return copy
