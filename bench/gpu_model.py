"""A network that only takes the time of a real one: its backward makes gradients of the right
shapes.

Layers are those of :mod:`bench.shapes`; the last one's gradients come first. Each layer does the
matrix products of its forward and backward pass on memory kept for that, in bfloat16 on a GPU. The
gradients are float32 and all of one value, so that the trained weights are known.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from bench.shapes import Layer, Network


class Work:
    """Memory that the products read and write, shared by all layers and all models of a network."""

    def __init__(self, network: Network, device: str) -> None:
        self._batch = network.batch
        sizes = (n for layer in network.layers if layer.rows for n in self._sizes(layer))
        dtype = torch.bfloat16 if device == "cuda" else torch.float32
        # Products never write to memory that they read: products of products would soon be
        # infinite, and the time of those would mean nothing.
        self._source = torch.randn(max(sizes), dtype=dtype, device=device)
        self._sink = torch.empty_like(self._source)

    def _sizes(self, layer: Layer) -> tuple[int, int, int]:
        rows = layer.rows * self._batch
        return rows * layer.inputs, rows * layer.outputs, layer.inputs * layer.outputs

    def forward(self, layer: Layer) -> None:
        """Compute outputs = inputs x weight."""
        rows = layer.rows * self._batch
        self._product(rows, layer.inputs, layer.outputs)

    def backward(self, layer: Layer) -> None:
        """Compute the gradients of the inputs and of the weight."""
        rows = layer.rows * self._batch
        self._product(rows, layer.outputs, layer.inputs)
        self._product(layer.outputs, rows, layer.inputs, across=True)

    def _product(self, rows: int, inner: int, columns: int, across: bool = False) -> None:
        """Multiply two matrices.

        ``across``: the left factor is transposed in memory, as outputs' gradients are for the
        gradient of the weight.
        """
        if rows:
            left = (
                self._part(self._source, inner, rows).t()
                if across
                else self._part(self._source, rows, inner)
            )
            torch.mm(
                left,
                self._part(self._source, inner, columns),
                out=self._part(self._sink, rows, columns),
            )

    @staticmethod
    def _part(memory: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
        return memory[: rows * columns].view(rows, columns)


class _Apply(torch.autograd.Function):
    """A layer. ``token`` passes through all layers and so fixes their order in backward."""

    @staticmethod
    def forward(
        ctx: Any,
        token: torch.Tensor,
        work: Work,
        layer: Layer,
        value: float,
        *parameters: torch.Tensor,
    ) -> torch.Tensor:
        ctx.work, ctx.layer, ctx.value = work, layer, value
        ctx.parameters = parameters
        if layer.rows:
            work.forward(layer)
        return token.view_as(token)

    @staticmethod
    def backward(ctx: Any, token: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        if ctx.layer.rows:
            ctx.work.backward(ctx.layer)
        return token, None, None, None, *(torch.full_like(p, ctx.value) for p in ctx.parameters)


class Model(nn.Module):
    """A model of a network.

    Weights are zero at first; every element of every gradient is ``value``. The backward of its
    output is the backward pass.
    """

    def __init__(self, network: Network, work: Work, value: float, device: str) -> None:
        super().__init__()
        self._work, self._value = work, value
        self._layers: list[tuple[Layer, list[nn.Parameter]]] = []
        for layer in network.layers:
            made = [
                nn.Parameter(torch.zeros(shape, device=device)) for shape in layer.shapes.values()
            ]
            for name, parameter in zip(layer.shapes, made):
                self.register_parameter(f"{layer.name}.{name}".replace(".", "_"), parameter)
            self._layers.append((layer, made))

    def forward(self, token: torch.Tensor) -> torch.Tensor:
        """Run the forward pass. ``token``: one element that requires a gradient."""
        for layer, parameters in self._layers:
            token = _Apply.apply(token, self._work, layer, self._value, *parameters)
        return token

    def holds(self, weight: float, tolerance: float = 0.0) -> bool:
        """Return whether every parameter's elements are all ``weight``.

        ``tolerance``: the largest deviation, as a share of ``weight``.
        """
        with torch.no_grad():
            return all(
                bool(((p - weight).abs() <= tolerance * abs(weight)).all())
                for p in self.parameters()
            )
