"""Worker of the case *replace* of ``bench elastic``: others may join its training."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import bpsx
from bench.child import serve
from bench.elastic_worker import digits_and_parts, plain, sha256
from bpsx.plugin.elastic import State, run


class Training:
    """A training on a thread of its own. ``times``: when each step ended here, by its number."""

    def __init__(self, model: str, steps: int) -> None:
        self.times: dict[int, float] = {}
        self.digest, self._error = "", ""
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._train, args=(model, steps), daemon=True)
        self._thread.start()

    def _train(self, model: str, steps: int) -> None:
        try:
            state, step, weights = made(model)

            @run
            def train(state: State) -> None:
                while state.step < steps:
                    step(state.step)
                    state.step += 1
                    with self._changed:
                        self.times[state.step] = time.monotonic()
                        self._changed.notify_all()
                    state.check_host_updates()

            train(state)
            self.digest = sha256(weights())
        except Exception as error:
            self._error = f"{type(error).__name__}: {error}"
        with self._changed:
            self._changed.notify_all()

    def wait_for(self, step: int, seconds: float) -> None:
        """Wait until step ``step`` has ended. Raises as :meth:`end`."""
        with self._changed:
            self._changed.wait_for(lambda: self._error or step in self.times, timeout=seconds)
        if self._error or step not in self.times:
            raise RuntimeError(self._error or f"step {step} has not ended after {seconds:g} s")

    def end(self, seconds: float) -> None:
        """Wait for the end. Raises :class:`RuntimeError` if the training failed."""
        self._thread.join(seconds)
        if not self.digest:
            raise RuntimeError(self._error or f"not over after {seconds:g} s")


def made(model: str) -> tuple[Any, Callable[[int], None], Callable[[], Any]]:
    """A model's state, what a step does, and its weights."""
    if model == "digits":
        import bpsx.torch as bps

        step, weights, network, optimizer = digits_and_parts()
        return bps.elastic.TorchState(network, optimizer, step=0), step, weights
    step, weights = plain(model)
    return InPlace(step=0, weights=weights()), step, weights


class InPlace(bpsx.State):
    """A state whose arrays stay where they are."""

    def sync(self) -> None:
        mine = self.weights
        super().sync()
        for own, got in zip(mine, self.weights):
            own[...] = got
        self.weights = mine


_training: Training | None = None
_before_init = 0.0


def init() -> int:
    global _before_init
    _before_init = time.monotonic()
    bpsx.init()
    return int(bpsx.rank())


def begin(model: str, steps: int) -> None:
    global _training
    _training = Training(model, steps)


def wait_for(step: int, seconds: float) -> None:
    assert _training is not None
    _training.wait_for(step, seconds)


def end(seconds: float) -> tuple[float, list[float], str]:
    """Return when init() began, when each step ended here, and the digest of the weights."""
    assert _training is not None
    _training.end(seconds)
    return _before_init, list(_training.times.values()), _training.digest


if __name__ == "__main__":
    serve({"init": init, "begin": begin, "wait_for": wait_for, "end": end})
    bpsx.shutdown()
