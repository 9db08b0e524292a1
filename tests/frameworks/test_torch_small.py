"""Hundreds of small gradients take the fast path from the second step on, with unchanged results.

Functions named ``job_*`` run in the workers.
"""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
from torch import nn

import bpsx.torch as bps
from bpsx.plugin import adapter
from support.torch_job import Finished, run_job

TENSORS, ELEMENTS, STEPS = 200, 4, 6


class Small(nn.Module):
    """Model with many parameters, and two whose gradients autograd puts in one block of memory."""

    def __init__(self) -> None:
        super().__init__()
        self.many = nn.ParameterList(torch.full((ELEMENTS,), float(i + 1)) for i in range(TENSORS))
        self.left, self.right = nn.Parameter(torch.ones(2, 2)), nn.Parameter(torch.ones(4))

    def forward(self, x: float) -> torch.Tensor:
        pair = (self.left.view(4) + self.right) * x
        return torch.stack([p * p * x for p in self.many]).sum() + pair.sum()


def optimizer_for(model: nn.Module, what: str) -> Any:
    named = [(f"{what}.{name}", p) for name, p in model.named_parameters()]
    return bps.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1e-2), named)


def calls_of_push_pull() -> list[str]:
    """Return a list to which each later exchange on the slow path appends its name."""
    found: list[str] = []
    original = adapter.Session.push_pull

    def noted(self: Any, name: str, *args: Any, **more: Any) -> Any:
        found.append(name)
        return original(self, name, *args, **more)

    adapter.Session.push_pull = noted  # type: ignore[method-assign]
    return found


def job_train() -> tuple[list[torch.Tensor], list[list[str]]]:
    """Return the final weights, and the names on the slow path by step.

    Gradients get new memory in some steps and keep it in others.
    """
    model, long_way = Small(), calls_of_push_pull()
    optimizer, steps = optimizer_for(model, "train"), []
    for step in range(STEPS):
        optimizer.zero_grad(set_to_none=step < 4)
        model(step + bps.rank()).backward()
        optimizer.step()
        steps.append(list(long_way))
        long_way.clear()
    return [p.detach().clone() for p in model.parameters()], steps


def job_write() -> list[str]:
    """Return the outcome of each step; in the last but one, a gradient under way is written to."""
    model = Small()
    optimizer, said = optimizer_for(model, "write"), []
    for step in range(STEPS):
        optimizer.zero_grad()
        model(1.0).backward()
        if step == STEPS - 2:
            model.many[7].grad.mul_(2)
        try:
            optimizer.step()
            said.append("")
        except bps.GradientOrderError as e:
            said.append(str(e))
    return said


def job_replace() -> list[float]:
    """Replace a gradient's memory while its sum is under way: the average arrives in the old
    memory.
    """
    model = Small()
    optimizer = optimizer_for(model, "replace")
    for step in range(STEPS):
        optimizer.zero_grad()
        model(1.0 + bps.rank()).backward()
        gradient = model.many[0].grad
        if step == STEPS - 1:
            gradient.data = torch.zeros(ELEMENTS)
        optimizer.synchronize()
    return model.many[0].grad.tolist()


def job_let_go() -> int:
    """Return how many gradients outlive the step that used them."""
    model = Small()
    optimizer = optimizer_for(model, "let go")
    for _ in range(STEPS):
        optimizer.zero_grad()
        model(1.0).backward()
        gradients = [weakref.ref(p.grad) for p in model.many]
        optimizer.step()
    optimizer.zero_grad()
    return sum(ref() is not None for ref in gradients)


JOBS = ["job_train", "job_write", "job_replace", "job_let_go"]


@pytest.fixture(scope="module", params=[(2, 1, 1), (1, 0, 2)], ids=["server", "machine"])
def finished(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Finished:
    job = run_job(__file__, JOBS, tmp_path_factory, *request.param)
    assert job.status == 0 and sorted(job.results) == [0, 1], job.output
    return job


def test_weights_are_those_of_averaged_gradients(finished: Finished) -> None:
    model = Small()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    for step in range(STEPS):
        optimizer.zero_grad()
        model(step + 0.5).backward()
        optimizer.step()
    for result in finished.results.values():
        weights, _ = result["job_train"]
        for ours, expected in zip(weights, model.parameters(), strict=True):
            torch.testing.assert_close(ours, expected.detach())


def test_only_gradients_with_shared_memory_take_the_slow_path(finished: Finished) -> None:
    for result in finished.results.values():
        _, steps = result["job_train"]
        assert len(steps[0]) > TENSORS
        for names in steps[1:]:
            gradients = [name for name in names if name.startswith("Gradient.")]
            assert not [name for name in gradients if ".many." in name]
            assert len(gradients) <= 2


def test_a_write_to_a_gradient_under_way_raises_and_the_next_step_works(finished: Finished) -> None:
    for result in finished.results.values():
        said = result["job_write"]
        assert "many.7" in said.pop(STEPS - 2)
        assert said == [""] * (STEPS - 1)


def test_the_average_arrives_in_the_gradient_that_the_optimizer_reads(finished: Finished) -> None:
    for result in finished.results.values():
        assert result["job_replace"] == [2.0 * 1.5] * ELEMENTS


def test_a_gradient_dropped_by_zero_grad_is_freed(finished: Finished) -> None:
    assert [result["job_let_go"] for result in finished.results.values()] == [0, 0]
