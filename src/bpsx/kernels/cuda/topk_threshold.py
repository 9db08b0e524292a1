"""The k-th largest magnitude of a gradient on a GPU: five of the kernels of ``topk.py``.

They leave in scratch memory the elements that may be sent and, for each group of chunks, how many
larger and equal elements precede it.
"""

from __future__ import annotations

import functools
from typing import Any

from numba import cuda

from bpsx.kernels.cuda.device import (
    SIMULATED,
    THREADS,
    WARPS,
    Kernel,
    at,
    atomic_add,
    block,
    blocks,
    device,
    element,
    fence,
    kernel,
    largest,
    magnitude,
    np,
    scan,
    shared_add,
    sync,
    thread,
)
from bpsx.kernels.cuda.feedback import EACH
from bpsx.kernels.cuda.selection import (
    BINS,
    BITS,
    CHUNK,
    COUNTERS,
    DIGIT,
    END,
    EQUAL,
    FLOOR,
    KNOWN,
    LEAST,
    LISTED,
    LOW,
    SETS,
    SHIFT,
    add_sets,
    bin_of_rank,
    chunk_collector,
    row_collector,
    valuer,
)

#: Elements of the sample, and how many of them are adjacent.
SAMPLE, RUN = (256 if SIMULATED else 4096), 4
#: Registers of a thread: in the pass over memory; in the same pass with residual or momentum to
#: read; and in kernels with a block per group of chunks, few so that most of these blocks run at
#: once.
_PASS, _MORE, REGISTERS = 64, 96, 40
#: The floor is precise enough if no more elements of the sample share its bin; elements of the list
#: that each thread puts into shared memory.
_NEAR, _PART = 8, 4
_LIST = _PART * THREADS
#: Offset of the chunks' counters in scratch memory.
CHUNK_COUNTERS = COUNTERS + 64


