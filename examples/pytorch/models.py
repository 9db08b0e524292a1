"""Models of the examples and benchmarks: a multi-layer perceptron, a small GPT, ResNet and VGG.

Nothing is downloaded; all begin with random weights. ``build("resnet50")`` makes one by name.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import nn
from torch.nn import functional


def perceptron(*widths: int) -> nn.Sequential:
    """Return linear layers of these widths, with ReLU between them."""
    layers: list[nn.Module] = []
    for before, after in zip(widths, widths[1:]):
        layers += [nn.Linear(before, after), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


# ---- GPT


class Block(nn.Module):
    """A transformer block with normalisation before each part."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before, self.between = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attend, self.project = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.widen, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map (batch, sequence, width) to the same shape."""
        batch, length, width = x.shape
        parts = (
            self.attend(self.before(x))
            .view(batch, length, 3, self.heads, width // self.heads)
            .permute(2, 0, 3, 1, 4)
        )
        mixed = functional.scaled_dot_product_attention(
            parts[0], parts[1], parts[2], is_causal=True
        )
        x = x + self.project(mixed.transpose(1, 2).reshape(batch, length, width))
        out: torch.Tensor = x + self.narrow(functional.gelu(self.widen(self.between(x))))
        return out


class GPT(nn.Module):
    """A small decoder: ``layers`` blocks over token and position embeddings.

    Its output layer is the token embedding. ``sequence`` is the greatest length of a text. Source:
    Radford et al., *Language Models are Unsupervised Multitask Learners*, 2019.
    """

    def __init__(
        self,
        vocabulary: int = 512,
        sequence: int = 64,
        width: int = 256,
        layers: int = 4,
        heads: int = 4,
    ) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(sequence, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.last = nn.LayerNorm(width)
        self.out = nn.Linear(width, vocabulary, bias=False)
        self.out.weight = self.tokens.weight
        for module in self.modules():
            if isinstance(module, (nn.Linear, nn.Embedding)):
                nn.init.normal_(module.weight, std=0.02)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Map int64 (batch, sequence) to logits (batch, sequence, vocabulary)."""
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1]))
        for block in self.blocks:
            x = block(x)
        out: torch.Tensor = self.out(self.last(x))
        return out


# ---- ResNet


def _convolution(inputs: int, outputs: int, kernel: int, stride: int = 1) -> nn.Sequential:
    """Return a convolution that keeps the size (divided by ``stride``), and batch normalisation."""
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, kernel, stride, kernel // 2, bias=False), nn.BatchNorm2d(outputs)
    )


class Residual(nn.Module):
    """``x + f(x)``, followed by ReLU.

    f is two 3x3 convolutions or, as a *bottleneck*, 1x1, 3x3 and 1x1 with four times as many
    outputs.
    """

    def __init__(self, inputs: int, width: int, stride: int, bottleneck: bool) -> None:
        super().__init__()
        outputs = 4 * width if bottleneck else width
        if bottleneck:
            self.inside = nn.Sequential(
                _convolution(inputs, width, 1),
                nn.ReLU(),
                _convolution(width, width, 3, stride),
                nn.ReLU(),
                _convolution(width, outputs, 1),
            )
        else:
            self.inside = nn.Sequential(
                _convolution(inputs, width, 3, stride), nn.ReLU(), _convolution(width, outputs, 3)
            )
        alike = stride == 1 and inputs == outputs
        self.shortcut: nn.Module = (
            nn.Identity() if alike else _convolution(inputs, outputs, 1, stride)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map (batch, inputs, height, width) to (batch, outputs, height/stride, width/stride)."""
        return functional.relu(self.shortcut(x) + self.inside(x))


def resnet(
    blocks: tuple[int, int, int, int], bottleneck: bool, classes: int = 1000
) -> nn.Sequential:
    """Return a ResNet with shortcuts of kind B.

    A bottleneck's stride is in its 3x3 convolution, as in most implementations today; the paper's
    is in the first 1x1. That changes the work, not the number of parameters. Source: He et al.,
    *Deep Residual Learning for Image Recognition*, 2015 (arXiv:1512.03385), table 1.
    """
    layers: list[nn.Module] = [_convolution(3, 64, 7, 2), nn.ReLU(), nn.MaxPool2d(3, 2, 1)]
    channels = 64
    for i, count in enumerate(blocks):
        width = 64 * 2**i
        for j in range(count):
            layers.append(Residual(channels, width, 2 if i > 0 and j == 0 else 1, bottleneck))
            channels = 4 * width if bottleneck else width
    model = nn.Sequential(
        *layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, classes)
    )
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
    return model


# ---- VGG


def vgg16(classes: int = 1000) -> nn.Sequential:
    """Return VGG-16, configuration D.

    Source: Simonyan and Zisserman, *Very Deep Convolutional Networks for Large-Scale Image
    Recognition*, 2014 (arXiv:1409.1556).
    """
    layers: list[nn.Module] = []
    channels = 3
    for count, width in ((2, 64), (2, 128), (3, 256), (3, 512), (3, 512)):
        for _ in range(count):
            layers += [nn.Conv2d(channels, width, 3, padding=1), nn.ReLU()]
            channels = width
        layers.append(nn.MaxPool2d(2))
    # The pooling changes nothing for pictures of 224 by 224, and allows other sizes.
    model = nn.Sequential(
        *layers,
        nn.AdaptiveAvgPool2d(7),
        nn.Flatten(),
        nn.Linear(512 * 7 * 7, 4096),
        nn.ReLU(),
        nn.Dropout(),
        nn.Linear(4096, 4096),
        nn.ReLU(),
        nn.Dropout(),
        nn.Linear(4096, classes),
    )
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
    return model


# ---- models by name


class Kind(NamedTuple):
    """A model's constructor and the size of its input.

    ``image``: pixels to a side of a picture. ``sequence``: tokens of a text, of a vocabulary of
    ``classes`` tokens.
    """

    make: Callable[[int], nn.Module]
    image: int = 0
    sequence: int = 0
    classes: int = 1000

    @property
    def unit(self) -> str:
        """The unit of input that is counted: tokens or images."""
        return "tokens" if self.sequence else "images"


def _mlp(classes: int) -> nn.Module:
    return nn.Sequential(nn.Flatten(), *perceptron(3 * 32 * 32, 2048, 2048, classes))


MODELS = {
    "resnet18": Kind(lambda classes: resnet((2, 2, 2, 2), False, classes), image=224),
    "resnet34": Kind(lambda classes: resnet((3, 4, 6, 3), False, classes), image=224),
    "resnet50": Kind(lambda classes: resnet((3, 4, 6, 3), True, classes), image=224),
    "resnet101": Kind(lambda classes: resnet((3, 4, 23, 3), True, classes), image=224),
    "vgg16": Kind(vgg16, image=224),
    "mlp": Kind(_mlp, image=32, classes=10),
    # 3.3 million parameters
    "gpt": Kind(lambda classes: GPT(classes), sequence=64, classes=512),
    # 124 million parameters: the paper's smallest
    "gpt2": Kind(lambda classes: GPT(classes, 1024, 768, 12, 12), sequence=1024, classes=50257),
}


def build(name: str, classes: int | None = None) -> nn.Module:
    """Return the model called ``name`` for ``classes`` classes, by default as many as it was
    published with.

    For a GPT the classes are the vocabulary.
    """
    kind = MODELS[name]
    return kind.make(classes or kind.classes)


def parameters_of(model: nn.Module) -> int:
    """Return the number of parameters; those that two layers share count once."""
    return sum(p.numel() for p in model.parameters())


def fingerprint(model: nn.Module) -> str:
    """Return a text that is the same for the same weights, bit for bit."""
    return hashlib.sha256(
        b"".join(p.detach().numpy().tobytes() for p in model.parameters())
    ).hexdigest()[:16]
