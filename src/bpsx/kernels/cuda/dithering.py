"""dithering on a GPU, with the wire and residual of ``cpu/dithering.py``.

The l2 norm may differ, since it is a sum in another order. Three kernels encode. The first computes
the norm and the elements to send. In the second each block makes chunks of levels, as planes of
bits, and packs them into scratch memory. The third copies the packed chunks into the wire. The norm
and the chunks' starts depend on all blocks, so the last block to finish computes them.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

from numba import cuda

from bpsx.kernels.codecs import N_OPTIONS, DeviceCodec, register_device
from bpsx.kernels.cpu.entropy_code import bits_bound
from bpsx.kernels.cuda.device import (
    THREADS,
    WARPS,
    Kernel,
    address,
    at,
    block,
    blocks,
    device,
    element,
    float_of,
    forget,
    grid,
    kernel,
    largest,
    last,
    magnitude,
    negative,
    np,
    plus,
    refuse,
    scan,
    signed,
    sync,
    thread,
    times,
    total,
    transposed,
)
from bpsx.kernels.cuda.entropy_code import (
    BITMAP,
    CHUNK,
    FEW,
    LASTS,
    LEVELS,
    MOST,
    MOVES,
    PLANE,
    SIGN,
    STEPS,
    WORDS,
    packer,
    row,
    unpack,
)
from bpsx.kernels.cuda.feedback import EACH, TILE, add_up, fetch, keep, place
from bpsx.kernels.cuda.stochastic_rounding import key_of, leveller, noise, scaler, unit_of, valuer

_HEAD = 8
_SEED = N_OPTIONS - 1
#: Most blocks; each leaves a sum or maximum in scratch memory. Behind these are each chunk's length
#: and start in the wire (uint32).
_SUMS = 4096
_LENGTHS = 8 * _SUMS
#: Index of the blocks' ticket in the state, seen as int32.
_TICKET = 6
#: Registers of a thread in the second pass.
_REGISTERS = 48


def _region(k: int) -> int:
    """Return the bytes of scratch memory for a packed chunk."""
    return 4 * ((8 + CHUNK * bits_bound(k) + 31) // 32 + 1)


@functools.cache
def _norm(wide: str, residual: bool, momentum: bool, l2: bool) -> Kernel:
    """Return the kernel of the first pass."""
    real, natural_unit, linear_unit = element(wide), unit_of(wide, True), unit_of(wide, False)
    # once: ignore the elements that fetch repeats, since other threads may have updated their
    # state.
    whole, once = np.uint32 if wide == "float32" else np.uint64, residual or momentum

    @kernel(addresses=7, integers=3, floats=2)
    def norm_of(
        g_: Any,
        e_: Any,
        m_: Any,
        wire: Any,
        written: Any,
        scratch: Any,
        state: Any,
        n: int,
        k: int,
        natural: int,
        factor: float,
        mu: float,
    ) -> None:
        g, e, m, sums, tops = (
            at(g_, 0, real),
            at(e_, 0, real),
            at(m_, 0, real),
            at(scratch, 0, np.float64),
            at(scratch, 0, np.uint64),
        )
        room = cuda.shared.array(WARPS, np.float64)
        tops_ = cuda.shared.array(WARPS, np.uint64)
        ticket = cuda.shared.array(1, np.int32)
        p, left, momenta = (
            cuda.local.array(EACH, real),
            cuda.local.array(EACH, real),
            cuda.local.array(EACH, real),
        )
        t, f, u, top, squares = thread(), real(factor), real(mu), whole(0), 0.0
        for begin in range(block() * TILE, n, blocks() * TILE):
            fetch(p, g, begin, t, n)
            if residual:
                fetch(left, e, begin, t, n)
            if momentum:
                fetch(momenta, m, begin, t, n)
            add_up(p, left, momenta, f, u, residual, momentum)
            if momentum:
                keep(m, momenta, begin, t, n)
            if residual:
                keep(e, p, begin, t, n)
            for j in range(EACH):
                if l2:
                    wide_ = np.float64(p[j])
                    squares += wide_ * wide_ if place(begin, t, j) < n else 0.0
                elif not once or place(begin, t, j) < n:
                    top = max(top, whole(magnitude(p[j])))
        squares, highest_ = (
            (total(squares, room), np.uint64(0)) if l2 else (0.0, largest(np.uint64(top), tops_))
        )
        if t == 0 and l2:
            sums[block()] = squares
        elif t == 0:
            tops[block()] = highest_
        if not last(at(state, 0, np.int32), _TICKET, ticket):
            return
        highest_, squares = np.uint64(0), 0.0
        for i in range(t, blocks(), THREADS):
            if l2:
                squares += sums[i]
            else:
                highest_ = max(highest_, tops[i])
        norm = (
            np.float64(math.sqrt(total(squares, room)))
            if l2
            else np.float64(float_of(largest(highest_, tops_), real(0)))
        )
        highest = natural_unit(norm, k) if natural else times(linear_unit(norm, k), real(k))
        finite = abs(highest) < np.inf
        if t == 0:
            at(wire, 0, np.float64)[0] = norm if finite else np.nan
            at(written, 0, np.int64)[0] = _HEAD
        if not finite:
            if residual:
                forget(e, n)
            if momentum:
                forget(m, n)

    return norm_of


def _quantiser(wide: str, residual: bool, momentum: bool, natural: bool, bits_: int) -> Any:
    """Return a function that makes a tile's levels, as planes of bits, and updates the residual."""
    real, level_of, value_of, scales_of, unit_of_ = (
        element(wide),
        leveller(natural),
        valuer(wide, natural),
        scaler(wide, natural),
        unit_of(wide, natural),
    )
    planes_of = bits_ + 1
    together = 32 // EACH  # planes of a thread's elements in a word of 32 bits
    kept = (1 << together) - 1

    @device
    def quantise(
        g: Any, e: Any, m: Any, planes: Any, begin: int, n: int, k: int, norm: Any, key: Any, u: Any
    ) -> None:
        p, momenta, found = (
            cuda.local.array(EACH, real),
            cuda.local.array(EACH, real),
            cuda.local.array(EACH, np.uint32),
        )
        t, unit = thread(), unit_of_(norm, k)
        a, b, top = scales_of(norm, k)
        lane = t & 31
        fetch(p, e if residual else g, begin, t, n)
        if momentum and not residual:
            fetch(momenta, m, begin, t, n)
            for j in range(EACH):
                p[j] = plus(p[j], times(u, momenta[j]))
        for j in range(EACH):
            level = level_of(abs(p[j]), a, b, top, noise(place(begin, t, j), key))
            found[j] = np.uint32(level | np.uint32(np.uint32(negative(p[j])) << np.uint32(bits_)))
            if residual:
                p[j] = plus(p[j], -signed(value_of(level, k, unit), p[j]))
        if residual:
            keep(e, p, begin, t, n)
        j, first = lane // together, place(begin, t & ~31, 0)
        inside = n - (first + 32 * j)
        within = np.uint32(0xFFFFFFFF) if inside >= 32 else np.uint32((1 << max(inside, 0)) - 1)
        for low in range(0, planes_of, together):
            word = np.uint32(0)
            for i in range(EACH):
                some = np.uint32(np.uint32(found[i] >> np.uint32(low)) & np.uint32(kept))
                word = np.uint32(word | np.uint32(some << np.uint32(together * i)))
            word = transposed(word)
            b_ = low + lane % together
            if b_ < planes_of:
                planes[b_ * PLANE + (first >> 5) % BITMAP + j] = np.uint32(word & within)

    return quantise


