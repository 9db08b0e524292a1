"""randomk: k elements at random places, which are the same for the same seed and counter.

So places need not be sent. Wire: the counter (uint64), then the values, in the order of their
places. Place i of k is (b + floor(i n / k) + r_i) mod n. b is uniform in [0, n), and r_i in
[0, floor((i + 1) n / k) - floor(i n / k)). No place occurs twice. By the rotation b all
elements are equally likely: k / n.

Random words are splitmix64's (Steele, Lea and Flood, "Fast splittable pseudorandom number
generators", OOPSLA 2014): the counter times the golden gamma, mixed by the finaliser "Mix13". The
upper half of a word's product with y gives a number below y. All of it is integer arithmetic.

Pushes with one counter have the same places. Their sum needs no accumulator: it is the sum of their
values.

Places ascend from b on. So the pass that adds the residual starts at b, and takes each element to
send while it is in the L1 cache.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numba
import numpy as np

from bpsx.kernels.codecs import (
    ALIKE,
    SEED,
    Codec,
    Decoder,
    Encoder,
    Summer,
    amount_numbers,
    amount_of,
    checked_amount,
    register,
)
from bpsx.kernels.cpu.bit_ops import at, cast, high, like, magnitude, reaching, width
from bpsx.kernels.cpu.feedback import BLOCK, add_up, forget
from bpsx.kernels.cpu.sparse import amount, clear, infinity

_HEAD = 8
GAMMA = np.uint64(0x9E3779B97F4A7C15)
_MIX = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
_SHIFTS = np.uint64(30), np.uint64(27), np.uint64(31)


@numba.njit
def mixed(z: Any) -> Any:
    """Apply splitmix64's finaliser."""
    z = (z ^ (z >> _SHIFTS[0])) * _MIX[0]
    z = (z ^ (z >> _SHIFTS[1])) * _MIX[1]
    return z ^ (z >> _SHIFTS[2])


@numba.njit
def _below(word: Any, y: Any) -> Any:
    """Return a number in [0, y)."""
    return np.int64(high(word, np.uint64(y)))


@numba.njit(error_model="numpy")
def draw(places: Any, seed: int, counter: Any, n: int, count: int) -> Any:
    """Set places[:count] (uint32) to this round's places, in their order, and return b.

    Word 0 of the round makes b, word i + 1 makes place i.
    """
    start = mixed(np.uint64(seed) + mixed(counter + GAMMA))
    turn = _below(mixed(start), n)
    each, over = n // count, n % count
    base, rest = np.int64(0), np.int64(0)
    for i in range(count):
        start += GAMMA
        rest += over
        carry = np.int64(rest >= count)
        rest -= carry * count
        place = turn + base + _below(mixed(start), each + carry)
        places[i] = place if place < n else place - n
        base += each + carry
    return turn


@numba.njit
def _overflow(p: Any, begin: int, size: int) -> Any:
    """Whether any of p[begin:begin + size] is infinite or NaN."""
    bound, found = infinity(p), np.uint64(0)
    end = begin + size
    for first in range(begin, end - 31, 32):
        found |= np.uint64(reaching(p, first, bound))
    for i in range(end - size % 32, end):
        found |= np.uint64(magnitude(p[i]) >= bound)
    return found != np.uint64(0)


@numba.njit
def _update(
    g: Any,
    e: Any,
    m: Any,
    block: Any,
    begin: int,
    size: int,
    factor: Any,
    mu: Any,
    residual: bool,
    momentum: bool,
) -> Any:
    """Update residual and momentum of a block; return whether there is an overflow."""
    if residual:
        add_up(e, begin, g, e, m, begin, size, factor, mu, True, momentum)
        return _overflow(e, begin, size)
    add_up(block, 0, g, e, m, begin, size, factor, mu, False, True)
    return _overflow(block, 0, size)


@numba.njit
def _take_there(g: Any, e: Any, factor: Any, places: Any, values: Any, count: int) -> Any:
    """Send the elements at ``places`` of a sum that is zero elsewhere.

    Residuals elsewhere stay the same.

    Returns the largest magnitude.
    """
    largest = np.uint64(0)
    for j in range(count):
        i = np.int64(places[j])
        value = g[i] + factor * e[i]
        values[j] = value
        e[i] = 0
        largest = max(largest, magnitude(value))
    return largest


@numba.njit
def _add_values(pushes: Any, stride: int, pushed: int, values: Any, count: int) -> None:
    """Set ``values`` to the sum of the ``count`` values of each of ``pushed`` pushes."""
    for k in range(pushed):
        added = like(at(pushes, k * stride + _HEAD, np.uint8), values)
        if k == 0:
            for j in range(count):
                values[j] = added[j]
        else:
            for j in range(count):
                values[j] = values[j] + added[j]


@numba.njit
def _scale(e: Any, n: int, factor: Any) -> Any:
    """Multiply residuals by ``factor``; return whether there is an overflow."""
    overflow, zero = False, cast(0.0, e)
    for begin in range(0, n, BLOCK):
        size = min(BLOCK, n - begin)
        for i in range(begin, begin + size):
            e[i] = zero + factor * e[i]  # as an encoder does where nothing was pushed: no -0
        overflow |= _overflow(e, begin, size)
    return overflow


@numba.njit
def _add_left(e: Any, factor: Any, places: Any, values: Any, count: int, residual: bool) -> Any:
    """Add the residuals at ``places``, if there are any, and clear them.

    Returns the largest magnitude.
    """
    largest = np.uint64(0)
    for j in range(count):
        if residual:
            i = np.int64(places[j])
            values[j] = values[j] + factor * e[i]
            e[i] = 0
        largest = max(largest, magnitude(values[j]))
    return largest


