"""dithering: stochastic rounding of magnitudes to k levels up to the norm; it keeps the mean.

Linear levels are those of QSGD (arXiv 1610.02132), powers of two those of natural dithering (arXiv
1905.10988); see stochastic_rounding.py.

Wire: the norm (float64), the bytes of each chunk (uint16 each), the chunks (entropy_code.py). A
norm of 0, or NaN after an overflow, stands alone.

The l2 norm is a sum in float64, in an order that depends on the device. Two devices differ by at
most n 2^-53 of it. Its squares overflow for float64 magnitudes beyond 1e154, and vanish below
1e-162.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numba
import numpy as np

from bpsx.errors import ConfigError
from bpsx.kernels.codecs import Codec, Decoder, Encoder, checked_choice, checked_number, register
from bpsx.kernels.cpu.bit_ops import at, cast, like
from bpsx.kernels.cpu.entropy_code import CHUNK, MASKS, bits_bound, pack, unpack
from bpsx.kernels.cpu.feedback import BLOCK, add_up, forget, sign_words
from bpsx.kernels.cpu.stochastic_rounding import (
    from_magnitude,
    key_of,
    largest,
    magnitude,
    spread,
    squares,
    take_off,
    to_levels,
)

_HEAD = 8
_MOST = {"linear": 255, "natural": 31}


@numba.njit
def _scales(norm: float, k: int, natural: bool, other: Any) -> Any:
    """Return two factors that scale a magnitude to z, and the largest z.

    See stochastic_rounding.py for z.

    The first factor is a power of two, for norms whose inverse overflows.
    """
    top = np.float64(k << 23) if not natural else np.float64(np.int64(1) << (k + 22))
    far = 2.0**512 if cast(2.0**-512, other) > 0 else 2.0**96
    a = far if norm < 2.0**-40 else 1 / far if norm > 2.0**40 else 1.0
    return cast(a, other), cast(top / (norm * a), other), np.float32(top)


@numba.njit
def _again(p: Any, g: Any, m: Any, begin: int, size: int, mu: Any) -> None:
    """Repeat the sum that add_up made of gradient and momentum; the momentum is already updated."""
    for i in range(size):
        p[i] = g[begin + i] + mu * m[begin + i]


@numba.njit
def _everywhere(out: Any, begin: int, size: int, value: Any, add: bool) -> None:
    for i in range(begin, begin + size):
        out[i] = out[i] + value if add else value


@numba.njit
def _unit(norm: float, k: int, natural: bool, other: Any) -> Any:
    """Return the value of one level; natural: that of the highest level."""
    return cast(norm if natural else norm / k, other)


@numba.njit
def _norm(
    g: Any,
    e: Any,
    m: Any,
    block: Any,
    n: int,
    f: Any,
    u: Any,
    l2: bool,
    residual: bool,
    momentum: bool,
) -> Any:
    """First pass: add up gradient, momentum and residual, and return the norm of the sum."""
    top, total = magnitude(cast(0.0, g)), 0.0
    for begin in range(0, n, BLOCK):
        size = min(BLOCK, n - begin)
        p, first = g, begin
        if residual:
            p = e
            add_up(p, first, g, e, m, begin, size, f, u, True, momentum)
        elif momentum:
            p, first = block, 0
            add_up(p, first, g, e, m, begin, size, f, u, False, True)
        if l2:
            total += squares(p, first, size)
        else:
            top = largest(p, first, size, top)
    return np.sqrt(total) if l2 else np.float64(from_magnitude(top))


@numba.njit
def _quantise(
    g: Any,
    e: Any,
    m: Any,
    block: Any,
    begin: int,
    size: int,
    u: Any,
    levels: Any,
    words: Any,
    norm: float,
    k: int,
    natural: bool,
    key: Any,
    residual: bool,
    momentum: bool,
) -> None:
    """Second pass, for a chunk: compute its levels and signs, and update the residual."""
    scales, unit = _scales(norm, k, natural, g), _unit(norm, k, natural, g)
    for place in range(0, size, BLOCK):
        some = min(BLOCK, size - place)
        p, first = e if residual else g, begin + place
        if momentum and not residual:
            p, first = block, 0
            _again(p, g, m, begin + place, some, u)
        to_levels(levels, place, p, first, some, begin + place, scales, key, natural)
        sign_words(words, place // 32, p, first, some)
        if residual:
            take_off(e, first, levels, place, some, unit, k, natural)
    for i in range(size, (size + 63) // 64 * 64):
        levels[i] = 0


class Dithering(Codec):
    """Codec ``dithering``; see the module."""

    name = "dithering"
    keys = ("k", "partition", "normalize")
    remembers = False
    own_noise = True

    def options(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """Accept ``k``, ``partition`` (linear or natural) and ``normalize`` (max or l2).

        ``k`` is the number of levels besides 0.
        """
        partition = checked_choice("partition", given.get("partition", "linear"), *_MOST)
        normalize = checked_choice("normalize", given.get("normalize", "max"), "max", "l2")
        k, allowed = (
            given.get("k"),
            f"a whole number from 1 to {_MOST[partition]} with partition={partition!r}",
        )
        if k is None:
            raise ConfigError(f"k is missing: dithering needs {allowed}")
        number = checked_number(k)
        if not isinstance(number, int) or not 1 <= number <= _MOST[partition]:
            raise ConfigError(f"k={k!r}: expected {allowed}")
        return {"k": number, "partition": partition, "normalize": normalize}

    def shrinks(self, options: Mapping[str, Any]) -> bool:
        """Whether the residual shrinks, as it does with the max norm and at least 2 levels.

        There an element's error is less than half the largest magnitude. The l2 norm may be any
        multiple of the largest magnitude.
        """
        return options["normalize"] == "max" and int(options["k"]) >= 2

    def numbers(self, options: Mapping[str, Any]) -> list[int]:
        """Return [k, natural, l2]."""
        return [
            options["k"],
            int(options["partition"] == "natural"),
            int(options["normalize"] == "l2"),
        ]

    def capacity(self, n: int, numbers: list[int]) -> int:
        """Return the bound: each chunk's size, first byte, partly filled byte, and bits.

        entropy_code.py bounds the number of bits.
        """
        return _HEAD + 4 * ((n + CHUNK - 1) // CHUNK) + (n * bits_bound(numbers[0]) + 7) // 8

    def scratch(self, n: int, numbers: list[int]) -> int:
        """Return the bytes for a chunk's levels, masks and signs, and for a block.

        The block holds the sum of gradient and momentum.
        """
        return CHUNK + 2 * MASKS + 8 * BLOCK

    def encoder(self, residual: bool, momentum: bool) -> Encoder:
        """Return an encoder that makes two passes: the norm, then the levels."""

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
            masks, words, signs = (
                at(scratch, CHUNK, np.uint64),
                at(scratch, CHUNK + MASKS, np.uint32),
                at(scratch, CHUNK + MASKS, np.uint64),
            )
            block = like(at(scratch, CHUNK + 2 * MASKS, np.uint8), g)
            k, natural, u = options[0], options[1] != 0, cast(mu, g)
            norm = _norm(g, e, m, block, n, cast(factor, g), u, options[2] != 0, residual, momentum)
            highest = _unit(norm, k, natural, g) * cast(1 if natural else k, g)
            at(wire, 0, np.float64)[0] = norm if np.isfinite(highest) else np.nan
            if not np.isfinite(highest):
                if residual:
                    forget(e, n)
                if momentum:
                    forget(m, n)
            if not norm > 0 or not np.isfinite(highest):
                return _HEAD
            chunks = (n + CHUNK - 1) // CHUNK
            key, end = key_of(options[7], counter), _HEAD + 2 * chunks
            for chunk in range(chunks):
                begin = chunk * CHUNK
                size = min(CHUNK, n - begin)
                _quantise(
                    g,
                    e,
                    m,
                    block,
                    begin,
                    size,
                    u,
                    scratch,
                    words,
                    norm,
                    k,
                    natural,
                    key,
                    residual,
                    momentum,
                )
                length = pack(at(wire, end, np.uint8), scratch, signs, masks, size, k)
                at(wire, _HEAD + 2 * chunk, np.uint16)[0] = length
                end += length
            return end

        return encode

    def decoder(self) -> Decoder:
        """Return a decoder that works chunk by chunk."""

        def decode(
            wire: Any, size: int, out: Any, scratch: Any, options: Any, n: int, add: int
        ) -> int:
            masks, words, signs = (
                at(scratch, CHUNK, np.uint64),
                at(scratch, CHUNK + MASKS, np.uint32),
                at(scratch, CHUNK + MASKS, np.uint64),
            )
            k, natural = options[0], options[1] != 0
            if size < _HEAD:
                return -1
            norm = at(wire, 0, np.float64)[0]
            if size == _HEAD and (norm == 0 or np.isnan(norm)):
                _everywhere(out, 0, n, cast(norm, out), add != 0)
                return 0
            chunks = (n + CHUNK - 1) // CHUNK
            unit, end = _unit(norm, k, natural, out), _HEAD + 2 * chunks
            if size < end or not norm > 0 or not np.isfinite(unit):
                return -1
            for chunk in range(chunks):
                begin = chunk * CHUNK
                some = min(CHUNK, n - begin)
                length: Any = np.int64(at(wire, _HEAD + 2 * chunk, np.uint16)[0])
                if end + length > size:
                    return -1
                if length:
                    if unpack(at(wire, end, np.uint8), length, scratch, signs, masks, some, k) < 0:
                        return -1
                    spread(out, begin, scratch, words, some, unit, k, natural, add != 0)
                elif not add:
                    _everywhere(out, begin, some, cast(0.0, out), False)
                end += length
            return 0 if end == size else -1

        return decode


register(Dithering())
