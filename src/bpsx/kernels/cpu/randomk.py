"""randomk: k elements at random places, the same ones for all who have the same seed and counter,
so that places need not travel.

Wire: the counter (uint64), then the values, in the order of the places. Place i of k is (b +
floor(i n / k) + r_i) mod n, with b uniform in [0, n) and r_i in [0, floor((i + 1) n / k) - floor(i
n / k)): none comes twice, and by the rotation b each element is as likely as any other, k / n.

Random words are splitmix64's (Steele, Lea and Flood, "Fast splittable pseudorandom number
generators", OOPSLA 2014): the counter times the golden gamma, mixed by the finaliser "Mix13". A
word becomes a number below y as the upper half of its product with y. All of it is integer
arithmetic.

Places ascend from b on. So the pass that adds the residual begins there, and takes what it comes by
while that is in the nearest cache.
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
    amount_numbers,
    amount_of,
    checked_amount,
    register,
)
from bpsx.kernels.cpu.bit_ops import at, cast, high, like, magnitude, reaching, width
from bpsx.kernels.cpu.feedback import BLOCK, add_up, forget
from bpsx.kernels.cpu.sparse import amount, clear, infinity

_HEAD = 8
_GAMMA = np.uint64(0x9E3779B97F4A7C15)
_MIX = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
_SHIFTS = np.uint64(30), np.uint64(27), np.uint64(31)


@numba.njit
def mixed(z: Any) -> Any:
    """splitmix64's finaliser."""
    z = (z ^ (z >> _SHIFTS[0])) * _MIX[0]
    z = (z ^ (z >> _SHIFTS[1])) * _MIX[1]
    return z ^ (z >> _SHIFTS[2])


@numba.njit
def _below(word: Any, y: Any) -> Any:
    """A number in [0, y)."""
    return np.int64(high(word, np.uint64(y)))


@numba.njit(error_model="numpy")
def draw(places: Any, seed: int, counter: Any, n: int, count: int) -> Any:
    """Set places[:count] (uint32) to this round's, in their order, and return b.

    Word 0 of the round makes b, word i + 1 place i.
    """
    start = mixed(np.uint64(seed) + mixed(counter + _GAMMA))
    turn = _below(mixed(start), n)
    each, over = n // count, n % count
    base, rest = np.int64(0), np.int64(0)
    for i in range(count):
        start += _GAMMA
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
    """Bring residual and momentum of a block up to date; whether there is an overflow."""
    if residual:
        add_up(e, begin, g, e, m, begin, size, factor, mu, True, momentum)
        return _overflow(e, begin, size)
    add_up(block, 0, g, e, m, begin, size, factor, mu, False, True)
    return _overflow(block, 0, size)


@numba.njit
def _take_there(g: Any, e: Any, factor: Any, places: Any, values: Any, count: int) -> Any:
    """Send what has its place, where there is nothing elsewhere: residual elsewhere stays what it
    is.

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
    """Send what has its place in [begin, end), ``sent`` and the ``largest`` magnitude being what
    they are already; both anew.
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
    """See the module."""

    name = "randomk"
    keys = ("k",)
    feedback = ("vanilla", "corrected", "sparse")
    counted = True
    too_many = 2**32

    def options(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """``k``: how many elements of each partition, or which part of them."""
        return {"k": checked_amount("k", given.get("k"))}

    def numbers(self, options: Mapping[str, Any]) -> list[int]:
        """[k, whether that is a fraction]"""
        return amount_numbers(options["k"])

    def capacity(self, n: int, numbers: list[int]) -> int:
        """Always the same, for each element type."""
        return _HEAD + 8 * amount_of(n, numbers)

    def scratch(self, n: int, numbers: list[int]) -> int:
        """A block, for what is made of gradient and momentum, and the places."""
        return 8 * BLOCK + 4 * amount_of(n, numbers)

    def encoder(self, residual: bool, momentum: bool) -> Encoder:
        """In one pass over memory; without residual and momentum it looks at nothing but what it
        sends.

        Nor with "sparse", at the server, if all pushes had the places of the answer: the sum is
        zero elsewhere.
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

    def decoder(self) -> Decoder:
        """Sets or adds what was sent, at places that follow from the counter that came with it."""

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
