"""topk on a GPU: see ``cpu/topk.py``, whose wire and residual these are.

Six kernels. A sample says how large an element must be, roughly, to be among the k: the floor. A pass over memory collects those that are, in order
within a chunk of elements, and counts them in bins by magnitude; one block chooses the bin of the k-th largest. Of what was collected, few, the next
kernel counts what each group of chunks, a block's, sends for certain and makes a list of what is in that bin; from that one block selects the k-th
largest, digit by digit. The last kernel sends. What a single block does is kept short, for all wait for it.

If the sample was unlucky and too few were collected, the block that chooses collects again, with no floor.
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
    largest,
    lowest,
    magnitude,
    np,
    ones,
    plus,
    refuse,
    scan,
    scan_warp,
    shared_add,
    sync,
    sync_warp,
    thread,
    times,
)
from bpsx.kernels.cuda.feedback import EACH, TILE, add_up, clearer, fetch, keep, place

#: Elements of the sample, how many of them lie side by side, and of a chunk, which is a warp's.
SAMPLE, RUN, CHUNK = (256 if SIMULATED else 4096), 4, (256 if SIMULATED else 2048)
#: Rows of 32 elements that a warp looks at before it collects, a thread each.
_ROWS = min(32, CHUNK // 32)
#: Of these, how many are loaded before the first is looked at, if there is nothing to be added up.
_PLAIN = min(16, _ROWS)
#: With more that are large enough in a row, in the mean, it collects row by row.
_DENSE = 8
_DIGIT = 11                                 # bits
_BINS = 1 << _DIGIT
#: Blocks take turns at so many sets of bins: many at one would wait for each other.
_SETS = 4
#: Registers: of the pass over memory; of what has a block for each group of chunks, few for all these to run at once.
_PASS, _REGISTERS = 64, 32
#: The floor is known well enough when no more of the sample are as near to it. A thread puts so many of the list into the block's memory.
_NEAR, _PART = 8, 4
_LIST = _PART * THREADS
#: Scratch: bins (uint32), what all know (uint64, see below), two counters (int32), counters of chunks and groups, what was collected, the list.
_KNOWN = 4 * _BINS * _SETS
_COUNTERS, _CHUNKS = _KNOWN + 64, _KNOWN + 128
#: The floor and, as a power of two, its bins' width; the bin's lowest magnitude, what is above all its others, and the bits in which these differ;
#: the k-th largest magnitude and how many that are equal to it are sent.
_FLOOR, _SHIFT, _LOW, _END, _BITS, _LEAST, _EQUAL = range(7)
#: How long the list is; whether there are infinities or NaN.
_LISTED, _OVERFLOW = range(2)


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


def _valuer(residual: bool, momentum: bool, anew: bool) -> Any:
    """A function that makes what is to be sent of one element, and changes nothing. Not ``anew``: gradient and momentum are added up already."""
    @device
    def value(g: Any, e: Any, m: Any, i: int, f: Any, u: Any) -> Any:
        if residual and not anew:
            return e[i]
        p = g[i]
        if momentum:
            p = plus(p, times(u, plus(times(u, m[i]), p) if anew else m[i]))
        if residual:
            p = plus(p, times(f, e[i]))
        return p

    return value


@functools.cache
def _sampler(wide: str, residual: bool, momentum: bool) -> Kernel:
    """The first block's work; the others empty the bins."""
    real, whole, value, each = element(wide), 8 * element(wide)().itemsize - 1, _valuer(residual, momentum, True), SAMPLE // THREADS

    @kernel(addresses=4, integers=2, floats=2)
    def sample(g_: Any, e_: Any, m_: Any, scratch: Any, n: int, rank: int, factor: float, mu: float) -> None:
        g, e, m, bins, known = at(g_, 0, real), at(e_, 0, real), at(m_, 0, real), at(scratch, 0, np.uint32), at(scratch, _KNOWN, np.uint64)
        counts = cuda.shared.array(_BINS, np.uint32)
        room = cuda.shared.array(WARPS, np.int32)
        tops = cuda.shared.array(WARPS, np.uint64)
        found = cuda.shared.array(2, np.int64)
        keys = cuda.local.array(each, np.uint64)
        t, f, u = thread(), real(factor), real(mu)
        if block() > 0:
            for i in range(_BINS // THREADS):
                bins[(block() - 1) * _BINS + i * THREADS + t] = 0
            return
        if t < 2:
            at(scratch, _COUNTERS, np.int32)[t] = 0
        if rank == 0:
            if t == 0:
                known[_FLOOR], known[_SHIFT] = np.uint64(0), np.uint64(whole - _DIGIT)
            return
        stride, most = n // (SAMPLE // RUN), np.uint64(0)
        for i in range(each):
            r, j = (i * THREADS + t) // RUN, (i * THREADS + t) % RUN
            first = r * stride + (((r * 2654435769 & 0xFFFFFFFF) * (stride - RUN + 1)) >> 32)
            keys[i] = magnitude(value(g, e, m, first + j, f, u))
        for i in range(each):
            most = max(most, keys[i])
        most = largest(most, tops)
        floor, rest, near = np.uint64(0), whole, SAMPLE
        while rest > 0 and near > _NEAR:
            digit = min(_DIGIT, rest)
            rest -= digit
            for i in range(_BINS // THREADS):
                counts[i * THREADS + t] = 0
            sync()
            for i in range(each):
                key = keys[i] >> np.uint64(rest)
                if key >> np.uint64(digit) == floor:
                    shared_add(counts, np.int64(key & np.uint64((1 << digit) - 1)), np.uint32(1))
            sync()
            _bin_of_rank(counts, rank, room, found)
            floor, rank, near = (floor << np.uint64(digit)) | np.uint64(found[0]), found[1], np.int64(counts[found[0]])
            sync()
        if t == 0:
            floor = min(floor << np.uint64(rest), magnitude(real(np.inf)))
            known[_FLOOR], known[_SHIFT] = floor, np.uint64(max(_bits_in(most - floor) - _DIGIT, 0))

    return sample


@device
def _tally(bins: Any, key: Any, floor: Any, shift: Any) -> Any:
    """Count one that was collected, or say that it is the floor itself: of those there may be many, for one place in memory."""
    if key == floor:
        return 1
    atomic_add(bins, _bin(key, floor, shift), np.uint32(1))
    return 0


def _row_collector(wide: str, residual: bool, momentum: bool) -> Any:
    """A function that a warp collects elements with row by row: what is at least the floor. It returns how many."""
    real, value = element(wide), _valuer(residual, momentum, False)

    @device
    def collect_rows(g: Any, e: Any, m: Any, scratch: Any, values: Any, indices: Any, to: int, begin: int, end: int, floor: Any, shift: Any,
                     f: Any, u: Any) -> Any:
        bins, lane = at(scratch, 4 * _BINS * (block() % _SETS), np.uint32), thread() & 31
        bound, count, same, overflow = magnitude(real(np.inf)), 0, 0, False
        for row in range(begin, end, 32):
            x = value(g, e, m, min(row + lane, end - 1), f, u)
            key = magnitude(x)
            hit = row + lane < end and key >= floor
            word = ballot(hit)
            if hit:
                place_ = to + count + ones(word & np.uint32((1 << lane) - 1))
                values[place_], indices[place_] = x, np.uint32(row + lane)
                same += _tally(bins, key, floor, shift)
                overflow |= key >= bound
            count += ones(word)
        same = scan_warp(same)[1]
        if same and lane == 0:
            atomic_add(bins, 0, np.uint32(same))
        if overflow:
            atomic_or(at(scratch, _COUNTERS, np.int32), _OVERFLOW, np.int32(1))
        return count

    return collect_rows


def _chunk_collector(wide: str, residual: bool, momentum: bool) -> Any:
    """A function that a warp collects a chunk with.

    It finds first which elements are large enough, as bits of a word for each row, which is a thread's; that alone is done for all of them.
    """
    real, value, collect_rows = element(wide), _valuer(residual, momentum, False), _row_collector(wide, residual, momentum)
    plain = not residual and not momentum

    @device
    def large_plain(g: Any, begin: int, n: int, bound: Any) -> Any:
        """The thread's word: more loads on their way at once."""
        lane, word, p = thread() & 31, np.uint32(0), cuda.local.array(_PLAIN, real)
        for row in range(0, _ROWS, _PLAIN):
            first = begin + 32 * row + lane
            if first + 32 * (_PLAIN - 1) < n:
                for j in range(_PLAIN):
                    p[j] = g[first + 32 * j]
            else:
                for j in range(_PLAIN):
                    p[j] = g[min(first + 32 * j, n - 1)]
            for j in range(_PLAIN):
                hits = ballot(not abs(p[j]) < bound)       # NaN, too
                word = hits if lane == row + j else word
        return word

    @device
    def large(g: Any, e: Any, m: Any, begin: int, n: int, bound: Any, f: Any, u: Any) -> Any:
        """The thread's word, once gradient, momentum and residual are added up."""
        lane, word = thread() & 31, np.uint32(0)
        p, left, momenta = cuda.local.array(EACH, real), cuda.local.array(EACH, real), cuda.local.array(EACH, real)
        for row in range(0, _ROWS, EACH):
            first = begin + 32 * row
            fetch(p, g, first, lane, n)
            if momentum:
                fetch(momenta, m, first, lane, n)
            if residual:
                fetch(left, e, first, lane, n)
            add_up(p, left, momenta, f, u, residual, momentum)
            if momentum:
                keep(m, momenta, first, lane, n)
            if residual:
                keep(e, p, first, lane, n)
            for j in range(EACH):
                hits = ballot(not abs(p[j]) < bound)       # NaN, too
                word = hits if lane == row + j else word
        return word

    @device
    def inside(word: Any, begin: int, n: int) -> Any:
        """The word without what is behind the last element."""
        left = n - (begin + 32 * (thread() & 31))
        return word if left >= 32 else np.uint32(word & np.uint32((1 << max(left, 0)) - 1))

    @device
    def collect(g: Any, e: Any, m: Any, scratch: Any, values: Any, indices: Any, chunk: int, n: int, floor: Any, shift: Any, f: Any, u: Any) -> Any:
        """How many were."""
        bins, lane, bound = at(scratch, 4 * _BINS * (block() % _SETS), np.uint32), thread() & 31, float_of(floor, f)
        infinity, count, same, overflow = magnitude(real(np.inf)), 0, 0, False
        for begin in range(chunk * CHUNK, min((chunk + 1) * CHUNK, n), 32 * _ROWS):
            word = inside(large_plain(g, begin, n, bound) if plain else large(g, e, m, begin, n, bound, f, u), begin, n)
            sync_warp()
            before, many = scan_warp(ones(word))
            to, first = chunk * CHUNK + count, begin + 32 * lane
            count += many
            if many > _DENSE * _ROWS:
                collect_rows(g, e, m, scratch, values, indices, to, begin, min(begin + 32 * _ROWS, n), floor, shift, f, u)
                word = np.uint32(0)
            to += before
            while word != np.uint32(0):
                i = first + lowest(word)
                x = value(g, e, m, i, f, u)
                values[to], indices[to] = x, np.uint32(i)
                same += _tally(bins, magnitude(x), floor, shift)
                overflow |= magnitude(x) >= infinity
                word = np.uint32(word & np.uint32(word - np.uint32(1)))
                to += 1
        same = scan_warp(same)[1]
        if same and lane == 0:
            atomic_add(bins, 0, np.uint32(same))
        if overflow:
            atomic_or(at(scratch, _COUNTERS, np.int32), _OVERFLOW, np.int32(1))
        return count

    return collect


@device
def _add_sets(bins: Any, counts: Any) -> None:
    """One set of bins, of all."""
    for i in range(_BINS // THREADS):
        sum_ = np.uint32(0)
        for j in range(_SETS):
            sum_ = np.uint32(sum_ + bins[j * _BINS + i * THREADS + thread()])
        counts[i * THREADS + thread()] = sum_
    sync()


@functools.cache
def _collector(wide: str, residual: bool, momentum: bool) -> Kernel:
    real, collect = element(wide), _chunk_collector(wide, residual, momentum)

    @kernel(addresses=6, integers=1, floats=2, registers=_PASS)
    def collector(g_: Any, e_: Any, m_: Any, scratch: Any, values_: Any, indices_: Any, n: int, factor: float, mu: float) -> None:
        g, e, m, values, indices = at(g_, 0, real), at(e_, 0, real), at(m_, 0, real), at(values_, 0, real), at(indices_, 0, np.uint32)
        known, counters, f, u = at(scratch, _KNOWN, np.uint64), at(scratch, _CHUNKS, np.uint32), real(factor), real(mu)
        for chunk in range(block() * WARPS + (thread() >> 5), (n + CHUNK - 1) // CHUNK, blocks() * WARPS):
            count = collect(g, e, m, scratch, values, indices, chunk, n, known[_FLOOR], known[_SHIFT], f, u)
            if thread() & 31 == 0:
                counters[chunk] = np.uint32(count)

    return collector


@functools.cache
def _chooser(wide: str, residual: bool, momentum: bool) -> Kernel:
    """By one block, the bin of the k-th largest."""
    real, whole, collect_rows = element(wide), 8 * element(wide)().itemsize - 1, _row_collector(wide, residual, momentum)

    @kernel(addresses=6, integers=2, floats=2)
    def choose(g_: Any, e_: Any, m_: Any, scratch: Any, values_: Any, indices_: Any, n: int, rank: int, factor: float, mu: float) -> None:
        g, e, m, values, indices = at(g_, 0, real), at(e_, 0, real), at(m_, 0, real), at(values_, 0, real), at(indices_, 0, np.uint32)
        bins, known, counters = at(scratch, 0, np.uint32), at(scratch, _KNOWN, np.uint64), at(scratch, _CHUNKS, np.uint32)
        counts = cuda.shared.array(_BINS, np.uint32)
        room = cuda.shared.array(WARPS, np.int32)
        found = cuda.shared.array(2, np.int64)
        t, floor, shift = thread(), known[_FLOOR], known[_SHIFT]
        _add_sets(bins, counts)
        if _bin_of_rank(counts, rank, room, found) < rank:
            floor, shift = np.uint64(0), np.uint64(whole - _DIGIT)
            for i in range(_BINS * _SETS // THREADS):
                bins[i * THREADS + t] = 0
            fence()
            sync()
            for chunk in range(t >> 5, (n + CHUNK - 1) // CHUNK, WARPS):
                begin = chunk * CHUNK
                count = collect_rows(g, e, m, scratch, values, indices, begin, begin, min(begin + CHUNK, n), floor, shift, real(factor), real(mu))
                if t & 31 == 0:
                    counters[chunk] = np.uint32(count)
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

    return choose


@device
def _least_of(values: Any, listed: Any, length: int, known: Any, near: Any, counts: Any, room: Any, found: Any) -> None:
    """The k-th largest magnitude, from the list, and ``near``: how much larger than the bin's lowest the first ones of the list are."""
    t, low, rest, prefix, rank = thread(), known[_LOW], np.int64(known[_BITS]), np.uint64(0), np.int64(known[_EQUAL])
    places = cuda.local.array(_PART, np.uint32)
    for j in range(_PART):
        places[j] = listed[min(j * THREADS + t, length - 1)]
    for j in range(_PART):
        near[j * THREADS + t] = magnitude(values[places[j]]) - low
    while rest > 0:
        digit = min(_DIGIT, rest)
        rest -= digit
        for i in range(_BINS // THREADS):
            counts[i * THREADS + t] = 0
        sync()
        for i in range(t, length, THREADS):
            key = (near[i] if i < _LIST else magnitude(values[listed[i]]) - low) >> np.uint64(rest)
            if key >> np.uint64(digit) == prefix:
                shared_add(counts, np.int64(key & np.uint64((1 << digit) - 1)), np.uint32(1))
        sync()
        _bin_of_rank(counts, rank, room, found)
        prefix, rank = (prefix << np.uint64(digit)) | np.uint64(found[0]), found[1]
    if t == 0:
        known[_LEAST], known[_EQUAL] = low + prefix, np.uint64(rank)


@device
def _line_up(both: Any, larger: Any, equals: Any, groups: int, room: Any) -> None:
    """From what groups have to what those before have, of both kinds."""
    own = cuda.local.array(4, np.uint32)
    part = (groups + THREADS - 1) // THREADS
    begin = min(thread() * part, groups)
    end, sum_, same = min(begin + part, groups), 0, 0
    for first in range(begin, end, 4):
        for j in range(4):
            own[j] = both[min(first + j, end - 1)]
        for j in range(4):
            sum_ += np.int64(own[j] & np.uint32(0xFFFF)) if first + j < end else 0
            same += np.int64(own[j] >> np.uint32(16)) if first + j < end else 0
    sum_, _ = scan(sum_, room)
    same, _ = scan(same, room)
    for first in range(begin, end, 4):
        for j in range(4):
            own[j] = both[min(first + j, end - 1)]
        for j in range(4):
            if first + j < end:
                larger[first + j], equals[first + j] = np.uint32(sum_), np.uint32(same)
                sum_ += np.int64(own[j] & np.uint32(0xFFFF))
                same += np.int64(own[j] >> np.uint32(16))


@functools.cache
def _lister(wide: str) -> Kernel:
    real = element(wide)

    @kernel(addresses=3, integers=1, registers=_REGISTERS)
    def make_list(scratch: Any, values_: Any, listed_: Any, chunks: int) -> None:
        values, listed = at(values_, 0, real), at(listed_, 0, np.uint32)
        known, of_all, counters = at(scratch, _KNOWN, np.uint64), at(scratch, _COUNTERS, np.int32), at(scratch, _CHUNKS, np.uint32)
        both = at(scratch, _CHUNKS + 12 * chunks, np.uint32)
        room = cuda.shared.array(WARPS, np.int32)
        t, low, end, sought = thread(), known[_LOW], known[_END], known[_BITS] > 0
        for group in range(block(), (chunks + WARPS - 1) // WARPS, blocks()):
            chunk, mine = group * WARPS + (t >> 5), 0
            for i in range(t & 31, np.int64(counters[chunk]) if chunk < chunks else 0, 32):
                at_ = chunk * CHUNK + i
                key = magnitude(values[at_])
                if key >= end:
                    mine += 1
                elif key >= low and sought:
                    listed[np.int64(atomic_add(of_all, _LISTED, np.int32(1)))] = np.uint32(at_)
                elif key >= low:
                    mine += 1 << 16
            _, all_ = scan(mine, room)
            if t == 0:
                both[group] = np.uint32(all_)

    return make_list


@functools.cache
def _selector(wide: str) -> Kernel:
    """By one block, the k-th largest, and where each group's begin."""
    real = element(wide)

    @kernel(addresses=3, integers=1)
    def select(scratch: Any, values_: Any, listed_: Any, chunks: int) -> None:
        values, listed, known = at(values_, 0, real), at(listed_, 0, np.uint32), at(scratch, _KNOWN, np.uint64)
        larger, equals = at(scratch, _CHUNKS + 4 * chunks, np.uint32), at(scratch, _CHUNKS + 8 * chunks, np.uint32)
        both = at(scratch, _CHUNKS + 12 * chunks, np.uint32)
        counts = cuda.shared.array(_BINS, np.uint32)
        near = cuda.shared.array(_LIST, np.uint64)
        room = cuda.shared.array(WARPS, np.int32)
        found = cuda.shared.array(2, np.int64)
        if known[_BITS] > 0:
            length = np.int64(at(scratch, _COUNTERS, np.int32)[_LISTED])
            _least_of(values, listed, length, known, near, counts, room, found)
            sync()
            low, least = known[_LOW], known[_LEAST]
            for i in range(thread(), length, THREADS):
                place_ = np.int64(listed[i])
                key = near[i] + low if i < _LIST else magnitude(values[place_])
                if key >= least:
                    atomic_add(both, place_ // (CHUNK * WARPS), np.uint32(1 if key > least else 1 << 16))
            fence()
            sync()
        _line_up(both, larger, equals, (chunks + WARPS - 1) // WARPS, room)

    return select


@functools.cache
def _sender(wide: str, residual: bool, momentum: bool) -> Kernel:
    real, words = element(wide), element(wide)().itemsize // 4

    @kernel(addresses=6, integers=3, registers=_REGISTERS)
    def send(e_: Any, m_: Any, wire: Any, scratch: Any, values_: Any, indices_: Any, n: int, chunks: int, count: int) -> None:
        e, m, values, indices = at(e_, 0, real), at(m_, 0, real), at(values_, 0, real), at(indices_, 0, np.uint32)
        known, sent, halves = at(scratch, _KNOWN, np.uint64), at(wire, 0, np.uint32), at(wire, 4 * count, np.uint32)
        counters, larger = at(scratch, _CHUNKS, np.uint32), at(scratch, _CHUNKS + 4 * chunks, np.uint32)
        equals, room = at(scratch, _CHUNKS + 8 * chunks, np.uint32), cuda.shared.array(WARPS, np.int32)
        t, least, equal, overflow = thread(), known[_LEAST], np.int64(known[_EQUAL]), at(scratch, _COUNTERS, np.int32)[_OVERFLOW] != 0
        lane = t & 31
        before = np.uint32((1 << lane) - 1)
        for group in range(block(), (chunks + WARPS - 1) // WARPS, blocks()):
            chunk, mine = group * WARPS + (t >> 5), 0
            many = np.int64(counters[chunk]) if chunk < chunks else 0
            for i in range(lane, many, 32):
                key = magnitude(values[chunk * CHUNK + i])
                mine += 1 if key > least else 1 << 16 if key == least else 0
            _, mine = scan_warp(mine)
            earlier, _ = scan(mine if lane == 31 else 0, room)      # of the warps before
            above, same = np.int64(larger[group]) + (earlier & 0xFFFF), np.int64(equals[group]) + (earlier >> 16)
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
        _sampler(wide, residual, momentum).launch(1 + _SETS, stream, g, e, m, scratch, n, 0 if n < 4 * SAMPLE or rank > SAMPLE else rank, factor, mu)
        _collector(wide, residual, momentum).launch(wide_grid, stream, g, e, m, scratch, values, indices, n, factor, mu)
        _chooser(wide, residual, momentum).launch(1, stream, g, e, m, scratch, values, indices, n, count, factor, mu)
        _lister(wide).launch(wide_grid, stream, scratch, values, listed, chunks)
        _selector(wide).launch(1, stream, scratch, values, listed, chunks)
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
