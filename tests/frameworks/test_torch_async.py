"""Asynchronous training and uneven batches with PyTorch.

Functions named ``job_*`` run in the workers.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import bpsx.torch as bps
from bpsx.errors import ConfigError
from support.torch_job import run_job

ASYNC = {"BYTEPS_ENABLE_ASYNC": "1"}


def network(seed: int = 1) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 40), nn.Tanh(), nn.Linear(40, 3)).to(torch.float64)


def batch(step: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    source = torch.Generator().manual_seed(1000 * rank + step)
    x = torch.randn(16, 6, generator=source, dtype=torch.float64)
    return x, torch.sin(x @ torch.ones(6, 3, dtype=torch.float64))


def loss_of(model: nn.Module, step: int, rank: int) -> torch.Tensor:
    x, y = batch(step, rank)
    return (model(x) - y).pow(2).mean()


def weights(model: nn.Module) -> list[torch.Tensor]:
    return [p.detach().clone() for p in model.parameters()]


def same(a: list[torch.Tensor], b: list[torch.Tensor], tolerance: float = 0.0) -> bool:
    return all(torch.allclose(x, y, rtol=0, atol=tolerance) for x, y in zip(a, b, strict=True))


MAKERS: dict[str, Any] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.05),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.02, momentum=0.9, weight_decay=0.01),
    "adam": lambda p: torch.optim.Adam(p, lr=0.01),
}


def steps(optimizer: Any, model: nn.Module, how_many: int, rank: int = 0, first: int = 0) -> None:
    for step in range(first, first + how_many):
        optimizer.zero_grad()
        loss_of(model, step, rank).backward()
        optimizer.step()


# ---- run in the workers


def job_alone() -> Any:
    """With a single worker the servers' weights equal its own, apart from rounding in each sum."""
    found = {}
    for name, make in MAKERS.items():
        model, plain = network(), network()
        optimizer: Any = bps.DistributedOptimizer(
            make(model.parameters()), [(f"{name}.{n}", p) for n, p in model.named_parameters()]
        )
        reference = make(plain.parameters())
        steps(optimizer, model, 20), steps(reference, plain, 20)
        found[name] = same(weights(model), weights(plain), 1e-12)
    return found


def job_turns() -> Any:
    """Workers take turns, so the result must equal one process taking the steps in order."""
    model = network(seed=1 + bps.rank())  # the seeds differ, but all start with worker 0's weights
    optimizer: Any = bps.DistributedOptimizer(
        MAKERS["sgd"](model.parameters()), model.named_parameters()
    )
    gone = []
    for turn in range(12):
        bps.barrier()
        if turn == 0 or turn % bps.size() == bps.rank():
            # The first step involves all workers; with learning rate 0 it changes nothing. A step
            # without a gradient fetches the weights.
            optimizer.param_groups[0]["lr"] = 0.0 if turn == 0 else 0.05
            optimizer.zero_grad()
            optimizer.step()
            loss_of(model, turn, bps.rank()).backward()
            optimizer.step()
            gone.append(turn)
    bps.barrier()
    optimizer.zero_grad()
    optimizer.step()
    plain = network(seed=1)
    reference = MAKERS["sgd"](plain.parameters())
    for turn in range(1, 12):
        steps(reference, plain, 1, turn % bps.size(), first=turn)
    return {"as in turn": same(weights(model), weights(plain), 1e-12), "weights": weights(model)}


