"""Averages of integers on GPUs: divides NCCL's sums in place, rounding down as on the CPU."""

from __future__ import annotations

from typing import Any

from bpsx.kernels.cuda.device import THREADS, Kernel, at, block, blocks, kernel, np, thread


def _divider(element: Any) -> Kernel:
    @kernel(addresses=1, integers=2)
    def divide(data: Any, n: Any, divisor: Any) -> None:
        i = block() * THREADS + thread()
        p = at(data, 0, element)
        while i < n:
            value = np.int64(p[i])
            p[i] = element(value // divisor)
            i += blocks() * THREADS

    return divide


_dividers = {"int32": _divider(np.int32), "int64": _divider(np.int64)}


def divider(dtype: str) -> Kernel:
    """Return the kernel of (address, elements, divisor) for ``int32`` or ``int64``.

    Any number of blocks of THREADS threads is valid.
    """
    return _dividers[dtype]
