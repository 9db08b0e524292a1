"""Worker of the case *bits* of ``bench elastic``: trains a network for each kind of gradients."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional

import bpsx.torch as bps
from bench.child import serve
from bench.elastic_worker import BATCH, COMMANDS, WIDTH, Made, begin_with, sha256
from bench.end_to_end_worker import Bfloat16
from examples.pytorch.digits import Digits, network

_ONEBIT = {"compressor": "onebit", "scaling": True, "ef": "vanilla"}
#: Kind -> options of the optimizer. All networks are trained with momentum; "momentum" adds it
#: before compression.
KINDS: dict[str, dict[str, Any]] = {
    "float32": {},
    "bfloat16": {"compression": Bfloat16},
    "onebit": {"compression_params": _ONEBIT},
    "topk": {"compression_params": {"compressor": "topk", "k": 0.02, "ef": "vanilla"}},
    "randomk": {"compression_params": {"compressor": "randomk", "k": 0.05, "ef": "vanilla"}},
    "dithering": {"compression_params": {"compressor": "dithering", "k": 4}},
    "momentum": {"compression_params": {**_ONEBIT, "momentum": "nesterov"}},
}


def networks() -> Made:
    """A network for each kind, all of which make a step together."""
    torch.set_num_threads(1)
    data, made = Digits(), {}
    parts = data.batches(0, BATCH, bps.rank(), bps.size())
    for kind, options in KINDS.items():
        model = network(WIDTH)
        optimizer = bps.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9),
            named_parameters=[(f"{kind}.{name}", p) for name, p in model.named_parameters()],
            **options,
        )
        made[kind] = model, optimizer

    def step(number: int) -> None:
        part = parts[number % len(parts)]
        for model, optimizer in made.values():
            optimizer.zero_grad()
            functional.cross_entropy(model(data.x[part]), data.y[part]).backward()
        for _, optimizer in made.values():
            optimizer.step()

    def digest() -> str:
        return " ".join(
            f"{kind}={sha256(p.detach().numpy() for p in model.parameters())}"
            for kind, (model, _) in made.items()
        )

    return step, digest


if __name__ == "__main__":
    serve({"begin": lambda steps: begin_with(networks, steps), **COMMANDS})
    bps.shutdown()
