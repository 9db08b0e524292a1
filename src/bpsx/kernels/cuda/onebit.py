"""onebit on a GPU, with the wire and residual of ``cpu/onebit.py``.

One kernel encodes, in one pass. Each block sums its magnitudes in float64. The last block to finish
adds these sums and writes the magnitude.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

from numba import cuda

from bpsx.kernels.codecs import DeviceCodec, register_device
from bpsx.kernels.cuda.device import (
    THREADS,
    WARPS,
    Kernel,
    address,
    at,
    ballot,
    block,
    blocks,
    element,
    forget,
    grid,
    kernel,
    last,
    negative,
    np,
    plus,
    refuse,
    signed,
    thread,
    total,
)
from bpsx.kernels.cuda.feedback import EACH, TILE, add_up, fetch, keep, place

_HEAD = 8
#: Most blocks; each leaves a sum in scratch memory.
_SUMS = 4096
#: Index of the blocks' ticket in the state, seen as int32.
_TICKET = 6


@functools.cache
def _encoder(wide: str, residual: bool, momentum: bool) -> Kernel:
    real = element(wide)

    @kernel(addresses=6, integers=2, floats=2)
    def encode(
        g_: Any,
        e_: Any,
        m_: Any,
        wire: Any,
        sums_: Any,
        state_: Any,
        n: int,
        scaling: int,
        factor: float,
        mu: float,
    ) -> None:
        g, e, m, words = (
            at(g_, 0, real),
            at(e_, 0, real),
            at(m_, 0, real),
            at(wire, _HEAD, np.uint32),
        )
        sums, state = at(sums_, 0, np.float64), at(state_, 0, np.float64)
        room = cuda.shared.array(WARPS, np.float64)
        ticket = cuda.shared.array(1, np.int32)
        p, left, momenta = (
            cuda.local.array(EACH, real),
            cuda.local.array(EACH, real),
            cuda.local.array(EACH, real),
        )
        t, before, f, u = thread(), real(state[0]), real(factor), real(mu)
        lane, found = t & 31, 0.0
        for begin in range(block() * TILE, n, blocks() * TILE):
            fetch(p, g, begin, t, n)
            if residual:
                fetch(left, e, begin, t, n)
                for j in range(EACH):
                    left[j] = plus(left[j], -signed(before, left[j]))
            if momentum:
                fetch(momenta, m, begin, t, n)
            add_up(p, left, momenta, f, u, residual, momentum)
            if momentum:
                keep(m, momenta, begin, t, n)
            if residual:
                keep(e, p, begin, t, n)
            word, some = np.uint32(0), real(0)
            for j in range(EACH):
                inside = place(begin, t, j) < n
                some += abs(p[j]) if inside else real(0)
                signs = ballot(inside and negative(p[j]))
                word = signs if lane == j else word
            if some < np.inf:
                found += np.float64(some)
            else:  # a float32 sum may overflow though its parts do not
                for j in range(EACH):
                    found += np.float64(abs(p[j])) if place(begin, t, j) < n else 0.0
            first = place(begin, t & ~31, 0)
            if lane < EACH and first + 32 * lane < n:
                words[(first >> 5) + lane] = word
        found = total(found, room)
        if t == 0:
            sums[block()] = found
        if not last(at(state_, 0, np.int32), _TICKET, ticket):
            return
        found = 0.0
        for i in range(t, blocks(), THREADS):
            found += sums[i]
        found = total(found, room)
        finite = abs(found) < np.inf
        if t == 0:
            magnitude = found / n if scaling else 1.0
            state[0] = magnitude if finite else 0.0
            at(wire, 0, np.float64)[0] = magnitude if finite else np.nan
        if not finite:
            if residual:
                forget(e, n)
            if momentum:
                forget(m, n)

    return encode


@functools.cache
def _decoder(wide: str, add: bool) -> Kernel:
    real = element(wide)

    @kernel(addresses=2, integers=1)
    def decode(wire: Any, out_: Any, n: int) -> None:
        out, words, size = (
            at(out_, 0, real),
            at(wire, _HEAD, np.uint32),
            real(at(wire, 0, np.float64)[0]),
        )
        t, values = thread(), cuda.local.array(EACH, real)
        for begin in range(block() * TILE, n, blocks() * TILE):
            if add:
                fetch(values, out, begin, t, n)
            for j in range(EACH):
                i = min(place(begin, t, j), n - 1)
                value = -size if (words[i >> 5] >> np.uint32(i & 31)) & np.uint32(1) else size
                values[j] = plus(values[j], value) if add else value
            keep(out, values, begin, t, n)

    return decode


class OneBit(DeviceCodec):
    """Codec ``onebit``; see the module."""

    name = "onebit"

    def size(self, wide: str, n: int, options: Sequence[int]) -> int:
        """Return the exact size, which is always the same."""
        return _HEAD + 4 * ((n + 31) // 32)

    def scratch(self, n: int, options: Sequence[int]) -> int:
        """Return the bytes for the blocks' sums."""
        return 8 * _SUMS

    def encode(
        self,
        wide: str,
        g: Any,
        e: Any,
        m: Any,
        wire: Any,
        written: Any,
        scratch: Any,
        state: Any,
        options: Sequence[int],
        n: int,
        counter: int,
        factor: float,
        mu: float,
        stream: int,
    ) -> None:
        """Queue the kernel, which passes over memory once."""
        _encoder(wide, e is not None, m is not None).launch(
            min(grid(-(-n // TILE)), _SUMS),
            stream,
            *map(address, (g, e, m, wire, scratch, state)),
            n,
            options[0],
            factor,
            mu,
        )

    def decode(
        self,
        wide: str,
        wire: Any,
        size: int,
        out: Any,
        scratch: Any,
        status: Any,
        options: Sequence[int],
        n: int,
        add: bool,
        stream: int,
    ) -> None:
        """Queue the kernel that sets or adds plus or minus the magnitude."""
        if size != self.size(wide, n, options):
            refuse(status, stream)
        else:
            _decoder(wide, add).launch(grid(-(-n // TILE)), stream, address(wire), address(out), n)


register_device(OneBit())
