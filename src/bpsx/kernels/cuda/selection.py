"""Collection of elements by topk's kernels, with counts of them in bins by magnitude.

See ``topk.py``.
"""

from __future__ import annotations

from typing import Any

from bpsx.kernels.cuda.device import (
    SIMULATED,
    THREADS,
    at,
    atomic_add,
    atomic_or,
    ballot,
    block,
    device,
    element,
    float_of,
    lowest,
    magnitude,
    np,
    ones,
    plus,
    scan,
    scan_warp,
    sync,
    sync_warp,
    thread,
    times,
)
from bpsx.kernels.cuda.feedback import EACH, add_up, fetch, keep

#: Elements of a chunk, which one warp handles.
CHUNK = 256 if SIMULATED else 2048
#: Rows of 32 elements that a warp inspects before it collects, one row per thread.
_ROWS = min(32, CHUNK // 32)
#: With more elements to collect than this per row, on average, a warp collects row by row.
_DENSE = 8
DIGIT = 11  # bits
BINS = 1 << DIGIT
#: Sets of bins, among which blocks are divided: with one set many would wait for each other.
SETS = 4
#: Layout of scratch memory: bins (uint32), values that all blocks read (uint64, see below), two
#: counters (int32), counters of chunks and groups, collected elements, the list.
KNOWN = 4 * BINS * SETS
COUNTERS = KNOWN + 64
#: Indices of these values: the floor and the binary logarithm of its bins' width; the chosen bin's
#: lowest magnitude, the end of its range, and how many bits vary in it; the k-th largest magnitude
#: and how many elements equal to it are sent.
FLOOR, SHIFT, LOW, END, BITS, LEAST, EQUAL = range(7)
#: Indices of the counters: length of the list; whether there are infinities or NaN.
LISTED, OVERFLOW = range(2)


@device
def _bin(key: Any, floor: Any, shift: Any) -> Any:
    """Return the bin of ``key``: 0 for the floor itself, then rising with the key.

    The last bin has all keys beyond the others.
    """
    return np.int64(
        min((key - floor + (np.uint64(1) << shift) - np.uint64(1)) >> shift, np.uint64(BINS - 1))
    )


@device
def bin_of_rank(bins: Any, rank: int, room: Any, found: Any) -> Any:
    """Set ``found`` to the bin of the rank-th largest element and the element's rank in that bin.

    Returns the number of all counted elements. All threads of the block must call it.
    """
    t, each = thread(), BINS // THREADS
    top = BINS - each * t  # this thread's bins are those just below
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


def valuer(residual: bool, momentum: bool, anew: bool) -> Any:
    """Return a function that computes what is to be sent of one element, and changes nothing.

    Not ``anew``: gradient and momentum have already been added up.
    """

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


@device
def _tally(bins: Any, key: Any, floor: Any, shift: Any) -> Any:
    """Count a collected element in its bin, or return 1 if it equals the floor.

    Many elements may equal the floor. They would contend for one place in memory, so the caller
    counts them.
    """
    if key == floor:
        return 1
    atomic_add(bins, _bin(key, floor, shift), np.uint32(1))
    return 0


def row_collector(wide: str, residual: bool, momentum: bool) -> Any:
    """Return a function with which a warp collects, row by row, all elements that reach the floor.

    That function returns their number.
    """
    real, value = element(wide), valuer(residual, momentum, False)

    @device
    def collect_rows(
        g: Any,
        e: Any,
        m: Any,
        scratch: Any,
        values: Any,
        indices: Any,
        to: int,
        begin: int,
        end: int,
        floor: Any,
        shift: Any,
        f: Any,
        u: Any,
    ) -> Any:
        bins, lane = at(scratch, 4 * BINS * (block() % SETS), np.uint32), thread() & 31
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
            atomic_or(at(scratch, COUNTERS, np.int32), OVERFLOW, np.int32(1))
        return count

    return collect_rows


def _looker(residual: bool, momentum: bool) -> Any:
    """Return a function with which a warp finds the elements that reach the floor.

    It gives each thread a mask of one row.
    """

    @device
    def large(
        g: Any,
        e: Any,
        m: Any,
        begin: int,
        n: int,
        bound: Any,
        f: Any,
        u: Any,
        p: Any,
        left: Any,
        momenta: Any,
    ) -> Any:
        """Add up gradient, momentum and residual; return the thread's mask."""
        lane, word = thread() & 31, np.uint32(0)
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
                hits = ballot(not abs(p[j]) < bound)  # catches NaN, too
                word = hits if lane == row + j else word
        return word

    return large


@device
def _inside(word: Any, begin: int, n: int) -> Any:
    """Clear the bits of ``word`` that are beyond the last element."""
    left = n - (begin + 32 * (thread() & 31))
    return word if left >= 32 else np.uint32(word & np.uint32((1 << max(left, 0)) - 1))


def chunk_collector(wide: str, residual: bool, momentum: bool) -> Any:
    """Return a function with which a warp collects a chunk.

    It first finds the elements that reach the floor; only that step handles all elements.
    """
    real, value, collect_rows = (
        element(wide),
        valuer(residual, momentum, False),
        row_collector(wide, residual, momentum),
    )
    large = _looker(residual, momentum)

    @device
    def collect(
        g: Any,
        e: Any,
        m: Any,
        scratch: Any,
        values: Any,
        indices: Any,
        chunk: int,
        n: int,
        floor: Any,
        shift: Any,
        f: Any,
        u: Any,
        p: Any,
        left: Any,
        momenta: Any,
    ) -> Any:
        """Return the number collected. p, left, momenta: EACH elements of the thread's own."""
        bins, lane, bound = (
            at(scratch, 4 * BINS * (block() % SETS), np.uint32),
            thread() & 31,
            float_of(floor, f),
        )
        infinity, count, same, overflow = magnitude(real(np.inf)), 0, 0, False
        for begin in range(chunk * CHUNK, min((chunk + 1) * CHUNK, n), 32 * _ROWS):
            word = _inside(large(g, e, m, begin, n, bound, f, u, p, left, momenta), begin, n)
            sync_warp()
            before, many = scan_warp(ones(word))
            to, first = chunk * CHUNK + count, begin + 32 * lane
            count += many
            if many > _DENSE * _ROWS:
                collect_rows(
                    g,
                    e,
                    m,
                    scratch,
                    values,
                    indices,
                    to,
                    begin,
                    min(begin + 32 * _ROWS, n),
                    floor,
                    shift,
                    f,
                    u,
                )
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
            atomic_or(at(scratch, COUNTERS, np.int32), OVERFLOW, np.int32(1))
        return count

    return collect


@device
def add_sets(bins: Any, counts: Any) -> None:
    """Add up all sets of bins into ``counts``."""
    for i in range(BINS // THREADS):
        sum_ = np.uint32(0)
        for j in range(SETS):
            sum_ = np.uint32(sum_ + bins[j * BINS + i * THREADS + thread()])
        counts[i * THREADS + thread()] = sum_
    sync()
