"""half on a GPU: see ``cpu/half.py``. A NaN stays a NaN; its other bits depend on the device."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

from numba import cuda

from bpsx.kernels.codecs import DeviceCodec, register_device
from bpsx.kernels.cuda.device import (
    Kernel,
    address,
    at,
    block,
    blocks,
    element,
    grid,
    kernel,
    narrow,
    np,
    plus,
    refuse,
    thread,
    widen,
)
from bpsx.kernels.cuda.feedback import EACH, TILE, fetch, keep


@functools.cache
def _encoder(wide: str) -> Kernel:
    real = element(wide)

    @kernel(addresses=2, integers=1)
    def encode(g_: Any, wire: Any, n: int) -> None:
        g, halves, t = at(g_, 0, real), at(wire, 0, np.uint16), thread()
        values, rounded = cuda.local.array(EACH, real), cuda.local.array(EACH, np.uint16)
        for begin in range(block() * TILE, n, blocks() * TILE):
            fetch(values, g, begin, t, n)
            for j in range(EACH):
                rounded[j] = narrow(np.float32(values[j]))
            keep(halves, rounded, begin, t, n)

    return encode


@functools.cache
def _decoder(wide: str, add: bool) -> Kernel:
    real = element(wide)

    @kernel(addresses=2, integers=1)
    def decode(wire: Any, out_: Any, n: int) -> None:
        out, halves, t = at(out_, 0, real), at(wire, 0, np.uint16), thread()
        values, rounded = cuda.local.array(EACH, real), cuda.local.array(EACH, np.uint16)
        for begin in range(block() * TILE, n, blocks() * TILE):
            fetch(rounded, halves, begin, t, n)
            if add:
                fetch(values, out, begin, t, n)
            for j in range(EACH):
                value = real(widen(rounded[j]))
                values[j] = plus(values[j], value) if add else value
            keep(out, values, begin, t, n)

    return decode


class Half(DeviceCodec):
    """Codec ``half``, without residual and momentum; see the module."""

    name = "half"

    def size(self, wide: str, n: int, options: Sequence[int]) -> int:
        """Return the exact size, which is always the same."""
        return 2 * n

    def encode(
        self,
        wide: str,
        g: Any,
        e: Any,
        m: Any,
        wire: Any,
        written: Any,
        scratch: Any,
        state: Any,
        options: Sequence[int],
        n: int,
        counter: int,
        factor: float,
        mu: float,
        stream: int,
    ) -> None:
        """Queue the kernel that rounds."""
        _encoder(wide).launch(grid(-(-n // TILE)), stream, address(g), address(wire), n)

    def decode(
        self,
        wide: str,
        wire: Any,
        size: int,
        out: Any,
        scratch: Any,
        status: Any,
        options: Sequence[int],
        n: int,
        add: bool,
        stream: int,
    ) -> None:
        """Queue the kernel that sets or adds."""
        if size != 2 * n:
            refuse(status, stream)
        else:
            _decoder(wide, add).launch(grid(-(-n // TILE)), stream, address(wire), address(out), n)


register_device(Half())
