"""onebit: the sign of each element and, with ``scaling``, their mean magnitude (arXiv 1905.10936).

Wire: the magnitude (float64), then the signs in words of 32, the first element's sign in the lowest
bit. A set bit means negative. 1/32 of the size of float32.

The residual p - decode(wire) is p minus its own sign times the magnitude. The encoder keeps p
itself, and the magnitude in ``state``. It subtracts the magnitude in the next round, while it reads
p anyway, and thus passes over memory once.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numba
import numpy as np

from bpsx.kernels.codecs import Codec, Decoder, Encoder, Summer, checked_flag, register
from bpsx.kernels.cpu.bit_ops import add_signed, at, cast, flipped, like, set_signed, signed
from bpsx.kernels.cpu.feedback import BLOCK, add_up, forget, sign_words

_HEAD = 8


@numba.njit(fastmath={"reassoc"})
def _magnitudes(p: Any, begin: int, n: int) -> Any:
    """Return the sum of one block's magnitudes, in the elements' type."""
    total = cast(0.0, p)
    for i in range(begin, begin + n):
        total += abs(p[i])
    return total


@numba.njit
def _sum(p: Any, begin: int, n: int) -> Any:
    """Return the sum of one block's magnitudes as float64; not finite if an element is not.

    A float32 sum may overflow even if all elements are finite. It is then computed again in
    float64.
    """
    total = np.float64(_magnitudes(p, begin, n))
    if not np.isfinite(total):
        total = np.float64(0.0)
        for i in range(begin, begin + n):
            total += np.float64(abs(p[i]))
    return total


@numba.njit
def _decode_block(
    words: Any, place: int, magnitude: Any, out: Any, first: int, size: int, add: bool
) -> None:
    """Decode ``size`` elements, whose signs begin at words[place], into out[first:first + size]."""
    if add:
        for j in range(size // 32):
            add_signed(out, first + 32 * j, words[place + j], magnitude)
    else:
        for j in range(size // 32):
            set_signed(out, first + 32 * j, words[place + j], magnitude)
    for i in range(size // 32 * 32, size):
        value = flipped(magnitude, words[place + size // 32], i % 32)
        out[first + i] = out[first + i] + value if add else value


@numba.njit
def _write_magnitude(
    magnitude: float, total: float, wire: Any, state: Any, e: Any, n: int, residual: bool
) -> None:
    """Write the magnitude, and keep it for the next round.

    ``total``: sum of all magnitudes. Not finite: an element was not.
    """
    if not np.isfinite(total):
        magnitude = np.nan
        if residual:
            forget(e, n)
    at(wire, 0, np.float64)[0] = magnitude
    state[0] = magnitude if np.isfinite(total) else 0.0


@numba.njit
def _with_residual(e: Any, begin: int, size: int, p: Any, first: int, f: Any, before: Any) -> None:
    """Set e[begin:begin + size] to p plus f times the residual, which is still to be computed.

    ``before``: the magnitude that was sent for what ``e`` has.
    """
    for i in range(size):
        left = e[begin + i]
        e[begin + i] = p[first + i] + f * (left - signed(before, left))


class OneBit(Codec):
    """Codec ``onebit``; see the module."""

    name = "onebit"
    keys = ("scaling",)
    remembers = False

    def options(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """Accept ``scaling``, a bool."""
        return {"scaling": checked_flag("scaling", given.get("scaling", False))}

    def numbers(self, options: Mapping[str, Any]) -> list[int]:
        """Return [scaling]."""
        return [int(options["scaling"])]

    def capacity(self, n: int, numbers: list[int]) -> int:
        """Return the exact size, which is always the same."""
        return _HEAD + 4 * ((n + 31) // 32)

    def scratch(self, n: int, numbers: list[int]) -> int:
        """Return the bytes of one block, for the sum of gradient and momentum."""
        return 8 * BLOCK

    def encoder(self, residual: bool, momentum: bool) -> Encoder:
        """Return an encoder that passes over memory once."""

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
        ) -> int:
            words = at(wire, _HEAD, np.uint32)
            before, f, u = cast(state[0], g), cast(factor, g), cast(mu, g)
            block = like(scratch, g)
            total = 0.0
            for begin in range(0, n, BLOCK):
                size = min(BLOCK, n - begin)
                p, first = g, begin
                if momentum:
                    p, first = block, 0
                    add_up(p, 0, g, e, m, begin, size, f, u, False, True)
                if residual:
                    _with_residual(e, begin, size, p, first, f, before)
                    p, first = e, begin
                total += _sum(p, first, size)
                sign_words(words, begin // 32, p, first, size)
            if momentum and not np.isfinite(total):
                forget(m, n)
            magnitude = total / n if options[0] else 1.0
            _write_magnitude(magnitude, total, wire, state, e, n, residual)
            return _HEAD + 4 * ((n + 31) // 32)

        return encode

    def decoder(self) -> Decoder:
        """Return a decoder that sets or adds plus or minus the magnitude."""

        def decode(
            wire: Any, size: int, out: Any, scratch: Any, options: Any, n: int, add: int
        ) -> int:
            if size != _HEAD + 4 * ((n + 31) // 32):
                return -1
            words, magnitude = at(wire, _HEAD, np.uint32), cast(at(wire, 0, np.float64)[0], out)
            _decode_block(words, 0, magnitude, out, 0, n, add != 0)
            return 0

        return decode

    def summer(self, residual: bool) -> Summer:
        """Return a function that sums each block in the L1 cache, and encodes it there.

        It passes over the residual once, and over no accumulator.
        """

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
        ) -> int:
            words, block = at(wire, _HEAD, np.uint32), like(scratch, e)
            before, f, d = cast(state[0], e), cast(factor, e), cast(divisor, e)
            total = 0.0
            for begin in range(0, n, BLOCK):
                size = min(BLOCK, n - begin)
                for k in range(count):
                    pushed = at(pushes, k * stride + _HEAD, np.uint32)
                    sent = cast(at(pushes, k * stride, np.float64)[0], e)
                    _decode_block(pushed, begin // 32, sent, block, 0, size, k > 0)
                if divisor > 1:
                    for i in range(size):
                        block[i] = block[i] / d
                p, first = block, 0
                if residual:
                    _with_residual(e, begin, size, p, first, f, before)
                    p, first = e, begin
                total += _sum(p, first, size)
                sign_words(words, begin // 32, p, first, size)
            magnitude = total / n if options[0] else 1.0
            _write_magnitude(magnitude, total, wire, state, e, n, residual)
            return _HEAD + 4 * ((n + 31) // 32)

        return sum_pushes


register(OneBit())
