"""onebit: the sign of each element, and with ``scaling`` one magnitude for all, the mean of theirs
(arXiv 1905.10936).

Wire: the magnitude (float64), then the signs, 32 to a word, the first element's lowest; a set bit
is negative. 1/32 of float32.

The residual p - decode(wire) is p less its own sign times the magnitude. So p itself is kept, and
the magnitude in ``state``: what has to be taken off is taken off in the next round, while p is read
anyway, and memory is passed over once.
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
    """The sum of magnitudes; of one block, in the elements' type."""
    total = cast(0.0, p)
    for i in range(begin, begin + n):
        total += abs(p[i])
    return total


@numba.njit
def _sum(p: Any, begin: int, n: int) -> Any:
    """The same as float64; not finite if an element is not.

    A float32 sum may overflow though its parts do not: it is then made again.
    """
    total = np.float64(_magnitudes(p, begin, n))
    if not np.isfinite(total):
        total = np.float64(0.0)
        for i in range(begin, begin + n):
            total += np.float64(abs(p[i]))
    return total


class OneBit(Codec):
    """See the module."""

    name = "onebit"
    keys = ("scaling",)

    def options(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """``scaling``: a bool."""
        return {"scaling": checked_flag("scaling", given.get("scaling", False))}

    def numbers(self, options: Mapping[str, Any]) -> list[int]:
        """[scaling]"""
        return [int(options["scaling"])]

    def capacity(self, n: int, numbers: list[int]) -> int:
        """Always the same."""
        return _HEAD + 4 * ((n + 31) // 32)

    def scratch(self, n: int, numbers: list[int]) -> int:
        """A block, for what is made of gradient and momentum."""
        return 8 * BLOCK

    def encoder(self, residual: bool, momentum: bool) -> Encoder:
        """In one pass over memory."""

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
        """Sets or adds plus or minus the magnitude."""

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
