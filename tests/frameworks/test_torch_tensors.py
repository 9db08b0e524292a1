"""push_pull and broadcasts on real workers: dtypes, layouts, handles, resuming.

``job_*`` functions run in the workers.
"""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from torch import nn

import bpsx.torch as bps
from bpsx.torch.parallel import DistributedDataParallel
from support.torch_job import Finished, each, run_job
from support.torch_release import UINT16

DTYPES = [
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.uint8,
    torch.int8,
    torch.int32,
    torch.int64,
]
SHAPES = [(), (0,), (1,), (3, 0, 2), (7,), (33, 5), (5000,), (300, 301)]
WORKERS = 3


def values(dtype: torch.dtype, shape: tuple[int, ...], rank: int) -> torch.Tensor:
    """Return values small enough for an 8-bit sum over all workers, with negative ones if the dtype
    has them.
    """
    source = torch.Generator().manual_seed(rank)
    low = 0 if dtype == torch.uint8 else -40
    return torch.randint(low, 40, shape, generator=source).to(dtype)


def noncontiguous(rank: int) -> dict[str, torch.Tensor]:
    def base() -> torch.Tensor:
        return torch.arange(24.0) + 100 * rank

    return {
        "transposed": base().reshape(4, 6).t(),
        "strided": base()[::3],
        "column": base().reshape(4, 6)[:, 1:2],
        "scalar": base()[7],
        "channels last": base().reshape(1, 4, 2, 3).to(memory_format=torch.channels_last),
    }


# ---- run in the workers


def job_dtypes() -> Any:
    rank, found = bps.rank(), {}
    for dtype in DTYPES:
        for shape in SHAPES:
            mine = values(dtype, shape, rank)
            total, mean = (
                bps.push_pull(mine, average=False),
                bps.push_pull(mine, name=f"mean.{dtype}.{shape}"),
            )
            assert torch.equal(mine, values(dtype, shape, rank)), "the input must not change"
            assert bps.push_pull_inplace(mine, average=False) is mine and torch.equal(mine, total)
            found[dtype, shape] = (total, mean)
    return found


def job_noncontiguous() -> Any:
    found = {}
    for key, tensor in noncontiguous(bps.rank()).items():
        strides = tensor.stride()
        result = bps.push_pull(tensor, average=False)
        handle = bps.push_pull_async_inplace(tensor, average=False, name=f"in place {key}")
        assert bps.synchronize(handle) is tensor and tensor.stride() == strides
        found[key] = (result.clone(), tensor.clone())
    return found


def job_many_handles() -> Any:
    """Start a hundred unnamed exchanges of one shape, and wait for them in reverse order."""
    handles = [
        bps.push_pull_async(torch.full((50,), float(i * (bps.rank() + 1))), average=False)
        for i in range(100)
    ]
    results = {i: float(bps.synchronize(handles[i])[49]) for i in reversed(range(100))}
    assert all(bps.poll(h) for h in handles)
    return [results[i] for i in range(100)]


def job_data_is_replaced() -> Any:
    """The memory of an exchange under way must stay allocated after the tensor has dropped it.

    Otherwise the arriving sum would overwrite another tensor.
    """
    damage = 0.0
    for _ in range(3):
        tensor = torch.full((1 << 20,), 1.0)
        handle = bps.push_pull_async_inplace(tensor, name="replaced", average=False)
        tensor.data = torch.empty(0)
        others = [torch.full((1 << 20,), 7.0) for _ in range(2)]
        bps.synchronize(handle)
        damage += sum(float((t - 7).abs().sum()) for t in others)
    return damage


def job_dropped() -> Any:
    """A deleted module frees its parameters, despite the hooks on them."""
    model = DistributedDataParallel(nn.Linear(3, 3))
    model(torch.ones(1, 3)).sum().backward()
    memory = [weakref.ref(p) for p in model.parameters()]
    del model
    gc.collect()
    return [w() is None for w in memory]


def job_compressed() -> Any:
    return bps.push_pull(
        torch.tensor([1.0, 1 / 3, -2.0]) * (bps.rank() + 1), compression=bps.Compression.fp16
    )


def job_names() -> Any:
    assert bps.size() == WORKERS and 0 <= bps.local_rank() < bps.local_size()
    indices = [bps.declare("first"), bps.declare("second"), bps.declare("first")]
    assert indices[0] == indices[2] == indices[1] - 1
    bps.barrier()
    bps.get_pushpull_speed()
    bps.push_pull(torch.zeros(100_000))
    return bps.get_pushpull_speed()


def special(rank: int) -> dict[str, torch.Tensor]:
    """Return, on rank 1, tensors that must arrive bit for bit, and other values elsewhere."""
    nan = (
        torch.tensor([0x7FC00001, 0x7F800001, 0x80000000 - 2**32, 0x3F800000], dtype=torch.int64)
        .to(torch.int32)
        .view(torch.float32)
    )
    made = {
        str(d): torch.arange(-3, 4).to(d)
        for d in [*DTYPES, torch.int16, torch.bool, torch.complex64, *UINT16]
    }
    made |= {
        "nan, -0.0": nan,
        "scalar": torch.tensor(5),
        "empty": torch.zeros(0, 2),
        "large": torch.randn(70000),
    }
    made["transposed"] = torch.randn(3, 5).t()
    return made if rank == 1 else {k: torch.zeros_like(v) for k, v in made.items()}


def job_broadcast() -> Any:
    mine = special(bps.rank())
    before = {k: v.clone() for k, v in mine.items()}
    ordered = dict(sorted(mine.items(), reverse=bps.rank() == 2))
    bps.broadcast_parameters(ordered, root_rank=1)
    norm = nn.BatchNorm1d(4)
    norm.num_batches_tracked += bps.rank()
    bps.broadcast_parameters(norm.state_dict(), root_rank=2)
    bps.broadcast_parameters(norm.named_parameters(), root_rank=2)
    return before, mine, int(norm.num_batches_tracked)


