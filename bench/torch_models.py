"""Models of the PyTorch benchmarks: a multi-layer perceptron, a small GPT, one of many small
tensors, and one whose first layers are the largest.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, cast

import torch
from torch import nn
from torch.nn import functional

from bench.shapes import SMALL_ELEMENTS
from examples.pytorch.models import GPT, perceptron

_SEQUENCE, _VOCABULARY = 64, 512


class Workload(NamedTuple):
    """A model with its loss.

    ``model()`` returns the same weights at every call. ``loss(model, rank)`` is the loss of a fixed
    batch of worker ``rank``.
    """

    model: Callable[[], nn.Module]
    loss: Callable[[nn.Module, int], torch.Tensor]
    optimizer: Callable[[nn.Module], torch.optim.Optimizer]


def _seeded(make: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    def made() -> nn.Module:
        torch.manual_seed(1)
        return make()

    return made


def _classes(rows: int, inputs: int, classes: int) -> Callable[[nn.Module, int], torch.Tensor]:
    def loss(model: nn.Module, rank: int) -> torch.Tensor:
        source = torch.Generator().manual_seed(rank)
        x = torch.randn(rows, inputs, generator=source)
        return functional.cross_entropy(model(x), torch.randint(classes, (rows,), generator=source))

    return loss


class _Small(nn.Module):
    """A model with as many small parameters as a network of thousands of normalization layers."""

    def __init__(self, tensors: int) -> None:
        super().__init__()
        self.small = nn.ParameterList(torch.ones(SMALL_ELEMENTS) for _ in range(tensors))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.stack([p * x for p in self.small]).sum()


def _next_token(rows: int) -> Callable[[nn.Module, int], torch.Tensor]:
    def loss(model: nn.Module, rank: int) -> torch.Tensor:
        text = torch.randint(
            _VOCABULARY, (rows, _SEQUENCE + 1), generator=torch.Generator().manual_seed(rank)
        )
        return functional.cross_entropy(model(text[:, :-1]).flatten(0, 1), text[:, 1:].flatten())

    return loss


WORKLOADS = {
    # 10.4 million parameters in 8 tensors
    "mlp": Workload(
        _seeded(lambda: perceptron(1024, 2048, 2048, 2000, 10)),
        _classes(64, 1024, 10),
        lambda model: torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9),
    ),
    # 3.3 million parameters in 51 tensors
    "gpt": Workload(
        _seeded(lambda: GPT(_VOCABULARY, _SEQUENCE)),
        _next_token(8),
        lambda model: torch.optim.AdamW(model.parameters(), lr=1e-3),
    ),
    # 26 thousand parameters in 4 tensors, for tests of the benchmark
    "tiny": Workload(
        _seeded(lambda: perceptron(64, 320, 16)),
        _classes(8, 64, 16),
        lambda model: torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9),
    ),
    # 2,000 tensors of 4 elements, for the cost of a tensor apart from its bytes
    "small": Workload(
        lambda: _Small(2000),
        lambda model, rank: cast("torch.Tensor", model(torch.full((1,), rank + 1.0))),
        lambda model: torch.optim.SGD(model.parameters(), lr=1e-6),
    ),
    # 12.8 million parameters, of which the first nine layers have 12.0 million. On a link of
    # 1 Gbit/s their gradients take longer than forward and backward.
    "front": Workload(
        _seeded(lambda: perceptron(*[1152] * 10, 512, 512, 10)),
        _classes(160, 1152, 10),
        lambda model: torch.optim.AdamW(model.parameters(), lr=1e-3),
    ),
}
