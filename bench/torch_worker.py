"""Worker of ``bench torch``: trains and reports how long steps take.

It uses bpsx, or PyTorch's DistributedDataParallel over gloo.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from bench.child import serve
from bench.torch_models import WORKLOADS

_made: dict[str, Any] = {}


def init(store: str = "", rank: int = 0, size: int = 2) -> int:
    """Join the job of the environment, or gloo's if ``store`` is given."""
    torch.set_num_threads(1)
    if store:
        dist.init_process_group(
            "gloo", store=dist.FileStore(store, size), rank=rank, world_size=size
        )
        return rank
    import bpsx.torch as bps

    if "BYTEPS_TRACE_DIR" in os.environ:  # two imitated machines would write to one file
        os.environ["BYTEPS_TRACE_DIR"] = str(
            Path(os.environ["BYTEPS_TRACE_DIR"], os.environ["DMLC_WORKER_ID"])
        )
    bps.init()
    return int(bps.rank())


def make(workload: str, way: str) -> int:
    """Build a model and its optimizer. Returns the number of parameters.

    ``way``: gloo, optimizer, barrier or ddp.
    """
    model, optimizer = WORKLOADS[workload].model(), None
    if way == "gloo":
        model, rank = torch.nn.parallel.DistributedDataParallel(model), dist.get_rank()
        optimizer = WORKLOADS[workload].optimizer(model)
    else:
        import bpsx.torch as bps
        from bpsx.torch.cross_barrier import CrossBarrier
        from bpsx.torch.parallel import DistributedDataParallel

        rank = bps.rank()
        named = [(f"{workload}.{way}.{name}", p) for name, p in model.named_parameters()]
        if way == "ddp":
            model = DistributedDataParallel(model)
            optimizer = WORKLOADS[workload].optimizer(model)
        elif way == "barrier":
            optimizer = CrossBarrier(model, WORKLOADS[workload].optimizer(model), named)
        else:
            optimizer = bps.DistributedOptimizer(WORKLOADS[workload].optimizer(model), named)
    _made[f"{workload} {way}"] = model, optimizer, rank, WORKLOADS[workload].loss
    return sum(p.numel() for p in model.parameters())


def _meet(way: str) -> None:
    if way == "gloo":
        dist.barrier()
    else:
        import bpsx.torch as bps

        bps.barrier()


def steps(workload: str, way: str, count: int, warm: int = 2) -> list[float]:
    """Return the mean seconds of a step: zero_grad, forward, backward and step.

    The mean is of ``count`` steps in a row after ``warm`` others; all workers begin together. No
    worker waits in between: CrossBarrier's steps overlap, and end on one worker now before and now
    after the other's.
    """
    model, optimizer, rank, loss = _made[f"{workload} {way}"]
    _meet(way)
    for i in range(warm + count):
        if i == warm:
            begin = time.perf_counter()
        optimizer.zero_grad()
        loss(model, rank).backward()
        optimizer.step()
    return [(time.perf_counter() - begin) / count]


def processor(workload: str, way: str, count: int) -> float:
    """Return the processor seconds of one step, of all threads of this process, after two other
    steps.
    """
    if way == "alone" and f"{workload} alone" not in _made:
        model = WORKLOADS[workload].model()
        _made[f"{workload} alone"] = (
            model,
            WORKLOADS[workload].optimizer(model),
            0,
            WORKLOADS[workload].loss,
        )
    model, optimizer, rank, loss = _made[f"{workload} {way}"]
    for i in range(2 + count):
        if i == 2:
            begin = time.process_time()
        optimizer.zero_grad()
        loss(model, rank).backward()
        optimizer.step()
    return (time.process_time() - begin) / count


def alone(workload: str, count: int) -> list[float]:
    """Return the seconds of each step without any exchange, which no transport can beat."""
    model = WORKLOADS[workload].model()
    optimizer, loss = WORKLOADS[workload].optimizer(model), WORKLOADS[workload].loss
    seconds = []
    for _ in range(count):
        begin = time.perf_counter()
        optimizer.zero_grad()
        loss(model, 0).backward()
        optimizer.step()
        seconds.append(time.perf_counter() - begin)
    return seconds


def checksum(workload: str, way: str) -> str:
    """Return a digest of the weights, to compare between workers.

    This guards against a fast step that is wrong.
    """
    model = _made[f"{workload} {way}"][0]
    return "".join(
        f"{t.view(torch.uint8).to(torch.int64).sum().item():x}."
        for t in model.state_dict().values()
        if t.is_floating_point()
    )


def overlap(workload: str, way: str, count: int) -> dict[str, float]:
    """Return the seconds in which gradients were in progress, and the part in which backward ran.

    Both are sums over all steps; see :mod:`bench.torch`.
    """
    import bpsx

    model, optimizer, rank, loss = _made[f"{workload} {way}"]
    bpsx.barrier()
    bpsx.trace_start()
    backward = []
    for _ in range(count):
        optimizer.zero_grad()
        value = loss(model, rank)
        begin = time.time()
        value.backward()
        backward.append((begin * 1e6, time.time() * 1e6))
        optimizer.step()
    path = bpsx.trace_stop()
    assert path is not None
    events = json.loads(Path(path).read_text())["traceEvents"]
    spans = [
        (e["ts"], e["ts"] + e["dur"])
        for e in events
        if e.get("tid") == "total" and "Gradient." in e["name"]
    ]
    under_way = _joined(spans)
    hidden = sum(max(0.0, min(b, d) - max(a, c)) for a, b in under_way for c, d in backward)
    return {"under_way": sum(b - a for a, b in under_way) / 1e6, "hidden": hidden / 1e6}


def _joined(spans: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return the union of intervals as intervals that do not meet."""
    found: list[tuple[float, float]] = []
    for begin, end in sorted(spans):
        if found and begin <= found[-1][1]:
            found[-1] = found[-1][0], max(end, found[-1][1])
        else:
            found.append((begin, end))
    return found


if __name__ == "__main__":
    serve(
        {
            "init": init,
            "make": make,
            "steps": steps,
            "alone": alone,
            "processor": processor,
            "checksum": checksum,
            "overlap": overlap,
        }
    )
    if dist.is_initialized():
        dist.destroy_process_group()
    else:
        import bpsx

        bpsx.shutdown()
