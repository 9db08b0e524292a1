"""Training with 2 and 4 workers equals training in one process on the joined batch, with the same
bits on all workers.

Machines have one process or two. Functions named ``job_*`` run in the workers. In float64 only the
order of additions differs from one process, hence 1e-11. In float32 that costs about 1e-6 per step.
fp16 on the wire rounds each gradient to 11 bits: 2e-3 after some steps.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import bpsx.torch as bps
from support.torch_job import Finished, run_job

STEPS, BATCH = 8, 4  # BATCH: rows per worker
Optimizer = Callable[[Any], torch.optim.Optimizer]
Loss = Callable[[nn.Module, torch.Tensor, torch.Tensor], torch.Tensor]

OPTIMIZERS: dict[str, Optimizer] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.05),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.02, momentum=0.9, weight_decay=0.01),
    "adam": lambda p: torch.optim.Adam(p, lr=0.01),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0.1),
}


def network(dtype: torch.dtype = torch.float64, seed: int = 1) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Linear(6, 40), nn.Tanh(), nn.Linear(40, 30), nn.Tanh(), nn.Linear(30, 3)
    ).to(dtype)


def batch(
    step: int, size: int, dtype: torch.dtype = torch.float64
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the joined batch of a step; worker r has rows r * BATCH to (r + 1) * BATCH."""
    source = torch.Generator().manual_seed(1000 + step)
    x = torch.randn(size * BATCH, 6, generator=source, dtype=torch.float64)
    return x.to(dtype), torch.sin(x @ torch.ones(6, 3, dtype=torch.float64)).to(dtype)


