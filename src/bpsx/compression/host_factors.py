"""PowerSGD's steps by the host's kernels, for a gradient on a GPU for which there are no others."""

from __future__ import annotations

import ctypes as C
from typing import TYPE_CHECKING

import numpy as np

from bpsx.compression.factors import MadeMatrix
from bpsx.kernels.low_rank import CHUNK

if TYPE_CHECKING:
    from bpsx.local._cuda import Gpu

_POINTER, _NUMBER = C.c_void_p, C.c_int64
_PROJECT = C.CFUNCTYPE(None, *[_POINTER] * 5, *[_NUMBER] * 6)
_RESTORE = C.CFUNCTYPE(None, *[_POINTER] * 7, *[_NUMBER] * 7)


class FactorsByHost:
    """As :class:`bpsx.compression.gpu_factors.FactorsOnGpu`, with copies of the whole gradient.

    The thread that calls it waits for them, and for the work.
    """

    def __init__(self, gpu: Gpu, made: MadeMatrix) -> None:
        self._gpu, self._made = gpu, made
        self._sizes = (made.rows, made.columns, made.rank)
        self._q_bytes = made.columns * made.rank * made.wide_itemsize
        self._data = np.empty(made.nbytes, np.uint8)
        self._e = np.zeros(
            made.rows * made.columns * made.wide_itemsize if made.feedback else 0, np.uint8
        )
        self._own, self._p = np.empty(made.q_offset + self._q_bytes, np.uint8), 0
        self._scratch = np.empty(made.scratch, np.uint8)
        self.shares = self._own.ctypes.data

    def project(self, data: int, q: int, stream: int) -> None:
        """Set own P = M Q."""
        self._gpu.move(self._data.ctypes.data, data, self._made.nbytes)
        given = (self._data, self._e, q, self.shares, self._scratch, *self._sizes)
        _call(_PROJECT, self._made.steps.project, *given, 0, self._made.rows, self._made.feedback)

    def project_back(self, data: int, p: int, stream: int) -> None:
        """Set own Q = M^T P."""
        own, self._p = self.shares + self._made.q_offset, p
        given = (self._data, self._e, p, own, self._scratch, *self._sizes)
        for begin in range(0, self._made.columns, CHUNK):
            end = min(begin + CHUNK, self._made.columns)
            _call(_PROJECT, self._made.steps.project_back, *given, begin, end, self._made.feedback)

    def restore(self, data: int, out: int, q: int, broken: bool, stream: int) -> None:
        """Set the result, at ``out`` on the GPU, and the residual."""
        own = self.shares + self._made.q_offset
        given = (self._data, self._e, self._p, q, own, self._data, self._scratch, *self._sizes)
        span = (0, self._made.rows, self._made.feedback, int(broken))
        _call(_RESTORE, self._made.steps.restore, *given, *span)
        self._gpu.move(out, self._data.ctypes.data, self._made.nbytes)

    def fetch(self, residual: int) -> None:
        """Copy the residual to an address."""
        C.memmove(residual, self._e.ctypes.data, self._e.nbytes)

    def store(self, residual: int) -> None:
        """Copy the residual from an address."""
        C.memmove(self._e.ctypes.data, residual, self._e.nbytes)


def _call(kind: type, address: int, *given: np.ndarray | int) -> None:
    """Call a C function, without the GIL."""
    kind(address)(*(g.ctypes.data if isinstance(g, np.ndarray) else g for g in given))
