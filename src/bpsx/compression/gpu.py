"""Compression of tensors on a GPU: a partition's memory there, and its kernels' launches.

kernels/codecs.py describes the kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import numpy as np

from bpsx.compression.spec import CompressionSpec, Made
from bpsx.dtypes import BY_NAME
from bpsx.kernels.codecs import N_STATE, SLACK, device_codec
from bpsx.kernels.cuda.convert import conversion
from bpsx.kernels.cuda.device import grid, only_building, refuse
from bpsx.kernels.cuda.feedback import TILE
from bpsx.kernels.cuda.momentum import N_STATE as N_TICKETS
from bpsx.kernels.cuda.momentum import nesterov
from bpsx.local._cuda import Gpu
from bpsx.local.devices import OnGpu

_ALIGNED = 256
#: Bytes of the shortest encoding: a norm of zero (float64) alone, which a separate kernel decodes.
_SHORTEST = 8
_STATE_BYTES = 8 * N_STATE
#: Bytes written (int64) and status (int32); core/gpu/copies.pxd has the same.
_WORDS_BYTES = 16


class Coder:
    """Encoder and decoder of one partition.

    All partitions' kernels of a direction run on one stream and so share scratch memory.

    ``wire`` and ``words`` are addresses on the GPU. ``size`` is the encoded size in bytes, or None
    if it varies. Not thread-safe: one thread encodes and decodes.
    """

    def __init__(
        self, gpu: Gpu, given: CompressionSpec, dtype: str, made: Made, rooms: tuple[int, int]
    ) -> None:
        """``rooms``: GPU addresses of scratch memory, one to encode in and one to decode in.

        Each has :func:`room` bytes.
        """
        self._gpu, self._codec, self._made, self._rooms = (
            gpu,
            device_codec(given.compressor),
            made,
            rooms,
        )
        self._wide = "float64" if made.wide_itemsize == 8 else "float32"
        self._conversion = conversion(dtype)
        self._mu = made.mu
        wide, n = made.n * made.wide_itemsize, made.n
        lengths = [
            wide if made.residual else 0,
            wide if made.momentum else 0,
            _STATE_BYTES,
            _WORDS_BYTES,
            made.capacity + SLACK,
        ]
        self._residual, self._momentum, self._state, self.words, self.wire = places(
            gpu.memory, lengths
        )
        self._lengths = lengths
        self.size = self._codec.size(self._wide, n, made.options)

    def build(self, stream: int) -> None:
        """Compile and load all kernels of :meth:`encode` and :meth:`decode` without queueing any.

        Raises any error of compiling or loading a kernel.
        """
        made = self._made
        with only_building():
            self.encode(self.wire, 1, 1.0, stream)
            for size in (
                0,
                min(_SHORTEST, made.capacity),
                made.capacity if self.size is None else self.size,
            ):
                self.decode(self.wire, size, stream)

    def encode(self, data: int, counter: int, factor: float, stream: int) -> None:
        """Queue kernels that encode the elements at address ``data`` into :attr:`wire`."""
        made, room = self._made, self._rooms[0]
        with self._gpu:
            if self._conversion is not None:
                self._conversion.widen.launch(grid(-(-made.n // TILE)), stream, data, room, made.n)
                data, room = room, room + _aside(made)
            self._codec.encode(
                self._wide,
                data,
                self._residual if made.residual else None,
                self._momentum if made.momentum else None,
                self.wire,
                self.words,
                room,
                self._state,
                made.options,
                made.n,
                counter,
                factor,
                self._mu,
                stream,
            )

    def decode(self, out: int, size: int, stream: int) -> None:
        """Queue kernels that decode ``size`` bytes at :attr:`wire` to address ``out``."""
        made, room = self._made, self._rooms[1]
        with self._gpu:
            to = out
            if self._conversion is not None:
                to, room = room, room + _aside(made)
            self._codec.decode(
                self._wide,
                self.wire,
                size,
                to,
                room,
                self.words + 8,
                made.options,
                made.n,
                False,
                stream,
            )
            if self._conversion is not None:
                self._conversion.narrow.launch(grid(-(-made.n // TILE)), stream, to, out, made.n)

    def fetch(self, residual: int, momentum: int, state: int) -> None:
        """Copy the state kept between rounds to addresses on the host.

        No kernel of the partition may be under way.
        """
        for host, here, length in self._kept(residual, momentum, state):
            self._gpu.move(host, here, length)

    def store(self, residual: int, momentum: int, state: int) -> None:
        """Copy the state kept between rounds from addresses on the host.

        No kernel of the partition may be under way.
        """
        for host, here, length in self._kept(residual, momentum, state):
            self._gpu.move(here, host, length)

    def _kept(self, *hosts: int) -> Iterable[tuple[int, int, int]]:
        return zip(hosts, (self._residual, self._momentum, self._state), self._lengths)


class MomentumOnGpu:
    """:class:`bpsx.compression.spec.MomentumSpec` of a tensor on a GPU.

    Its kernel runs on a separate stream, between the user's stream and the copies. The constructor
    raises any error of compiling or loading the kernel.
    """

    def __init__(self, gpu: Gpu, dtype: str, n: int) -> None:
        self._gpu, self._n, self._dtype = gpu, n, "float64" if dtype == "float64" else "float32"
        self._nbytes, itemsize = n * np.dtype(self._dtype).itemsize, BY_NAME[dtype].itemsize
        self._kernel = nesterov(dtype)
        with gpu, only_building():
            self._kernel.launch(1, gpu.aside, *[0] * 4, 0, 0.0)
        self._kept, self._out, self._state = (
            gpu.memory(self._nbytes),
            gpu.memory(n * itemsize),
            gpu.memory(4 * N_TICKETS),
        )

    def taken(self) -> np.ndarray:
        """Return a copy of the momentum. No kernel may be under way."""
        found = np.empty(self._n, self._dtype)
        self._gpu.move(found.ctypes.data, self._kept, self._nbytes)
        return found

    def put(self, kept: np.ndarray | float) -> None:
        """Set the momentum."""
        given = np.empty(self._n, self._dtype)
        given[:] = kept
        self._gpu.move(self._kept, given.ctypes.data, self._nbytes)

    def add(self, address: int, mu: float, on: OnGpu) -> tuple[int, OnGpu]:
        """Queue the kernel that adds momentum to the gradient at ``address``.

        Returns the address of the elements to send, and their location with the event after which
        they are complete.
        """
        gpu, aside = self._gpu, self._gpu.aside
        gpu.wait(aside, (on.moment or gpu.moment(on.streams(), "momentum")).event)
        if self._n:
            with gpu:
                self._kernel.launch(
                    grid(-(-self._n // TILE)),
                    aside,
                    address,
                    self._kept,
                    self._out,
                    self._state,
                    self._n,
                    mu,
                )
        return self._out, on._replace(moment=gpu.moment(aside, "momentum"))


def check_launch(gpu: Gpu) -> None:
    """Launch a kernel and check its output.

    Raises any error that keeps the GPU from running kernels.
    """
    place, answer = gpu.memory(4), np.zeros(1, np.int32)
    with gpu:
        refuse(place, gpu.aside)
    gpu.settle(gpu.aside)
    gpu.move(answer.ctypes.data, place, answer.nbytes)
    if answer[0] != -1:
        raise RuntimeError(f"a test kernel wrote {answer[0]} instead of -1")


def places(allocate: Callable[[int], int], lengths: Sequence[int]) -> list[int]:
    """Allocate memory at once for parts of these bytes; return their addresses."""
    ends = [0]
    for length in lengths:
        ends.append(ends[-1] + -(-length // _ALIGNED) * _ALIGNED)
    base = allocate(ends[-1])
    return [base + at for at in ends[:-1]]


def _aside(made: Made) -> int:
    """Bytes for widened elements."""
    return -(-made.n * made.wide_itemsize // _ALIGNED) * _ALIGNED


def room(given: CompressionSpec, made: Sequence[Made]) -> int:
    """Return the bytes of scratch memory that the largest of these partitions needs."""
    codec = device_codec(given.compressor)
    return max(_aside(one) + codec.scratch(one.n, one.options) for one in made)