@numba.njit
def _take(
    g: Any,
    e: Any,
    m: Any,
    begin: int,
    end: int,
    mu: Any,
    residual: bool,
    momentum: bool,
    places: Any,
    values: Any,
    sent: int,
    count: int,
    largest: Any,
) -> Any:
    """Send the elements whose place is in [begin, end).

    ``sent``: number sent so far. ``largest``: largest magnitude so far. Returns both, updated.
    """
    while sent < count:
        i = np.int64(places[sent])
        if i < begin or i >= end:
            break
        value = e[i] if residual else g[i] + mu * m[i] if momentum else g[i]
        values[sent] = value
        largest = max(largest, magnitude(value))
        if residual:
            e[i] = 0
        sent += 1
    return sent, largest


class RandomK(Codec):
    """Codec ``randomk``; see the module."""

    name = "randomk"
    keys = ("k",)
    feedback = ("vanilla", "corrected", "sparse")
    remembers = False
    counted = True
    too_many = 2**32

    def options(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """Accept ``k``: a number of elements of each partition, or a fraction."""
        return {"k": checked_amount("k", given.get("k"))}

    def numbers(self, options: Mapping[str, Any]) -> list[int]:
        """Return [k, whether k is a fraction]."""
        return amount_numbers(options["k"])

    def capacity(self, n: int, numbers: list[int]) -> int:
        """Return the same bound for each element type."""
        return _HEAD + 8 * amount_of(n, numbers)

    def scratch(self, n: int, numbers: list[int]) -> int:
        """Return the bytes for a block of summed gradient and momentum, and for the places."""
        return 8 * BLOCK + 4 * amount_of(n, numbers)

    def encoder(self, residual: bool, momentum: bool) -> Encoder:
        """Return an encoder that passes over memory once, or reads only the elements that it sends.

        Without residual and momentum it reads only those. The same holds at the server with
        "sparse", if all pushes had the reply's places: the sum is then zero elsewhere.
        """
        kept = residual or momentum

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
            places, block, values = (
                at(scratch, 8 * BLOCK, np.uint32),
                like(scratch, g),
                like(at(wire, _HEAD, np.uint8), g),
            )
            begin = draw(places, options[SEED], np.uint64(counter), n, count)
            at(wire, 0, np.uint64)[0] = counter
            overflow, largest, sent, done = False, np.uint64(0), 0, 0
            if not kept:
                sent, largest = _take(
                    g, e, m, 0, n, u, False, False, places, values, 0, count, largest
                )
            there = residual and not momentum and options[ALIKE] != 0
            if there:
                largest = _take_there(g, e, f, places, values, count)
                overflow = largest >= infinity(g)
            while kept and not there and done < n:
                size = min(BLOCK - begin % BLOCK, n - begin, n - done)
                overflow |= _update(g, e, m, block, begin, size, f, u, residual, momentum)
                sent, largest = _take(
                    g,
                    e,
                    m,
                    begin,
                    begin + size,
                    u,
                    residual,
                    momentum,
                    places,
                    values,
                    sent,
                    count,
                    largest,
                )
                done += size
                begin = begin + size if begin + size < n else 0
            if overflow:
                if largest < infinity(g):
                    values[0] = np.nan
                if residual:
                    forget(e, n)
                if momentum:
                    forget(m, n)
            return _HEAD + count * width(g)

        return encode

    def size(self, n: int, numbers: list[int], itemsize: int) -> int:
        """Return the exact size."""
        return _HEAD + itemsize * amount_of(n, numbers)

    def summer(self, residual: bool) -> Summer:
        """Return a function that sums values. It reads residuals elsewhere only to scale them."""

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
            sent, f, d = amount(options, n), cast(factor, e), cast(divisor, e)
            places, values = at(scratch, 8 * BLOCK, np.uint32), like(at(wire, _HEAD, np.uint8), e)
            draw(places, options[SEED], np.uint64(counter), n, sent)
            at(wire, 0, np.uint64)[0] = counter
            _add_values(pushes, stride, count, values, sent)
            if divisor > 1:
                for j in range(sent):
                    values[j] = values[j] / d
            overflow = False
            if residual and options[ALIKE] == 0 and factor != 1.0:
                overflow, f = _scale(e, n, f), cast(1.0, e)
            largest = _add_left(e, f, places, values, sent, residual)
            if residual and (overflow or largest >= infinity(e)):
                if largest < infinity(e):
                    values[0] = np.nan
                forget(e, n)
            return _HEAD + sent * width(e)

        return sum_pushes

    def decoder(self) -> Decoder:
        """Return a decoder that sets or adds the sent elements.

        Their places follow from the wire's counter.
        """

        def decode(
            wire: Any, size: int, out: Any, scratch: Any, options: Any, n: int, add: int
        ) -> int:
            count = amount(options, n)
            if size != _HEAD + count * width(out):
                return -1
            places, values = at(scratch, 8 * BLOCK, np.uint32), like(at(wire, _HEAD, np.uint8), out)
            draw(places, options[SEED], at(wire, 0, np.uint64)[0], n, count)
            if not add:
                clear(out, n)
            for i in range(count):
                out[places[i]] = out[places[i]] + values[i] if add else values[i]
            return 0

        return decode


register(RandomK())