def job_options() -> Any:
    """Frozen parameters, groups, a closure, clipping between synchronize() and step(), several
    passes per step, and a strided parameter.
    """
    model = network()
    frozen = model[2].bias
    frozen.requires_grad_(False)
    extra = nn.Parameter(torch.zeros(4, 3, dtype=torch.float64).t())
    groups = [
        {"params": model[0].parameters()},
        {"params": model[2].parameters(), "lr": 0.01},
        {"params": [extra]},
    ]
    named = [*model.named_parameters(), ("extra", extra)]
    optimizer: Any = bps.DistributedOptimizer(
        torch.optim.SGD(groups, lr=0.02), named, backward_passes_per_step=2
    )
    before = frozen.detach().clone()
    found: dict[str, Any] = {"isinstance": isinstance(optimizer, torch.optim.SGD)}

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        value = loss_of(model, 0, bps.rank()) + (extra - 1).pow(2).sum()
        value.backward()
        return value

    first = float(optimizer.step(closure))
    for _ in range(100):
        closure()
        loss_of(model, 1, bps.rank()).backward()  # a second pass adds to the gradients
        optimizer.synchronize()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        with optimizer.skip_synchronize():
            optimizer.step()
    bps.barrier()
    found["last"], found["first"] = float(optimizer.step(closure)), first
    found["frozen"] = bool((frozen == before).all())
    # On all workers, before the next step, which all take part in.
    frozen.requires_grad_(True)
    optimizer.step(closure)
    optimizer.step(closure)
    found["unfrozen"] = bool((frozen != before).any())
    bps.barrier()
    optimizer.param_groups[0]["lr"] = 0.0
    optimizer.zero_grad()
    optimizer.step()
    found["weights"] = [*weights(model), extra.detach().clone()]
    try:
        bps.DistributedOptimizer(
            torch.optim.SGD(network().parameters(), lr=0.1), compression=bps.Compression.fp16
        )
    except ConfigError as e:
        found["compression"] = str(e)
    return found


def job_uneven() -> Any:
    """The pattern of docs/train/uneven-and-elastic.md: worker r has 4 + 3 r batches per epoch."""
    model = network(seed=1 + bps.rank())
    optimizer: Any = bps.DistributedOptimizer(
        MAKERS["adam"](model.parameters()), model.named_parameters()
    )
    bps.broadcast_parameters(model.state_dict(), root_rank=0)
    lasts = []
    for _ in range(3):
        steps(optimizer, model, 4 + 3 * bps.rank(), bps.rank())
        lasts.append(bps.join())
        bps.broadcast_parameters(model.state_dict(), root_rank=lasts[-1])
        bps.broadcast_optimizer_state(optimizer, root_rank=lasts[-1])
    return {
        "weights": weights(model),
        "lasts": lasts,
        "steps": int(next(iter(optimizer.state.values()))["step"]),
    }


# ---- tests


def test_a_single_worker_trains_as_without_servers(tmp_path: Path):
    job = run_job(__file__, ["job_alone"], tmp_path, workers=1, **ASYNC)
    assert job.status == 0, job.output
    assert job.results[0]["job_alone"] == dict.fromkeys(MAKERS, True)


@pytest.mark.parametrize("workers", [2, 3])
def test_steps_in_turn_are_those_of_one_process(tmp_path: Path, workers: int):
    job = run_job(
        __file__,
        ["job_turns"],
        tmp_path,
        workers=workers,
        servers=2,
        BYTEPS_PARTITION_BYTES="4096",
        **ASYNC,
    )
    assert job.status == 0, job.output
    found = [job.results[r]["job_turns"] for r in range(workers)]
    assert all(f["as in turn"] for f in found) and all(
        same(found[0]["weights"], f["weights"]) for f in found
    )


def test_groups_closures_clipping_and_passes_work(tmp_path: Path):
    job = run_job(__file__, ["job_options"], tmp_path, **ASYNC)
    assert job.status == 0, job.output
    found = [job.results[r]["job_options"] for r in range(2)]
    for f in found:
        assert f["isinstance"] and f["frozen"] and f["unfrozen"] and f["last"] < f["first"] / 3
        assert same(found[0]["weights"], f["weights"])
        assert "FP16Compressor" in f["compression"] and "BYTEPS_ENABLE_ASYNC" in f["compression"]


def test_uneven_batches_end_with_equal_weights(tmp_path: Path):
    job = run_job(__file__, ["job_uneven"], tmp_path, workers=3, servers=2)
    assert job.status == 0, job.output
    found = [job.results[r]["job_uneven"] for r in range(3)]
    assert all(same(found[0]["weights"], f["weights"]) for f in found)
    assert {str(f["lasts"]) for f in found} == {"[2, 2, 2]"} and [f["steps"] for f in found] == [
        30
    ] * 3
