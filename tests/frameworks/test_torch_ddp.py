"""PyTorch's own DistributedDataParallel through bpsx: communication hook and process group backend.

``job_*`` functions run in the workers.
"""

from __future__ import annotations

import os
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp as fsdp
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel as DDP
from torch_models import Forked, assert_all_close, batch, tanh_model, train

import bpsx.torch as bps
from bpsx.errors import BpsxError
from support.torch_job import run_job

SMALL = 0.0005  # MB, so that there are several buckets


@contextmanager
def group(backend: str) -> Any:
    dist.init_process_group(backend)
    try:
        yield dist.get_rank(), dist.get_world_size()
    finally:
        dist.destroy_process_group()


# ---- run in the workers


def job_hook() -> Any:
    """gloo is the backend, and bpsx averages the gradients.

    Worker 1 starts with other weights, and the buckets are rebuilt after the first step.
    """
    with group("gloo") as (rank, size):
        model = DDP(tanh_model(1 + rank), bucket_cap_mb=SMALL)
        model.register_comm_hook(None, bps.ddp_comm_hook)
        return train(model, rank, size)


def job_hook_moves_gradients() -> Any:
    """bpsx's counters show that it sends the gradients."""
    from bpsx.api.verbs import session

    with group("gloo") as (rank, size):
        model = DDP(tanh_model(), bucket_cap_mb=SMALL)
        model.register_comm_hook(None, bps.ddp_comm_hook)
        before = session().counters()["tensor_bytes"]
        train(model, rank, size)
        return session().counters()["tensor_bytes"] - before, sum(
            p.numel() * 8 for p in model.parameters()
        )


def job_hook_fp16() -> Any:
    with group("bpsx") as (rank, size):
        model = DDP(tanh_model(), bucket_cap_mb=SMALL)
        model.register_comm_hook(bps.DDPHookState("half", bps.Compression.fp16), bps.ddp_comm_hook)
        return train(model, rank, size)


def job_hook_two_models() -> Any:
    """Two models of the same shape in one backward pass, with interleaved buckets."""
    with group("bpsx") as (rank, size):
        models = [DDP(tanh_model(i), bucket_cap_mb=SMALL) for i in (1, 2)]
        for i, model in enumerate(models):
            model.register_comm_hook(bps.DDPHookState(f"model {i}"), bps.ddp_comm_hook)
        return train_two(models, rank, size)


def train_two(models: list[nn.Module], rank: int = 0, size: int = 1) -> list[torch.Tensor]:
    both = nn.ModuleList(models)
    optimizer = torch.optim.SGD(both.parameters(), lr=0.1)
    for step in range(3):
        optimizer.zero_grad()
        x, y = batch(step, rank, size)
        nn.functional.mse_loss(models[0](x) * models[1](x), y).backward()
        optimizer.step()
    return [p.detach().clone() for p in both.parameters()]


def job_hook_errors() -> Any:
    found = []
    for state in ("name", 3):
        try:
            bps.ddp_comm_hook(state, None)
        except BpsxError as e:
            found.append(str(e))
    for options in (("",), ("x", int)):
        try:
            bps.DDPHookState(*options)
        except BpsxError as e:
            found.append(str(e))
    return found


def job_plain() -> Any:
    with group("bpsx") as (rank, size):
        return train(DDP(tanh_model(1 + rank), bucket_cap_mb=SMALL), rank, size)


def job_view() -> Any:
    with group("bpsx") as (rank, size):
        return train(
            DDP(tanh_model(), bucket_cap_mb=SMALL, gradient_as_bucket_view=True), rank, size
        )


def job_static() -> Any:
    with group("bpsx") as (rank, size):
        return train(DDP(tanh_model(), bucket_cap_mb=SMALL, static_graph=True), rank, size)


def job_compiled() -> Any:
    with group("bpsx") as (rank, size):
        return train(torch.compile(DDP(tanh_model()), backend="eager"), rank, size)


def job_unused() -> Any:
    with group("bpsx") as (rank, size):
        return train(
            DDP(Forked(), bucket_cap_mb=SMALL, find_unused_parameters=True),
            rank,
            size,
            with_step=True,
        )


def job_no_sync() -> Any:
    with group("bpsx") as (rank, size):
        model = DDP(tanh_model(), bucket_cap_mb=SMALL)
        return train(model, rank, size, passes=2, no_sync=model.no_sync)


def job_two_models() -> Any:
    with group("bpsx") as (rank, size):
        return train_two([DDP(tanh_model(i), bucket_cap_mb=SMALL) for i in (1, 2)], rank, size)


def job_zero() -> Any:
    """Each worker keeps the optimizer state of some parameters and broadcasts their new values."""
    # its import warns about PyTorch internals
    from torch.distributed.optim import ZeroRedundancyOptimizer

    with group("bpsx") as (rank, size):
        model = DDP(tanh_model(), bucket_cap_mb=SMALL)
        return train(
            model,
            rank,
            size,
            optimizer=ZeroRedundancyOptimizer(
                model.parameters(), torch.optim.SGD, lr=0.1, momentum=0.9
            ),
        )


