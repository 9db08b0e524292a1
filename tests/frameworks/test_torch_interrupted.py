"""Ctrl-C, or an exception from a signal handler, while a worker waits for others: training
continues and no gradient is paired with another step.

Worker 0's wait is interrupted in step 1; worker 1 makes it wait until then.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import bpsx.torch as bps
from bpsx.torch.cross_barrier import CrossBarrier
from bpsx.torch.parallel import DistributedDataParallel
from support.torch_job import Finished, each, run_job

STEPS = 4
INTERRUPTED = 1
SCENES = [
    "step_again",
    "zero_grad",
    "another_exception",
    "kinds",
    "backward_is_refused",
    "synchronize",
    "cross_barrier",
    "ddp",
]


class _Alarm(Exception):
    """Raised by a watchdog's signal handler."""


class _Interruption:
    """Raise ``what`` in the main thread as soon as that waits for a sum."""

    def __init__(self, what: type[BaseException]) -> None:
        self._what, self._main = what, threading.main_thread().ident
        assert self._main is not None
        self._before = signal.signal(signal.SIGUSR1, self._raise)
        self._watch = threading.Thread(target=self._until_it_waits)

    def _raise(self, *_: object) -> None:
        raise self._what("interrupted")

    def _until_it_waits(self) -> None:
        assert self._main is not None
        while True:
            frame = sys._current_frames()[self._main]
            if frame.f_code.co_name in ("wait", "ended") and "bpsx" in frame.f_code.co_filename:
                break
        signal.pthread_kill(self._main, signal.SIGUSR1)

    def __enter__(self) -> None:
        self._watch.start()

    def __exit__(self, *_: object) -> None:
        self._watch.join()
        signal.signal(signal.SIGUSR1, self._before)


def _interrupted(
    wait: Callable[[], object], scene: str, what: type[BaseException] = KeyboardInterrupt
) -> None:
    """Interrupt worker 0 in ``wait()``, then let worker 1 continue.

    Worker 1 has pushed nothing of this step yet; on worker 1 this does nothing.
    """
    if bps.rank() == 0:
        with pytest.raises(what), _Interruption(what):
            wait()
        with Path(os.environ["FIFOS"], scene).open("w"):
            pass


def _held_back(scene: str, step: int) -> None:
    if bps.rank() == 1 and step == INTERRUPTED:
        with Path(os.environ["FIFOS"], scene).open():  # blocks until worker 0 opens the FIFO, too
            pass


def _model() -> torch.nn.Module:
    return torch.nn.ModuleList(
        [torch.nn.Linear(3, 1, bias=False, dtype=torch.float64) for _ in range(3)]
    )


def _loss(model: torch.nn.Module, step: int) -> torch.Tensor:
    """Return a loss with gradient 10**``step`` times 1 or 3 by worker, so an average of 2 *
    10**``step``.
    """
    x = torch.ones(1, 3, dtype=torch.float64)
    total: torch.Tensor = sum(layer(x).sum() for layer in model) * 10.0**step * (1 + 2 * bps.rank())  # type: ignore[union-attr,misc]
    return total


def _gradients(model: torch.nn.Module) -> list[float]:
    return [float(p.grad[0, 0]) for p in model.parameters() if p.grad is not None]


def _train(
    scene: str,
    act: Callable[[Any, torch.nn.Module], object],
    what: type[BaseException] = KeyboardInterrupt,
) -> list[list[float]]:
    model = _model()
    optimizer: Any = bps.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.0),
        [(f"{scene}.{n}", p) for n, p in model.named_parameters()],
    )
    seen = []
    for step in range(STEPS):
        optimizer.zero_grad()
        _held_back(scene, step)
        _loss(model, step).backward()
        if step == INTERRUPTED and bps.rank() == 0:
            _interrupted(optimizer.step, scene, what)
            act(optimizer, model)
        else:
            optimizer.step()
        seen.append(_gradients(model))
    return seen


def job_step_again() -> list[list[float]]:
    return _train("step_again", lambda optimizer, _: optimizer.step())


def job_zero_grad() -> list[list[float]]:
    return _train("zero_grad", lambda optimizer, _: optimizer.zero_grad())


def job_another_exception() -> list[list[float]]:
    return _train("another_exception", lambda optimizer, _: optimizer.step(), _Alarm)