def scratch_layout(n: int) -> tuple[int, int, int, int]:
    """Return the ends of four parts of scratch memory.

    These are the chunks' counters, the collected values, their indices, and the list.
    """
    chunks = -(-n // CHUNK)
    values = CHUNK_COUNTERS + -(-16 * chunks // 64) * 64
    indices = values + 8 * CHUNK * chunks
    return values, indices, indices + 4 * CHUNK * chunks, indices + 8 * CHUNK * chunks


@device
def _bits_in(x: Any) -> Any:
    found = 0
    while x != np.uint64(0):
        x >>= np.uint64(1)
        found += 1
    return found


@functools.cache
def sampler(wide: str, residual: bool, momentum: bool) -> Kernel:
    """Return the kernel whose first block finds the floor; the other blocks clear the bins."""
    real, whole, value, each = (
        element(wide),
        8 * element(wide)().itemsize - 1,
        valuer(residual, momentum, True),
        SAMPLE // THREADS,
    )

    @kernel(addresses=4, integers=2, floats=2)
    def sample(
        g_: Any, e_: Any, m_: Any, scratch: Any, n: int, rank: int, factor: float, mu: float
    ) -> None:
        g, e, m, bins, known = (
            at(g_, 0, real),
            at(e_, 0, real),
            at(m_, 0, real),
            at(scratch, 0, np.uint32),
            at(scratch, KNOWN, np.uint64),
        )
        counts = cuda.shared.array(BINS, np.uint32)
        room = cuda.shared.array(WARPS, np.int32)
        tops = cuda.shared.array(WARPS, np.uint64)
        found = cuda.shared.array(2, np.int64)
        keys = cuda.local.array(each, np.uint64)
        t, f, u = thread(), real(factor), real(mu)
        if block() > 0:
            for i in range(BINS // THREADS):
                bins[(block() - 1) * BINS + i * THREADS + t] = 0
            return
        if t < 2:
            at(scratch, COUNTERS, np.int32)[t] = 0
        if rank == 0:
            if t == 0:
                known[FLOOR], known[SHIFT] = np.uint64(0), np.uint64(whole - DIGIT)
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
            digit = min(DIGIT, rest)
            rest -= digit
            for i in range(BINS // THREADS):
                counts[i * THREADS + t] = 0
            sync()
            for i in range(each):
                key = keys[i] >> np.uint64(rest)
                if key >> np.uint64(digit) == floor:
                    shared_add(counts, np.int64(key & np.uint64((1 << digit) - 1)), np.uint32(1))
            sync()
            bin_of_rank(counts, rank, room, found)
            floor, rank, near = (
                (floor << np.uint64(digit)) | np.uint64(found[0]),
                found[1],
                np.int64(counts[found[0]]),
            )
            sync()
        if t == 0:
            floor = min(floor << np.uint64(rest), magnitude(real(np.inf)))
            known[FLOOR], known[SHIFT] = floor, np.uint64(max(_bits_in(most - floor) - DIGIT, 0))

    return sample


@functools.cache
def collector(wide: str, residual: bool, momentum: bool) -> Kernel:
    real, collect = element(wide), chunk_collector(wide, residual, momentum)

    @kernel(addresses=6, integers=1, floats=2, registers=_MORE if residual or momentum else _PASS)
    def collect_all(
        g_: Any,
        e_: Any,
        m_: Any,
        scratch: Any,
        values_: Any,
        indices_: Any,
        n: int,
        factor: float,
        mu: float,
    ) -> None:
        g, e, m, values, indices = (
            at(g_, 0, real),
            at(e_, 0, real),
            at(m_, 0, real),
            at(values_, 0, real),
            at(indices_, 0, np.uint32),
        )
        known, counters, f, u = (
            at(scratch, KNOWN, np.uint64),
            at(scratch, CHUNK_COUNTERS, np.uint32),
            real(factor),
            real(mu),
        )
        p, left, momenta = (
            cuda.local.array(EACH, real),
            cuda.local.array(EACH, real),
            cuda.local.array(EACH, real),
        )
        for chunk in range(
            block() * WARPS + (thread() >> 5), (n + CHUNK - 1) // CHUNK, blocks() * WARPS
        ):
            count = collect(
                g,
                e,
                m,
                scratch,
                values,
                indices,
                chunk,
                n,
                known[FLOOR],
                known[SHIFT],
                f,
                u,
                p,
                left,
                momenta,
            )
            if thread() & 31 == 0:
                counters[chunk] = np.uint32(count)

    return collect_all


@functools.cache
def chooser(wide: str, residual: bool, momentum: bool) -> Kernel:
    """Return the kernel, of one block, that chooses the bin of the k-th largest."""
    real, whole, collect_rows = (
        element(wide),
        8 * element(wide)().itemsize - 1,
        row_collector(wide, residual, momentum),
    )

    @kernel(addresses=6, integers=2, floats=2)
    def choose(
        g_: Any,
        e_: Any,
        m_: Any,
        scratch: Any,
        values_: Any,
        indices_: Any,
        n: int,
        rank: int,
        factor: float,
        mu: float,
    ) -> None:
        g, e, m, values, indices = (
            at(g_, 0, real),
            at(e_, 0, real),
            at(m_, 0, real),
            at(values_, 0, real),
            at(indices_, 0, np.uint32),
        )
        bins, known, counters = (
            at(scratch, 0, np.uint32),
            at(scratch, KNOWN, np.uint64),
            at(scratch, CHUNK_COUNTERS, np.uint32),
        )
        counts = cuda.shared.array(BINS, np.uint32)
        room = cuda.shared.array(WARPS, np.int32)
        found = cuda.shared.array(2, np.int64)
        t, floor, shift = thread(), known[FLOOR], known[SHIFT]
        add_sets(bins, counts)
        if bin_of_rank(counts, rank, room, found) < rank:
            floor, shift = np.uint64(0), np.uint64(whole - DIGIT)
            for i in range(BINS * SETS // THREADS):
                bins[i * THREADS + t] = 0
            fence()
            sync()
            for chunk in range(t >> 5, (n + CHUNK - 1) // CHUNK, WARPS):
                begin = chunk * CHUNK
                count = collect_rows(
                    g,
                    e,
                    m,
                    scratch,
                    values,
                    indices,
                    begin,
                    begin,
                    min(begin + CHUNK, n),
                    floor,
                    shift,
                    real(factor),
                    real(mu),
                )
                if t & 31 == 0:
                    counters[chunk] = np.uint32(count)
            fence()
            sync()
            add_sets(bins, counts)
            bin_of_rank(counts, rank, room, found)
        if t == 0:
            chosen, low, width = found[0], floor, np.uint64(0)
            if chosen > 0:
                low += (np.uint64(chosen - 1) << shift) + np.uint64(1)
                width = np.uint64(whole) if chosen == BINS - 1 else shift
            known[LOW], known[END], known[BITS] = low, low + (np.uint64(1) << width), width
            known[LEAST], known[EQUAL] = low, np.uint64(found[1])

    return choose


@device
def _least_of(
    values: Any, listed: Any, length: int, known: Any, near: Any, counts: Any, room: Any, found: Any
) -> None:
    """Find the k-th largest magnitude from the list.

    ``near``: shared memory for the list's first elements, as differences from the bin's lowest
    magnitude.
    """
    t, low, rest, prefix, rank = (
        thread(),
        known[LOW],
        np.int64(known[BITS]),
        np.uint64(0),
        np.int64(known[EQUAL]),
    )
    places = cuda.local.array(_PART, np.uint32)
    for j in range(_PART):
        places[j] = listed[min(j * THREADS + t, length - 1)]
    for j in range(_PART):
        near[j * THREADS + t] = magnitude(values[places[j]]) - low
    while rest > 0:
        digit = min(DIGIT, rest)
        rest -= digit
        for i in range(BINS // THREADS):
            counts[i * THREADS + t] = 0
        sync()
        for i in range(t, length, THREADS):
            key = (near[i] if i < _LIST else magnitude(values[listed[i]]) - low) >> np.uint64(rest)
            if key >> np.uint64(digit) == prefix:
                shared_add(counts, np.int64(key & np.uint64((1 << digit) - 1)), np.uint32(1))
        sync()
        bin_of_rank(counts, rank, room, found)
        prefix, rank = (prefix << np.uint64(digit)) | np.uint64(found[0]), found[1]
    if t == 0:
        known[LEAST], known[EQUAL] = low + prefix, np.uint64(rank)


@device
def _line_up(both: Any, larger: Any, equals: Any, groups: int, room: Any) -> None:
    """Turn groups' counts of larger and equal elements into counts for all groups before each."""
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
def lister(wide: str) -> Kernel:
    real = element(wide)

    @kernel(addresses=3, integers=1, registers=REGISTERS)
    def make_list(scratch: Any, values_: Any, listed_: Any, chunks: int) -> None:
        values, listed = at(values_, 0, real), at(listed_, 0, np.uint32)
        known, of_all, counters = (
            at(scratch, KNOWN, np.uint64),
            at(scratch, COUNTERS, np.int32),
            at(scratch, CHUNK_COUNTERS, np.uint32),
        )
        both = at(scratch, CHUNK_COUNTERS + 12 * chunks, np.uint32)
        room = cuda.shared.array(WARPS, np.int32)
        t, low, end, sought = thread(), known[LOW], known[END], known[BITS] > 0
        for group in range(block(), (chunks + WARPS - 1) // WARPS, blocks()):
            chunk, mine = group * WARPS + (t >> 5), 0
            for i in range(t & 31, np.int64(counters[chunk]) if chunk < chunks else 0, 32):
                at_ = chunk * CHUNK + i
                key = magnitude(values[at_])
                if key >= end:
                    mine += 1
                elif key >= low and sought:
                    listed[np.int64(atomic_add(of_all, LISTED, np.int32(1)))] = np.uint32(at_)
                elif key >= low:
                    mine += 1 << 16
            _, all_ = scan(mine, room)
            if t == 0:
                both[group] = np.uint32(all_)

    return make_list


@functools.cache
def selector(wide: str) -> Kernel:
    """Return the kernel, of one block, that selects the k-th largest and each group's start."""
    real = element(wide)

    @kernel(addresses=3, integers=1)
    def select(scratch: Any, values_: Any, listed_: Any, chunks: int) -> None:
        values, listed, known = (
            at(values_, 0, real),
            at(listed_, 0, np.uint32),
            at(scratch, KNOWN, np.uint64),
        )
        larger, equals = (
            at(scratch, CHUNK_COUNTERS + 4 * chunks, np.uint32),
            at(scratch, CHUNK_COUNTERS + 8 * chunks, np.uint32),
        )
        both = at(scratch, CHUNK_COUNTERS + 12 * chunks, np.uint32)
        counts = cuda.shared.array(BINS, np.uint32)
        near = cuda.shared.array(_LIST, np.uint64)
        room = cuda.shared.array(WARPS, np.int32)
        found = cuda.shared.array(2, np.int64)
        if known[BITS] > 0:
            length = np.int64(at(scratch, COUNTERS, np.int32)[LISTED])
            _least_of(values, listed, length, known, near, counts, room, found)
            sync()
            low, least = known[LOW], known[LEAST]
            for i in range(thread(), length, THREADS):
                place_ = np.int64(listed[i])
                key = near[i] + low if i < _LIST else magnitude(values[place_])
                if key >= least:
                    atomic_add(
                        both, place_ // (CHUNK * WARPS), np.uint32(1 if key > least else 1 << 16)
                    )
            fence()
            sync()
        _line_up(both, larger, equals, (chunks + WARPS - 1) // WARPS, room)

    return select
