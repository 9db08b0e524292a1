"""A compressed partition of a job, simulated: what its workers push, and what its lane replies.

The codecs are the compiled ones; all else that happens to their state is written here anew.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import ml_dtypes
import numpy as np

from bpsx.compression.spec import CompressionSpec, mix, stream
from bpsx.kernels.codecs import ALIKE, codec
from support.codec_tools import Coder

_State = tuple[int, float, bytes, bytes]


def _coder(spec: CompressionSpec, n: int, wide: str, which: int, sender: int | None) -> Coder:
    """``sender``: the worker's number; None: the lane's."""
    used = codec(spec.compressor)
    own = [0 if sender is None else sender + 1] if used.own_noise else []
    seed = mix(spec.seed, which, *own)
    return Coder(
        spec.compressor,
        dict(spec.options),
        n,
        wide,
        residual=bool(spec.ef),
        momentum=bool(spec.momentum) and sender is not None,
        seed=seed - 2**64 if seed >= 2**63 else seed,
    )


class Partition:
    """Partition ``part`` of a tensor: ``n`` elements of ``dtype``, and ``workers`` workers."""

    def __init__(
        self, spec: CompressionSpec, name: str, part: int, n: int, dtype: str, workers: int
    ) -> None:
        self.spec, self.dtype = spec, ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype
        self.wide = "float64" if dtype == "float64" else "float32"
        which = stream(name.encode(), part)
        self.workers = [_coder(spec, n, self.wide, which, of) for of in range(workers)]
        self.lane = _coder(spec, n, self.wide, which, None)
        self.counted = codec(spec.compressor).counted
        self.lane_rate = 0.0
        self._rates = [0.0] * workers

    def _factor(self, last: float, now: float) -> float:
        corrected = self.spec.ef == "corrected" and now > 0 and last > 0
        return last / now if corrected else 1.0

    def push(self, of: int, gradient: np.ndarray, rate: float) -> bytes:
        """Encode a worker's gradient."""
        factor = self._factor(self._rates[of], rate)
        self._rates[of] = rate if rate > 0 else self._rates[of]
        wide = np.ascontiguousarray(gradient.astype(self.wide))
        return self.workers[of].encode(wide, factor, self.spec.mu)

    def state(self) -> _State:
        """The lane's state."""
        lane = self.lane
        return lane.counter, self.lane_rate, lane.residual.tobytes(), lane.state.tobytes()

    def go_to(self, state: _State) -> None:
        """Set the lane's state."""
        self.lane.counter, self.lane_rate, residual, rest = state
        self.lane.residual[:] = np.frombuffer(residual, self.wide)
        self.lane.state[:] = np.frombuffer(rest)

    def without_residual(self, state: _State) -> _State:
        """A state of the lane, in which the residual starts anew."""
        return state[0], 0.0, bytes(len(state[2])), bytes(len(state[3]))

    def answer(self, pushes: Mapping[int, bytes], divisor: int, rate: float) -> bytes:
        """The lane's next answer, to pushes by worker."""
        total: np.ndarray | None = None
        counters = {int.from_bytes(push[:8], "little") for push in pushes.values()}
        for of in sorted(pushes):
            total = self.lane.decode(pushes[of], total)
        assert total is not None
        if divisor > 1:
            total /= total.dtype.type(divisor)
        if self.counted:
            self.lane.counter = max(counters) - 1
            self.lane.options[ALIKE] = self.spec.ef == "sparse" and len(counters) == 1
        factor = self._factor(self.lane_rate, rate)
        self.lane_rate = rate if rate > 0 else self.lane_rate
        return self.lane.encode(total, factor)

    def take(self, answer: bytes, who: Any) -> np.ndarray:
        """Let workers ``who`` decode an answer; return what they get."""
        got = self.lane.decode(answer)
        assert got is not None
        for of in who if self.counted else ():
            self.workers[of].counter = int.from_bytes(answer[:8], "little")
        return got.astype(self.dtype)
