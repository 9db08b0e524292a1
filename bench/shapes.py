"""Shapes of the parameters of well-known networks, layer by layer in the order of the forward pass.

A layer's work in a forward pass is one matrix product: ``rows`` rows of each sample, as wide as the
weight's inputs, times the weight. For a convolution the rows are the positions of its output.
Backward does two products of that size. Left out are products without a weight (attention's own: 6
% of BERT-large's at 384 tokens), normalisation, activations and pooling.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import NamedTuple

#: Elements of each tensor of the network of small tensors in ``bench torch``.
SMALL_ELEMENTS = 4


class Layer(NamedTuple):
    """One layer of a network.

    ``shapes``: shape of each parameter by its name; the first is the weight, with outputs first.
    ``rows``: rows of one sample; 0 if the layer is a look-up or works element by element.
    """

    name: str
    shapes: Mapping[str, tuple[int, ...]]
    rows: int = 0

    @property
    def outputs(self) -> int:
        return next(iter(self.shapes.values()))[0]

    @property
    def inputs(self) -> int:
        return math.prod(next(iter(self.shapes.values()))[1:])

    @property
    def elements(self) -> int:
        """Number of elements of all parameters."""
        return sum(math.prod(shape) for shape in self.shapes.values())

    @property
    def products(self) -> int:
        """Multiplications of one sample's forward pass."""
        return self.rows * self.inputs * self.outputs


class Network(NamedTuple):
    """A network. ``batch``: samples of one worker in a step."""

    layers: tuple[Layer, ...]
    batch: int

    @property
    def elements(self) -> int:
        return sum(layer.elements for layer in self.layers)

    @property
    def tensors(self) -> int:
        return sum(len(layer.shapes) for layer in self.layers)

    @property
    def products(self) -> int:
        """Multiplications of one sample's forward pass."""
        return sum(layer.products for layer in self.layers)


def _dense(name: str, inputs: int, outputs: int, rows: int = 1) -> Layer:
    return Layer(name, {"weight": (outputs, inputs), "bias": (outputs,)}, rows)


def _normed(name: str, inputs: int, outputs: int, kernel: int, side: int) -> Layer:
    """Return a convolution without bias, followed by batch normalisation.

    The convolution's output has ``side`` x ``side`` positions.
    """
    shapes: Mapping[str, tuple[int, ...]] = {
        "weight": (outputs, inputs, kernel, kernel),
        "norm.weight": (outputs,),
        "norm.bias": (outputs,),
    }
    return Layer(name, shapes, side * side)


def resnet50() -> Network:
    """Return ResNet-50 for 224 x 224 pixels and 1000 classes.

    The stride is in the middle convolution of a block, as is usual today.
    """
    layers, inputs, side = [_normed("conv1", 3, 64, 7, 112)], 64, 56
    for stage, blocks in enumerate((3, 4, 6, 3)):
        width = 64 << stage
        for block in range(blocks):
            before, side = side, side // 2 if stage and not block else side
            name = f"layer{stage + 1}.{block}"
            layers += [
                _normed(f"{name}.conv1", inputs, width, 1, before),
                _normed(f"{name}.conv2", width, width, 3, side),
                _normed(f"{name}.conv3", width, 4 * width, 1, side),
            ]
            if not block:
                layers.append(_normed(f"{name}.downsample", inputs, 4 * width, 1, side))
            inputs = 4 * width
    return Network((*layers, _dense("fc", 2048, 1000)), 64)


def vgg16() -> Network:
    """Return VGG-16 for 224 x 224 pixels and 1000 classes, without batch normalisation."""
    layers, inputs, side = [], 3, 224
    for stage, widths in enumerate(
        ((64, 64), (128, 128), (256, 256, 256), (512, 512, 512), (512, 512, 512))
    ):
        for i, width in enumerate(widths):
            layers.append(
                Layer(
                    f"conv{stage + 1}_{i + 1}",
                    {"weight": (width, inputs, 3, 3), "bias": (width,)},
                    side * side,
                )
            )
            inputs = width
        side //= 2
    return Network(
        (
            *layers,
            _dense("fc6", 512 * 7 * 7, 4096),
            _dense("fc7", 4096, 4096),
            _dense("fc8", 4096, 1000),
        ),
        32,
    )


def bert_large(tokens: int = 384) -> Network:
    """Return BERT-large: 24 layers of width 1024, 16 heads, a vocabulary of 30,522.

    It has the pooler, but no task's head. A sample is a text of ``tokens`` tokens.
    """
    hidden, inner = 1024, 4096
    norm: Mapping[str, tuple[int, ...]] = {"weight": (hidden,), "bias": (hidden,)}
    layers = [
        Layer(f"embeddings.{name}", {"weight": (rows, hidden)})
        for name, rows in (("word", 30522), ("position", 512), ("kind", 2))
    ]
    layers.append(Layer("embeddings.norm", norm))
    for i in range(24):
        name = f"layer.{i}"
        layers += [
            _dense(f"{name}.{part}", hidden, hidden, tokens)
            for part in ("query", "key", "value", "attended")
        ]
        layers += [
            Layer(f"{name}.norm1", norm),
            _dense(f"{name}.up", hidden, inner, tokens),
            _dense(f"{name}.down", inner, hidden, tokens),
            Layer(f"{name}.norm2", norm),
        ]
    return Network((*layers, _dense("pooler", hidden, hidden)), 8)


