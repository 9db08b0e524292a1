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

from bpsx.kernels.codecs import Codec, Decoder, Encoder, checked_flag, register
from bpsx.kernels.cpu.bit_ops import at, cast, flipped, like, signed
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
                    for i in range(size):
                        left = e[begin + i]
                        e[begin + i] = p[first + i] + f * (left - signed(before, left))
                    p, first = e, begin
                total += _sum(p, first, size)
                sign_words(words, begin // 32, p, first, size)
            magnitude = total / n if options[0] else 1.0
            if not np.isfinite(total):
                magnitude = np.nan
                if residual:
                    forget(e, n)
                if momentum:
                    forget(m, n)
            at(wire, 0, np.float64)[0] = magnitude
            state[0] = magnitude if np.isfinite(total) else 0.0
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
            for j in range(n // 32):
                word = words[j]
                if add:
                    for lane in range(32):
                        out[32 * j + lane] += flipped(magnitude, word, lane)
                else:
                    for lane in range(32):
                        out[32 * j + lane] = flipped(magnitude, word, lane)
            for i in range(n // 32 * 32, n):
                value = flipped(magnitude, words[i // 32], i % 32)
                out[i] = out[i] + value if add else value
            return 0

        return decode


register(OneBit())
