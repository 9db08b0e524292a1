"""Worker of ``bench gpu``: moves tensors and trains, and reports how long it takes.

One process uses both bpsx.torch and torch.distributed.
"""

from __future__ import annotations

import logging
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
_COMPRESSION: dict[str, dict[str, Any]] = {
    "onebit": {"compressor": "onebit", "scaling": True, "ef": "vanilla"},
    "dithering": {"compressor": "dithering", "k": 4, "ef": "vanilla"},
    "topk": {"compressor": "topk", "k": 0.001, "ef": "vanilla"},
    "rank4": {"compressor": "powersgd", "rank": 4, "ef": "vanilla"},
}
#: The ways of DistributedDataParallel.
_DDP = ("ddp", "bf16", "powersgd")
#: Ways without compression.
_EXACT = ("ddp", "bpsx", "alone")
_work: dict[str, Work] = {}
_made: dict[str, _Made] = {}


class _Grouping(logging.Handler):
    """Keeps the line in which bpsx says how a machine's GPUs reduce together."""

    said = ""

    def emit(self, record: logging.LogRecord) -> None:
        if "in groups of" in (line := record.getMessage()):
            self.said = line


_grouping = _Grouping()


def init() -> int:
    torch.set_num_threads(1)
    if _DEVICE == "cuda":
        torch.cuda.set_device(int(os.environ.get("BYTEPS_LOCAL_RANK", "0")))
    bps.init()
    logging.getLogger("bpsx").addHandler(_grouping)
    return int(bps.rank())


def leave() -> None:
    """Leave the job, and keep the process and its models."""
    _sync()
    bps.shutdown()


def enter(changes: dict[str, str | None]) -> int:
    """Enter another job, with these changes of variables; None removes one."""
    for name, value in changes.items():
        os.environ.pop(name, None)
        if value is not None:
            os.environ[name] = value
    return init()


def grouping() -> str:
    """Return how bpsx said that this machine's GPUs reduce together; "" where it does not say."""
    return _grouping.said


def counters() -> dict[str, float]:
    """Return the bytes that this process's GPU has moved over PCIe and over NVLink so far.

    Keys are pcie_out, pcie_in, nvlink_out and nvlink_in; what the driver does not count is missing.
    """
    if _DEVICE != "cuda":
        return {}
    import pynvml

    pynvml.nvmlInit()
    bus = torch.cuda.get_device_properties(torch.cuda.current_device())
    address = f"{bus.pci_domain_id:08x}:{bus.pci_bus_id:02x}:{bus.pci_device_id:02x}.0"
    gpu = pynvml.nvmlDeviceGetHandleByPciBusId(address.encode())
    every = 0xFFFFFFFF  # all links together
    fields = {
        "pcie_out": (pynvml.NVML_FI_DEV_PCIE_COUNT_TX_BYTES, 1),
        "pcie_in": (pynvml.NVML_FI_DEV_PCIE_COUNT_RX_BYTES, 1),
        "nvlink_out": ((pynvml.NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_TX, every), 1024),
        "nvlink_in": ((pynvml.NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_RX, every), 1024),
    }
    found = pynvml.nvmlDeviceGetFieldValues(gpu, [field for field, _ in fields.values()])
    return {
        name: float(value.value.ullVal * unit)
        for (name, (_, unit)), value in zip(fields.items(), found)
        if value.nvmlReturn == pynvml.NVML_SUCCESS
    }


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
        self.model: Any = _parallel(self.plain, way) if way in _DDP else self.plain
        self.optimizer: torch.optim.Optimizer = torch.optim.SGD(self.plain.parameters(), lr=_RATE)
        if way not in (*_DDP, "alone"):
            named = [(f"{workload}.{way}.{name}", p) for name, p in self.plain.named_parameters()]
            self.optimizer = bps.DistributedOptimizer(
                self.optimizer, named, compression_params=_COMPRESSION.get(way)
            )
        self.token = torch.zeros((), device=_DEVICE, requires_grad=True)
        self.average = value if way == "alone" else (bps.size() + 1) / 2
        # topk has not sent all yet: each weight lies between none and all of its gradients.
        self.tolerance = {"topk": 1.0, "bf16": 1e-2}.get(way, 1e-6 if way in _EXACT else 1e-3)
        self.done = 0

    def step(self) -> None:
        self.optimizer.zero_grad()
        self.model(self.token).backward()
        self.optimizer.step()
        self.token.grad = None
        self.done += 1


def _parallel(model: Model, way: str) -> torch.nn.parallel.DistributedDataParallel:
    """Return the model under DistributedDataParallel with the hook of ``way``.

    Gradients that are views of their bucket save DDP a copy.
    """
    made = torch.nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
    if way == "bf16":
        from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook

        made.register_comm_hook(None, bf16_compress_hook)
    elif way == "powersgd":
        from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook

        # The epsilon is for gradients of a lower rank, as those of these models are.
        state = powerSGD_hook.PowerSGDState(
            None, 4, start_powerSGD_iter=2, orthogonalization_epsilon=1e-8
        )
        made.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    return made


def make(workload: str, way: str) -> int:
    """Build a model and do its first steps, in which names are declared and buckets are built.

    PowerSGD begins after two. Returns the number of its parameters.
    """
    made = _made[f"{workload} {way}"] = _Made(workload, way)
    for _ in range(4 if way == "powersgd" else 2):
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


def drop(workload: str, way: str = "") -> None:
    """Free the memory of a network's models; with ``way``, only of that one."""
    for name in [
        n for n in _made if n == f"{workload} {way}" or (not way and n.startswith(f"{workload} "))
    ]:
        del _made[name]
    if not way:
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
            "leave": leave,
            "enter": enter,
            "grouping": grouping,
            "counters": counters,
        }
    )
    if dist.is_initialized():
        dist.destroy_process_group()
    bps.shutdown()