def mean_square(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return (model(x) - y).pow(2).mean()


def weights(model: nn.Module) -> list[torch.Tensor]:
    return [p.detach().clone() for p in model.parameters()]


def shard(step: int, dtype: torch.dtype = torch.float64) -> tuple[torch.Tensor, torch.Tensor]:
    mine = slice(bps.rank() * BATCH, (bps.rank() + 1) * BATCH)
    return tuple(t[mine] for t in batch(step, bps.size(), dtype))  # type: ignore[return-value]


def train_here(
    model: nn.Module, make: Optimizer, dtype: torch.dtype = torch.float64, **options: Any
) -> list[torch.Tensor]:
    optimizer: Any = bps.DistributedOptimizer(
        make(model.parameters()), model.named_parameters(), **options
    )
    bps.broadcast_parameters(model.state_dict(), root_rank=0)
    for step in range(STEPS):
        optimizer.zero_grad()
        mean_square(model, *shard(step, dtype)).backward()
        optimizer.step()
    return weights(model)


def train_alone(
    model: nn.Module, make: Optimizer, size: int, dtype: torch.dtype = torch.float64
) -> list[torch.Tensor]:
    optimizer = make(model.parameters())
    for step in range(STEPS):
        optimizer.zero_grad()
        mean_square(model, *batch(step, size, dtype)).backward()
        optimizer.step()
    return weights(model)


# ---- run in the workers


def job_sgd() -> Any:
    return train_here(
        network(seed=1 + bps.rank()), OPTIMIZERS["sgd"]
    )  # the seeds differ, so broadcast_parameters must work


def job_momentum() -> Any:
    return train_here(network(seed=1 + bps.rank()), OPTIMIZERS["momentum"])


def job_adam() -> Any:
    return train_here(network(seed=1 + bps.rank()), OPTIMIZERS["adam"])


def job_adamw() -> Any:
    return train_here(network(seed=1 + bps.rank()), OPTIMIZERS["adamw"])


def job_float32() -> Any:
    return train_here(network(torch.float32), OPTIMIZERS["sgd"], torch.float32)


def job_bfloat16() -> Any:
    return train_here(network(torch.bfloat16), OPTIMIZERS["sgd"], torch.bfloat16)


def job_fp16_compression() -> Any:
    return train_here(
        network(torch.float32), OPTIMIZERS["sgd"], torch.float32, compression=bps.Compression.fp16
    )


def job_passes() -> Any:
    """Each worker accumulates its batch in two halves.

    The loss is halved, because passes are summed.
    """
    model = network()
    base = OPTIMIZERS["momentum"](model.parameters())
    optimizer: Any = bps.DistributedOptimizer(
        base, model.named_parameters(), backward_passes_per_step=2
    )
    for step in range(STEPS):
        optimizer.zero_grad()
        x, y = shard(step)
        for half in (slice(0, BATCH // 2), slice(BATCH // 2, BATCH)):
            (mean_square(model, x[half], y[half]) / 2).backward()
        optimizer.step()
    return weights(model)


class Branches(nn.Module):
    """Model with a trunk, two heads, an unused head, a frozen layer and a layer used twice.

    Each batch uses one of the two heads.
    """

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.trunk, self.twice, self.frozen = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6)
        self.heads = nn.ModuleList(nn.Linear(6, 3) for _ in range(3))
        self.tied = nn.Linear(6, 6)
        self.tied.weight = self.twice.weight
        self.frozen.requires_grad_(False)
        self.double()

    def forward(self, x: torch.Tensor, head: int) -> torch.Tensor:
        out: torch.Tensor = self.heads[head](
            self.tied(self.twice(self.twice(self.frozen(self.trunk(x)))))
        )
        return out


def head_of(rank: int, step: int) -> int:
    """Return the head: 0 on all workers, or 1 on one of them."""
    return int(step % 2 == 1 and rank == step // 2 % 2)


def job_branches() -> Any:
    """Weight decay and momentum move a parameter with a zero gradient, but not one with none."""
    return branches(OPTIMIZERS["momentum"])


def job_branches_adamw() -> Any:
    return branches(OPTIMIZERS["adamw"])


def branches(make: Callable[[Any], torch.optim.Optimizer]) -> list[torch.Tensor]:
    model = Branches()
    optimizer: Any = bps.DistributedOptimizer(make(model.parameters()), model.named_parameters())
    for step in range(STEPS):
        optimizer.zero_grad()
        x, y = shard(step)
        (model(x, head_of(bps.rank(), step)) - y).pow(2).mean().backward()
        optimizer.step()
    return weights(model)


def job_opposite_orders() -> Any:
    """Workers push tensors of several partitions in opposite orders."""
    torch.manual_seed(5)
    towers = nn.ModuleList(nn.Linear(300, 2000, bias=False) for _ in range(4))
    optimizer: Any = bps.DistributedOptimizer(
        torch.optim.SGD(towers.parameters(), lr=0.1), towers.named_parameters()
    )
    for _ in range(3):
        optimizer.zero_grad()
        for tower in towers if bps.rank() % 2 else reversed(towers):
            tower(torch.ones(1, 300)).sum().backward()
        optimizer.step()
    return [w[:2, :2].clone() for w in weights(towers)]


def job_clipping() -> Any:
    model = network()
    optimizer: Any = bps.DistributedOptimizer(
        OPTIMIZERS["sgd"](model.parameters()), model.named_parameters()
    )
    for step in range(STEPS):
        optimizer.zero_grad()
        mean_square(model, *shard(step)).backward()
        optimizer.synchronize()
        nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        with optimizer.skip_synchronize():
            optimizer.step()
    return weights(model)


def job_scheduler_and_closure() -> Any:
    model = network()
    optimizer: Any = bps.DistributedOptimizer(OPTIMIZERS["momentum"](model.parameters()))
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)
    for step in range(STEPS):

        def closure(step: int = step) -> torch.Tensor:
            optimizer.zero_grad()
            loss = mean_square(model, *shard(step))
            loss.backward()
            return loss

        optimizer.step(closure)
        scheduler.step()
    return weights(model)


# ---- the same in one process


def alone_branches(make: Callable[[Any], torch.optim.Optimizer], size: int) -> list[torch.Tensor]:
    model = Branches()
    optimizer = make(model.parameters())
    for step in range(STEPS):
        optimizer.zero_grad()
        x, y = batch(step, size)
        for rank in range(size):
            mine = slice(rank * BATCH, (rank + 1) * BATCH)
            ((model(x[mine], head_of(rank, step)) - y[mine]).pow(2).mean() / size).backward()
        optimizer.step()
    return weights(model)


def alone_opposite_orders(size: int) -> list[torch.Tensor]:
    torch.manual_seed(5)
    return [(nn.Linear(300, 2000, bias=False).weight.detach()[:2, :2] - 0.3) for _ in range(4)]


def alone_clipping(size: int) -> list[torch.Tensor]:
    model = network()
    optimizer = OPTIMIZERS["sgd"](model.parameters())
    for step in range(STEPS):
        optimizer.zero_grad()
        mean_square(model, *batch(step, size)).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        optimizer.step()
    return weights(model)


def alone_scheduler(size: int) -> list[torch.Tensor]:
    model = network()
    optimizer = OPTIMIZERS["momentum"](model.parameters())
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)
    for step in range(STEPS):
        optimizer.zero_grad()
        mean_square(model, *batch(step, size)).backward()
        optimizer.step()
        scheduler.step()
    return weights(model)


#: Job function -> (the same in one process, tolerance).
CASES: dict[str, tuple[Callable[[int], list[torch.Tensor]], float]] = {
    "job_sgd": (lambda n: train_alone(network(), OPTIMIZERS["sgd"], n), 1e-11),
    "job_momentum": (lambda n: train_alone(network(), OPTIMIZERS["momentum"], n), 1e-11),
    "job_adam": (lambda n: train_alone(network(), OPTIMIZERS["adam"], n), 1e-11),
    "job_adamw": (lambda n: train_alone(network(), OPTIMIZERS["adamw"], n), 1e-11),
    "job_float32": (
        lambda n: train_alone(network(torch.float32), OPTIMIZERS["sgd"], n, torch.float32),
        1e-5,
    ),
    "job_bfloat16": (
        lambda n: train_alone(network(torch.bfloat16), OPTIMIZERS["sgd"], n, torch.bfloat16),
        2e-2,
    ),
    "job_fp16_compression": (
        lambda n: train_alone(network(torch.float32), OPTIMIZERS["sgd"], n, torch.float32),
        2e-3,
    ),
    "job_passes": (lambda n: train_alone(network(), OPTIMIZERS["momentum"], n), 1e-11),
    "job_branches": (lambda n: alone_branches(OPTIMIZERS["momentum"], n), 1e-11),
    "job_branches_adamw": (lambda n: alone_branches(OPTIMIZERS["adamw"], n), 1e-11),
    "job_opposite_orders": (alone_opposite_orders, 1e-6),
    "job_clipping": (alone_clipping, 1e-11),
    "job_scheduler_and_closure": (alone_scheduler, 1e-11),
}


@pytest.fixture(
    scope="module",
    params=[(2, 1, 1), (4, 2, 1), (2, 1, 2), (1, 0, 2)],
    ids=["2 workers", "4 workers", "2 machines of 2", "1 machine of 2"],
)
def job(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Finished:
    machines, servers, processes = request.param
    finished = run_job(
        __file__,
        list(CASES),
        tmp_path_factory,
        machines,
        servers,
        processes,
        apart=request.param == (2, 1, 1),
        BYTEPS_PARTITION_BYTES="65536",
    )
    assert finished.status == 0, finished.output[-5000:]
    assert sorted(finished.results) == list(range(machines * processes))
    return finished


@pytest.mark.parametrize("case", CASES)
def test_equals_one_process_on_the_joined_batch(job: Finished, case: str) -> None:
    alone, tolerance = CASES[case]
    expected = alone(len(job.results))
    for mine in (job.results[rank][case] for rank in job.results):
        for a, b in zip(mine, expected, strict=True):
            torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("case", CASES)
def test_all_workers_hold_the_same_bits(job: Finished, case: str) -> None:
    first, *others = (job.results[rank][case] for rank in sorted(job.results))
    for other in others:
        assert all(
            torch.equal(a.view(torch.uint8), b.view(torch.uint8))
            for a, b in zip(first, other, strict=True)
        )
