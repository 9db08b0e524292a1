"""Halves to float32 and back on a GPU, for codecs, which know float32 and float64 only: see
``cpu/convert.py``.

Source and result may not overlap. What is left of a NaN's bits is the device's; it stays a NaN.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

from numba import cuda

from bpsx.kernels.cuda.device import Kernel, at, block, blocks, kernel, thread
from bpsx.kernels.cuda.feedback import EACH, TILE, fetch, keep
from bpsx.kernels.cuda.half_precision import HALVES, form


class Conversion(NamedTuple):
    """Kernels of (source, out, n): ``widen`` makes n float32 of halves, ``narrow`` the nearest
    halves of n float32, ties to even.

    For any number of blocks; ``grid(-(-n // TILE))`` are enough. Elements lie at multiples of their
    size.
    """

    widen: Kernel
    narrow: Kernel


def conversion(dtype: str) -> Conversion | None:
    """For elements of ``dtype``; None where they are wide already. Thread-safe."""
    return Conversion(widen(dtype), narrow(dtype)) if dtype in HALVES else None


@functools.cache
def widen(dtype: str) -> Kernel:
    """See :class:`Conversion`; ``dtype`` is ``float16`` or ``bfloat16``."""
    half, real, widened, _ = form(dtype)
    return _converter(half, real, widened)


@functools.cache
def narrow(dtype: str) -> Kernel:
    """Likewise."""
    half, real, _, narrowed = form(dtype)
    return _converter(real, half, narrowed)


def _converter(given: Any, wanted: Any, one: Any) -> Kernel:
    @kernel(addresses=2, integers=1)
    def convert(source_: Any, out_: Any, n: int) -> None:
        source, out, t = at(source_, 0, given), at(out_, 0, wanted), thread()
        before, after = cuda.local.array(EACH, given), cuda.local.array(EACH, wanted)
        for begin in range(block() * TILE, n, blocks() * TILE):
            fetch(before, source, begin, t, n)
            for j in range(EACH):
                after[j] = one(before[j])
            keep(out, after, begin, t, n)

    return convert
