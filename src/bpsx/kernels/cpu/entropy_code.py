"""Lossless code for chunks of levels (bytes from 0 to k) and their signs.

A chunk of at most CHUNK elements is a byte, r + 8 s, and then a stream of bits in planes, in this
order:

1. Which levels are not 0. With s = 0 this is one bit per element. Otherwise it is one number per
   nonzero element: the count of zeros between it and the nonzero element before it. One more number
   counts the zeros at the end. The number x has the Rice code of parameter s (Rice and
   Plaunt, "Adaptive variable-length coding", IEEE Trans. Comm. 1971): x >> s zeros, a one, the
   s low bits of x, lowest first; but from x >> s = 16 on, 16 zeros and 14 bits of x. The zeros
   at the end come last, so a reader finds the end when the chunk is full.
2. The signs of the nonzero elements; a set bit means negative.
3. Their levels less 1, Rice-coded with parameter r, plane by plane. First the low bits, lowest
   first, each plane for all nonzero elements. Then whether (level - 1) >> r is above 0. Then,
   for the elements where it is, whether it is above 1. And so on up to (k - 1) >> r, which no
   level exceeds.

Zeros fill the last byte. A chunk of zeros takes no bytes at all. r and s follow from counts alone,
see _parameter and _spacing. Let N be the number of nonzero elements and S the sum of their levels
less 1. Then r is the largest with N 2^r <= S, so the high parts sum to less than 2 N.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np

from bpsx.kernels.cpu.bit_ops import above, gather_bits, lowest, ones, scatter_bits
from bpsx.kernels.cpu.bitstream import end, get, holding, put, raise_bytes

#: Elements of a chunk; bytes of its masks or signs.
CHUNK, MASKS = 8192, 1024
_LIMIT, _RAW = 16, 14


def bits_bound(k: int) -> int:
    """Return the most bits that an element takes.

    These are one for its place, its sign, r low ones, and high ones, which sum to less than 3 N;
    see the module. That holds for s = 0. Another s is chosen only if it takes fewer bits, see
    _spacing.
    """
    return 2 + max(0, k.bit_length() - 1) + min(3, k - 1)


@numba.njit
def _all_ones(masks: Any, groups: int) -> int:
    count = 0
    for j in range(groups):
        count += ones(masks[j])
    return count


@numba.njit
def _parameter(levels: Any, groups: int, count: int, k: int) -> int:
    if k <= 2:
        return 0
    total = -count
    for i in range(64 * groups):
        total += levels[i]
    r = 0
    while count << (r + 1) <= total:
        r += 1
    return r


@numba.njit
def _spacing(size: int, count: int) -> int:
    """Return the largest s with 2^s at most the mean distance of nonzero elements.

    Returns 0 if that might take more bits than there are elements. A number takes s + 1 + (x >> s)
    bits. Where x >> s is 16 or more it takes 30, which is less than s + 1 + 2 (x >> s).
    """
    s = 0
    while (count + 1) << (s + 1) <= size:
        s += 1
    return s if (count + 1) * (s + 1) + 2 * (size >> s) < size else 0


@numba.njit
def _put_number(to: Any, written: int, held: Any, x: int, s: int) -> Any:
    high = x >> s
    if high < _LIMIT:
        return put(
            to, written, held, np.uint64((((x & ((1 << s) - 1)) << 1) | 1) << high), high + 1 + s
        )
    return put(to, written, held, np.uint64(x << _LIMIT), _LIMIT + _RAW)


@numba.njit
def _put_places(to: Any, held: Any, masks: Any, size: int, s: int) -> Any:
    """Write the places of nonzero elements behind the first byte; return (written, held).

    The first byte is in ``held``.
    """
    written, after = 8, 0
    for j in range((size + 63) // 64):
        word = masks[j]
        if s == 0:
            written, held = put(to, written, held, word, min(64, size - 64 * j))
            continue
        while word != np.uint64(0):
            i = 64 * j + lowest(word)
            written, held = _put_number(to, written, held, i - after, s)
            after = i + 1
            word &= word - np.uint64(1)
    if s:
        written, held = _put_number(to, written, held, size - after, s)
    return written, held


@numba.njit
def pack(to: Any, levels: Any, signs: Any, masks: Any, size: int, k: int) -> Any:
    """Encode a chunk. Levels up to the next multiple of 64 must be 0; masks is scratch memory.

    Returns the bytes written, and touches up to 8 more.
    """
    groups = (size + 63) // 64
    for j in range(groups):
        masks[j] = above(levels, 64 * j, np.uint8(0))
    count = _all_ones(masks, groups)
    if count == 0:
        return 0
    r, s = _parameter(levels, groups, count, k), _spacing(size, count)
    written, held = _put_places(to, np.uint64(r + 8 * s), masks, size, s)
    for j in range(groups):
        written, held = put(to, written, held, gather_bits(signs[j], masks[j]), ones(masks[j]))
    for low in range(r):
        for j in range(groups):
            word = holding(levels, 64 * j, np.uint8(1 << low))
            written, held = put(to, written, held, gather_bits(word, masks[j]), ones(masks[j]))
    for high in range(1, ((k - 1) >> r) + 1):
        left = np.uint64(0)
        for j in range(groups):
            word = above(levels, 64 * j, np.uint8(high << r))
            written, held = put(to, written, held, gather_bits(word, masks[j]), ones(masks[j]))
            masks[j] = word
            left |= word
        if left == np.uint64(0):
            break
    return end(to, written, held)


@numba.njit
def _get_numbers(of: Any, limit: int, masks: Any, size: int, s: int) -> int:
    """Set the bits of masks, which are 0, from Rice-coded numbers.

    Returns the position behind the numbers, or -1 if they are invalid.
    """
    position, i = 8, np.int64(0)
    while True:
        word = get(of, position)
        high: Any = lowest(word)
        if high < _LIMIT:
            i += (high << s) | (np.int64(word >> np.uint64(high + 1)) & ((1 << s) - 1))
            position += high + 1 + s
        else:
            i += np.int64(word >> np.uint64(_LIMIT)) & ((1 << _RAW) - 1)
            position += _LIMIT + _RAW
        if position > limit or i > size:
            return -1
        if i == size:
            return position
        masks[i >> 6] |= np.uint64(1) << np.uint64(i & 63)
        i += 1


@numba.njit
def _get_places(of: Any, limit: int, levels: Any, masks: Any, size: int, s: int) -> int:
    """Set masks, and levels to 1 where masks are set; return the position behind them, or -1."""
    if s == 0:
        position = 8 + size
        if position > limit:
            return -1
        for j in range(size // 64):
            masks[j] = get(of, 8 + 64 * j)
        if size % 64:
            masks[size // 64] = get(of, 8 + size // 64 * 64) & (
                (np.uint64(1) << np.uint64(size % 64)) - np.uint64(1)
            )
    else:
        for j in range((size + 63) // 64):
            masks[j] = 0
        position = _get_numbers(of, limit, masks, size, s)
    for i in range(64 * ((size + 63) // 64)):
        levels[i] = 0
    for j in range((size + 63) // 64):
        raise_bytes(levels, 64 * j, masks[j], np.uint8(1))
    return position


@numba.njit
def _get_plane(
    of: Any, position: int, levels: Any, masks: Any, groups: int, amount: int, narrow: bool
) -> int:
    """Add ``amount`` to those masked levels whose bit is set; return their number.

    With ``narrow`` they become the new mask.
    """
    count = 0
    for j in range(groups):
        mask = masks[j]
        if mask != np.uint64(0):
            word = scatter_bits(get(of, position), mask)
            raise_bytes(levels, 64 * j, word, np.uint8(amount))
            position += ones(mask)
            count += ones(word)
            if narrow:
                masks[j] = word
    return count


@numba.njit
def unpack(of: Any, length: int, levels: Any, signs: Any, masks: Any, size: int, k: int) -> int:
    """Decode levels and signs of a chunk of ``length`` bytes, at least 1; masks is scratch memory.

    Returns 0, or -1 if the bytes are invalid. Bytes that no encoder writes may give levels above k,
    up to the next power of two; 256 becomes 0.
    """
    groups, limit = (size + 63) // 64, 8 * length
    head = np.int64(of[0])
    r, s = head & 7, head >> 3
    if s >= _RAW or (r and (1 << r) >= k):
        return -1
    position = _get_places(of, limit, levels, masks, size, s)
    if position < 0:
        return -1
    count = _all_ones(masks, groups)
    if position + count * (1 + r) > limit:
        return -1
    for j in range(groups):
        signs[j] = scatter_bits(get(of, position), masks[j])
        position += ones(masks[j])
    for low in range(r):
        _get_plane(of, position, levels, masks, groups, 1 << low, False)
        position += count
    for _ in range((k - 1) >> r):
        if count == 0:
            break
        if position + count > limit:
            return -1
        higher = _get_plane(of, position, levels, masks, groups, 1 << r, True)
        position += count
        count = higher
    return 0 if (position + 7) >> 3 == length else -1