def job_buffers() -> Any:
    """Every forward pass uses worker 0's running statistics."""
    with group("bpsx") as (rank, size):
        model = DDP(nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4)).double())
        for step in range(3):
            model(batch(step, rank, size)[0]).sum().backward()
        model.eval()
        model(batch(9, rank, size)[0])
        model.train()
        model._sync_buffers()
        return [b.clone() for b in model.buffers()], batch(0, rank, size)[0]


def job_join() -> Any:
    """Worker 0 has two batches, worker 1 three, and so on; averages are over workers that still
    have data.
    """
    with group("bpsx") as (rank, size):
        model = DDP(tanh_model(), bucket_cap_mb=SMALL)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with Join([model], divide_by_initial_world_size=False):
            for step in range(2 + rank):
                optimizer.zero_grad()
                x, y = batch(step, rank, size)
                nn.functional.mse_loss(model(x), y).backward()
                optimizer.step()
        return [p.detach().clone() for p in model.parameters()]


def join_alone(size: int) -> list[torch.Tensor]:
    model = tanh_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(size + 1):
        optimizer.zero_grad()
        active = [r for r in range(size) if step < 2 + r]
        for r in active:
            x, y = batch(step, r, size)
            (nn.functional.mse_loss(model(x), y) / len(active)).backward()
        optimizer.step()
    return [p.detach().clone() for p in model.parameters()]


def job_shards() -> Any:
    """fully_shard gathers parameters before use and reduces gradients to their owners."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    with group("bpsx") as (rank, size):
        model = tanh_model()
        fully_shard(model, mesh=init_device_mesh("cpu", (size,)))
        return [p.full_tensor() for p in train(model, rank, size)]  # type: ignore[attr-defined]


def job_one_dies(hook: bool = True) -> Any:
    with group("gloo" if hook else "bpsx") as (rank, size):
        model = DDP(tanh_model(), bucket_cap_mb=SMALL)
        if hook:
            model.register_comm_hook(None, bps.ddp_comm_hook)
        train(model, rank, size, steps=2)
        loss = nn.functional.mse_loss(model(batch(3, rank, size)[0]), batch(3, rank, size)[1])
        if rank == 1:
            os._exit(3)
        try:
            loss.backward()
        except RuntimeError as e:
            return str(e)
        return "none"


def job_one_dies_in_the_group() -> Any:
    return job_one_dies(hook=False)


# ---- tests

#: fully_shard came with PyTorch 2.6.
SHARDS = ["job_shards"] if hasattr(fsdp, "fully_shard") else []
MODELS = [
    "job_plain",
    "job_view",
    "job_static",
    "job_compiled",
    "job_unused",
    "job_no_sync",
    "job_two_models",
    "job_zero",
    "job_join",
    *SHARDS,
    "job_buffers",
    "job_hook",
    "job_hook_moves_gradients",
    "job_hook_fp16",
    "job_hook_two_models",
    "job_hook_errors",
]


@pytest.mark.parametrize(
    ("workers", "servers", "processes"),
    [(2, 1, 1), (2, 2, 2)],
    ids=["2 workers", "4 workers on 2 machines"],
)
def test_as_one_process_on_the_joined_batch(
    tmp_path: Path, workers: int, servers: int, processes: int
) -> None:
    finished = run_job(
        __file__, MODELS, tmp_path, workers=workers, servers=servers, processes=processes
    )
    size = workers * processes
    assert sorted(finished.results) == list(range(size)), finished.output[-4000:]
    alone = train(tanh_model())
    for name in (
        "job_plain",
        "job_view",
        "job_static",
        "job_compiled",
        "job_zero",
        *SHARDS,
        "job_hook",
    ):
        assert_all_close(finished, size, name, alone)
    assert_all_close(finished, size, "job_unused", train(Forked(), with_step=True))
    assert_all_close(finished, size, "job_no_sync", train(tanh_model(), passes=2))
    for name in ("job_two_models", "job_hook_two_models"):
        assert_all_close(finished, size, name, train_two([tanh_model(i) for i in (1, 2)]))
    assert_all_close(finished, size, "job_join", join_alone(size))
    assert_all_close(finished, size, "job_hook_fp16", alone, 1e-3)
    for result in finished.results.values():
        assert all(
            torch.equal(a, b)
            for a, b in zip(
                result["job_buffers"][0], finished.results[0]["job_buffers"][0], strict=True
            )
        )
        moved, each = result["job_hook_moves_gradients"]
        assert moved == 4 * each
        states = result["job_hook_errors"]
        assert all("ddp_comm_hook: state must be" in text for text in states[:2]) and all(
            "DDPHookState: " in text for text in states[2:]
        )
        assert len(states) == 4


@pytest.mark.parametrize(
    ("function", "workers"), [("job_one_dies", 3), ("job_one_dies_in_the_group", 2)]
)
def test_a_dead_worker_ends_backward_on_the_others(
    tmp_path: Path, function: str, workers: int
) -> None:
    finished = run_job(__file__, [function], tmp_path, workers=workers, BPSX_DEADLOCK_SECONDS="60")
    for rank in [0, 2][: workers - 1]:
        message = finished.results[rank][function] if rank in finished.results else finished.output
        assert "PeerLostError: worker 1" in message, message


pytestmark = pytest.mark.timeout(300)
