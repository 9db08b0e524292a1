"""A compressed partition of a job, simulated: what its workers push, and what its lane replies.

The codecs are the compiled ones; all else that happens to their state is written here anew.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

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


class Sum(NamedTuple):
    """One round of a partition: gradients by worker, and what is known of its result."""

    gradients: Mapping[int, np.ndarray]
    average: bool
    rate: float
    #: Whether this is what the survivors have got, with None for an error; None: no survivor took
    #: part.
    fits: Callable[[np.ndarray | None], bool] | None
    #: A worker that asks for an average while the others ask for a sum, so that the sum fails.
    odd: int = -1


def counted(
    part: Partition, sums: Sequence[Sum], lost: Sequence[int], resets: bool = False
) -> list[set[int]]:
    """For each sum, all numbers n for which it may be the one without the first n of ``lost``.

    In later sums n does not decrease. ``resets``: the lane's residual may have been lost. Raises
    AssertionError if no way fits.
    """
    # How many of the lost workers do not count, with the lane's state.
    branches: list[tuple[int, _State]] = [(0, part.state())]
    numbers = []
    for place, one in enumerate(sums):
        pushes = {of: part.push(of, g, one.rate) for of, g in one.gradients.items()}
        if resets:
            branches += [(n, part.without_residual(state)) for n, state in branches]
        found: dict[tuple[int, _State], bytes | None] = {}
        for n, state in branches:
            found.update(_next(part, one, pushes, lost, n, state))
        assert found, f"{part.spec.text()}: sum {place} fits to none of {[n for n, _ in branches]}"
        branches = list(found)
        numbers.append({n for n, _ in branches})
        for answer in [answer for answer in found.values() if answer is not None][:1]:
            part.take(answer, one.gradients)
    return numbers


def _next(
    part: Partition, one: Sum, pushes: dict[int, bytes], lost: Sequence[int], least: int,
    state: _State,
) -> dict[tuple[int, _State], bytes | None]:  # fmt: skip
    """What may follow: how many do not count, with the lane's state; and its answer."""
    found: dict[tuple[int, _State], bytes | None] = {}
    for n in range(least, len(lost) + 1):
        who = [of for of in one.gradients if of not in lost[:n]]
        if not who:
            if one.fits is None:
                found[least, state] = None
            continue
        if one.odd in who and len(who) > 1:
            if one.fits is None or one.fits(None):
                found[n, state] = None
            continue
        part.go_to(state)
        divisor = len(part.workers) - n if one.average or who == [one.odd] else 1
        answer = part.answer({of: pushes[of] for of in who}, divisor, one.rate)
        after = part.state()
        if one.fits is None or one.fits(part.take(answer, ())):
            found[n, after] = answer
    return found
