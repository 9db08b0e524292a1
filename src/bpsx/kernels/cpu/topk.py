"""topk: the k elements of largest magnitude; of equal ones those that come first.

Magnitudes are compared as bits, so NaN is the largest. Wire: the indices (uint32, ascending), then
the values.

A sample gives a floor: roughly the magnitude that an element needs to be among the k. One pass over
memory collects the elements that reach it, in order. Of these few, the k are selected exactly,
digit by digit. If an unlucky sample makes the pass collect too few, the k are selected from all
elements.

A lane with a residual adds pushes block by block in the L1 cache. As indices ascend, it only needs
to know how far it is in each push.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numba
import numpy as np

from bpsx.kernels.codecs import (
    MOST_PUSHES,
    Checker,
    Codec,
    Decoder,
    Encoder,
    Summer,
    amount_numbers,
    amount_of,
    checked_amount,
    register,
)
from bpsx.kernels.cpu.bit_ops import at, cast, like, lowest, magnitude, reaching, width
from bpsx.kernels.cpu.feedback import BLOCK, add_up, forget
from bpsx.kernels.cpu.sparse import amount, clear, infinity

#: Elements of the sample, and how many of them are adjacent.
SAMPLE, RUN = 4096, 4
_DIGIT = 11  # bits
#: Bytes of scratch memory for counters, or for places in pushes.
_HEAD = max(4 << _DIGIT, 8 * MOST_PUSHES)


@numba.njit
def _threshold(values: Any, n: int, rank: Any, counts: Any) -> Any:
    """Return the rank-th largest magnitude and how many of the ``rank`` largest equal it.

    1 <= rank <= n.
    """
    found, low = np.uint64(0), 8 * width(values) - 1
    while low > 0:
        digit = min(_DIGIT, low)
        low -= digit
        mask, shift, above = np.uint64((1 << digit) - 1), np.uint64(low), np.uint64(digit)
        for j in range(1 << digit):
            counts[j] = 0
        for i in range(n):
            key = magnitude(values[i]) >> shift
            if key >> above == found:
                counts[key & mask] += np.uint32(1)
        j = (1 << digit) - 1
        while j > 0 and counts[j] < rank:
            rank -= np.int64(counts[j])
            j -= 1
        found = found << above | np.uint64(j)
    return found, rank


@numba.njit
def sample_at(r: int, stride: int) -> int:
    """Return the start of run ``r`` of the sample.

    Fibonacci hashing takes it off a regular grid, since tensors have rows.
    """
    return r * stride + ((r * 2654435769 & 0xFFFFFFFF) * (stride - RUN + 1) >> 32)


@numba.njit(error_model="numpy")
def _rank(n: int, count: int) -> Any:
    """Return the rank of the floor in a sample; 0: no sample is needed, the floor is 0.

    About ``count`` of n elements reach the floor, rather more than fewer.
    """
    expected = SAMPLE * count / n
    rank = np.int64(expected + 4.0 * np.sqrt(expected) + 4.0)
    return np.int64(0) if n < 4 * SAMPLE or rank > SAMPLE else rank


@numba.njit
def _sample(
    g: Any,
    e: Any,
    m: Any,
    n: int,
    factor: Any,
    mu: Any,
    residual: bool,
    momentum: bool,
    sample: Any,
) -> None:
    """Set ``sample`` to some of the elements to choose from."""
    stride = n // (SAMPLE // RUN)
    for r in range(SAMPLE // RUN):
        begin = sample_at(r, stride)
        for i in range(RUN):
            p = g[begin + i]
            if momentum:
                p += mu * (mu * m[begin + i] + p)
            if residual:
                p += factor * e[begin + i]
            sample[r * RUN + i] = p


@numba.njit
def _sample_sum(
    pushes: Any,
    stride: int,
    pushed: int,
    count: int,
    divisor: Any,
    e: Any,
    n: int,
    factor: Any,
    sample: Any,
) -> None:
    """Set ``sample`` to some elements of the sum of pushes, with their residuals."""
    apart = n // (SAMPLE // RUN)
    for i in range(SAMPLE):
        sample[i] = 0
    for k in range(pushed):
        indices = at(pushes, k * stride, np.uint32)
        values = like(at(pushes, k * stride + 4 * count, np.uint8), e)
        j = np.int64(0)
        for r in range(SAMPLE // RUN):
            begin = sample_at(r, apart)
            while j < count and np.int64(indices[j]) < begin:
                j += 1
            while j < count and np.int64(indices[j]) < begin + RUN:
                sample[r * RUN + np.int64(indices[j]) - begin] += values[j]
                j += 1
    for r in range(SAMPLE // RUN):
        begin = sample_at(r, apart)
        for i in range(RUN):
            sample[r * RUN + i] = sample[r * RUN + i] / divisor + factor * e[begin + i]


@numba.njit
def _sum_block(
    pushes: Any,
    stride: int,
    pushed: int,
    count: int,
    places: Any,
    block: Any,
    begin: int,
    size: int,
) -> None:
    """Set ``block`` to the sum of the pushes' elements begin to begin + size.

    ``places``: how far each push has been read; updated.
    """
    for i in range(size):
        block[i] = 0
    for k in range(pushed):
        indices = at(pushes, k * stride, np.uint32)
        values = like(at(pushes, k * stride + 4 * count, np.uint8), block)
        j = places[k]
        while j < count and np.int64(indices[j]) < begin + size:
            place = np.int64(indices[j]) - begin
            block[place] = block[place] + values[j] if k else values[j]
            j += 1
        places[k] = j


@numba.njit
def _collect(
    p: Any, begin: int, size: int, floor: Any, indices: Any, values: Any, found: int
) -> int:
    """Append the elements of p[begin:begin + size] whose magnitude is at least ``floor``.

    ``found``: number collected so far. Returns the new number.
    """
    end = begin + size
    for first in range(begin, end - 31, 32):
        word = np.uint64(reaching(p, first, floor))
        while word != np.uint64(0):
            i = first + lowest(word)
            indices[found], values[found] = i, p[i]
            found += 1
            word &= word - np.uint64(1)
    for i in range(end - size % 32, end):
        if magnitude(p[i]) >= floor:
            indices[found], values[found] = i, p[i]
            found += 1
    return found


@numba.njit
def _collect_more(
    p: Any,
    begin: int,
    size: int,
    floor: Any,
    same: Any,
    indices: Any,
    values: Any,
    found: Any,
    count: int,
) -> Any:
    """Collect from a block; return the floor for the next one, ``same`` and ``found``.

    ``same``: number of elements collected that equal the floor.
    """
    before, found = found, _collect(p, begin, size, floor, indices, values, found)
    same += _equal(values, before, found, floor)
    # No further element equal to the floor can be among the k. Usually these are zeros.
    if same >= count:
        floor, same = floor + np.uint64(1), np.int64(0)
    return floor, same, found


@numba.njit
def _equal(values: Any, begin: int, end: int, size: Any) -> Any:
    """Return the number of elements of magnitude ``size``."""
    found = np.int64(0)
    for i in range(begin, end):
        found += np.int64(magnitude(values[i]) == size)
    return found


@numba.njit
def _send(
    indices: Any,
    values: Any,
    found: int,
    least: Any,
    equal: Any,
    sent_indices: Any,
    sent_values: Any,
    count: int,
) -> Any:
    """Send the ``count`` elements above ``least`` and the first ``equal`` that have it.

    Returns the largest magnitude.
    """
    sent, largest = np.int64(0), np.uint64(0)
    for i in range(found):
        if sent == count:
            break
        size = magnitude(values[i])
        # If this element does not count, the next one overwrites it.
        sent_indices[sent], sent_values[sent] = indices[i], values[i]
        largest = max(largest, size)
        same = np.int64(size == least and equal > 0)
        sent += np.int64(size > least) + same
        equal -= same
    return largest


@numba.njit
def _choose(
    p: Any, n: int, indices: Any, values: Any, found: Any, counts: Any, wire: Any, count: int
) -> Any:
    """Send the ``count`` largest of the n elements; return the largest magnitude.

    ``found``: number of elements collected in ``indices`` and ``values``. They are enough unless
    there are fewer than ``count``.
    """
    if found >= count:
        least, equal = _threshold(values, found, count, counts)
    else:
        least, equal = _threshold(p, n, count, counts)
        found = _collect(p, 0, n, least, indices, values, 0)
    sent = at(wire, 0, np.uint32), like(at(wire, 4 * count, np.uint8), p)
    return _send(indices, values, found, least, equal, sent[0], sent[1], count)


@numba.njit
def _clear_sent(e: Any, n: int, sent: Any, count: int, largest: Any) -> None:
    """Clear the residuals of the sent elements; after an overflow, all."""
    for i in range(count):
        e[sent[i]] = 0
    if largest >= infinity(e):
        forget(e, n)


class TopK(Codec):
    """Codec ``topk``; see the module."""

    name = "topk"
    keys = ("k",)
    remembers = False
    too_many = 2**32

    def options(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """Accept ``k``: a number of elements of each partition, or a fraction."""
        return {"k": checked_amount("k", given.get("k"))}

    def numbers(self, options: Mapping[str, Any]) -> list[int]:
        """Return [k, whether k is a fraction]."""
        return amount_numbers(options["k"])

    def capacity(self, n: int, numbers: list[int]) -> int:
        """Return the same bound for each element type."""
        return 12 * amount_of(n, numbers)

    def scratch(self, n: int, numbers: list[int]) -> int:
        """Return the bytes for counters, collected values and indices, and summed elements.

        Values and indices have room for all elements, though few are used. The summed elements need
        memory only where no residual holds them.
        """
        return _HEAD + 20 * (n + BLOCK)

    def encoder(self, residual: bool, momentum: bool) -> Encoder:
        """Return an encoder that usually passes over memory once."""

        def encode(
            g: Any,
            e: Any,
            m: Any,
            wire: Any,
            scratch: Any,
            state: Any,
            options: Any,
            n: int,
            counter: int,
            factor: float,
            mu: float,
        ) -> Any:
            count, f, u = amount(options, n), cast(factor, g), cast(mu, g)
            room = n + BLOCK
            counts, values = at(scratch, 0, np.uint32), like(at(scratch, _HEAD, np.uint8), g)
            indices = at(scratch, _HEAD + 8 * room, np.uint32)
            p = (
                e
                if residual
                else like(at(scratch, _HEAD + 12 * room, np.uint8), g)
                if momentum
                else g
            )
            floor, rank = np.uint64(0), _rank(n, count)
            if rank:
                sample = like(indices, g)
                _sample(g, e, m, n, f, u, residual, momentum, sample)
                floor = _threshold(sample, SAMPLE, rank, counts)[0]
            found, same = np.int64(0), np.int64(0)
            for begin in range(0, n, BLOCK):
                size = min(BLOCK, n - begin)
                add_up(p, begin, g, e, m, begin, size, f, u, residual, momentum)
                floor, same, found = _collect_more(
                    p, begin, size, floor, same, indices, values, found, count
                )
            largest = _choose(p, n, indices, values, found, counts, wire, count)
            if residual:
                _clear_sent(e, n, at(wire, 0, np.uint32), count, largest)
            if momentum and largest >= infinity(g):
                forget(m, n)
            return count * (4 + width(g))

        return encode

    def size(self, n: int, numbers: list[int], itemsize: int) -> int:
        """Return the exact size."""
        return (4 + itemsize) * amount_of(n, numbers)

    def summer(self, residual: bool) -> Summer | None:
        """Return a function that passes over the residual once, and over no accumulator."""
        if not residual:
            return None  # the encoder needs the sum as a whole

        def sum_pushes(
            pushes: Any,
            stride: int,
            count: int,
            divisor: int,
            e: Any,
            wire: Any,
            scratch: Any,
            state: Any,
            options: Any,
            n: int,
            counter: int,
            factor: float,
        ) -> Any:
            sent, f, d, room = amount(options, n), cast(factor, e), cast(divisor, e), n + BLOCK
            counts, places = at(scratch, 0, np.uint32), at(scratch, 0, np.int64)
            values = like(at(scratch, _HEAD, np.uint8), e)
            indices = at(scratch, _HEAD + 8 * room, np.uint32)
            block = like(at(scratch, _HEAD + 12 * room, np.uint8), e)
            floor, rank = np.uint64(0), _rank(n, sent)
            if rank:
                sample = like(indices, e)
                _sample_sum(pushes, stride, count, sent, d, e, n, f, sample)
                floor = _threshold(sample, SAMPLE, rank, counts)[0]
            for k in range(count):
                places[k] = 0
            found, same = np.int64(0), np.int64(0)
            for begin in range(0, n, BLOCK):
                size = min(BLOCK, n - begin)
                _sum_block(pushes, stride, count, sent, places, block, begin, size)
                if divisor > 1:
                    for i in range(size):
                        block[i] = block[i] / d
                for i in range(size):
                    e[begin + i] = block[i] + f * e[begin + i]
                floor, same, found = _collect_more(
                    e, begin, size, floor, same, indices, values, found, sent
                )
            largest = _choose(e, n, indices, values, found, counts, wire, sent)
            _clear_sent(e, n, at(wire, 0, np.uint32), sent, largest)
            return sent * (4 + width(e))

        return sum_pushes

    def checker(self) -> Checker:
        """Return a function that checks the indices."""

        def check(wire: Any, options: Any, n: int) -> int:
            count, indices = amount(options, n), at(wire, 0, np.uint32)
            wrong = count > 0 and np.int64(indices[count - 1]) >= n
            for j in range(1, count):
                wrong |= indices[j] <= indices[j - 1]
            return -1 if wrong else 0

        return check

    def decoder(self) -> Decoder:
        """Return a decoder that sets or adds the sent elements."""

        def decode(
            wire: Any, size: int, out: Any, scratch: Any, options: Any, n: int, add: int
        ) -> int:
            count = amount(options, n)
            if size != count * (4 + width(out)):
                return -1
            indices, values = at(wire, 0, np.uint32), like(at(wire, 4 * count, np.uint8), out)
            if not add:
                clear(out, n)
            last = np.int64(-1)
            for j in range(count):
                i = np.int64(indices[j])
                if i <= last or i >= n:
                    return -1
                out[i] = out[i] + values[j] if add else values[j]
                last = i
            return 0

        return decode


register(TopK())
