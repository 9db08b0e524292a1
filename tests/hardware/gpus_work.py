"""Worker functions of tests/hardware: jobs on real GPUs, with several machines imitated on one.

See test_gpus.py.
"""

from __future__ import annotations

import os
import signal
import traceback
from typing import Any

import torch
import torch.distributed as dist

import bpsx
import bpsx.torch as bps


def begin() -> torch.device:
    """Select this process's GPU and return it: machines share GPUs if these are too few."""
    local, size = (int(os.environ[f"BYTEPS_LOCAL_{name}"]) for name in ("RANK", "SIZE"))
    machine = int(os.environ.get("DMLC_WORKER_ID", "0"))
    index = (machine * size + local) % torch.cuda.device_count()
    torch.cuda.set_device(index)
    bps.init()
    return torch.device("cuda", index)


def model_of(device: torch.device) -> torch.nn.Module:
    torch.manual_seed(7)
    return (
        torch.nn.Sequential(
            torch.nn.Conv2d(3, 8, 3),
            torch.nn.ReLU(),
            torch.nn.Flatten(),
            torch.nn.Linear(8 * 36, 300),
            torch.nn.ReLU(),
            torch.nn.Linear(300, 10),
        )
        .double()
        .to(device)
    )


def batch(device: torch.device, step: int, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the joined batch of a step, the same on all workers."""
    made = torch.Generator().manual_seed(step)
    x, y = (
        torch.randn(4 * size, 3, 8, 8, generator=made, dtype=torch.float64),
        torch.randint(0, 10, (4 * size,), generator=made),
    )
    return x.to(device), y.to(device)


def loss_of(model: torch.nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.cross_entropy(model(x), y)


def reference(device: torch.device, steps: int, size: int) -> list[torch.Tensor]:
    model = model_of(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(steps):
        optimizer.zero_grad()
        loss_of(model, *batch(device, step, size)).backward()
        optimizer.step()
    return [p.detach() for p in model.parameters()]


def trained(device: torch.device, how: str, steps: int = 12) -> float:
    """Return the largest difference between weights trained by all workers and by one.

    Workers train on their parts of the batch, the one process on all of it.
    """
    r, n = bps.rank(), bps.size()
    model = model_of(device)
    if r:
        with torch.no_grad():
            for p in model.parameters():
                p.add_(r)
    bps.broadcast_parameters(model.state_dict(), root_rank=0, prefix=f"{how}.")
    base = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    run: torch.nn.Module = model
    if how == "DistributedOptimizer":
        optimizer = bps.DistributedOptimizer(base, named_parameters=model.named_parameters())
    elif how == "CrossBarrier":
        from bpsx.torch.cross_barrier import CrossBarrier

        optimizer = CrossBarrier(
            model,
            base,
            named_parameters=[(f"crossing.{k}", p) for k, p in model.named_parameters()],
            num_steps=steps,
        )
    elif how == "parallel":
        from bpsx.torch.parallel import DistributedDataParallel

        run, optimizer = DistributedDataParallel(model, device_ids=[device.index]), base
    else:
        run, optimizer = (
            torch.nn.parallel.DistributedDataParallel(model, device_ids=[device.index]),
            base,
        )
        if how == "hook":
            run.register_comm_hook(None, bps.ddp_comm_hook)
    for step in range(steps):
        x, y = batch(device, step, n)
        optimizer.zero_grad()
        loss_of(run, x[r::n], y[r::n]).backward()
        optimizer.step()
    if how == "CrossBarrier":
        model.state_dict()  # reading the whole state applies pending updates
    return max(
        float((a.detach() - b).abs().max())
        for a, b in zip(model.parameters(), reference(device, steps, n), strict=True)
    )


def sums(device: torch.device) -> list[str]:
    """Return the errors found in sums and averages of all types and many sizes."""
    r, n = bps.rank(), bps.size()
    wrong = []
    for dtype in (
        torch.float32,
        torch.float16,
        torch.bfloat16,
        torch.float64,
        torch.int32,
        torch.int64,
        torch.uint8,
        torch.int8,
    ):
        for size in (0, 1, 5, 1000, 300_001, 3_000_001):
            for average in (False, True):
                if average and dtype.itemsize == 1 and n > 1 and bps.local_size() > 1:
                    continue
                x = torch.full(
                    (size,), -3 if dtype.is_signed and r == 0 else r + 1, dtype=dtype, device=device
                )
                want = (-3 if dtype.is_signed else 1) + sum(range(2, n + 1))
                want = want / n if average else want
                want = want if dtype.is_floating_point else int(want // 1)
                got = bps.push_pull(x, average=average, name=f"{dtype}.{size}")
                if not bool(
                    torch.all(
                        (got.double() - want).abs() <= (0.02 if dtype.itemsize == 2 else 1e-6)
                    )
                ):
                    wrong.append(
                        f"{dtype} {size} average={average}: {got[:3].tolist()} instead of {want}"
                    )
    return wrong + averages_under_way_together(device)


def averages_under_way_together(device: torch.device) -> list[str]:
    """Return the errors found in averages that NCCL may put into one group.

    Integers are divided after the group, floats before it.
    """
    r, n = bps.rank(), bps.size()
    wrong = []
    for k in range(10):
        tensors = {
            f"{dtype}.{i}": torch.full(
                (100_000 + i,), 7 * r + i + k - 20, dtype=dtype, device=device
            )
            for dtype in (torch.int32, torch.float32, torch.int64)
            for i in range(8)
        }
        handles = {
            name: bps.push_pull_async(x, average=True, name=f"together.{name}")
            for name, x in tensors.items()
        }
        for name, x in tensors.items():
            want = sum(7 * w + int(name[-1]) + k - 20 for w in range(n)) / n
            got = bps.synchronize(handles[name])
            if not bool(
                torch.all(
                    (got.double() - (want if x.is_floating_point() else want // 1)).abs() <= 1e-5
                )
            ):
                wrong.append(f"{name} in round {k}: {got[:3].tolist()} instead of {want}")
    return wrong


def streams(device: torch.device) -> float:
    """Create on one stream and use on another, without waiting on the host; return the largest
    error.
    """
    n = bps.size()
    first, second = torch.cuda.Stream(device), torch.cuda.Stream(device)
    a, total = torch.randn(2048, 2048, device=device), torch.zeros(1 << 20, device=device)
    torch.cuda.synchronize()
    for k in range(20):
        with torch.cuda.stream(first):
            b = a
            for _ in range(8):
                b = (b @ a) * 1e-3
            x = torch.full((1 << 20,), float(k), device=device) + 0 * b[0, 0]
            handle = bps.push_pull_async_inplace(x, name="stream", average=False)
        with torch.cuda.stream(second):
            total += bps.synchronize(handle)
        del x, b
    torch.cuda.synchronize()
    return float((total - n * sum(range(20))).abs().max())


def odd_gradients(device: torch.device) -> float:
    """Let one gradient share its memory when its batch starts, while the other is on another
    stream.

    Returns the largest error of the weights.
    """
    r, n = bps.rank(), bps.size()
    side = torch.cuda.Stream(device)
    odd, other = (torch.nn.Parameter(torch.zeros(1 << 20, device=device)) for _ in range(2))
    optimizer = bps.DistributedOptimizer(
        torch.optim.SGD([odd, other], lr=1.0), [("odd", odd), ("other", other)]
    )
    kept: list[torch.Tensor] = []
    odd.register_post_accumulate_grad_hook(lambda p: kept.append(p.grad.view(-1)))
    for _ in range(5):
        kept.clear()
        side.wait_stream(torch.cuda.current_stream(device))
        torch.cuda._sleep(50_000_000)  # makes sure that missing waits show
        with torch.cuda.stream(side):
            first = (other * (r + 2.0)).sum()
        second = (odd * (r + 1.0)).sum()
        torch.cuda.current_stream(device).wait_stream(side)
        (first + second).backward()
        optimizer.step()
        optimizer.zero_grad()
    torch.cuda.synchronize()
    mean = (n - 1) / 2
    return max(
        float((odd + 5 * (mean + 1)).abs().max()), float((other + 5 * (mean + 2)).abs().max())
    )


def both_kinds(device: torch.device) -> bool:
    """Exchange tensors on the host and on the GPU, under separate names and under one."""
    n = bps.size()
    ok = True
    for step in range(3):
        here, there = (
            torch.full((50_000,), step + 1.0),
            torch.full((50_000,), step + 2.0, device=device),
        )
        handles = [
            bps.push_pull_async(here, average=False, name="host"),
            bps.push_pull_async(there, average=False, name="gpu"),
        ]
        a, b = (bps.synchronize(h) for h in handles)
        ok = ok and bool((a == n * (step + 1)).all()) and bool((b == n * (step + 2)).all())
        moved = bps.push_pull(here if step % 2 else there, average=False, name="either")
        ok = ok and bool((moved.cpu() == n * (step + (1 if step % 2 else 2))).all())
    return ok


def graph_refused(device: torch.device) -> str:
    """Return the error of a push_pull in a captured CUDA graph."""
    x = torch.ones(1000, device=device)
    bps.push_pull(x, name="graph")
    torch.cuda.synchronize()
    told = ""
    try:
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            try:
                bps.push_pull_async_inplace(x, name="graph")
            except Exception as e:
                told = f"{type(e).__name__}: {e}"
    except Exception as e:
        told = told or f"the capture broke: {e}"
    return told


def compressed(device: torch.device) -> list[str]:
    """Return the differences between compression on the GPU and on the host."""
    r = bps.rank()
    wrong = []
    for name, params in {
        "onebit": {"compressor": "onebit", "ef": "vanilla"},
        "topk": {"compressor": "topk", "k": 0.01, "ef": "vanilla"},
        "randomk": {"compressor": "randomk", "k": 0.1, "seed": 3, "ef": "vanilla"},
        "dithering": {"compressor": "dithering", "k": 3, "seed": 3},
    }.items():
        for dtype in (torch.float32, torch.float16):
            for place in ("gpu", "host"):
                bpsx.declare(f"{name}.{dtype}.{place}", compression=params)
            for step in range(3):
                # With integers the machine's sum does not depend on the order.
                made = torch.Generator().manual_seed(100 * r + step)
                g = torch.randint(-50, 50, (1_500_000,), generator=made).to(dtype)
                there = bps.push_pull(g.to(device), average=False, name=f"{name}.{dtype}.gpu").cpu()
                here = bps.push_pull(g, average=False, name=f"{name}.{dtype}.host")
                # randomk and dithering draw by name, and the two names differ.
                if name in ("onebit", "topk") and not torch.allclose(
                    there.double(), here.double(), rtol=1e-3, atol=1e-4
                ):
                    wrong.append(
                        f"{name} {dtype} {step}: {there[:4].tolist()} and {here[:4].tolist()}"
                    )
                if not bool(there.isfinite().all()) or not bool(there.any()):
                    wrong.append(f"{name} {dtype} {step}: nothing")
    return wrong + factored(device)


def factored(device: torch.device) -> list[str]:
    """Return what is wrong with sums of low rank by PowerSGD, which are exact."""
    wrong = []
    column = torch.linspace(-1, 1, 700, dtype=torch.float64, device=device).unsqueeze(1)
    for dtype, most in ((torch.float32, 1e-4), (torch.float16, 0.1), (torch.float64, 1e-9)):
        params = {"compressor": "powersgd", "rank": 4, "ef": "vanilla"}
        bpsx.declare(f"factored.{dtype}", compression=params)
        for step in range(3):
            rows = [
                torch.randn(1, 900, generator=torch.Generator().manual_seed(9 * r + step)).double()
                for r in range(bps.size())
            ]
            mine = (column @ rows[bps.rank()].to(device)).to(dtype)
            there = bps.push_pull(mine, average=False, name=f"factored.{dtype}").double()
            here = column @ sum(rows).to(device)
            if float((there - here).abs().max()) > most * float(here.abs().max()):
                wrong.append(f"factored {dtype} {step}: {there[0, :4]} and {here[0, :4]}")
    return wrong


def others(device: torch.device) -> list[str]:
    """The rest of the plugin on GPUs: broadcast, gathers, sparse, batch normalisation, CuPy."""
    import cupy

    r, n = bps.rank(), bps.size()
    wrong = []
    x = torch.full((1000, 3), float(r), device=device)
    bps.broadcast_parameters({"x": x}, root_rank=n - 1)
    if not bool((x == n - 1).all()):
        wrong.append("broadcast")
    sparse = torch.sparse_coo_tensor(
        [[r, n]], torch.ones(2, device=device), (n + 1,), device=device
    )
    if bps.push_pull(sparse, average=False, name="sparse").to_dense().tolist() != [1.0] * n + [
        float(n)
    ]:
        wrong.append("sparse")
    norm = bps.SyncBatchNorm(4).to(device)
    made = torch.Generator().manual_seed(1)
    whole = torch.randn(8 * n, 4, generator=made)
    ours = norm(whole[r::n].to(device))
    plain = torch.nn.BatchNorm1d(4)(whole)[r::n]
    if float((ours.detach().cpu() - plain.detach()).abs().max()) > 1e-5:
        wrong.append("SyncBatchNorm")
    total = bpsx.push_pull(cupy.full((7, 5), r + 1, cupy.float32), "cupy", average=False)
    if not isinstance(total, cupy.ndarray) or float(total.sum()) != 35 * sum(range(1, n + 1)):
        wrong.append("cupy")
    return wrong


def killed() -> str:
    """Return the error that a process gets when the last one is killed in its backward pass."""
    device = begin()
    r, n = bps.rank(), bps.size()
    model = model_of(device)
    optimizer = bps.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1), named_parameters=model.named_parameters()
    )
    if r == n - 1:
        passes: list[torch.Tensor] = []

        def die(gradient: torch.Tensor) -> None:
            passes.append(gradient)
            if len(passes) == 4:
                os.kill(os.getpid(), signal.SIGKILL)

        # The gradients of the layers behind it are under way by then.
        next(iter(model.parameters())).register_hook(die)
    try:
        for step in range(100_000):
            x, y = batch(device, step, n)
            optimizer.zero_grad()
            loss_of(model, x[r::n], y[r::n]).backward()
            optimizer.step()
    except bpsx.BpsxError as e:
        return f"{type(e).__name__}: {e}"
    return "nothing"


def all_of_it() -> dict[str, Any]:
    """Return each function's result by name, or the text of its exception."""
    device = begin()
    dist.init_process_group("bpsx")
    found: dict[str, Any] = {}
    for part in (sums, streams, odd_gradients, both_kinds, compressed, others, graph_refused):
        try:
            found[part.__name__] = part(device)
        except Exception as e:
            found[part.__name__] = f"{type(e).__name__}: {e}"
            traceback.print_exc()
    for how in ("DistributedOptimizer", "CrossBarrier", "parallel", "hook", "backend"):
        try:
            found[how] = trained(device, how)
        except Exception as e:
            found[how] = float("inf")
            traceback.print_exc()
            print(f"{how}: {type(e).__name__}: {e}")
    dist.destroy_process_group()
    return found
