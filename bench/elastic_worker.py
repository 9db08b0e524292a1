"""Worker of ``bench elastic``: trains on a thread of its own, and tells when each step ended."""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np

import bpsx
from bench.child import serve
from bench.plain_model import SIZES, next_weights, start_weights

#: What a step does, and the digest of the weights.
Made = tuple[Callable[[int], None], Callable[[], str]]
WIDTH, BATCH = 256, 32


class Training:
    """A training under way. Steps end together on all workers, which all get the same numbers."""

    def __init__(self, made: Callable[[], Made], steps: int) -> None:
        self.times: list[float] = []  # when each step ended, by the monotonic clock
        self.digest = ""  # of the weights, once the last step has ended
        self._steps, self._made = steps, made
        self._changed = threading.Condition()
        self._ending, self._over, self._error = False, False, ""
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            step, digest = self._made()
            bpsx.barrier()
            while self._wants_more():
                step(len(self.times))
                with self._changed:
                    self.times.append(time.monotonic())
                    self._changed.notify_all()
            self.digest = digest()
        except Exception as error:
            self._error = f"{type(error).__name__}: {error}"
        with self._changed:
            self._over = True
            self._changed.notify_all()

    def _wants_more(self) -> bool:
        with self._changed:
            self._changed.wait_for(lambda: len(self.times) < self._steps or self._ending)
            return len(self.times) < self._steps

    def more(self, steps: int) -> None:
        """Do so many steps more."""
        with self._changed:
            self._steps += steps
            self._changed.notify_all()

    def wait_for(self, count: int, seconds: float) -> int:
        """Wait until ``count`` steps have ended; returns how many have.

        Raises :class:`TimeoutError`, or :class:`RuntimeError` if the training failed.
        """
        with self._changed:
            there = self._changed.wait_for(
                lambda: self._over or len(self.times) >= count, timeout=seconds
            )
        if self._error:
            raise RuntimeError(self._error)
        if not there:
            raise TimeoutError(f"step {len(self.times)} has not ended after {seconds:g} s")
        return len(self.times)

    def end(self, seconds: float) -> None:
        """Wait until all steps have ended; no more will follow."""
        with self._changed:
            self._ending = True
            self._changed.notify_all()
        self._thread.join(seconds)
        self.wait_for(self._steps, 0)


def hashed(step: Callable[[int], None], weights: Callable[[], Any]) -> Made:
    """A training whose digest is the SHA-256 of its weights."""
    return step, lambda: sha256(weights())


def sha256(weights: Iterable[np.ndarray]) -> str:
    parts = b"".join(np.ascontiguousarray(w).tobytes() for w in weights)
    return hashlib.sha256(parts).hexdigest()


def plain(model: str) -> tuple[Callable[[int], None], Callable[[], Any]]:
    """A model of NumPy arrays, whose gradients follow from its weights."""
    weights = start_weights(SIZES[model])
    names = [f"{model}.{i}" for i in range(len(weights))]

    def step(number: int) -> None:
        next_weights(weights, number, [bpsx.rank()], exchange)

    def exchange(gradients: list[np.ndarray]) -> Iterator[np.ndarray]:
        handles = [
            bpsx.push_pull_async(g, name=n, average=False, output=g)
            for n, g in zip(names, gradients)
        ]
        return map(bpsx.synchronize, handles)

    return step, lambda: weights


def digits() -> tuple[Callable[[int], None], Callable[[], Any]]:
    """The demo's network, trained by bpsx.torch."""
    return digits_and_parts()[:2]


def digits_and_parts() -> tuple[Callable[[int], None], Callable[[], Any], Any, Any]:
    """The same, with the network and its optimizer."""
    import torch
    from torch.nn import functional

    import bpsx.torch as bps
    from examples.pytorch.digits import Digits, network

    torch.set_num_threads(1)
    torch.manual_seed(1)
    data, model = Digits(), network(WIDTH)
    optimizer = bps.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9),
        named_parameters=model.named_parameters(),
    )
    parts = data.batches(0, BATCH, bps.rank(), bps.size())

    def step(number: int) -> None:
        part = parts[number % len(parts)]
        optimizer.zero_grad()
        functional.cross_entropy(model(data.x[part]), data.y[part]).backward()
        optimizer.step()

    return step, lambda: [p.detach().numpy() for p in model.parameters()], model, optimizer


_training: Training | None = None


def begin(model: str, steps: int) -> None:
    begin_with(lambda: hashed(*(digits() if model == "digits" else plain(model))), steps)


def begin_with(made: Callable[[], Made], steps: int) -> None:
    """Train on another thread."""
    global _training
    _training = Training(made, steps)


def wait_for(count: int, seconds: float) -> int:
    assert _training is not None
    return _training.wait_for(count, seconds)


def more(steps: int) -> None:
    assert _training is not None
    _training.more(steps)


def passed() -> int:
    """Return how many steps have ended. Raises :class:`RuntimeError` if the training failed."""
    return wait_for(0, 0)


def end(seconds: float) -> tuple[list[float], str]:
    """Return when each step ended, and the digest of the weights."""
    assert _training is not None
    _training.end(seconds)
    return _training.times, _training.digest


def init() -> int:
    bpsx.init()
    return int(bpsx.rank())


#: Commands of all workers that train in the background.
COMMANDS: dict[str, Callable[..., Any]] = {
    "init": init,
    "more": more,
    "passed": passed,
    "wait_for": wait_for,
    "end": end,
}

if __name__ == "__main__":
    serve({"begin": begin, **COMMANDS})
    bpsx.shutdown()
