"""Conversion of halves to float32 and back on a GPU, for codecs: see ``cpu/convert.py``.

Codecs handle float32 and float64 only. Source and result must not overlap. A NaN stays a NaN; its
other bits depend on the device.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

from numba import cuda

from bpsx.kernels.cuda.device import Kernel, at, block, blocks, kernel, thread
from bpsx.kernels.cuda.feedback import EACH, TILE, fetch, keep
from bpsx.kernels.cuda.half_precision import HALVES, form


class Conversion(NamedTuple):
    """Kernels of (source, out, n): ``widen`` and ``narrow``.

    ``widen`` converts n halves to float32. ``narrow`` converts n float32 to the nearest halves,
    ties to even. Any number of blocks is valid; ``grid(-(-n // TILE))`` are enough. Addresses must
    be multiples of the element size.
    """

    widen: Kernel
    narrow: Kernel


def conversion(dtype: str) -> Conversion | None:
    """Return the conversion of ``dtype``, or None if it is a wide type. Thread-safe."""
    return Conversion(widen(dtype), narrow(dtype)) if dtype in HALVES else None


@functools.cache
def widen(dtype: str) -> Kernel:
    """Return the kernel ``widen`` of :class:`Conversion` for ``float16`` or ``bfloat16``."""
    half, real, widened, _ = form(dtype)
    return _converter(half, real, widened)


@functools.cache
def narrow(dtype: str) -> Kernel:
    """Return the kernel ``narrow`` of :class:`Conversion` for ``float16`` or ``bfloat16``."""
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
