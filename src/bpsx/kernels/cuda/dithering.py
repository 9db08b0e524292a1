"""dithering on a GPU: see ``cpu/dithering.py``, whose wire and residual these are; of the l2 norm as far as a sum in another order allows.

Four kernels encode: the norm, and what is to be sent; the levels, as planes of bits; chunks of these, which a block each packs into scratch memory;
and these, side by side, into the wire. What needs to know of all blocks, the norm and where each chunk begins, is done by the one that is done last.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

from numba import cuda

from bpsx.kernels.codecs import N_OPTIONS, DeviceCodec, register_device
from bpsx.kernels.cpu.levels import bits_bound
from bpsx.kernels.cuda.device import (
    THREADS,
    WARPS,
    Kernel,
    address,
    at,
    block,
    blocks,
    collect_bits,
    device,
    element,
    float_of,
    forget,
    grid,
    kernel,
    last,
    magnitude,
    negative,
    np,
    plus,
    refuse,
    scan,
    shared_max,
    signed,
    sync,
    thread,
    times,
    total,
)
from bpsx.kernels.cuda.feedback import EACH, TILE, add_up, fetch, keep, place
from bpsx.kernels.cuda.levels import BITMAP, BITS, CHUNK, LASTS, LEVELS, MASK, MOST, SIGN, SIGNS, STEPS, WORDS, pack, row, unpack
from bpsx.kernels.cuda.rounding import key_of, leveller, noise, scaler, unit_of, valuer

_HEAD = 8
_SEED = N_OPTIONS - 1
#: Sums or maxima that blocks leave in scratch: as many as blocks can be. Behind them, of each chunk its length and where it begins (uint32).
_SUMS = 4096
_LENGTHS = 8 * _SUMS
#: Where in the state, seen as int32, blocks take their tickets.
_TICKET = 6


def _region(k: int) -> int:
    """The bytes of scratch that a packed chunk has."""
    return 4 * ((8 + CHUNK * bits_bound(k) + 31) // 32 + 1)


def _together(l2: bool) -> Any:
    """A function of what each thread has found: largest[0] = the largest; or the sum, which is returned."""
    @device
    def together(top: Any, squares: Any, largest: Any, room: Any) -> Any:
        if thread() == 0:
            largest[0] = 0
        squares = total(squares, room) if l2 else 0.0
        sync()
        shared_max(largest, 0, top)
        sync()
        return squares

    return together


@functools.cache
def _norm(wide: str, residual: bool, momentum: bool, l2: bool) -> Kernel:
    """The first pass."""
    real, natural_unit, linear_unit, together = element(wide), unit_of(wide, True), unit_of(wide, False), _together(l2)

    @kernel(addresses=7, integers=3, floats=2)
    def norm_of(g_: Any, e_: Any, m_: Any, wire: Any, written: Any, scratch: Any, state: Any, n: int, k: int, natural: int,
                factor: float, mu: float) -> None:
        g, e, m, sums, tops = at(g_, 0, real), at(e_, 0, real), at(m_, 0, real), at(scratch, 0, np.float64), at(scratch, 0, np.uint64)
        room = cuda.shared.array(WARPS, np.float64)
        largest = cuda.shared.array(1, np.uint64)
        ticket = cuda.shared.array(1, np.int32)
        p, left, momenta = cuda.local.array(EACH, real), cuda.local.array(EACH, real), cuda.local.array(EACH, real)
        t, f, u, top, squares = thread(), real(factor), real(mu), np.uint64(0), 0.0
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
                elif place(begin, t, j) < n:
                    top = max(top, magnitude(p[j]))
        squares = together(top, squares, largest, room)
        if t == 0 and l2:
            sums[block()] = squares
        elif t == 0:
            tops[block()] = largest[0]
        if not last(at(state, 0, np.int32), _TICKET, ticket):
            return
        top, squares = np.uint64(0), 0.0
        for i in range(t, blocks(), THREADS):
            if l2:
                squares += sums[i]
            else:
                top = max(top, tops[i])
        squares = together(top, squares, largest, room)
        norm = np.float64(math.sqrt(squares)) if l2 else np.float64(float_of(largest[0], real(0)))
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


@functools.cache
def _quantiser(wide: str, residual: bool, momentum: bool, natural: bool, bits_: int) -> Kernel:
    """The second pass: the levels as planes of bits, and what they leave in the residual."""
    real, level_of, value_of, scales_of, unit_of_ = (element(wide), leveller(natural), valuer(wide, natural), scaler(wide, natural),
                                                     unit_of(wide, natural))
    planes = BITS + bits_

    @kernel(addresses=5, integers=4, floats=1)
    def quantise(g_: Any, e_: Any, m_: Any, wire: Any, planes_: Any, n: int, k: int, seed: int, counter: int, mu: float) -> None:
        g, e, m, words = at(g_, 0, real), at(e_, 0, real), at(m_, 0, real), at(planes_, 0, np.uint32)
        p, momenta, found = cuda.local.array(EACH, real), cuda.local.array(EACH, real), cuda.local.array(planes, np.uint32)
        t, norm, u, key = thread(), at(wire, 0, np.float64)[0], real(mu), key_of(seed, counter)
        if not norm > 0:
            return
        lane, unit = t & 31, unit_of_(norm, k)
        a, b, top = scales_of(norm, k)
        for begin in range(block() * TILE, n, blocks() * TILE):
            fetch(p, e if residual else g, begin, t, n)
            if momentum and not residual:
                fetch(momenta, m, begin, t, n)
                for j in range(EACH):
                    p[j] = plus(p[j], times(u, momenta[j]))
            for j in range(EACH):
                i, level, value = place(begin, t, j), np.uint32(0), np.uint32(0)
                if i < n:
                    level = level_of(abs(p[j]), a, b, top, noise(i, key))
                if level > np.uint32(0):
                    value = np.uint32(np.uint32((level - np.uint32(1)) << np.uint32(BITS)) | np.uint32(1 << MASK))
                    value = np.uint32(value | np.uint32(np.uint32(negative(p[j])) << np.uint32(SIGNS)))
                collect_bits(value, j, found)
                if residual:
                    p[j] = plus(p[j], -signed(value_of(level, k, unit), p[j]))
            if residual:
                keep(e, p, begin, t, n)
            first = place(begin, t & ~31, 0)
            if lane < EACH and first + 32 * lane < n:
                word = (first >> 5) + lane
                for b_ in range(planes):
                    words[word // BITMAP * (planes * BITMAP) + b_ * BITMAP + word % BITMAP] = found[b_]

    return quantise


@functools.cache
def _packer() -> Kernel:
    @device
    def line_up(wire: Any, written: Any, lengths: Any, chunks: int, room: Any) -> None:
        """Where each chunk begins, and the end."""
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

    @kernel(addresses=5, integers=4, registers=64)
    def pack_all(wire: Any, written: Any, scratch: Any, planes_: Any, state: Any, n: int, k: int, bits_: int, region: int) -> None:
        lengths, chunks = at(scratch, _LENGTHS, np.uint32), (n + CHUNK - 1) // CHUNK
        buffer = cuda.shared.array(MOST, np.uint32)
        lasts = cuda.shared.array(LASTS, np.int32)
        room = cuda.shared.array(WARPS, np.int32)
        masks, words = cuda.local.array(WORDS, np.uint32), cuda.local.array(WORDS, np.uint32)
        t = thread()
        if not at(wire, 0, np.float64)[0] > 0:
            return
        for chunk in range(block(), chunks, blocks()):
            for i in range(t, region // 4, THREADS):
                buffer[i] = 0
            planes = at(planes_, chunk * (4 * BITMAP) * (BITS + bits_), np.uint32)
            length = pack(buffer, planes, min(CHUNK, n - chunk * CHUNK), k, bits_, lasts, room, masks, words)
            sync()
            packed = at(scratch, _LENGTHS + 8 * chunks + chunk * region, np.uint32)
            for i in range(t, (length + 3) // 4, THREADS):
                packed[i] = buffer[i]
            if t == 0:
                lengths[chunk] = np.uint32(length)
                at(wire, _HEAD, np.uint16)[chunk] = np.uint16(length)
            sync()
        if last(at(state, 0, np.int32), _TICKET, room):
            line_up(wire, written, lengths, chunks, room)

    return pack_all


@functools.cache
def _joiner() -> Kernel:
    """Packed chunks to where they begin in the wire: words that lie there as they should, and a few bytes before and behind."""
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
    """Where each chunk begins, by one block."""
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
        """Set or add what the levels stand for."""
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
    def unpack_all(wire: Any, out_: Any, scratch: Any, status_: Any, size_: int, n: int, k: int) -> None:
        out, of, begins, status = at(out_, 0, real), at(wire, 0, np.uint32), at(scratch, 0, np.uint32), at(status_, 0, np.int32)
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
                if unpack(of, 8 * at_, length, levels, size, k, bitmap, steps, entries, room, masks):
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
    """See the module."""

    name = "dithering"

    def size(self, wide: str, n: int, options: Sequence[int]) -> int | None:
        """What there is depends on the elements."""
        return None

    def scratch(self, n: int, options: Sequence[int]) -> int:
        """What blocks leave, chunks' lengths and places, and chunks, packed and as planes of bits."""
        chunks, k = -(-n // CHUNK), options[0]
        return _LENGTHS + chunks * (8 + _region(k) + 4 * BITMAP * (BITS + (k - 1).bit_length()))

    def encode(self, wide: str, g: Any, e: Any, m: Any, wire: Any, written: Any, scratch: Any, state: Any, options: Sequence[int], n: int,
               counter: int, factor: float, mu: float, stream: int) -> None:
        """In two passes: the norm, then the levels."""
        k, natural, l2, region, chunks = options[0], options[1], options[2], _region(options[0]), -(-n // CHUNK)
        residual, momentum, bits_ = e is not None, m is not None, (k - 1).bit_length()
        g, e, m, wire, written, scratch, state = map(address, (g, e, m, wire, written, scratch, state))
        tiles, planes = grid(-(-n // TILE)), scratch + _LENGTHS + chunks * (8 + region)
        _norm(wide, residual, momentum, bool(l2)).launch(min(tiles, _SUMS), stream, g, e, m, wire, written, scratch, state, n, k, natural, factor, mu)
        _quantiser(wide, residual, momentum, bool(natural), bits_).launch(tiles, stream, g, e, m, wire, planes, n, k, options[_SEED], counter, mu)
        _packer().launch(grid(chunks), stream, wire, written, scratch, planes, state, n, k, bits_, region)
        _joiner().launch(grid(chunks), stream, wire, scratch, chunks, region)

    def decode(self, wide: str, wire: Any, size: int, out: Any, scratch: Any, status: Any, options: Sequence[int], n: int, add: bool,
               stream: int) -> None:
        """Chunk by chunk, once it is known where each begins."""
        chunks = -(-n // CHUNK)
        wire, out, scratch, status = map(address, (wire, out, scratch, status))
        if size == _HEAD:
            _filler(wide, add).launch(grid(-(-n // TILE)), stream, wire, out, status, n)
        elif size < _HEAD + 2 * chunks:
            refuse(status, stream)
        else:
            _finder().launch(1, stream, wire, scratch, status, size, chunks)
            _unpacker(wide, bool(options[1]), add).launch(grid(chunks), stream, wire, out, scratch, status, size, n, options[0])


register_device(Dithering())