@device
def _line_up(wire: Any, written: Any, lengths: Any, chunks: int, room: Any) -> None:
    """Compute the start of each chunk, and the wire's size."""
    each = (chunks + THREADS - 1) // THREADS
    first, behind = min(thread() * each, chunks), min((thread() + 1) * each, chunks)
    sum_ = 0
    for chunk in range(first, behind):
        sum_ += np.int64(lengths[chunk])
    begin, all_ = scan(sum_, room)
    begin += _HEAD + 2 * chunks
    for chunk in range(first, behind):
        lengths[chunks + chunk] = np.uint32(begin)
        begin += np.int64(lengths[chunk])
    if thread() == 0:
        at(written, 0, np.int64)[0] = _HEAD + 2 * chunks + all_


@functools.cache
def _coder(
    wide: str, residual: bool, momentum: bool, natural: bool, bits_: int, few: bool
) -> Kernel:
    """Return the kernel of the second pass: levels, the residual, and packed chunks of levels."""
    real, quantise, pack = (
        element(wide),
        _quantiser(wide, residual, momentum, natural, bits_),
        packer(bits_, few),
    )
    all_planes = PLANE * (bits_ + 1)

    @kernel(addresses=7, integers=5, floats=1, registers=_REGISTERS)
    def code(
        g_: Any,
        e_: Any,
        m_: Any,
        wire: Any,
        written: Any,
        scratch: Any,
        state: Any,
        n: int,
        k: int,
        seed: int,
        counter: int,
        region: int,
        mu: float,
    ) -> None:
        g, e, m, lengths, chunks = (
            at(g_, 0, real),
            at(e_, 0, real),
            at(m_, 0, real),
            at(scratch, _LENGTHS, np.uint32),
            (n + CHUNK - 1) // CHUNK,
        )
        buffer = cuda.shared.array(MOST, np.uint32)
        planes = cuda.shared.array(all_planes, np.uint32)
        lasts = cuda.shared.array(LASTS, np.int32)
        room = cuda.shared.array(WARPS, np.int32)
        sums = cuda.shared.array(WARPS, np.uint64)
        masks, words, moves = (
            cuda.local.array(WORDS, np.uint32),
            cuda.local.array(WORDS, np.uint32),
            cuda.local.array(MOVES, np.uint32),
        )
        t, norm = thread(), at(wire, 0, np.float64)[0]
        if not norm > 0:
            return
        for chunk in range(block(), chunks, blocks()):
            first = chunk * CHUNK
            for i in range(t, region // 4, THREADS):
                buffer[i] = 0
            for begin in range(first, min(first + CHUNK, n), TILE):
                quantise(g, e, m, planes, begin, n, k, norm, key_of(seed, counter), real(mu))
            sync()
            length = pack(
                buffer, planes, min(CHUNK, n - first), k, lasts, room, sums, masks, words, moves
            )
            sync()
            packed = at(scratch, _LENGTHS + 8 * chunks + chunk * region, np.uint32)
            for i in range(t, (length + 3) // 4, THREADS):
                packed[i] = buffer[i]
            if t == 0:
                lengths[chunk] = np.uint32(length)
                at(wire, _HEAD, np.uint16)[chunk] = np.uint16(length)
            sync()
        if last(at(state, 0, np.int32), _TICKET, room):
            _line_up(wire, written, lengths, chunks, room)

    return code


@functools.cache
def _joiner() -> Kernel:
    """Return the kernel that copies packed chunks to their starts in the wire.

    It copies aligned words, and a few bytes before and after them.
    """

    @kernel(addresses=2, integers=2)
    def join(wire: Any, scratch: Any, chunks: int, region: int) -> None:
        to, lengths, t = at(wire, 0, np.uint8), at(scratch, _LENGTHS, np.uint32), thread()
        if not at(wire, 0, np.float64)[0] > 0:
            return
        for chunk in range(block(), chunks, blocks()):
            place_ = _LENGTHS + 8 * chunks + chunk * region
            packed, of = at(scratch, place_, np.uint8), at(scratch, place_, np.uint32)
            begin, length = np.int64(lengths[chunks + chunk]), np.int64(lengths[chunk])
            head = min(-begin & 3, length)
            words = (length - head) >> 2
            aligned, behind = at(wire, begin + head, np.uint32), head + 4 * words
            for i in range(t, words, THREADS):
                both = np.uint64(of[i]) | (np.uint64(of[i + 1]) << np.uint64(32))
                aligned[i] = np.uint32((both >> np.uint64(8 * head)) & np.uint64(0xFFFFFFFF))
            if t < head:
                to[begin + t] = packed[t]
            if t < length - behind:
                to[begin + behind + t] = packed[behind + t]

    return join


@functools.cache
def _filler(wide: str, add: bool) -> Kernel:
    real = element(wide)

    @kernel(addresses=3, integers=1)
    def fill(wire: Any, out_: Any, status: Any, n: int) -> None:
        out, norm = at(out_, 0, real), at(wire, 0, np.float64)[0]
        if norm == 0 or norm != norm:
            for i in range(block() * THREADS + thread(), n, blocks() * THREADS):
                out[i] = out[i] + real(norm) if add else real(norm)
        else:
            at(status, 0, np.int32)[0] = -1

    return fill


@functools.cache
def _finder() -> Kernel:
    """Return the kernel, of one block, that finds the start of each chunk."""

    @kernel(addresses=3, integers=2)
    def find(wire: Any, scratch: Any, status: Any, size: int, chunks: int) -> None:
        lengths, begins = at(wire, _HEAD, np.uint16), at(scratch, 0, np.uint32)
        room = cuda.shared.array(WARPS, np.int32)
        each = (chunks + THREADS - 1) // THREADS
        first, behind = min(thread() * each, chunks), min((thread() + 1) * each, chunks)
        sum_ = 0
        for chunk in range(first, behind):
            sum_ += np.int64(lengths[chunk])
        begin, all_ = scan(sum_, room)
        begin += _HEAD + 2 * chunks
        for chunk in range(first, behind):
            begins[chunk] = np.uint32(begin)
            begin += np.int64(lengths[chunk])
        if thread() == 0 and _HEAD + 2 * chunks + all_ != size:
            at(status, 0, np.int32)[0] = -1

    return find


@functools.cache
def _unpacker(wide: str, natural: bool, add: bool) -> Kernel:
    real, value_of, unit_of_ = element(wide), valuer(wide, natural), unit_of(wide, natural)

    @device
    def spread(out: Any, levels: Any, begin: int, size: int, k: int, unit: Any, n: int) -> None:
        """Set or add the values of the levels."""
        t, values = thread(), cuda.local.array(EACH, real)
        for first in range(0, size, TILE):
            if add:
                fetch(values, out, begin + first, t, n)
            for j in range(EACH):
                level = np.int64(levels[row(min(place(first, t, j), CHUNK - 1))])
                value = value_of(np.uint32(level & 255), k, unit)
                value = -value if level >= SIGN else value
                values[j] = plus(values[j], value) if add else value
            keep(out, values, begin + first, t, begin + size)

    @kernel(addresses=4, integers=3)
    def unpack_all(
        wire: Any, out_: Any, scratch: Any, status_: Any, size_: int, n: int, k: int
    ) -> None:
        out, of, begins, status = (
            at(out_, 0, real),
            at(wire, 0, np.uint32),
            at(scratch, 0, np.uint32),
            at(status_, 0, np.int32),
        )
        levels = cuda.shared.array(LEVELS, np.uint16)
        bitmap = cuda.shared.array(BITMAP, np.uint32)
        steps = cuda.shared.array(STEPS, np.uint8)
        entries = cuda.shared.array(LASTS, np.int32)
        room = cuda.shared.array(WARPS, np.int32)
        masks = cuda.local.array(WORDS, np.uint32)
        norm, chunks = at(wire, 0, np.float64)[0], (n + CHUNK - 1) // CHUNK
        unit = unit_of_(norm, k)
        if not norm > 0 or not unit < np.inf:
            status[0] = -1
            return
        for chunk in range(block(), chunks, blocks()):
            length, at_ = np.int64(at(wire, _HEAD, np.uint16)[chunk]), np.int64(begins[chunk])
            begin = chunk * CHUNK
            size = min(CHUNK, n - begin)
            if at_ + length > size_:
                status[0] = -1
            elif length > 0:
                if unpack(
                    of, 8 * at_, length, levels, size, k, bitmap, steps, entries, room, masks
                ):
                    sync()
                    spread(out, levels, begin, size, k, unit, n)
                else:
                    status[0] = -1
            elif not add:
                for i in range(begin + thread(), begin + size, THREADS):
                    out[i] = real(0)
            sync()

    return unpack_all


class Dithering(DeviceCodec):
    """Codec ``dithering``; see the module."""

    name = "dithering"

    def size(self, wide: str, n: int, options: Sequence[int]) -> int | None:
        """Return None: the size depends on the elements."""
        return None

    def scratch(self, n: int, options: Sequence[int]) -> int:
        """Return the bytes for blocks' results, chunks' lengths and starts, and packed chunks."""
        return _LENGTHS + -(-n // CHUNK) * (8 + _region(options[0]))

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
        """Queue two passes, for the norm and for the levels, and the copy into the wire."""
        k, natural, l2, region, chunks = (
            options[0],
            options[1],
            options[2],
            _region(options[0]),
            -(-n // CHUNK),
        )
        residual, momentum, bits_ = e is not None, m is not None, k.bit_length()
        g, e, m, wire, written, scratch, state = map(
            address, (g, e, m, wire, written, scratch, state)
        )
        tiles = min(grid(-(-n // TILE)), _SUMS)
        _norm(wide, residual, momentum, bool(l2)).launch(
            tiles, stream, g, e, m, wire, written, scratch, state, n, k, natural, factor, mu
        )
        coder = _coder(wide, residual, momentum, bool(natural), bits_, k <= FEW)
        coder.launch(
            grid(chunks, 64),
            stream,
            g,
            e,
            m,
            wire,
            written,
            scratch,
            state,
            n,
            k,
            options[_SEED],
            counter,
            region,
            mu,
        )
        _joiner().launch(grid(chunks), stream, wire, scratch, chunks, region)

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
        """Queue a kernel that finds the chunks' starts, and one that decodes chunk by chunk."""
        chunks = -(-n // CHUNK)
        wire, out, scratch, status = map(address, (wire, out, scratch, status))
        if size == _HEAD:
            _filler(wide, add).launch(grid(-(-n // TILE)), stream, wire, out, status, n)
        elif size < _HEAD + 2 * chunks:
            refuse(status, stream)
        else:
            _finder().launch(1, stream, wire, scratch, status, size, chunks)
            _unpacker(wide, bool(options[1]), add).launch(
                grid(chunks), stream, wire, out, scratch, status, size, n, options[0]
            )


register_device(Dithering())
