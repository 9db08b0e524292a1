"""Stochastic rounding of magnitudes to levels, and back, on a GPU.

It gives the same bits as ``cpu/stochastic_rounding.py``.
"""

from __future__ import annotations

from typing import Any

from bpsx.kernels.cuda.bit_ops import mixed
from bpsx.kernels.cuda.device import bits, device, element, float_of, np, times

_FRACTION = 23
_EXPONENT = (127 + _FRACTION - 1) << _FRACTION


@device
def key_of(seed: int, counter: int) -> Any:
    """Return the key of the random numbers."""
    return mixed(mixed(np.uint64(np.int64(seed))) + np.uint64(counter))


@device
def noise(index: int, key: Any) -> Any:
    """Return 32 random bits for element ``index``."""
    x = np.uint32(np.uint32(index) + np.uint32(key & np.uint64(0xFFFFFFFF)))
    x = np.uint32(np.uint32(x ^ (x >> np.uint32(16))) * np.uint32(0x7FEB352D)) ^ np.uint32(
        key >> np.uint64(32)
    )
    x = np.uint32(np.uint32(x ^ (x >> np.uint32(15))) * np.uint32(0x846CA68B))
    return np.uint32(x ^ (x >> np.uint32(16)))


def scaler(wide: str, natural: bool) -> Any:
    """Return a function of norm and k that gives two factors and the largest z.

    The factors scale a magnitude to z, see ``cpu/stochastic_rounding.py``.
    """
    real, far = element(wide), 2.0**512 if wide == "float64" else 2.0**96

    @device
    def scales(norm: Any, k: int) -> Any:
        top = np.float64(1 << (k + _FRACTION - 1)) if natural else np.float64(k << _FRACTION)
        a = far if norm < 2.0**-40 else 1 / far if norm > 2.0**40 else 1.0
        return real(a), real(top / (norm * a)), np.float32(top)

    return scales


def unit_of(wide: str, natural: bool) -> Any:
    """Return a function of norm and k: the value of one level; natural: of the highest level."""
    real = element(wide)

    @device
    def unit(norm: Any, k: int) -> Any:
        return real(norm) if natural else real(norm / np.float64(k))

    return unit


def leveller(natural: bool) -> Any:
    """Return a function of a magnitude, :func:`scaler`'s numbers and random bits: the level."""

    @device
    def level(size: Any, a: Any, b: Any, top: Any, random: Any) -> Any:
        z = np.float32(times(times(size, a), b))
        z = z if z < top else top
        between = natural and z >= np.float32(1 << _FRACTION)
        fixed = np.uint32(bits(z) - np.uint32(_EXPONENT)) if between else np.uint32(np.int32(z))
        return np.uint32(
            np.uint32(fixed + np.uint32(random >> np.uint32(32 - _FRACTION)))
            >> np.uint32(_FRACTION)
        )

    return level


def valuer(wide: str, natural: bool) -> Any:
    """Return a function of a level, k and :func:`unit_of`'s number: the level's value."""
    real, fraction, bias = (
        element(wide),
        23 if wide == "float32" else 52,
        127 if wide == "float32" else 1023,
    )

    @device
    def value(level: Any, k: int, unit: Any) -> Any:
        if not natural:
            return times(real(np.int32(level)), unit)
        power = (
            float_of(np.uint64(np.int64(level) + bias - k) << np.uint64(fraction), unit)
            if level > np.uint32(0)
            else real(0)
        )
        return times(power, unit)

    return value
