"""PowerSGD's steps on a GPU: a matrix's memory there, and its kernels' launches.

docs/internals/powersgd-on-gpus.md describes the way of a gradient.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence

from bpsx.compression.factors import MadeMatrix
from bpsx.kernels.cuda.device import THREADS, WARPS, grid, only_building
from bpsx.kernels.cuda.low_rank import adder, gatherer, projector, restorer
from bpsx.kernels.low_rank import ROWS, TALL
from bpsx.local._cuda import Gpu

_ALIGNED = 256


class FactorsOnGpu:
    """What a matrix has on a GPU: the residual, and copies of its factors.

    All matrices' work is queued on one stream, so they share scratch memory, and each step finds
    what the one before has left. ``shares``: address on the host, in pinned memory, of this
    worker's P, then of its Q, whose offset is ``made.q_offset``. Not thread-safe: one thread
    queues.
    """

    def __init__(self, gpu: Gpu, dtype: str, made: MadeMatrix, room: int) -> None:
        """``room``: GPU address of :func:`scratch` bytes."""
        self._gpu, self._made, self._room = gpu, made, room
        self._sizes = (made.rows, made.columns, made.rank)
        self._p_bytes, self._q_bytes = (
            size * made.rank * made.wide_itemsize for size in self._sizes[:2]
        )
        self._e_bytes = made.rows * made.columns * made.wide_itemsize if made.feedback else 0
        lengths = (self._e_bytes, self._p_bytes, self._q_bytes, self._q_bytes, self._q_bytes)
        self._e, self._p, self._q, self._own, self._sums = _places(gpu.memory, lengths)
        pinned = (made.q_offset + self._q_bytes, self._p_bytes, self._q_bytes, self._q_bytes)
        self.shares, self._p_up, self._q_up, self._sums_up = _places(gpu.pinned, pinned)
        self._project = projector(dtype, made.feedback)
        self._gather = gatherer(dtype, made.feedback)
        self._add = adder(dtype)
        self._restore = restorer(dtype, made.feedback)

    def project(self, data: int, q: int, stream: int) -> None:
        """Queue own P = M Q and its copy to :attr:`shares`.

        ``data``: the gradient's address on the GPU. ``q``: the address of Q on the host.
        """
        self._send(self._q, self._q_up, q, self._q_bytes, stream)
        self._queue_projection(data, stream)
        self._gpu.copy(self.shares, self._p, self._p_bytes, stream)

    def project_back(self, data: int, p: int, stream: int) -> None:
        """Queue own Q = M^T P and its copy to :attr:`shares`.

        ``p``: the address of the orthonormal P on the host.
        """
        self._send(self._p, self._p_up, p, self._p_bytes, stream)
        self._queue_projection_back(data, stream)
        own = self.shares + self._made.q_offset
        self._gpu.copy(own, self._own, self._q_bytes, stream)

    def restore(self, data: int, out: int, q: int, broken: bool, stream: int) -> None:
        """Queue the result, at ``out`` on the GPU, and the residual.

        ``q``: the address of the summed Q on the host. ``broken``: it is not finite.
        """
        self._send(self._sums, self._sums_up, q, self._q_bytes, stream)
        self._queue_result(data, out, broken, stream)

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

    def _queue_projection(self, data: int, stream: int) -> None:
        with self._gpu:
            self._project.launch(
                grid(-(-self._made.rows // WARPS)),
                stream,
                data,
                self._e,
                self._q,
                self._p,
                *self._sizes,
            )

    def _queue_projection_back(self, data: int, stream: int) -> None:
        rows, columns, rank = self._sizes
        with self._gpu:
            self._gather.launch(
                _tiles(self._sizes, ROWS), stream, data, self._e, self._p, self._room, *self._sizes
            )
            self._add.launch(
                grid(-(-columns * rank // THREADS)),
                stream,
                self._room,
                self._own,
                rows,
                columns * rank,
            )

    def _queue_result(self, data: int, out: int, broken: bool, stream: int) -> None:
        with self._gpu:
            self._restore.launch(
                _tiles(self._sizes, TALL),
                stream,
                data,
                self._e,
                self._p,
                self._sums,
                self._own,
                out,
                *self._sizes,
                int(broken),
            )


def build(gpu: Gpu, dtype: str, feedback: bool) -> None:
    """Compile and load all kernels without queueing any.

    Raises any error of compiling or loading a kernel.
    """
    with gpu, only_building():
        for kernel in (projector(dtype, feedback), gatherer(dtype, feedback)):
            kernel.launch(1, gpu.aside, *[0] * 7)
        adder(dtype).launch(1, gpu.aside, *[0] * 4)
        restorer(dtype, feedback).launch(1, gpu.aside, *[0] * 10)


def scratch(made: MadeMatrix) -> int:
    """Return the bytes of scratch memory on the GPU: a Q for each ROWS rows."""
    return -(-made.rows // ROWS) * made.columns * made.rank * made.wide_itemsize


def _tiles(sizes: Sequence[int], rows: int) -> int:
    """Return the number of blocks for tiles of THREADS columns and ``rows`` rows."""
    return grid(-(-sizes[0] // rows) * -(-sizes[1] // THREADS))


def _places(allocate: Callable[[int], int], lengths: Sequence[int]) -> list[int]:
    """Allocate memory at once for parts of these bytes; return their addresses."""
    ends = [0]
    for length in lengths:
        ends.append(ends[-1] + -(-length // _ALIGNED) * _ALIGNED)
    base = allocate(ends[-1])
    return [base + at for at in ends[:-1]]
