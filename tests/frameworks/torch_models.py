"""Small float64 models, a stateful optimizer, and their training on parts of a joined batch."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

ROWS = 12  # of the joined batch, divisible by 1, 2, 3 and 4 workers
STEPS = 4


def tanh_model(seed: int = 1) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 3)
    ).double()


class Forked(nn.Module):
    """Model that uses one of two branches, depending on the step."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.left, self.right = (
            tanh_model(2),
            nn.Linear(3, 3).double(),
            nn.Linear(3, 3).double(),
        )

    def forward(self, x: torch.Tensor, step: int) -> torch.Tensor:
        return (self.right if step % 2 else self.left)(self.stem(x))  # type: ignore[no-any-return]


class Counting(torch.optim.SGD):
    """Optimizer that counts its steps and moves by a length that depends on all counts.

    It counts in its groups and on itself, in numbers, in place in tensors, and in a list.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.taken, self.tensor, self.listed = 0, torch.zeros(()), [0]
        for group in self.param_groups:
            group["tensor"] = torch.zeros(1)

    @torch.no_grad()  # type: ignore[untyped-decorator]
    def step(self, closure: Any = None) -> None:
        self.taken += 1
        self.tensor += 1
        self.listed[0] += 1
        for group in self.param_groups:
            group["count"] = group.get("count", 0) + 1
            group["tensor"] += 1
            slower = self.taken + self.tensor + self.listed[0] + group["count"] + group["tensor"]
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(p.grad * (group["lr"] / slower))


def batch(step: int, rank: int = 0, size: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    """Return worker ``rank``'s rows of step ``step``'s batch."""
    torch.manual_seed(1000 + step)
    x, y = torch.randn(ROWS, 6, dtype=torch.float64), torch.randn(ROWS, 3, dtype=torch.float64)
    each = ROWS // size
    return x[rank * each : (rank + 1) * each], y[rank * each : (rank + 1) * each]


def train(
    model: nn.Module,
    rank: int = 0,
    size: int = 1,
    *,
    steps: int = STEPS,
    optimizer: Any = None,
    passes: int = 1,
    with_step: bool = False,
    no_sync: Callable[[], Any] = contextlib.nullcontext,
) -> list[torch.Tensor]:
    """Train on this worker's rows and return the parameters.

    ``passes``: backward passes, of as many steps' batches, per optimizer step.
    """
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(steps):
        optimizer.zero_grad()
        for i in range(passes):
            x, y = batch(step * passes + i, rank, size)
            with no_sync() if i < passes - 1 else contextlib.nullcontext():
                out = model(x, step) if with_step else model(x)
                nn.functional.mse_loss(out, y).backward()
        optimizer.step()
    return [p.detach().clone() for p in model.parameters()]


def assert_all_close(
    finished: Any, workers: int, name: str, expected: list[torch.Tensor], tolerance: float = 1e-11
) -> None:
    """Assert that all workers have the same bits for function ``name``, close to ``expected``."""
    first = finished.results[0][name]
    for rank in range(workers):
        for ours, theirs in zip(finished.results[rank][name], first, strict=True):
            assert torch.equal(ours, theirs), (name, rank)
    for ours, alone in zip(first, expected, strict=True):
        torch.testing.assert_close(
            ours, alone, rtol=tolerance, atol=tolerance, msg=lambda text: f"{name}: {text}"
        )
