"""PowerSGD's steps on a GPU: a matrix's memory there, and its kernels' launches.

docs/internals/powersgd-on-gpus.md describes the way of a gradient.
"""

from __future__ import annotations

import ctypes

from bpsx.compression.factors import MadeMatrix
from bpsx.compression.gpu import places
from bpsx.kernels.cuda.low_rank import Steps
from bpsx.kernels.low_rank import ROWS
from bpsx.local._cuda import Gpu


class FactorsOnGpu:
    """Steps of one matrix whose gradients are on a GPU, where its residual is kept.

    Steps of all matrices are queued on one stream. So matrices share scratch memory, and a step
    reads the factors that the step before it has copied or computed. ``shares``: address in pinned
    memory of this worker's P; its Q is ``made.q_offset`` bytes behind. Not thread-safe: one thread
    queues.
    """

    def __init__(self, gpu: Gpu, dtype: str, made: MadeMatrix, room: int) -> None:
        """``room``: GPU address of :func:`scratch` bytes."""
        self._gpu, self._made, self._room = gpu, made, room
        self._p_bytes, self._q_bytes = (
            size * made.rank * made.wide_itemsize for size in (made.rows, made.columns)
        )
        self._e_bytes = made.rows * made.columns * made.wide_itemsize if made.feedback else 0
        lengths = (self._e_bytes, self._p_bytes, self._q_bytes, self._q_bytes, self._q_bytes)
        self._e, self._p, self._q, self._own, self._sums = places(gpu.memory, lengths)
        pinned = (made.q_offset + self._q_bytes, self._p_bytes, self._q_bytes, self._q_bytes)
        self.shares, self._p_up, self._q_up, self._sums_up = places(gpu.pinned, pinned)
        self._steps = Steps(dtype, made.feedback, made.rows, made.columns, made.rank)

    def project(self, data: int, q: int, stream: int) -> None:
        """Queue own P = M Q and its copy to :attr:`shares`.

        ``data``: the gradient's address on the GPU. ``q``: the address of Q on the host.
        """
        self._send(self._q, self._q_up, q, self._q_bytes, stream)
        with self._gpu:
            self._steps.project(stream, data, self._e, self._q, self._p)
        self._gpu.copy(self.shares, self._p, self._p_bytes, stream)

    def project_back(self, data: int, p: int, stream: int) -> None:
        """Queue own Q = M^T P and its copy to :attr:`shares`.

        ``p``: the address of the orthonormal P on the host.
        """
        self._send(self._p, self._p_up, p, self._p_bytes, stream)
        with self._gpu:
            self._steps.project_back(stream, data, self._e, self._p, self._room, self._own)
        own = self.shares + self._made.q_offset
        self._gpu.copy(own, self._own, self._q_bytes, stream)

    def restore(self, data: int, out: int, q: int, broken: bool, stream: int) -> None:
        """Queue the result, at ``out`` on the GPU, and the residual.

        ``q``: the address of the summed Q on the host. ``broken``: it is not finite.
        """
        self._send(self._sums, self._sums_up, q, self._q_bytes, stream)
        with self._gpu:
            self._steps.restore(stream, data, self._e, self._p, self._sums, self._own, out, broken)

    def fetch(self, residual: int) -> None:
        """Copy the residual to an address on the host. No step may be under way."""
        self._gpu.move(residual, self._e, self._e_bytes)

    def store(self, residual: int) -> None:
        """Copy the residual from an address on the host. No step may be under way."""
        self._gpu.move(self._e, residual, self._e_bytes)

    def _send(self, to: int, by: int, source: int, nbytes: int, stream: int) -> None:
        """Queue a copy to the GPU by way of pinned memory.

        An earlier copy from there has ended: each place is for one step, and the driver has waited
        for that step or for a later one since. It does not wait for the last one.
        """
        ctypes.memmove(by, source, nbytes)
        self._gpu.copy(to, by, nbytes, stream)


def scratch(made: MadeMatrix) -> int:
    """Return the bytes of scratch memory on the GPU: a Q for each ROWS rows."""
    return -(-made.rows // ROWS) * made.columns * made.rank * made.wide_itemsize
