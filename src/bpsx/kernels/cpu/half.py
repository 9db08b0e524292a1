"""half: every element as float16, rounded to the nearest.

The setting ``fp16`` applies it to tensors that have no other compression.

Wire: n float16. Values beyond 65504 become infinity, as in any float16. Servers add in float32 and
round once.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from bpsx.kernels.codecs import Codec, Decoder, Encoder, register
from bpsx.kernels.cpu.bit_ops import at, cast
from bpsx.kernels.cpu.half_precision import narrow, widen


class Half(Codec):
    """Codec ``half``, without residual and momentum; see the module."""

    name = "half"
    feedback = ()
    remembers = False

    def options(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """Accept no options."""
        return {}

    def numbers(self, options: Mapping[str, Any]) -> list[int]:
        """Return no numbers."""
        return []

    def capacity(self, n: int, numbers: list[int]) -> int:
        """Return the exact size, which is always the same."""
        return 2 * n

    def encoder(self, residual: bool, momentum: bool) -> Encoder:
        """Return an encoder that rounds."""

        def encode(
            g: Any,
            e: Any,
            m: Any,
            wire: Any,
            scratch: Any,
            state: Any,
            options: Any,
            n: int,
            counter: int,
            factor: float,
            mu: float,
        ) -> int:
            # int16 stands for float16, see half_precision.py.
            halves = at(wire, 0, np.int16)
            for i in range(n):
                halves[i] = narrow(np.float32(g[i]), halves[i])
            return 2 * n

        return encode

    def decoder(self) -> Decoder:
        """Return a decoder that sets or adds."""

        def decode(
            wire: Any, size: int, out: Any, scratch: Any, options: Any, n: int, add: int
        ) -> int:
            if size != 2 * n:
                return -1
            halves = at(wire, 0, np.int16)
            if add:
                for i in range(n):
                    out[i] += cast(widen(halves[i]), out)
            else:
                for i in range(n):
                    out[i] = widen(halves[i])
            return 0

        return decode


register(Half())
