"""A training script without training: for ``bench advise``.

As ``python -m bench.advise_worker`` it makes steps until it is ended. In a job of ``bench advise``
it makes steps on command.
"""

from __future__ import annotations

import sys
import time
from functools import cache

import numpy as np

import bpsx
from bench.child import serve
from bpsx.launch.advise_methods import METHODS, PLAIN

#: Shapes of the gradients in the order in which backward makes them: 103 MB of float32.
SHAPES = [(1000, 2048), (2048, 4096), *[(512, 4608)] * 6, *[(256, 2304)] * 2, (64, 64), (64,)]
#: Seconds of forward, and of backward for all gradients.
_FORWARD, _BACKWARD = 0.05, 0.15


def init() -> int:
    bpsx.init()
    return int(bpsx.rank())


@cache
def _gradients(method: str) -> list[tuple[str, np.ndarray]]:
    """Return names and gradients, declared with the method's compression."""
    rng, found = np.random.default_rng(bpsx.rank()), []
    for i, shape in enumerate(SHAPES):
        name = f"{method}.{i}"
        bpsx.declare(name, compression=METHODS[method])
        found.append((name, rng.standard_normal(shape, np.float32)))
    return found


def step(method: str) -> float:
    """Make a step; returns its seconds."""
    begin = time.perf_counter()
    time.sleep(_FORWARD)
    handles = []
    for i, (name, gradient) in enumerate(_gradients(method)):
        time.sleep(_BACKWARD / len(SHAPES))
        handles.append(bpsx.push_pull_async(gradient, name=name, priority=i))
    for handle in handles:
        bpsx.synchronize(handle)
    return time.perf_counter() - begin


def steps(method: str, count: int) -> list[float]:
    """Return the seconds of ``count`` steps, after one that does not count."""
    step(method)
    bpsx.barrier()
    return [step(method) for _ in range(count)]


if __name__ == "__main__":
    if sys.argv[1:] == ["alone"]:
        init()
        while True:
            step(PLAIN)
    serve({"init": init, "steps": steps})
