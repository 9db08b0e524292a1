"""Worker of ``bench compress --end-to-end``: trains the digits in one of the ways, an epoch at a
time.
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
    """Gradients and their sums travel as bfloat16: the code of a user who has no compressor."""

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
    """Build a network and its optimizer, the same for all ways, and compile the compressor's
    kernels.

    Returns the bytes of its gradients.
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
    """Exchange one tensor large enough to be compressed.

    So the kernels are loaded, on the server too, before training begins.
    """
    weight = torch.nn.Parameter(torch.zeros(1 << 16))
    optimizer = _distributed(torch.optim.SGD([weight], lr=0.1), [(f"warm.{way}", weight)], way)
    weight.sum().backward()
    optimizer.step()


def steps(way: str, epoch: int, count: int | None = None) -> dict[str, Any]:
    """Train an epoch, or its first ``count`` steps, begun by all workers together.

    Returns the seconds of each step and of all, and the bytes sent and received in a step.
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
    """Return the share of test pictures that are recognised.

    It is a float64: float32's 0.95 is less than 0.95.
    """
    n = len(_data().test_y)
    return round(accuracy(_made[way][0], _data()) * n) / n


def checksum(way: str) -> str:
    """Return a digest of the weights, to compare between workers.

    This guards against a fast step that is wrong.
    """
    return "".join(
        f"{p.detach().view(torch.int32).to(torch.int64).sum().item():x}."
        for p in _made[way][0].parameters()
    )


if __name__ == "__main__":
    serve({"init": init, "make": make, "steps": steps, "score": score, "checksum": checksum})
    bps.shutdown()
