"""Oracle of dithering, in plain, slow NumPy.

Mirrors ``cpu/dithering.py``, ``stochastic_rounding.py`` and ``entropy_code.py``.

Only tests import it.
"""

from __future__ import annotations

import numpy as np

CHUNK = 8192
_M64 = 2**64 - 1


def _mixed(z: int) -> int:
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 & _M64
    z = (z ^ z >> 27) * 0x94D049BB133111EB & _M64
    return z ^ z >> 31


def noise(n: int, seed: int, counter: int) -> np.ndarray:
    """Return 32 random bits for each of n elements."""
    key = _mixed((_mixed(seed & _M64) + counter) & _M64)
    x = np.arange(n, dtype=np.uint32) + np.uint32(key & 0xFFFFFFFF)
    x = (x ^ x >> np.uint32(16)) * np.uint32(0x7FEB352D) ^ np.uint32(key >> 32)
    x = (x ^ x >> np.uint32(15)) * np.uint32(0x846CA68B)
    return x ^ x >> np.uint32(16)


def norm_of(p: np.ndarray, l2: bool) -> float:
    """Return the norm of ``p``.

    The l2 norm is computed precisely, since devices sum it in different orders.
    """
    with np.errstate(over="ignore"):
        return (
            float(np.sqrt(np.square(p.astype(np.float64)).sum())) if l2 else float(np.abs(p).max())
        )


def levels_of(p: np.ndarray, norm: float, k: int, natural: bool, random: np.ndarray) -> np.ndarray:
    """Return the elements' levels as integers."""
    top = 2.0 ** (k + 22) if natural else k * 2.0**23
    kind = p.dtype.type
    far = 2.0**96 if kind is np.float32 else 2.0**512
    a = far if norm < 2.0**-40 else 1 / far if norm > 2.0**40 else 1.0
    z = np.minimum(
        (np.abs(p) * kind(a) * kind(top / (norm * a))).astype(np.float32), np.float32(top)
    )
    fixed = np.minimum(z, 2.0**31 - 1024).astype(np.int64)
    if natural:
        between = z.view(np.int32).astype(np.int64) - (149 << 23)
        fixed = np.where(z < 2**23, fixed, between)
    levels: np.ndarray = (fixed + (random >> 9)) >> 23
    return levels


def values_of(levels: np.ndarray, norm: float, k: int, natural: bool, wide: str) -> np.ndarray:
    """Return the values that ``levels`` stand for."""
    kind = np.dtype(wide).type
    values: np.ndarray = (
        np.where(levels > 0, 2.0 ** (levels - k), 0).astype(wide) * kind(norm)
        if natural
        else levels.astype(wide) * kind(norm / k)
    )
    return values


def _number(x: int, s: int) -> list[int]:
    if x >> s < 16:
        return [0] * (x >> s) + [1] + [x >> b & 1 for b in range(s)]
    return [0] * 16 + [x >> b & 1 for b in range(14)]


def chunk_bytes(levels: np.ndarray, negative: np.ndarray, k: int) -> bytes:
    """Encode one chunk."""
    size, marked = len(levels), levels > 0
    count = int(marked.sum())
    if count == 0:
        return b""
    less = levels[marked] - 1
    r = max(0, (int(less.sum()) // count).bit_length() - 1)
    s = max(0, (size // (count + 1)).bit_length() - 1)
    if (count + 1) * (s + 1) + 2 * (size >> s) >= size:
        s = 0
    if s:
        gaps = np.diff(np.append(np.flatnonzero(marked), size), prepend=-1) - 1
        planes = [np.array(sum((_number(int(x), s) for x in gaps), []), bool)]
    else:
        planes = [marked]
    planes.append(negative[marked])
    planes += [(less >> b & 1).astype(bool) for b in range(r)]
    high = less >> r
    for step in range((k - 1) >> r):
        planes.append(high > step)
        high = high[high > step]
    return bytes([r + 8 * s]) + np.packbits(np.concatenate(planes), bitorder="little").tobytes()


def encode(
    p: np.ndarray,
    k: int,
    natural: bool,
    l2: bool,
    seed: int,
    counter: int,
    norm: float | None = None,
) -> bytes:
    """Return the wire bytes; ``norm``, if given, replaces the norm of ``p``."""
    with np.errstate(over="ignore", invalid="ignore"):
        norm = norm_of(p, l2) if norm is None else norm
        highest = values_of(np.array([k]), norm, k, natural, p.dtype.name)[0]
    if not np.isfinite(highest):
        return np.float64(np.nan).tobytes()
    if norm == 0:
        return np.float64(norm).tobytes()
    levels = levels_of(p, norm, k, natural, noise(len(p), seed, counter))
    chunks = [
        chunk_bytes(levels[i : i + CHUNK], np.signbit(p[i : i + CHUNK]), k)
        for i in range(0, len(p), CHUNK)
    ]
    return (
        np.float64(norm).tobytes()
        + np.array([len(c) for c in chunks], np.uint16).tobytes()
        + b"".join(chunks)
    )


class _Bits:
    """Reader of a chunk's bits, from the front."""

    def __init__(self, chunk: bytes) -> None:
        self.bits = np.unpackbits(np.frombuffer(chunk, np.uint8), bitorder="little").astype(
            np.int64
        )
        self.at = 0

    def take(self, count: int) -> np.ndarray:
        self.at += count
        return self.bits[self.at - count : self.at]

    def integer(self, count: int) -> int:
        return sum(int(b) << i for i, b in enumerate(self.take(count)))

    def number(self, s: int) -> int:
        high = 0
        while high < 16 and not self.take(1)[0]:
            high += 1
        return high << s | self.integer(s) if high < 16 else self.integer(14)


def chunk_levels(chunk: bytes, size: int, k: int) -> np.ndarray:
    """Return the signed levels of a chunk."""
    levels, negative = np.zeros(size, np.int64), np.zeros(size, bool)
    if not chunk:
        return levels
    bits = _Bits(chunk)
    r, s = bits.integer(3), bits.integer(5)
    if s:
        places, i = [], bits.number(s)
        while i < size:
            places.append(i)
            i += 1 + bits.number(s)
    else:
        places = np.flatnonzero(bits.take(size)).tolist()
    negative[places] = bits.take(len(places)).astype(bool)
    levels[places] = 1 + sum(bits.take(len(places)) << b for b in range(r))
    left = np.array(places, np.int64)
    for _ in range((k - 1) >> r):
        left = left[bits.take(len(left)).astype(bool)]
        levels[left] += 1 << r
    return np.where(negative, -levels, levels)


def decode(wire: bytes, n: int, k: int, natural: bool, wide: str = "float32") -> np.ndarray:
    """Return the n elements that ``wire`` decodes to."""
    norm = float(np.frombuffer(wire[:8], np.float64)[0])
    if len(wire) == 8:
        return np.full(n, norm, wide)
    chunks = -(-n // CHUNK)
    at, found = 8 + 2 * chunks, []
    for i, length in enumerate(np.frombuffer(wire[8:at], np.uint16).astype(int)):
        found.append(chunk_levels(wire[at : at + length], min(CHUNK, n - i * CHUNK), k))
        at += length
    levels = np.concatenate(found)
    values = values_of(np.abs(levels), norm, k, natural, wide)
    decoded: np.ndarray = np.where(levels < 0, -values, values)
    return decoded
