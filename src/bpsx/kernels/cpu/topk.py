"""topk: the k elements of largest magnitude; of equal ones those that come first.

Magnitudes are compared as bits, so NaN is the largest. Wire: the indices (uint32, ascending), then
the values.

A sample gives a floor: roughly the magnitude that an element needs to be among the k. One pass over
memory collects the elements that reach it, in order. Of these few, the k are selected exactly,
digit by digit. If an unlucky sample makes the pass collect too few, the k are selected from all
elements.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numba
import numpy as np

from bpsx.kernels.codecs import (
    Codec,
    Decoder,
    Encoder,
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
_HEAD = 4 << _DIGIT  # bytes of scratch memory for counters


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
def _guess(
    g: Any,
    e: Any,
    m: Any,
    n: int,
    count: int,
    factor: Any,
    mu: Any,
    residual: bool,
    momentum: bool,
    sample: Any,
    counts: Any,
) -> Any:
    """Return a floor that about ``count`` of the summed elements reach, rather more than fewer."""
    expected = SAMPLE * count / n
    rank = np.int64(expected + 4.0 * np.sqrt(expected) + 4.0)
    if n < 4 * SAMPLE or rank > SAMPLE:
        return np.uint64(0)
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
    return _threshold(sample, SAMPLE, rank, counts)[0]


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
            floor = _guess(g, e, m, n, count, f, u, residual, momentum, like(indices, g), counts)
            found, same = 0, 0
            for begin in range(0, n, BLOCK):
                size = min(BLOCK, n - begin)
                add_up(p, begin, g, e, m, begin, size, f, u, residual, momentum)
                before, found = found, _collect(p, begin, size, floor, indices, values, found)
                same += _equal(values, before, found, floor)
                # No further element equal to the floor can be among the k. Usually these are zeros.
                if same >= count:
                    floor, same = floor + np.uint64(1), 0
            if found >= count:
                least, equal = _threshold(values, found, count, counts)
            else:
                least, equal = _threshold(p, n, count, counts)
                found = _collect(p, 0, n, least, indices, values, 0)
            sent = at(wire, 0, np.uint32)
            largest = _send(
                indices,
                values,
                found,
                least,
                equal,
                sent,
                like(at(wire, 4 * count, np.uint8), g),
                count,
            )
            if residual:
                for i in range(count):
                    e[sent[i]] = 0
            if largest >= infinity(g):
                if residual:
                    forget(e, n)
                if momentum:
                    forget(m, n)
            return count * (4 + width(g))

        return encode

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
