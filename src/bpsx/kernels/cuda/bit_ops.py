"""Hashes on a GPU, equal to those of ``cpu/``."""

from __future__ import annotations

from typing import Any

from bpsx.kernels.cuda.device import device, np

_MIX = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
_SHIFTS = np.uint64(30), np.uint64(27), np.uint64(31)


@device
def mixed(z: Any) -> Any:
    """Apply splitmix64's finaliser."""
    z = (z ^ (z >> _SHIFTS[0])) * _MIX[0]
    z = (z ^ (z >> _SHIFTS[1])) * _MIX[1]
    return z ^ (z >> _SHIFTS[2])
