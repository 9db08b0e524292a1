"""Measures the rate at which a job's links carry tensors, when the job begins.

All workers of the job do so at once, by push_pulls like a script's. So what they find is the rate
of the narrowest place that these share: a worker's link, a server's, or a processor.
docs/internals/autotune.md has the steps.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from bpsx.planning.link_rate import PROBE

Array = np.ndarray[Any, Any]
#: Sums an array over all workers, in place. Its name begins with :data:`PROBE`.
Sum = Callable[[str, Array], None]

_SMALL, _LARGE = 1 << 20, 8 << 20
#: Seconds of an exchange of _SMALL bytes, as the workers' mean: one that takes longer says enough,
#: though it is the first; one that takes less says little about so fast a link.
_LONG, _SHORT = 0.05, 0.01
#: Round trips in which TCP's window grows to _SMALL bytes, at most.
_GROWTH = 8
#: Seconds that a measured time may be wrong by.
_ERROR = 1e-4


def measure(sum_: Sum, workers: int, now: Callable[[], float]) -> tuple[float, float]:
    """Return the bytes of a tensor per second that this worker exchanges with the servers.

    Also returns the seconds of the smallest push_pull: a round trip to a server and back.

    The number of push_pulls depends on times that the workers have summed, so it is the same on
    all. ``workers``: with how many the job has begun. ``now``: a clock, in seconds.
    """

    def timed(what: str, array: Array) -> float:
        begin = now()
        sum_(PROBE + what, array)
        return now() - begin

    def mean(seconds: float) -> float:
        array = np.array([seconds], np.float32)
        sum_(PROBE + "time", array)
        return float(array[0]) / workers

    def result(array: Array, seconds: float) -> tuple[float, float]:
        return array.nbytes / max(seconds - round_trip, _ERROR), round_trip

    mean(0.0)  # all workers are here afterwards
    round_trip = timed("time", np.zeros(1, np.float32))
    small = np.zeros(_SMALL // 4, np.float32)
    first = timed("small", small)
    if mean(max(0.0, first - _GROWTH * round_trip)) > _LONG:
        return result(small, first)
    second = timed("small", small)
    if mean(max(0.0, second - round_trip)) > _SHORT:
        return result(small, second)
    large = np.zeros(_LARGE // 4, np.float32)
    timed("large", large)  # memory is made
    return result(large, timed("large", large))
