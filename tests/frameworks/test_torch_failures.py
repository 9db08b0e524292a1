"""Errors when workers disagree or die, and jobs of a single worker.

``job_*`` functions run in the workers.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import bpsx.torch as bps
from bpsx.errors import BpsxError
from support.jobs import Process
from support.torch_job import load, run_job, source_of


def error_of(act: Any) -> str:
    try:
        act()
    except BpsxError as e:
        return f"{type(e).__name__}: {e}"
    return "none"


# ---- run in the workers


def job_mismatch() -> Any:
    """Shapes differ, then dtypes; then all workers agree again, and the job continues."""
    rank, found = bps.rank(), []
    found.append(error_of(lambda: bps.push_pull(torch.zeros(3 + rank), name="shape")))
    found.append(
        error_of(
            lambda: bps.push_pull(
                torch.zeros(3, dtype=[torch.float32, torch.float64][rank]), name="dtype"
            )
        )
    )
    found.append(
        error_of(lambda: bps.broadcast_parameters({"weight": torch.zeros(2, 2 + rank)}, 0))
    )
    return found, bps.push_pull(torch.full((3,), rank + 1.0), name="shape", average=False)


def job_step_mismatch() -> Any:
    """The models differ in one layer: step() raises on both workers and keeps the weights."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2 + bps.rank()))
    optimizer: Any = bps.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters()
    )
    before = [p.detach().clone() for p in model.parameters()]
    model(torch.ones(1, 4)).sum().backward()
    message = error_of(optimizer.step)
    return message, all(torch.equal(a, b) for a, b in zip(before, model.parameters()))


def job_optimizer_state() -> Any:
    """The root's optimizer state cannot be sent: all workers raise an error.

    Then the parameter groups differ; only the worker with other groups than the root can detect
    that.
    """
    weight, bias = (nn.Parameter(torch.zeros(2)) for _ in range(2))
    optimizer = torch.optim.SGD([weight, bias], lr=0.1)
    if bps.rank() == 0:
        optimizer.state[weight] = {"odd": object()}
    odd = error_of(lambda: bps.broadcast_optimizer_state(optimizer, 0))
    groups = [[weight, bias], [{"params": [weight]}, {"params": [bias]}]][bps.rank()]
    other = error_of(lambda: bps.broadcast_optimizer_state(torch.optim.SGD(groups, lr=0.1), 0))
    return odd, other, error_of(lambda: bps.broadcast_parameters({}, 2))


def job_one_dies() -> Any:
    model = nn.Linear(3, 2)
    optimizer: Any = bps.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters()
    )
    for step in range(3):
        optimizer.zero_grad()
        if step == 2 and bps.rank() == 1:
            os._exit(3)
        model(torch.ones(1, 3)).sum().backward()
        if step == 2:
            return error_of(optimizer.step)
        optimizer.step()
    return "not reached"


def job_alone() -> Any:
    model = nn.Linear(3, 2)
    optimizer: Any = bps.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters()
    )
    bps.broadcast_parameters(model.state_dict(), 0)
    bps.broadcast_optimizer_state(optimizer, 0)
    weight = model.weight.detach().clone()
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    moved = (weight - model.weight.detach()) * 10
    return (
        bps.size(),
        moved,
        bps.push_pull(torch.arange(3)),
        bps.push_pull_inplace(torch.arange(6.0).reshape(2, 3).t(), average=False),
    )


# ---- tests


def test_disagreement_is_an_error_on_both_workers_and_the_job_continues(tmp_path: Path) -> None:
    finished = run_job(
        __file__, ["job_mismatch", "job_step_mismatch", "job_optimizer_state"], tmp_path
    )
    assert sorted(finished.results) == [0, 1], finished.output[-3000:]
    for result in finished.results.values():
        messages, total = result["job_mismatch"]
        for message, name in zip(messages, ("'shape'", "'dtype'", "'Parameter.weight'")):
            assert message.startswith("MismatchError") and name in message
        assert total.tolist() == [3, 3, 3]
        message, unchanged = result["job_step_mismatch"]
        assert message.startswith("MismatchError") and "Gradient.1." in message and unchanged
        odd, _, root = result["job_optimizer_state"]
        assert odd.startswith("StateError") and "state 0.odd is a object" in odd
        assert root.startswith("ConfigError") and "expected 0 to 1" in root
        _, groups, _ = result["job_optimizer_state"]
        assert (
            "worker 0 has SGD with groups of [2] parameters, worker 1 has SGD with groups of [1, 1]"
            " parameters" in groups
        )


def test_a_dead_worker_is_named_by_step(tmp_path: Path) -> None:
    finished = run_job(__file__, ["job_one_dies"], tmp_path)
    assert finished.status != 0
    message = finished.results[0]["job_one_dies"] if 0 in finished.results else finished.output
    assert "PeerLostError" in message and "worker 1" in message


def assert_alone(result: tuple[Any, ...]) -> None:
    size, moved, integers, in_place = result
    assert (
        size == 1
        and integers.tolist() == [0, 1, 2]
        and in_place.tolist() == [[0, 3], [1, 4], [2, 5]]
    )
    torch.testing.assert_close(moved, torch.ones(2, 3))


def test_one_worker_without_servers(tmp_path: Path) -> None:
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("DMLC_", "BYTEPS_", "BPSX_"))}
    alone = Process(
        "worker", [sys.executable, "-c", source_of(__file__, ["job_alone"], tmp_path)], clean
    )
    try:
        assert alone.wait(100) == 0, alone.text()
    finally:
        alone.end()
    assert_alone(load(tmp_path / "0.results")["job_alone"])


def test_one_worker_with_a_server(tmp_path: Path) -> None:
    finished = run_job(__file__, ["job_alone"], tmp_path, workers=1, BYTEPS_FORCE_DISTRIBUTED="1")
    assert finished.status == 0, finished.output[-3000:]
    assert_alone(finished.results[0]["job_alone"])


pytestmark = pytest.mark.timeout(300)