MAKERS: dict[str, Any] = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "Adam": lambda p: torch.optim.Adam(p, lr=0.01, betas=(0.8, 0.9)),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.01),
}


def steps(model: nn.Module, optimizer: Any, first: int, last: int) -> None:
    for step in range(first, last):
        torch.manual_seed(step)
        optimizer.zero_grad()
        model(torch.randn(8, 5, dtype=torch.float64)).pow(2).sum().backward()
        optimizer.step()


def checkpoint(make: Any) -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    model = nn.Linear(5, 3).double()
    optimizer = make(model.parameters())
    optimizer.param_groups[0]["lr"] = 0.02
    steps(model, optimizer, 0, 3)
    return model, optimizer


def job_resume() -> Any:
    """Only worker 0 has read the checkpoint; then all train on equal batches."""
    found = {}
    for name, make in MAKERS.items():
        if bps.rank() == 0:
            model, optimizer = checkpoint(make)
        else:
            model = nn.Linear(5, 3).double()
            optimizer = make(model.parameters())
        optimizer = bps.DistributedOptimizer(optimizer, model.named_parameters())
        bps.broadcast_parameters(model.state_dict(), root_rank=0)
        kept = [p.detach().clone() for p in model.parameters()]
        bps.broadcast_optimizer_state(optimizer, root_rank=0)
        assert all(torch.equal(a, b) for a, b in zip(kept, model.parameters()))
        state = str(optimizer.state_dict())
        steps(model, optimizer, 3, 6)
        found[name] = (state, [p.detach().clone() for p in model.parameters()])
    return found


JOBS = [
    "job_dtypes",
    "job_noncontiguous",
    "job_many_handles",
    "job_data_is_replaced",
    "job_dropped",
    "job_compressed",
    "job_names",
    "job_broadcast",
    "job_resume",
]


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Finished:
    finished = run_job(__file__, JOBS, tmp_path_factory, WORKERS, 2, BYTEPS_PARTITION_BYTES="65536")
    assert finished.status == 0, finished.output[-5000:]
    return finished


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_dtypes_and_shapes(job: Finished, dtype: torch.dtype) -> None:
    """The sums are small integers, so they are exact in every dtype.

    Integer averages round down; half types are divided in float32 and then rounded.
    """
    for shape in SHAPES:
        total = sum(
            (
                values(torch.int64, shape, r)
                if dtype != torch.uint8
                else values(dtype, shape, r).long()
            )
            for r in range(WORKERS)
        )
        assert isinstance(total, torch.Tensor)
        mean = (
            (total.double() / WORKERS).to(dtype)
            if dtype.is_floating_point
            else total.div(WORKERS, rounding_mode="floor").to(dtype)
        )
        for found in each(job, "job_dtypes"):
            got_total, got_mean = found[dtype, shape]
            assert (
                got_total.dtype == got_mean.dtype == dtype
                and got_total.shape == got_mean.shape == torch.Size(shape)
            )
            assert torch.equal(got_total, total.to(dtype))
            torch.testing.assert_close(
                got_mean,
                mean,
                rtol=torch.finfo(dtype).eps if dtype.is_floating_point else 0,
                atol=0,
            )


def test_noncontiguous(job: Finished) -> None:
    expected = {k: sum(noncontiguous(r)[k] for r in range(WORKERS)) for k in noncontiguous(0)}
    for found in each(job, "job_noncontiguous"):
        for key, (result, in_place) in found.items():
            assert torch.equal(result, expected[key]) and torch.equal(in_place, expected[key])


def test_memory_under_way_is_kept_when_data_is_replaced(job: Finished) -> None:
    assert each(job, "job_data_is_replaced") == [0.0] * WORKERS


def test_a_dropped_module_takes_its_parameters_along(job: Finished) -> None:
    assert all(all(gone) for gone in each(job, "job_dropped"))


def test_many_handles_without_a_name(job: Finished) -> None:
    assert each(job, "job_many_handles") == [[i * 6.0 for i in range(100)]] * WORKERS


def test_fp16_compression(job: Finished) -> None:
    for found in each(job, "job_compressed"):
        assert found.dtype == torch.float32
        torch.testing.assert_close(found, torch.tensor([2.0, 2 / 3, -4.0]), rtol=1e-3, atol=0)


def test_ranks_declare_barrier_speed(job: Finished) -> None:
    for milliseconds, rate in each(job, "job_names"):
        assert milliseconds > 1.6e12 and rate > 0


def test_broadcast_parameters(job: Finished) -> None:
    everywhere = each(job, "job_broadcast")
    wanted = everywhere[1][0]
    for _, mine, batches in everywhere:
        assert batches == 2
        for key, tensor in wanted.items():
            assert torch.equal(*(t.reshape(-1).view(torch.uint8) for t in (mine[key], tensor))), key


@pytest.mark.parametrize("name", MAKERS)
def test_all_workers_continue_from_one_workers_checkpoint(job: Finished, name: str) -> None:
    """With equal batches the averaged gradient is each worker's own up to the last bit (three times
    g over three), hence 1e-12.
    """
    model, optimizer = checkpoint(MAKERS[name])
    state = str(optimizer.state_dict())
    steps(model, optimizer, 3, 6)
    found = [r[name] for r in each(job, "job_resume")]
    assert [f[0] for f in found] == [state] * WORKERS
    for _, got in found:
        assert all(torch.equal(a, b) for a, b in zip(got, found[0][1]))
        torch.testing.assert_close(
            got, [p.detach() for p in model.parameters()], rtol=1e-12, atol=1e-12
        )
