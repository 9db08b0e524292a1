"""topk on a GPU, with the wire and residual of ``cpu/topk.py``.

Six kernels encode, the first five of them in ``topk_threshold.py``:

1. A sample gives the floor: roughly the magnitude that an element needs to be among the k.
2. A pass over memory collects the elements that reach the floor, in order within a chunk, and
   counts them in bins by magnitude.
3. One block chooses the bin of the k-th largest.
4. Each block handles groups of chunks. Among the few elements collected it counts those that are
   certainly sent, and lists those in the chosen bin.
5. One block selects the k-th largest from the list, digit by digit.
6. The last kernel sends.

All blocks wait for steps of a single block, so these are short. If an unlucky sample makes step 2
collect too few elements, step 3 collects again, without a floor.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

from numba import cuda

from bpsx.kernels.codecs import DeviceCodec, amount_of, register_device
from bpsx.kernels.cuda.device import (
    THREADS,
    WARPS,
    Kernel,
    address,
    at,
    ballot,
    bits,
    block,
    blocks,
    element,
    float_of,
    grid,
    kernel,
    magnitude,
    np,
    ones,
    plus,
    refuse,
    scan,
    scan_warp,
    thread,
)
from bpsx.kernels.cuda.feedback import TILE, clearer
from bpsx.kernels.cuda.selection import CHUNK, COUNTERS, EQUAL, KNOWN, LEAST, OVERFLOW, SETS
from bpsx.kernels.cuda.topk_threshold import (
    CHUNK_COUNTERS,
    REGISTERS,
    SAMPLE,
    chooser,
    collector,
    lister,
    sampler,
    scratch_layout,
    selector,
)


@functools.cache
def _sender(wide: str, residual: bool, momentum: bool) -> Kernel:
    real, words = element(wide), element(wide)().itemsize // 4

    @kernel(addresses=6, integers=3, registers=REGISTERS)
    def send(
        e_: Any,
        m_: Any,
        wire: Any,
        scratch: Any,
        values_: Any,
        indices_: Any,
        n: int,
        chunks: int,
        count: int,
    ) -> None:
        e, m, values, indices = (
            at(e_, 0, real),
            at(m_, 0, real),
            at(values_, 0, real),
            at(indices_, 0, np.uint32),
        )
        known, sent, halves = (
            at(scratch, KNOWN, np.uint64),
            at(wire, 0, np.uint32),
            at(wire, 4 * count, np.uint32),
        )
        counters, larger = (
            at(scratch, CHUNK_COUNTERS, np.uint32),
            at(scratch, CHUNK_COUNTERS + 4 * chunks, np.uint32),
        )
        equals, room = (
            at(scratch, CHUNK_COUNTERS + 8 * chunks, np.uint32),
            cuda.shared.array(WARPS, np.int32),
        )
        t, least, equal, overflow = (
            thread(),
            known[LEAST],
            np.int64(known[EQUAL]),
            at(scratch, COUNTERS, np.int32)[OVERFLOW] != 0,
        )
        lane = t & 31
        before = np.uint32((1 << lane) - 1)
        for group in range(block(), (chunks + WARPS - 1) // WARPS, blocks()):
            chunk, mine = group * WARPS + (t >> 5), 0
            many = np.int64(counters[chunk]) if chunk < chunks else 0
            for i in range(lane, many, 32):
                key = magnitude(values[chunk * CHUNK + i])
                mine += 1 if key > least else 1 << 16 if key == least else 0
            _, mine = scan_warp(mine)
            earlier, _ = scan(mine if lane == 31 else 0, room)  # sums of earlier warps
            above, same = (
                np.int64(larger[group]) + (earlier & 0xFFFF),
                np.int64(equals[group]) + (earlier >> 16),
            )
            for first in range(0, many, 32):
                at_ = chunk * CHUNK + min(first + lane, many - 1)
                value, inside = values[at_], first + lane < many
                key = magnitude(value)
                larger_ones, same_ones = (
                    ballot(inside and key > least),
                    ballot(inside and key == least),
                )
                ties = same + ones(same_ones & before)
                if inside and (key > least or (key == least and ties < equal)):
                    to, i = (
                        above + ones(larger_ones & before) + min(ties, equal),
                        np.int64(indices[at_]),
                    )
                    sent[to] = np.uint32(i)
                    if words == 1:
                        halves[to] = np.uint32(bits(value))
                    else:  # a float64 behind an odd number of indices is aligned to 4 bytes only
                        halves[2 * to] = np.uint32(np.uint64(bits(value)) & np.uint64(0xFFFFFFFF))
                        halves[2 * to + 1] = np.uint32(np.uint64(bits(value)) >> np.uint64(32))
                    if residual:
                        e[i] = real(0)
                above += ones(larger_ones)
                same += ones(same_ones)
        if overflow:
            for i in range(block() * THREADS + t, n, blocks() * THREADS):
                if residual:
                    e[i] = real(0)
                if momentum:
                    m[i] = real(0)

    return send


@functools.cache
def _decoder(wide: str, add: bool) -> Kernel:
    real, words = element(wide), element(wide)().itemsize // 4

    @kernel(addresses=3, integers=2)
    def decode(wire: Any, out_: Any, status: Any, n: int, count: int) -> None:
        out, indices, halves, j = (
            at(out_, 0, real),
            at(wire, 0, np.uint32),
            at(wire, 4 * count, np.uint32),
            block() * THREADS + thread(),
        )
        if j < count:
            i = np.int64(indices[j])
            if i >= n or (j > 0 and np.int64(indices[j - 1]) >= i):
                at(status, 0, np.int32)[0] = -1
            else:
                raw = np.uint64(halves[words * j])
                if words == 2:
                    raw |= np.uint64(halves[words * j + words - 1]) << np.uint64(32)
                value = float_of(raw, real(0))
                out[i] = plus(out[i], value) if add else value

    return decode


class TopK(DeviceCodec):
    """Codec ``topk``; see the module."""

    name = "topk"

    def size(self, wide: str, n: int, options: Sequence[int]) -> int:
        """Return the exact size, which is fixed for each element type."""
        return amount_of(n, [*options]) * (4 + int(element(wide)().itemsize))

    def scratch(self, n: int, options: Sequence[int]) -> int:
        """Return the bytes for counters, and for values, indices and a list of all elements.

        Usually little of this memory is used.
        """
        return scratch_layout(n)[-1]

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
        """Queue the kernels, of which one passes over memory."""
        residual, momentum, count = e is not None, m is not None, amount_of(n, [*options])
        expected = SAMPLE * count / n
        rank = int(expected + 4 * math.sqrt(expected) + 4)
        g, e, m, wire, scratch = map(address, (g, e, m, wire, scratch))
        values, indices, listed = (scratch + offset for offset in scratch_layout(n)[:3])
        chunks = -(-n // CHUNK)
        wide_grid = grid(-(-chunks // WARPS))
        sampler(wide, residual, momentum).launch(
            1 + SETS,
            stream,
            g,
            e,
            m,
            scratch,
            n,
            0 if n < 4 * SAMPLE or rank > SAMPLE else rank,
            factor,
            mu,
        )
        collector(wide, residual, momentum).launch(
            wide_grid, stream, g, e, m, scratch, values, indices, n, factor, mu
        )
        chooser(wide, residual, momentum).launch(
            1, stream, g, e, m, scratch, values, indices, n, count, factor, mu
        )
        lister(wide).launch(wide_grid, stream, scratch, values, listed, chunks)
        selector(wide).launch(1, stream, scratch, values, listed, chunks)
        _sender(wide, residual, momentum).launch(
            wide_grid, stream, e, m, wire, scratch, values, indices, n, chunks, count
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
        """Queue the kernels that set or add the sent elements."""
        count = amount_of(n, [*options])
        if size != self.size(wide, n, options):
            refuse(status, stream)
            return
        if not add:
            clearer(wide).launch(grid(-(-n // TILE)), stream, address(out), n)
        _decoder(wide, add).launch(
            -(-count // THREADS), stream, address(wire), address(out), address(status), n, count
        )


register_device(TopK())
