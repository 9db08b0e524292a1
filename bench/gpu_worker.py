"""Worker of ``bench gpu``: moves tensors and trains, and reports how long it takes.

One process uses both bpsx.torch and torch.distributed.
"""

from __future__ import annotations

import os
import time
from functools import cache
from typing import Any

import torch
import torch.distributed as dist

import bpsx.torch as bps
from bench.child import serve
from bench.gpu_model import Model, Work
from bench.shapes import NETWORKS

_DEVICE = os.environ["BENCH_DEVICE"]
_RATE = 2.0**-10
#: ``compression_params`` of each way that compresses.
_COMPRESSION = {"onebit": {"compressor": "onebit", "scaling": True, "ef": "vanilla"}}
_work: dict[str, Work] = {}
_made: dict[str, _Made] = {}


def init() -> int:
    torch.set_num_threads(1)
    if _DEVICE == "cuda":
        torch.cuda.set_device(int(os.environ.get("BYTEPS_LOCAL_RANK", "0")))
    bps.init()
    return int(bps.rank())


def join(store: str, rank: int, size: int) -> None:
    """Join the peer's job, too.

    Its processes meet at a file, since nothing about the network is known here.
    """
    backend = "nccl" if _DEVICE == "cuda" else "gloo"
    dist.init_process_group(backend, store=dist.FileStore(store, size), rank=rank, world_size=size)


def _sync() -> None:
    if _DEVICE == "cuda":
        torch.cuda.synchronize()


@cache
def _tensors(device: str, count: int, nbytes: int) -> tuple[list[str], list[torch.Tensor]]:
    """Return names and tensors. Zeros stay finite however often they are summed in place."""
    return (
        [f"bench.{device}.{count}x{nbytes}.{i}" for i in range(count)],
        [torch.zeros(nbytes // 4, device=device) for _ in range(count)],
    )


def _round(way: str, names: list[str], tensors: list[torch.Tensor]) -> None:
    """Sum all tensors in place.

    Several tensors are in flight together; a single one goes through the blocking verb.
    """
    if way == "bpsx" and len(tensors) == 1:
        bps.push_pull_inplace(tensors[0], average=False, name=names[0])
    elif way == "bpsx":
        handles = [
            bps.push_pull_async_inplace(tensor, average=False, name=name)
            for name, tensor in zip(names, tensors)
        ]
        for handle in handles:
            bps.synchronize(handle)
    elif len(tensors) == 1:
        dist.all_reduce(tensors[0])
    else:
        works = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
        for work in works:
            work.wait()


def rounds(
    way: str, device: str, count: int, nbytes: int, calls: int, warm: int = 1
) -> list[float]:
    """Return the seconds of each sum of ``count`` tensors, after ``warm`` others.

    A sum takes from the first call until the device has finished.
    """
    names, tensors = _tensors(device, count, nbytes)
    for _ in range(warm):
        _round(way, names, tensors)
    bps.barrier()
    _sync()
    samples = []
    for _ in range(calls):
        before = time.perf_counter()
        _round(way, names, tensors)
        _sync()
        samples.append(time.perf_counter() - before)
    return samples


def check(way: str, device: str, count: int, nbytes: int) -> bool:
    """Return whether the sums are right, to guard against a fast sum that is wrong."""
    names, tensors = _tensors(device, count, nbytes)
    for i, tensor in enumerate(tensors):
        tensor.fill_(bps.rank() + 1 + i)
    _round(way, names, tensors)
    n = bps.size()
    right = all(
        bool((tensor == n * (n + 1) // 2 + n * i).all()) for i, tensor in enumerate(tensors)
    )
    for tensor in tensors:
        tensor.zero_()
    return right


class _Made:
    """A model, its optimizer, and the number of steps done."""

    def __init__(self, workload: str, way: str) -> None:
        network, value = NETWORKS[workload](), float(bps.rank() + 1)
        if workload not in _work:
            _work[workload] = Work(network, _DEVICE)
        self.plain = Model(network, _work[workload], value, _DEVICE)
        # Gradients that are views of their bucket save DDP a copy.
        self.model: Any = (
            torch.nn.parallel.DistributedDataParallel(self.plain, gradient_as_bucket_view=True)
            if way == "ddp"
            else self.plain
        )
        self.optimizer: torch.optim.Optimizer = torch.optim.SGD(self.plain.parameters(), lr=_RATE)
        if way not in ("ddp", "alone"):
            named = [(f"{workload}.{way}.{name}", p) for name, p in self.plain.named_parameters()]
            self.optimizer = bps.DistributedOptimizer(
                self.optimizer, named, compression_params=_COMPRESSION.get(way)
            )
        self.token = torch.zeros((), device=_DEVICE, requires_grad=True)
        self.average = value if way == "alone" else (bps.size() + 1) / 2
        self.tolerance = 1e-3 if way in _COMPRESSION else 1e-6
        self.done = 0

    def step(self) -> None:
        self.optimizer.zero_grad()
        self.model(self.token).backward()
        self.optimizer.step()
        self.token.grad = None
        self.done += 1


def make(workload: str, way: str) -> int:
    """Build a model and do its first steps, in which names are declared and buckets are built.

    Returns the number of its parameters.
    """
    made = _made[f"{workload} {way}"] = _Made(workload, way)
    for _ in range(2):
        made.step()
    _sync()
    return sum(p.numel() for p in made.plain.parameters())


def steps(workload: str, way: str, count: int, warm: int = 1) -> list[float]:
    """Return the mean seconds of a step: zero_grad, forward, backward and step.

    The mean is of ``count`` steps in a row after ``warm`` others, until the device has finished.
    """
    made = _made[f"{workload} {way}"]
    for _ in range(warm):
        made.step()
    _sync()
    bps.barrier()
    begin = time.perf_counter()
    for _ in range(count):
        made.step()
    _sync()
    return [(time.perf_counter() - begin) / count]


def right(workload: str, way: str) -> bool:
    """Return whether the weights are those that this number of steps must give."""
    made = _made[f"{workload} {way}"]
    return made.plain.holds(-_RATE * made.done * made.average, made.tolerance)


def drop(workload: str) -> None:
    """Free the memory of a network's models."""
    for name in [n for n in _made if n.startswith(f"{workload} ")]:
        del _made[name]
    _work.pop(workload, None)
    if _DEVICE == "cuda":
        torch.cuda.empty_cache()


if __name__ == "__main__":
    serve(
        {
            "init": init,
            "join": join,
            "rounds": rounds,
            "check": check,
            "make": make,
            "steps": steps,
            "right": right,
            "drop": drop,
        }
    )
    if dist.is_initialized():
        dist.destroy_process_group()
    bps.shutdown()
