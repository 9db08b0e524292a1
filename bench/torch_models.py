"""Models of the PyTorch benchmarks and examples, of our own making: a multi-layer perceptron, a small GPT, one that begins large."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import nn
from torch.nn import functional

_SEQUENCE, _VOCABULARY = 64, 512


class Workload(NamedTuple):
    """``model()`` has the same weights at every call; ``loss(model, rank)`` is of a fixed batch of that worker's."""

    model: Callable[[], nn.Module]
    loss: Callable[[nn.Module, int], torch.Tensor]
    optimizer: Callable[[nn.Module], torch.optim.Optimizer]


class Block(nn.Module):
    """A transformer block, normalised first."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before, self.between = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attend, self.project = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.widen, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(batch, sequence, width) to the same."""
        batch, length, width = x.shape
        parts = self.attend(self.before(x)).view(batch, length, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(parts[0], parts[1], parts[2], is_causal=True)
        x = x + self.project(mixed.transpose(1, 2).reshape(batch, length, width))
        out: torch.Tensor = x + self.narrow(functional.gelu(self.widen(self.between(x))))
        return out


class GPT(nn.Module):
    """A small decoder: ``layers`` blocks over token and position embeddings, whose output layer is the token embedding."""

    def __init__(self, vocabulary: int = _VOCABULARY, sequence: int = _SEQUENCE, width: int = 256, layers: int = 4, heads: int = 4) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(sequence, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.last = nn.LayerNorm(width)
        self.out = nn.Linear(width, vocabulary, bias=False)
        self.out.weight = self.tokens.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """int64 (batch, sequence) to logits (batch, sequence, vocabulary)."""
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1]))
        for block in self.blocks:
            x = block(x)
        out: torch.Tensor = self.out(self.last(x))
        return out


def perceptron(*widths: int) -> nn.Sequential:
    """Linear layers of these widths with ReLU between."""
    layers: list[nn.Module] = []
    for before, after in zip(widths, widths[1:]):
        layers += [nn.Linear(before, after), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


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


def _next_token(rows: int) -> Callable[[nn.Module, int], torch.Tensor]:
    def loss(model: nn.Module, rank: int) -> torch.Tensor:
        text = torch.randint(_VOCABULARY, (rows, _SEQUENCE + 1), generator=torch.Generator().manual_seed(rank))
        return functional.cross_entropy(model(text[:, :-1]).flatten(0, 1), text[:, 1:].flatten())

    return loss


WORKLOADS = {
    # 10.4 million parameters in 8 tensors
    "mlp": Workload(_seeded(lambda: perceptron(1024, 2048, 2048, 2000, 10)), _classes(64, 1024, 10),
                    lambda model: torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)),
    # 3.3 million in 51
    "gpt": Workload(_seeded(GPT), _next_token(8), lambda model: torch.optim.AdamW(model.parameters(), lr=1e-3)),
    # 13.2 million, of which the first five layers have 11.8. On a link of 1 Gbit/s their gradients take about as long as forward and backward.
    "front": Workload(_seeded(lambda: perceptron(1536, 1536, 1536, 1536, 1536, 1536, 512, 512, 512, 10)), _classes(256, 1536, 10),
                      lambda model: torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)),
}