def job_synchronize() -> list[list[float]]:
    return _train("synchronize", lambda optimizer, _: optimizer.synchronize())


def job_backward_is_refused() -> list[list[float]]:
    def act(optimizer: Any, model: torch.nn.Module) -> None:
        with pytest.raises(bps.GradientOrderError, match="interrupted"):
            _loss(model, 9).backward()
        optimizer.zero_grad()  # discards the accumulated gradients

    return _train("backward_is_refused", act)


def job_kinds() -> list[list[float]]:
    """The interruption comes while workers find out whether the gradients are sparse."""
    model = torch.nn.Embedding(4, 2, sparse=True, dtype=torch.float64)
    optimizer: Any = bps.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.0), [("kinds", model.weight)]
    )
    seen = []
    for step in (INTERRUPTED, INTERRUPTED + 1):
        optimizer.zero_grad()
        _held_back("kinds", step)
        (model(torch.tensor([bps.rank()])).sum() * 10.0**step).backward()
        if step == INTERRUPTED:
            _interrupted(optimizer.step, "kinds")
        optimizer.step()
        assert model.weight.grad is not None
        seen.append(model.weight.grad.to_dense()[:, 0].tolist())
    return seen


def job_cross_barrier() -> tuple[list[float], list[float]]:
    """Interrupt the forward pass that waits for step 1."""
    weights = []
    for crossing in (True, False):
        torch.manual_seed(7)
        model = torch.nn.Sequential(*[torch.nn.Linear(3, 3, dtype=torch.float64) for _ in range(3)])
        names = [(f"crossing {crossing}.{n}", p) for n, p in model.named_parameters()]
        plain = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        optimizer: Any = (
            CrossBarrier(model, plain, names)
            if crossing
            else bps.DistributedOptimizer(plain, names)
        )
        for step in range(STEPS):
            x = torch.full((2, 3), 1.0 + step + bps.rank(), dtype=torch.float64)
            if step == INTERRUPTED + 1 and crossing:
                _interrupted(lambda x=x, model=model: model(x), "cross_barrier")  # type: ignore[misc]
            model(x).pow(2).mean().backward()
            if crossing:
                _held_back("cross_barrier", step)
            optimizer.step()
            optimizer.zero_grad()
        optimizer.synchronize()
        weights.append(torch.cat([p.detach().flatten() for p in model.parameters()]).tolist())
    return weights[0], weights[1]


def job_ddp() -> list[list[float]]:
    inner = _model()
    model = DistributedDataParallel(inner)
    inner.forward = lambda step: _loss(inner, step)  # type: ignore[method-assign]
    seen = []
    for step in range(STEPS):
        inner.zero_grad()
        _held_back("ddp", step)
        loss = model(step)
        if step == INTERRUPTED and bps.rank() == 0:
            _interrupted(loss.backward, "ddp")
            with pytest.raises(bps.GradientOrderError, match="synchronize"):
                model(step)
            model.synchronize()
        else:
            loss.backward()
        seen.append(_gradients(inner))
    return seen


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Finished:
    folder = tmp_path_factory.mktemp("fifos")
    for scene in SCENES:
        os.mkfifo(folder / scene)
    return run_job(__file__, [f"job_{s}" for s in SCENES], tmp_path_factory, FIFOS=str(folder))


@pytest.mark.parametrize(
    "scene",
    ["step_again", "zero_grad", "another_exception", "synchronize", "backward_is_refused", "ddp"],
)
def test_every_sum_is_of_one_step(job: Finished, scene: str) -> None:
    assert job.status == 0, job.output
    right = [[2.0 * 10.0**step] * 3 for step in range(STEPS)]
    ours, theirs = each(job, f"job_{scene}")
    assert theirs == right
    if scene in ("zero_grad", "backward_is_refused"):
        right[INTERRUPTED] = []
    assert ours == right


def test_workers_exchange_only_once_whether_gradients_are_sparse(job: Finished) -> None:
    assert job.status == 0, job.output
    assert each(job, "job_kinds") == [[[5.0, 5.0, 0.0, 0.0], [50.0, 50.0, 0.0, 0.0]]] * 2


def test_an_interrupted_forward_pass_continues_with_the_update(job: Finished) -> None:
    assert job.status == 0, job.output
    for crossing, plain in each(job, "job_cross_barrier"):
        assert crossing == plain
