"""Worker of a benchmark job: it measures push_pulls on command."""

from __future__ import annotations

import threading
import time
from functools import cache

import numpy as np

import bpsx
from bench.child import serve
from bench.jobs import RATE

_MANY = {"rate": RATE, "tiny": (1000, 4096)}
_stop_spinning: threading.Event | None = None


def init() -> int:
    bpsx.init()
    return int(bpsx.rank())


@cache
def _arrays(
    kind: str, count: int, nbytes: int
) -> tuple[list[str], list[np.ndarray], list[np.ndarray]]:
    """Return names, inputs and outputs of ``count`` tensors of ``nbytes`` bytes.

    They are allocated and touched once, as a training script's gradients stay in place, too.
    """
    names = [f"bench.{kind}.{i}" for i in range(count)]
    inputs = [np.full(nbytes // 4, bpsx.rank() + 1 + i % 7, np.float32) for i in range(count)]
    return names, inputs, [np.zeros_like(a) for a in inputs]


def _round(names: list[str], inputs: list[np.ndarray], outputs: list[np.ndarray]) -> None:
    handles = [bpsx.push_pull_async(a, name=n, output=o) for n, a, o in zip(names, inputs, outputs)]
    for handle in handles:
        bpsx.synchronize(handle)


def _timed(
    names: list[str], inputs: list[np.ndarray], outputs: list[np.ndarray], rounds: int, warm: int
) -> list[float]:
    """Return the seconds of each of ``rounds`` rounds, after ``warm`` others and a barrier."""
    for _ in range(warm):
        _round(names, inputs, outputs)
    bpsx.barrier()
    samples = []
    for _ in range(rounds):
        before = time.perf_counter()
        _round(names, inputs, outputs)
        samples.append(time.perf_counter() - before)
    return samples


def many(kind: str, rounds: int, warm: int = 1) -> list[float]:
    """Return the seconds of each round in which all tensors of a kind are in flight together."""
    names, inputs, outputs = _arrays(kind, *_MANY[kind])
    return _timed(names, inputs, outputs, rounds, warm)


def check(kind: str) -> bool:
    """Return whether the outputs of the last round are the averages.

    This guards against a fast result that is wrong.
    """
    _, inputs, outputs = _arrays(kind, *_MANY[kind])
    lead = (bpsx.size() - 1) / 2 - bpsx.rank()
    return all(np.array_equal(o, a + np.float32(lead)) for a, o in zip(inputs, outputs))


def one(calls: int, nbytes: int = 4096, warm: int = 20) -> list[float]:
    """Return the seconds of each of ``calls`` synchronous push_pulls of one tensor."""
    (name,), (array,), (output,) = _arrays("one", 1, nbytes)
    for _ in range(warm):
        bpsx.push_pull(array, name=name, output=output)
    bpsx.barrier()
    samples = []
    for _ in range(calls):
        before = time.perf_counter()
        bpsx.push_pull(array, name=name, output=output)
        samples.append(time.perf_counter() - before)
    return samples


def steps(count: int) -> None:
    """Exchange the traffic of ``count`` training steps: a large tensor and twenty small ones in
    each.
    """
    large, small = _arrays("large", 1, 1 << 20), _arrays("small", 20, 4096)
    for _ in range(count):
        _round(large[0] + small[0], large[1] + small[1], large[2] + small[2])


def model(rounds: int, warm: int = 1) -> list[float]:
    """Return the seconds of each step of a model with 160 tensors and 48 MB of gradients.

    The model has a few large tensors, more of middle size, and mostly small ones.
    """
    parts = [
        _arrays("model.large", 8, 4_000_000),
        _arrays("model.middle", 32, 500_000),
        _arrays("model.small", 120, 4096),
    ]
    names, inputs, outputs = ([x for part in column for x in part] for column in zip(*parts))
    return _timed(names, inputs, outputs, rounds, warm)


def count_up(name: str, elements: int, rounds: int) -> bool:
    """Push rank + round + 1 in each round. Returns whether all sums were right."""
    right = True
    for i in range(rounds):
        got = bpsx.push_pull(
            np.full(elements, bpsx.rank() + i + 1, np.float32), name=name, average=False
        )
        right = right and bool((got == sum(r + i + 1 for r in range(bpsx.size()))).all())
    return right


def spin(on: bool) -> None:
    """Start or stop a Python thread that never releases the GIL by itself."""
    global _stop_spinning
    if _stop_spinning is not None:
        _stop_spinning.set()
        _stop_spinning = None
    if on:
        _stop_spinning = threading.Event()
        threading.Thread(target=_spin, args=(_stop_spinning,), daemon=True).start()


def _spin(stop: threading.Event) -> None:
    while not stop.is_set():
        pass


if __name__ == "__main__":
    serve(
        {
            "init": init,
            "many": many,
            "check": check,
            "one": one,
            "steps": steps,
            "model": model,
            "count_up": count_up,
            "spin": spin,
        }
    )
    bpsx.shutdown()
