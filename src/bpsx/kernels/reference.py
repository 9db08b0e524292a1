"""The oracle: what the kernels compute, in NumPy, slowly and plainly.

Used by tests only; not imported by anything else.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from bpsx.dtypes import BY_NAME

_WORD = 2**64 - 1
#: What splitmix64 counts in: the golden ratio's fraction, odd.
GAMMA = 0x9E3779B97F4A7C15


def bfloat16_to_float32(bits: np.ndarray) -> np.ndarray:
    """``bits``: uint16 array holding bfloat16 values."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


def float32_to_bfloat16(values: np.ndarray) -> np.ndarray:
    """Nearest bfloat16, ties to even, as uint16; NaN stays NaN."""
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    quiet = (bits | 0x00400000) >> 16
    return np.where(np.isnan(values), quiet, rounded).astype(np.uint16)


def reduce(pushes: Sequence[np.ndarray], dtype: str, divisor: int = 1) -> np.ndarray:
    """Sum of ``pushes`` (bfloat16 as uint16), divided by ``divisor``: added left to right in the
    wide type, narrowed once.

    An average of bfloat16 is added in parts of a power of two each, which is exact, so that it
    cannot overflow in float32.
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

    ``encode(p, counter) -> bytes`` and ``decode(bytes, n) -> array`` are the codec's own; ``wide``:
    float32 or float64.
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
        """What goes on the wire for the gradient ``g``; brings residual and momentum up to date.

        ``only``: the elements whose residual is added and changed; else all.
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
    """The magnitude as float64, then sign bits in little-endian words of 32."""
    magnitude = np.abs(p).mean(dtype=np.float64) if scaling else 1.0
    if not np.isfinite(p).all():
        magnitude = np.nan
    negative = np.zeros(-(-len(p) // 32) * 32, bool)
    negative[: len(p)] = np.signbit(p)
    return np.float64(magnitude).tobytes() + np.packbits(negative, bitorder="little").tobytes()


def onebit_decode(wire: bytes, n: int, wide: str = "float32") -> np.ndarray:
    """Plus or minus the magnitude."""
    magnitude = np.frombuffer(wire[:8], np.float64)[0].astype(wide)
    negative = np.unpackbits(np.frombuffer(wire[8:], np.uint8), bitorder="little")[:n].astype(bool)
    decoded: np.ndarray = np.where(negative, -magnitude, magnitude).astype(wide)
    return decoded


def amount(n: int, k: int | float) -> int:
    """How many of n elements topk and randomk send: a fraction, or so many."""
    return min(n, max(1, int(np.float64(k) * np.float64(n)))) if isinstance(k, float) else min(n, k)


def topk_encode(p: np.ndarray, k: int | float) -> bytes:
    """The indices of the elements with the largest magnitude (as bits; of equal ones the first),
    ascending, as uint32; then those elements.
    """
    magnitudes = p.view(f"u{p.itemsize}") & ~np.zeros(1, f"u{p.itemsize}") >> 1
    best = np.sort(np.argsort(~magnitudes, kind="stable")[: amount(len(p), k)])
    return best.astype(np.uint32).tobytes() + p[best].tobytes()


def topk_decode(wire: bytes, n: int, k: int | float, wide: str = "float32") -> np.ndarray:
    """Zeros but for what was sent. Raises ValueError for what is not topk's."""
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
    """The finaliser of splitmix64, of a 64-bit number."""
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 & _WORD
    z = (z ^ z >> 27) * 0x94D049BB133111EB & _WORD
    return z ^ z >> 31


def randomk_places(seed: int, counter: int, n: int, count: int) -> list[int]:
    """Which of n elements randomk sends, in their order."""
    start = splitmix64(seed + splitmix64(counter + GAMMA & _WORD) & _WORD)

    def below(y: int, i: int) -> int:
        return splitmix64(start + i * GAMMA & _WORD) * y >> 64

    edges = [i * n // count for i in range(count + 1)]
    turn = below(n, 0)
    return [(turn + edges[i] + below(edges[i + 1] - edges[i], i + 1)) % n for i in range(count)]


def randomk_encode(p: np.ndarray, counter: int, seed: int, k: int | float, kept: bool) -> bytes:
    """The counter as uint64, then the elements at this round's places.

    ``kept``: with residual or momentum, which notice any overflow.
    """
    values = p[randomk_places(seed, counter, len(p), amount(len(p), k))]
    if kept and np.isfinite(values).all() and not np.isfinite(p).all():
        values[0] = np.nan
    return np.uint64(counter).tobytes() + values.tobytes()


def randomk_decode(
    wire: bytes, n: int, seed: int, k: int | float, wide: str = "float32"
) -> np.ndarray:
    """Zeros but for what was sent. Raises ValueError for what is not randomk's."""
    count = amount(n, k)
    if len(wire) != 8 + count * np.dtype(wide).itemsize:
        raise ValueError("size")
    decoded = np.zeros(n, wide)
    decoded[randomk_places(seed, int.from_bytes(wire[:8], "little"), n, count)] = np.frombuffer(
        wire[8:], wide
    )
    return decoded
