"""Training with compressed gradients: equal bits on all workers, and about the result of
uncompressed training.

Functions named ``job_*`` run in the workers.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import bpsx.torch as bps
from support.torch_job import Finished, each, run_job

STEPS = 100
PARAMS: dict[str, Any] = {
    "none": None,
    "onebit": {"compressor": "onebit", "scaling": True, "ef": "vanilla"},
    "topk": {"compressor": "topk", "k": 0.05, "ef": "corrected"},
    "randomk": {"compressor": "randomk", "k": 0.2, "ef": "sparse", "seed": 5},
    "dithering": {"compressor": "dithering", "k": 4, "seed": 5},
    "powersgd": {"compressor": "powersgd", "rank": 2, "ef": "vanilla"},
    "fp16": {"fp16": True},
    "by name": {
        "0.weight": {"compressor": "topk", "k": 0.1, "ef": "vanilla"},
        "2.weight": {"compressor": "onebit", "scaling": True},
    },
}


def network() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 5))


def batch(step: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return rows and their classes by a fixed linear rule."""
    rule = torch.randn(32, 5, generator=torch.Generator().manual_seed(0))
    rows = torch.randn(64, 32, generator=torch.Generator().manual_seed(1000 * rank + step))
    return rows, (rows @ rule).argmax(1)


def _trained(case: str) -> tuple[list[torch.Tensor], float]:
    model = network()
    names = list(model.named_parameters())
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.2)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 40, gamma=0.5)
    params = (
        PARAMS[case] if case == "by name" or PARAMS[case] is None else lambda name: PARAMS[case]
    )
    optimizer = bps.DistributedOptimizer(
        optimizer,
        [(n if case == "by name" else f"{case}.{n}", p) for n, p in names],
        compression_params=params,
    )
    for step in range(STEPS):
        rows, classes = batch(step, bps.rank())
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(rows), classes).backward()
        optimizer.step()
        schedule.step()
    rows, classes = batch(0, 99)
    return [p.detach().clone() for p in model.parameters()], float(
        (model(rows).argmax(1) == classes).float().mean()
    )


def job_train() -> Any:
    return {case: _trained(case) for case in PARAMS}


def job_too_many() -> Any:
    """Use a k that is valid for one tensor and too large for another."""
    model = network()
    optimizer = bps.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.2),
        [(f"many.{n}", p) for n, p in model.named_parameters()],
        compression_params=lambda name: {
            "compressor": "topk",
            "k": 2049 if name == "many.0.weight" else 320,
        },
    )
    rows, classes = batch(0, bps.rank())
    try:
        nn.functional.cross_entropy(model(rows), classes).backward()
    except ValueError as error:
        return str(error)
    optimizer.step()
    return "no error"


@pytest.fixture(scope="module", params=[4], ids="{} workers".format)
def job(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Finished:
    finished = run_job(
        __file__,
        ["job_train", "job_too_many"],
        tmp_path_factory,
        request.param,
        BYTEPS_MIN_COMPRESS_BYTES="1000",
    )
    assert finished.status == 0, finished.output[-5000:]
    return finished


def test_a_k_larger_than_a_gradient_is_refused_by_name(job: Finished) -> None:
    assert all(
        "many.0.weight" in text and "k=2049 is more than the 2048 elements" in text
        for text in each(job, "job_too_many")
    )


@pytest.mark.parametrize("case", PARAMS)
def test_all_workers_have_the_same_bits_and_learn_as_well_as_uncompressed(
    job: Finished, case: str
) -> None:
    found = [r[case] for r in each(job, "job_train")]
    assert all(
        torch.equal(a, b) for weights, _ in found for a, b in zip(weights, found[0][0], strict=True)
    )
    plain = each(job, "job_train")[0]["none"]
    assert found[0][1] > plain[1] - 0.1 and plain[1] > 0.8, (found[0][1], plain[1])
    if case != "none":
        assert not torch.equal(found[0][0][0], plain[0][0]), "nothing has been compressed"