def gpt2(tokens: int = 80) -> Network:
    """Return the smallest GPT-2: 12 layers of width 768, a vocabulary of 50,257.

    The output has the weights of the input's look-up. A sample is a text of ``tokens`` tokens, the
    batch that the OSDI'20 paper gives for GPT-2.
    """
    hidden, inner, words = 768, 3072, 50257
    norm: Mapping[str, tuple[int, ...]] = {"weight": (hidden,), "bias": (hidden,)}
    layers = [Layer("position", {"weight": (1024, hidden)})]
    for i in range(12):
        name = f"layer.{i}"
        layers += [
            Layer(f"{name}.norm1", norm),
            _dense(f"{name}.attention", hidden, 3 * hidden, tokens),
            _dense(f"{name}.attended", hidden, hidden, tokens),
            Layer(f"{name}.norm2", norm),
            _dense(f"{name}.up", hidden, inner, tokens),
            _dense(f"{name}.down", inner, hidden, tokens),
        ]
    tied = Layer("words", {"weight": (words, hidden)}, tokens)
    return Network((*layers, Layer("norm", norm), tied), 1)


def _generator(name: str, width: int = 64, side: int = 256, blocks: int = 4) -> list[Layer]:
    """Return a generator of U-GAT-IT, which turns an image of ``side`` x ``side`` into another."""
    full, small = 4 * width, side // 4
    ratios: Mapping[str, tuple[int, ...]] = {"rho1": (full,), "rho2": (full,)}
    layers = [
        _filter(f"{name}.down0", 3, width, 7, side),
        _filter(f"{name}.down1", width, 2 * width, 3, side // 2),
        _filter(f"{name}.down2", 2 * width, full, 3, small),
    ]
    for i in range(blocks):
        layers += [_filter(f"{name}.block{i}.{k}", full, full, 3, small) for k in (1, 2)]
    layers += [
        Layer(f"{name}.average", {"weight": (1, full)}, 1),
        Layer(f"{name}.largest", {"weight": (1, full)}, 1),
        _dense(f"{name}.mix", 2 * full, full, small * small),
        Layer(f"{name}.code1", {"weight": (full, small * small * full)}, 1),
        Layer(f"{name}.code2", {"weight": (full, full)}, 1),
        Layer(f"{name}.gamma", {"weight": (full, full)}, 1),
        Layer(f"{name}.beta", {"weight": (full, full)}, 1),
    ]
    for i in range(blocks):
        layers += [_filter(f"{name}.up.block{i}.{k}", full, full, 3, small) for k in (1, 2)]
        layers.append(Layer(f"{name}.up.norm{i}", ratios))
    return [
        *layers,
        _filter(f"{name}.up1", full, 2 * width, 3, side // 2),
        _filter(f"{name}.up2", 2 * width, width, 3, side),
        _filter(f"{name}.image", width, 3, 7, side),
    ]


def _discriminator(name: str, depth: int, width: int = 64, side: int = 256) -> list[Layer]:
    """Return a discriminator of U-GAT-IT with ``depth`` convolutions before its attention."""
    layers, inputs, size = [], 3, side
    for i in range(depth):
        outputs, size = width << i, size // 2 if i < depth - 1 else size - 1
        layers.append(
            Layer(
                f"{name}.conv{i}",
                {"weight": (outputs, inputs, 4, 4), "bias": (outputs,)},
                size * size,
            )
        )
        inputs = outputs
    return [
        *layers,
        Layer(f"{name}.average", {"weight": (1, inputs)}, 1),
        Layer(f"{name}.largest", {"weight": (1, inputs)}, 1),
        _dense(f"{name}.mix", 2 * inputs, inputs, size * size),
        Layer(f"{name}.map", {"weight": (1, inputs, 4, 4)}, (size - 1) ** 2),
    ]


def _filter(name: str, inputs: int, outputs: int, kernel: int, side: int) -> Layer:
    """Return a convolution without bias, whose output has ``side`` x ``side`` positions."""
    return Layer(name, {"weight": (outputs, inputs, kernel, kernel)}, side * side)


def ugatit() -> Network:
    """Return U-GAT-IT as published, for 256 x 256 pixels: two generators, four discriminators.

    Each generator has one dense tensor of 268 million parameters. All networks make gradients in
    one step here; a training step has one for each kind. The batch is the OSDI'20 paper's.
    """
    layers: list[Layer] = []
    for way in ("a", "b"):
        layers += _generator(f"generator_{way}")
        layers += _discriminator(f"global_{way}", 6)
        layers += _discriminator(f"local_{way}", 4)
    return Network(tuple(layers), 2)


def tiny() -> Network:
    """Return a network of 0.4 million parameters in nine tensors, to see that a benchmark runs."""
    return Network(
        (
            _normed("conv", 3, 16, 3, 8),
            _dense("in", 1024, 256),
            _dense("middle", 256, 512),
            _dense("out", 512, 10),
        ),
        4,
    )


#: Networks by name; ``tiny`` is for trying a benchmark out.
NETWORKS: Mapping[str, Callable[[], Network]] = {
    "resnet50": resnet50,
    "vgg16": vgg16,
    "bert-large": bert_large,
    "gpt2": gpt2,
    "ugatit": ugatit,
    "tiny": tiny,
}
