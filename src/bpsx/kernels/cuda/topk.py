"""topk on a GPU: see ``cpu/topk.py``, whose wire and residual these are.

Four kernels. A sample says how large an element must be, roughly, to be among the k: the floor. A pass over memory collects those that are, in
order within a chunk of elements, and counts them in bins by magnitude; so the bin of the k-th largest is known. Of what was collected, few, the third
kernel counts what each chunk sends for certain and makes a list of what is in that bin, from which the k-th largest is selected, digit by digit. The
last kernel sends. What needs to know of all blocks is done by the one that is done last.

If the sample was unlucky and too few were collected, that last block collects again, with no floor.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

from numba import cuda

from bpsx.kernels.codecs import DeviceCodec, amount_of, register_device
from bpsx.kernels.cuda.device import (
    SIMULATED,
    THREADS,
    WARPS,
    Kernel,
    address,
    at,
    atomic_add,
    atomic_or,
    ballot,
    bits,
    block,
    blocks,
    device,
    element,
    fence,
    float_of,
    grid,
    kernel,
    last,
    magnitude,
    np,
    ones,
    plus,
    refuse,
    scan,
    scan_warp,
    shared_add,
    shared_max,
    sync,
    sync_warp,
    thread,
    times,
)
from bpsx.kernels.cuda.feedback import EACH, TILE, add_up, clearer, fetch, keep, place

#: Elements of the sample, how many of them lie side by side, and of a chunk, which is a warp's.
SAMPLE, RUN, CHUNK = (256 if SIMULATED else 4096), 4, (256 if SIMULATED else 2048)
_DIGIT = 11                                 # bits
_BINS = 1 << _DIGIT
#: Blocks take turns at so many sets of bins: many at one would wait for each other.
_SETS = 8
#: Scratch: bins (uint32), what all know (uint64, see below), tickets (int32), counters of chunks, what was collected, the list.
_KNOWN = 4 * _BINS * _SETS
_TICKETS, _CHUNKS = _KNOWN + 64, _KNOWN + 128
#: The floor and, as a power of two, its bins' width; the bin's lowest magnitude, what is above all its others, and the bits in which these differ;
#: the k-th largest magnitude and how many that are equal to it are sent.
_FLOOR, _SHIFT, _LOW, _END, _BITS, _LEAST, _EQUAL = range(7)
#: A ticket of each kernel; how long the list is; whether there are infinities or NaN.
_COLLECTED, _REFINED, _LISTED, _OVERFLOW = range(4)


def _places(n: int) -> tuple[int, int, int, int]:
    """Where in scratch the chunks' counters end, and indices and values of what was collected, and the list."""
    chunks = -(-n // CHUNK)
    values = _CHUNKS + -(-16 * chunks // 64) * 64
    indices = values + 8 * CHUNK * chunks
    return values, indices, indices + 4 * CHUNK * chunks, indices + 8 * CHUNK * chunks


@device
def _bin(key: Any, floor: Any, shift: Any) -> Any:
    """0 for the floor itself, for what is above it the more the larger it is, the last for all the rest."""
    return np.int64(min((key - floor + (np.uint64(1) << shift) - np.uint64(1)) >> shift, np.uint64(_BINS - 1)))


@device
def _bits_in(x: Any) -> Any:
    found = 0
    while x != np.uint64(0):
        x >>= np.uint64(1)
        found += 1
    return found


@device
def _bin_of_rank(bins: Any, rank: int, room: Any, found: Any) -> Any:
    """found = the bin with the rank-th largest, and its rank in there. The number of all that are counted. All threads come here."""
    t, each = thread(), _BINS // THREADS
    top = _BINS - each * t                  # this thread's begin below
    own = 0
    for j in range(each):
        own += np.int64(bins[top - 1 - j])
    before, counted = scan(own, room)
    if before < rank and rank <= before + own:
        j = top - 1
        while before + np.int64(bins[j]) < rank:
            before += np.int64(bins[j])
            j -= 1
        found[0], found[1] = j, rank - before
    sync()
    return counted


def _valuer(residual: bool, momentum: bool) -> Any:
    """A function that makes what is to be sent of one element, and changes nothing."""
    @device
    def value(g: Any, e: Any, m: Any, i: int, f: Any, u: Any) -> Any:
        p = g[i]
        if momentum:
            p = plus(p, times(u, plus(times(u, m[i]), p)))
        if residual:
            p = plus(p, times(f, e[i]))
        return p

    return value


@functools.cache
def _sampler(wide: str, residual: bool, momentum: bool) -> Kernel:
    real, whole, value = element(wide), 8 * element(wide)().itemsize - 1, _valuer(residual, momentum)

    @kernel(addresses=4, integers=2, floats=2)
    def sample(g_: Any, e_: Any, m_: Any, scratch: Any, n: int, rank: int, factor: float, mu: float) -> None:
        g, e, m, bins, known = at(g_, 0, real), at(e_, 0, real), at(m_, 0, real), at(scratch, 0, np.uint32), at(scratch, _KNOWN, np.uint64)
        keys = cuda.shared.array(SAMPLE, np.uint64)
        counts = cuda.shared.array(_BINS, np.uint32)
        room = cuda.shared.array(WARPS, np.int32)
        found = cuda.shared.array(2, np.int64)
        t, f, u = thread(), real(factor), real(mu)
        for i in range(t, _BINS * _SETS, THREADS):
            bins[i] = 0
        if t < 4:
            at(scratch, _TICKETS, np.int32)[t] = 0
        if rank == 0:
            if t == 0:
                known[_FLOOR], known[_SHIFT] = np.uint64(0), np.uint64(whole - _DIGIT)
            return
        stride = n // (SAMPLE // RUN)
        for i in range(SAMPLE // THREADS):
            r, j = (i * THREADS + t) // RUN, (i * THREADS + t) % RUN
            first = r * stride + (((r * 2654435769 & 0xFFFFFFFF) * (stride - RUN + 1)) >> 32)
            keys[i * THREADS + t] = magnitude(value(g, e, m, first + j, f, u))
        floor, rest = np.uint64(0), whole
        while rest > 0:
            digit = min(_DIGIT, rest)
            rest -= digit
            for i in range(t, _BINS, THREADS):
                counts[i] = 0
            sync()
            for i in range(t, SAMPLE, THREADS):
                key = keys[i] >> np.uint64(rest)
                if key >> np.uint64(digit) == floor:
                    shared_add(counts, np.int64(key & np.uint64((1 << digit) - 1)), np.uint32(1))
            sync()
            _bin_of_rank(counts, rank, room, found)
            floor, rank = (floor << np.uint64(digit)) | np.uint64(found[0]), found[1]
        most = np.uint64(0)
        for i in range(t, SAMPLE, THREADS):
            most = max(most, keys[i])
        sync()
        keys[0] = floor
        sync()
        shared_max(keys, 0, most)
        sync()
        if t == 0:
            known[_FLOOR], known[_SHIFT] = floor, np.uint64(max(_bits_in(keys[0] - floor) - _DIGIT, 0))

    return sample


def _chunk_collector(wide: str, residual: bool, momentum: bool) -> Any:
    """A function that a warp collects a chunk with."""
    real = element(wide)

    @device
    def collect(g: Any, e: Any, m: Any, scratch: Any, values: Any, indices: Any, chunk: int, n: int, floor: Any, shift: Any, f: Any, u: Any,
                anew: bool) -> Any:
        """One chunk, by a warp. ``anew``: for the first time; later gradient and momentum are added up already."""
        bins, lane = at(scratch, 4 * _BINS * (block() % _SETS), np.uint32), thread() & 31
        p, left, momenta = cuda.local.array(EACH, real), cuda.local.array(EACH, real), cuda.local.array(EACH, real)
        bound, count, same, overflow = magnitude(real(np.inf)), 0, 0, False
        for begin in range(chunk * CHUNK, min((chunk + 1) * CHUNK, n), 32 * EACH):
            if anew or not residual:
                fetch(p, g, begin, lane, n)
                if momentum:
                    fetch(momenta, m, begin, lane, n)
            if residual:
                fetch(left, e, begin, lane, n)
            if anew:
                add_up(p, left, momenta, f, u, residual, momentum)
                if momentum:
                    keep(m, momenta, begin, lane, n)
                if residual:
                    keep(e, p, begin, lane, n)
            elif residual:
                for j in range(EACH):
                    p[j] = left[j]
            elif momentum:
                for j in range(EACH):
                    p[j] = plus(p[j], times(u, momenta[j]))
            for j in range(EACH):
                i, key = place(begin, lane, j), magnitude(p[j])
                hit = i < n and key >= floor
                word = ballot(hit)
                if hit:
                    to = chunk * CHUNK + count + ones(word & np.uint32((1 << lane) - 1))
                    values[to], indices[to] = p[j], np.uint32(i)
                count += ones(word)
        sync_warp()
        for first in range(lane, count, 32):
            key = magnitude(values[chunk * CHUNK + first])
            overflow |= key >= bound
            if key == floor:
                same += 1
            else:
                atomic_add(bins, _bin(key, floor, shift), np.uint32(1))
        if same:
            atomic_add(bins, 0, np.uint32(same))
        if overflow:
            atomic_or(at(scratch, _TICKETS, np.int32), _OVERFLOW, np.int32(1))
        if lane == 0:
            at(scratch, _CHUNKS, np.uint32)[chunk] = np.uint32(count)

    return collect


@device
def _add_sets(bins: Any, counts: Any) -> None:
    """One set of bins, of all."""
    for i in range(thread(), _BINS, THREADS):
        sum_ = np.uint32(0)
        for j in range(_SETS):
            sum_ = np.uint32(sum_ + bins[j * _BINS + i])
        counts[i] = sum_
    sync()


@functools.cache
def _collector(wide: str, residual: bool, momentum: bool) -> Kernel:
    real, whole, collect = element(wide), 8 * element(wide)().itemsize - 1, _chunk_collector(wide, residual, momentum)

    @kernel(addresses=6, integers=2, floats=2, registers=64)
    def collector(g_: Any, e_: Any, m_: Any, scratch: Any, values_: Any, indices_: Any, n: int, rank: int, factor: float, mu: float) -> None:
        g, e, m, values, indices = at(g_, 0, real), at(e_, 0, real), at(m_, 0, real), at(values_, 0, real), at(indices_, 0, np.uint32)
        bins, known = at(scratch, 0, np.uint32), at(scratch, _KNOWN, np.uint64)
        counts = cuda.shared.array(_BINS, np.uint32)
        room = cuda.shared.array(WARPS, np.int32)
        found = cuda.shared.array(2, np.int64)
        t, f, u, floor, shift = thread(), real(factor), real(mu), known[_FLOOR], known[_SHIFT]
        chunks = (n + CHUNK - 1) // CHUNK
        for chunk in range(block() * WARPS + (t >> 5), chunks, blocks() * WARPS):
            collect(g, e, m, scratch, values, indices, chunk, n, floor, shift, f, u, True)
        if not last(at(scratch, _TICKETS, np.int32), _COLLECTED, room):
            return
        _add_sets(bins, counts)
        if _bin_of_rank(counts, rank, room, found) < rank:
            floor, shift = np.uint64(0), np.uint64(whole - _DIGIT)
            for i in range(t, _BINS * _SETS, THREADS):
                bins[i] = 0
            fence()
            sync()
            for chunk in range(t >> 5, chunks, WARPS):
                collect(g, e, m, scratch, values, indices, chunk, n, floor, shift, f, u, False)
            fence()
            sync()
            _add_sets(bins, counts)
            _bin_of_rank(counts, rank, room, found)
        if t == 0:
            chosen, low, width = found[0], floor, np.uint64(0)
            if chosen > 0:
                low += (np.uint64(chosen - 1) << shift) + np.uint64(1)
                width = np.uint64(whole) if chosen == _BINS - 1 else shift
            known[_LOW], known[_END], known[_BITS] = low, low + (np.uint64(1) << width), width
            known[_LEAST], known[_EQUAL] = low, np.uint64(found[1])

    return collector


@device
def _least_of(values: Any, listed: Any, length: int, known: Any, counts: Any, room: Any, found: Any) -> None:
    """The k-th largest magnitude, from the list."""
    t, low, rest, prefix, rank = thread(), known[_LOW], np.int64(known[_BITS]), np.uint64(0), np.int64(known[_EQUAL])
    while rest > 0:
        digit = min(_DIGIT, rest)
        rest -= digit
        for i in range(t, _BINS, THREADS):
            counts[i] = 0
        sync()
        for i in range(t, length, THREADS):
            key = (magnitude(values[listed[i]]) - low) >> np.uint64(rest)
            if key >> np.uint64(digit) == prefix:
                shared_add(counts, np.int64(key & np.uint64((1 << digit) - 1)), np.uint32(1))
        sync()
        _bin_of_rank(counts, rank, room, found)
        prefix, rank = (prefix << np.uint64(digit)) | np.uint64(found[0]), found[1]
    if t == 0:
        known[_LEAST], known[_EQUAL] = low + prefix, np.uint64(rank)


@device
def _line_up(counts: Any, larger: Any, equals: Any, chunks: int, room: Any) -> None:
    """From what chunks have to what those before have, of both kinds. Each warp has a part, and goes along it 32 at a time."""
    lane = thread() & 31
    part = (chunks + 32 * WARPS - 1) // (32 * WARPS) * 32
    first = (thread() >> 5) * part
    behind, sum_, same = min(first + part, chunks), 0, 0
    for begin in range(first + lane, behind, 32 * EACH):
        for j in range(EACH):
            own = counts[min(begin + 32 * j, behind - 1)] if begin + 32 * j < behind else np.uint32(0)
            sum_ += np.int64(own & np.uint32(0xFFFF))
            same += np.int64(own >> np.uint32(16))
    before, _ = scan(sum_, room)
    earlier, _ = scan(same, room)
    sum_, same = before - scan_warp(sum_)[0], earlier - scan_warp(same)[0]
    for begin in range(first, behind, 32):
        own = np.int64(counts[min(begin + lane, behind - 1)]) if begin + lane < behind else np.int64(0)
        before, all_ = scan_warp(own & 0xFFFF)
        earlier, also = scan_warp(own >> 16)
        if begin + lane < behind:
            larger[begin + lane], equals[begin + lane] = np.uint32(sum_ + before), np.uint32(same + earlier)
        sum_ += all_
        same += also


@functools.cache
def _refiner(wide: str) -> Kernel:
    real = element(wide)

    @kernel(addresses=3, integers=2)
    def refine(scratch: Any, values_: Any, listed_: Any, n: int, chunks: int) -> None:
        values, listed = at(values_, 0, real), at(listed_, 0, np.uint32)
        known, tickets, counters = at(scratch, _KNOWN, np.uint64), at(scratch, _TICKETS, np.int32), at(scratch, _CHUNKS, np.uint32)
        larger, equals = at(scratch, _CHUNKS + 4 * chunks, np.uint32), at(scratch, _CHUNKS + 8 * chunks, np.uint32)
        both = at(scratch, _CHUNKS + 12 * chunks, np.uint32)
        counts = cuda.shared.array(_BINS, np.uint32)
        room = cuda.shared.array(WARPS, np.int32)
        found = cuda.shared.array(2, np.int64)
        t, low, end, sought = thread(), known[_LOW], known[_END], known[_BITS] > 0
        lane = t & 31
        for chunk in range(block() * WARPS + (t >> 5), chunks, blocks() * WARPS):
            many, above, same = np.int64(counters[chunk]), 0, 0
            for first in range(0, many, 32):
                at_ = chunk * CHUNK + min(first + lane, many - 1)
                key, inside = magnitude(values[at_]), first + lane < many
                above += ones(ballot(inside and key >= end))
                hit = inside and key >= low and key < end
                if sought:
                    if hit:
                        listed[np.int64(atomic_add(tickets, _LISTED, np.int32(1)))] = np.uint32(at_)
                else:
                    same += ones(ballot(hit))
            if lane == 0:
                both[chunk] = np.uint32(above + (same << 16))
        if not last(tickets, _REFINED, room):
            return
        if sought:
            length = np.int64(tickets[_LISTED])
            _least_of(values, listed, length, known, counts, room, found)
            fence()
            sync()
            least = known[_LEAST]
            for i in range(t, length, THREADS):
                key, chunk = magnitude(values[listed[i]]), np.int64(listed[i]) // CHUNK
                if key > least:
                    atomic_add(both, chunk, np.uint32(1))
                elif key == least:
                    atomic_add(both, chunk, np.uint32(1 << 16))
            fence()
            sync()
        _line_up(both, larger, equals, chunks, room)

    return refine


@functools.cache
def _sender(wide: str, residual: bool, momentum: bool) -> Kernel:
    real, words = element(wide), element(wide)().itemsize // 4

    @kernel(addresses=6, integers=3)
    def send(e_: Any, m_: Any, wire: Any, scratch: Any, values_: Any, indices_: Any, n: int, chunks: int, count: int) -> None:
        e, m, values, indices = at(e_, 0, real), at(m_, 0, real), at(values_, 0, real), at(indices_, 0, np.uint32)
        known, sent, halves = at(scratch, _KNOWN, np.uint64), at(wire, 0, np.uint32), at(wire, 4 * count, np.uint32)
        counters, larger = at(scratch, _CHUNKS, np.uint32), at(scratch, _CHUNKS + 4 * chunks, np.uint32)
        equals = at(scratch, _CHUNKS + 8 * chunks, np.uint32)
        t, least, equal, overflow = thread(), known[_LEAST], np.int64(known[_EQUAL]), at(scratch, _TICKETS, np.int32)[_OVERFLOW] != 0
        lane = t & 31
        before = np.uint32((1 << lane) - 1)
        for chunk in range(block() * WARPS + (t >> 5), chunks, blocks() * WARPS):
            many, above, same = np.int64(counters[chunk]), np.int64(larger[chunk]), np.int64(equals[chunk])
            for first in range(0, many, 32):
                at_ = chunk * CHUNK + min(first + lane, many - 1)
                value, inside = values[at_], first + lane < many
                key = magnitude(value)
                larger_ones, same_ones = ballot(inside and key > least), ballot(inside and key == least)
                ties = same + ones(same_ones & before)
                if inside and (key > least or (key == least and ties < equal)):
                    to, i = above + ones(larger_ones & before) + min(ties, equal), np.int64(indices[at_])
                    sent[to] = np.uint32(i)
                    if words == 1:
                        halves[to] = np.uint32(bits(value))
                    else:       # float64 lies behind an odd number of 32-bit words as often as not
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
        out, indices, halves, j = at(out_, 0, real), at(wire, 0, np.uint32), at(wire, 4 * count, np.uint32), block() * THREADS + thread()
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
    """See the module."""

    name = "topk"

    def size(self, wide: str, n: int, options: Sequence[int]) -> int:
        """Always the same, for each element type."""
        return amount_of(n, [*options]) * (4 + int(element(wide)().itemsize))

    def scratch(self, n: int, options: Sequence[int]) -> int:
        """Counters; values and indices of all elements and a list of them, though few are used."""
        return _places(n)[-1]

    def encode(self, wide: str, g: Any, e: Any, m: Any, wire: Any, written: Any, scratch: Any, state: Any, options: Sequence[int], n: int,
               counter: int, factor: float, mu: float, stream: int) -> None:
        """In one pass over memory."""
        residual, momentum, count = e is not None, m is not None, amount_of(n, [*options])
        expected = SAMPLE * count / n
        rank = int(expected + 4 * math.sqrt(expected) + 4)
        g, e, m, wire, scratch = map(address, (g, e, m, wire, scratch))
        values, indices, listed = (scratch + offset for offset in _places(n)[:3])
        chunks = -(-n // CHUNK)
        wide_grid = grid(-(-chunks // WARPS))
        _sampler(wide, residual, momentum).launch(1, stream, g, e, m, scratch, n, 0 if n < 4 * SAMPLE or rank > SAMPLE else rank, factor, mu)
        _collector(wide, residual, momentum).launch(wide_grid, stream, g, e, m, scratch, values, indices, n, count, factor, mu)
        _refiner(wide).launch(wide_grid, stream, scratch, values, listed, n, chunks)
        _sender(wide, residual, momentum).launch(wide_grid, stream, e, m, wire, scratch, values, indices, n, chunks, count)

    def decode(self, wide: str, wire: Any, size: int, out: Any, scratch: Any, status: Any, options: Sequence[int], n: int, add: bool,
               stream: int) -> None:
        """Sets or adds what was sent."""
        count = amount_of(n, [*options])
        if size != self.size(wide, n, options):
            refuse(status, stream)
            return
        if not add:
            clearer(wide).launch(grid(-(-n // TILE)), stream, address(out), n)
        _decoder(wide, add).launch(-(-count // THREADS), stream, address(wire), address(out), address(status), n, count)


register_device(TopK())
