"""Oracle of the kernels: the same results in plain, slow NumPy.

Only tests import it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from bpsx.dtypes import BY_NAME

_WORD = 2**64 - 1
#: Increment of splitmix64: the fraction of the golden ratio, as an odd number.
GAMMA = 0x9E3779B97F4A7C15


def bfloat16_to_float32(bits: np.ndarray) -> np.ndarray:
    """Widen bfloat16 values, given as a uint16 array, to float32."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


def float32_to_bfloat16(values: np.ndarray) -> np.ndarray:
    """Return the nearest bfloat16 values as uint16; ties to even, NaN stays NaN."""
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    quiet = (bits | 0x00400000) >> 16
    return np.where(np.isnan(values), quiet, rounded).astype(np.uint16)


def reduce(pushes: Sequence[np.ndarray], dtype: str, divisor: int = 1) -> np.ndarray:
    """Return the sum of ``pushes`` divided by ``divisor``.

    Adds left to right in the wide type, and rounds once to ``dtype``.

    bfloat16 is passed and returned as uint16. For an average of bfloat16 each part is first scaled
    by a power of two. That is exact, and the sum cannot overflow in float32.
    """
    scale = np.float32(
        2.0 ** -min(16, (len(pushes) - 1).bit_length())
        if divisor != 1 and dtype == "bfloat16"
        else 1
    )
    if dtype == "bfloat16":
        wide = [bfloat16_to_float32(p) * scale for p in pushes]
    elif dtype == "float16":
        wide = [p.astype(np.float32) for p in pushes]
    elif BY_NAME[dtype].wide_itemsize != BY_NAME[dtype].itemsize:
        wide = [p.astype(np.int32) for p in pushes]
    else:
        wide = [p.copy() for p in pushes]
    total = wide[0]
    with np.errstate(over="ignore", invalid="ignore"):
        for w in wide[1:]:
            total = total + w
        if divisor != 1:
            total = (
                total / (total.dtype.type(divisor) * total.dtype.type(scale))
                if total.dtype.kind == "f"
                else total // total.dtype.type(divisor)
            )
        if dtype == "bfloat16":
            return float32_to_bfloat16(total)
        return total.astype(pushes[0].dtype)


class Reference:
    """A partition's encoder as :mod:`bpsx.kernels.codecs` defines it, for any codec's oracle.

    ``encode(p, counter) -> bytes`` and ``decode(bytes, n) -> array`` are the codec's own functions.
    ``wide``: float32 or float64.
    """

    def __init__(
        self,
        encode: Callable[[np.ndarray, int], bytes],
        decode: Callable[[bytes, int], np.ndarray],
        n: int,
        wide: str = "float32",
    ) -> None:
        self.encode_plain, self.decode = encode, decode
        self.residual, self.momentum = np.zeros(n, wide), np.zeros(n, wide)
        self.counter = 0

    def encode(
        self,
        g: np.ndarray,
        *,
        residual: bool = False,
        momentum: bool = False,
        factor: float = 1.0,
        mu: float = 0.0,
        only: Sequence[int] | None = None,
    ) -> bytes:
        """Return the wire bytes of gradient ``g``, and update residual and momentum.

        ``only``: indices of the elements whose residual is added and updated; None: all elements.
        """
        kind, where = g.dtype.type, slice(None) if only is None else list(only)
        self.counter += 1
        p = g
        if momentum:
            self.momentum = kind(mu) * self.momentum + g
            p = g + kind(mu) * self.momentum
        if residual:
            p = p.copy()
            p[where] = p[where] + kind(factor) * self.residual[where]
        wire = self.encode_plain(p, self.counter)
        if residual:
            self.residual[where] = (p - self.decode(wire, len(p)))[where]
        if not np.isfinite(p).all():
            self.residual[:] = 0
            self.momentum[:] = 0
        return wire


