"""The oracle: what the kernels compute, in NumPy, slowly and plainly. Used by tests only; not imported by anything else."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from bpsx.dtypes import BY_NAME


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
    """Sum of ``pushes`` (bfloat16 as uint16), divided by ``divisor``: added left to right in the wide type, narrowed once."""
    if dtype == "bfloat16":
        wide = [bfloat16_to_float32(p) for p in pushes]
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
            total = total / total.dtype.type(divisor) if total.dtype.kind == "f" else total // total.dtype.type(divisor)
        if dtype == "bfloat16":
            return float32_to_bfloat16(total)
        return total.astype(pushes[0].dtype)
