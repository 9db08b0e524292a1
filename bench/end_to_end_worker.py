"""A worker of ``bench compress --end-to-end``: trains the digits with one kind of compression or
another, a few steps at a time.
"""

from __future__ import annotations

import time
from functools import cache
from typing import Any

import torch
from torch.nn import functional

import bpsx.torch as bps
from bench.child import serve
from bench.end_to_end import BATCH, EPOCHS, LEARNING_RATE, WAYS, WIDTH
from bpsx.api.verbs import session
from bpsx.torch.compression import Compressor
from examples.pytorch.digits import Digits, accuracy, network

_made: dict[str, Any] = {}


class Bfloat16(Compressor):
    """What a user writes who has no compressor: gradients travel as bfloat16, and their sum too."""

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        return tensor.to(torch.bfloat16), tensor.dtype

    @staticmethod
    def decompress(tensor: torch.Tensor, ctx: Any) -> torch.Tensor:
        return tensor.to(ctx)


def init() -> int:
    torch.set_num_threads(1)
    bps.init()
    return int(bps.rank())


@cache
def _data() -> Digits:
    return Digits()


def make(way: str) -> int:
    """A network and its optimizer, alike for all ways.

    Returns the bytes of its gradients. Compiles what the compressor needs.
    """
    model = network(WIDTH)
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE, momentum=0.9)
    if way != "alone":
        _warm(way)
        optimizer = _distributed(
            optimizer, [(f"{way}.{name}", p) for name, p in model.named_parameters()], way
        )
    _made[way] = model, optimizer
    return sum(p.numel() * p.element_size() for p in model.parameters())


def _distributed(
    optimizer: torch.optim.Optimizer, named: list[tuple[str, torch.Tensor]], way: str
) -> torch.optim.Optimizer:
    if way == "bfloat16":
        return bps.DistributedOptimizer(optimizer, named, compression=Bfloat16)
    params = WAYS[way]
    return bps.DistributedOptimizer(
        optimizer, named, compression_params=None if params is None else lambda name: params
    )


def _warm(way: str) -> None:
    """A step of a tensor large enough to be compressed, so that kernels are there, on the server
    too, and training has not begun.
    """
    weight = torch.nn.Parameter(torch.zeros(1 << 16))
    optimizer = _distributed(torch.optim.SGD([weight], lr=0.1), [(f"warm.{way}", weight)], way)
    weight.sum().backward()
    optimizer.step()


def steps(way: str, epoch: int, count: int | None = None) -> dict[str, Any]:
    """An epoch, or the first ``count`` steps of it, begun by all workers together: the seconds of
    each step and of all, and what a step has sent and received, in bytes.
    """
    data, (model, optimizer) = _data(), _made[way]
    parts = data.batches(epoch, BATCH, bps.rank(), bps.size())[:count]
    for group in optimizer.param_groups:
        group["lr"] = LEARNING_RATE * (1 - epoch / EPOCHS)
    seconds = []
    bps.barrier()
    before, begin = _moved(), time.perf_counter()
    for part in parts:
        last = time.perf_counter()
        optimizer.zero_grad()
        functional.cross_entropy(model(data.x[part]), data.y[part]).backward()
        optimizer.step()
        seconds.append(time.perf_counter() - last)
    total = time.perf_counter() - begin
    return {"steps": seconds, "seconds": total, "bytes": (_moved() - before) / len(parts)}


def _moved() -> int:
    counters = session().counters()
    return counters["bytes_sent"] + counters["bytes_received"]


def score(way: str) -> float:
    """The share of test pictures that are recognised, in float64: float32's 0.95 is less than
    0.95.
    """
    n = len(_data().test_y)
    return round(accuracy(_made[way][0], _data()) * n) / n


def checksum(way: str) -> str:
    """The weights, to compare between workers: a fast wrong step would be a fine figure."""
    return "".join(
        f"{p.detach().view(torch.int32).to(torch.int64).sum().item():x}."
        for p in _made[way][0].parameters()
    )


if __name__ == "__main__":
    serve({"init": init, "make": make, "steps": steps, "score": score, "checksum": checksum})
    bps.shutdown()