def onebit_encode(p: np.ndarray, scaling: bool) -> bytes:
    """Encode as the magnitude (float64), then the sign bits in little-endian words of 32 bits."""
    magnitude = np.abs(p).mean(dtype=np.float64) if scaling else 1.0
    if not np.isfinite(p).all():
        magnitude = np.nan
    negative = np.zeros(-(-len(p) // 32) * 32, bool)
    negative[: len(p)] = np.signbit(p)
    return np.float64(magnitude).tobytes() + np.packbits(negative, bitorder="little").tobytes()


def onebit_decode(wire: bytes, n: int, wide: str = "float32") -> np.ndarray:
    """Decode each element to plus or minus the magnitude."""
    magnitude = np.frombuffer(wire[:8], np.float64)[0].astype(wide)
    negative = np.unpackbits(np.frombuffer(wire[8:], np.uint8), bitorder="little")[:n].astype(bool)
    decoded: np.ndarray = np.where(negative, -magnitude, magnitude).astype(wide)
    return decoded


def amount(n: int, k: int | float) -> int:
    """Return the number of elements out of n that topk and randomk send.

    ``k``: a fraction of n (float) or a number of elements (int).
    """
    return min(n, max(1, int(np.float64(k) * np.float64(n)))) if isinstance(k, float) else min(n, k)


def topk_encode(p: np.ndarray, k: int | float) -> bytes:
    """Encode as ascending indices (uint32) of the largest magnitudes, then the values.

    Magnitudes are compared as bits. Among equal magnitudes the lowest index wins.
    """
    magnitudes = p.view(f"u{p.itemsize}") & ~np.zeros(1, f"u{p.itemsize}") >> 1
    best = np.sort(np.argsort(~magnitudes, kind="stable")[: amount(len(p), k)])
    return best.astype(np.uint32).tobytes() + p[best].tobytes()


def topk_decode(wire: bytes, n: int, k: int | float, wide: str = "float32") -> np.ndarray:
    """Decode to an array that is zero except at the sent indices.

    Raises ValueError for bytes that topk cannot have written.
    """
    count = amount(n, k)
    if len(wire) != count * (4 + np.dtype(wide).itemsize):
        raise ValueError("size")
    indices = np.frombuffer(wire[: 4 * count], np.uint32).astype(np.int64)
    if (np.diff(indices) <= 0).any() or (indices >= n).any():
        raise ValueError("indices")
    decoded = np.zeros(n, wide)
    decoded[indices] = np.frombuffer(wire[4 * count :], wide)
    return decoded


def splitmix64(z: int) -> int:
    """Apply splitmix64's finaliser to a 64-bit number."""
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 & _WORD
    z = (z ^ z >> 27) * 0x94D049BB133111EB & _WORD
    return z ^ z >> 31


def randomk_places(seed: int, counter: int, n: int, count: int) -> list[int]:
    """Return the indices of the elements that randomk sends, in wire order."""
    start = splitmix64(seed + splitmix64(counter + GAMMA & _WORD) & _WORD)

    def below(y: int, i: int) -> int:
        return splitmix64(start + i * GAMMA & _WORD) * y >> 64

    edges = [i * n // count for i in range(count + 1)]
    turn = below(n, 0)
    return [(turn + edges[i] + below(edges[i + 1] - edges[i], i + 1)) % n for i in range(count)]


def randomk_encode(p: np.ndarray, counter: int, seed: int, k: int | float, kept: bool) -> bytes:
    """Encode as the counter (uint64), then the elements at this round's indices.

    ``kept``: the codec has residual or momentum, and therefore detects any overflow.
    """
    values = p[randomk_places(seed, counter, len(p), amount(len(p), k))]
    if kept and np.isfinite(values).all() and not np.isfinite(p).all():
        values[0] = np.nan
    return np.uint64(counter).tobytes() + values.tobytes()


def randomk_decode(
    wire: bytes, n: int, seed: int, k: int | float, wide: str = "float32"
) -> np.ndarray:
    """Decode to an array that is zero except at the sent indices.

    Raises ValueError for bytes that randomk cannot have written.
    """
    count = amount(n, k)
    if len(wire) != 8 + count * np.dtype(wide).itemsize:
        raise ValueError("size")
    decoded = np.zeros(n, wide)
    decoded[randomk_places(seed, int.from_bytes(wire[:8], "little"), n, count)] = np.frombuffer(
        wire[8:], wide
    )
    return decoded
