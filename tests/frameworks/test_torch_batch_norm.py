"""SyncBatchNorm on several workers equals BatchNorm on the joined batch: forward, backward and
running statistics.

``job_*`` functions run in the workers.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import bpsx.torch as bps
from support.torch_job import Finished, run_job

pytestmark = pytest.mark.timeout(300)
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "cumulative": {"momentum": None},
    "without affine": {"affine": False},
    "without running": {"track_running_stats": False},
    "no bias": {},
    "no weight": {},
    "large mean": {},
    "images": {"eps": 1e-3, "momentum": 0.3},
    "bfloat16": {},
    "all bfloat16": {},
    "float16": {},
}
LOW = {"bfloat16": torch.bfloat16, "all bfloat16": torch.bfloat16, "float16": torch.float16}


def batch(case: str, rank: int, step: int) -> torch.Tensor:
    """Return a batch whose size differs between workers, and is 0 on worker 1 in step 1."""
    n = 0 if rank == 1 and step == 1 else rank + 2
    shape = (n, 3, 2 + rank, 4) if case == "images" else (n, 3)
    x = torch.randn(
        shape, generator=torch.Generator().manual_seed(10 * step + rank), dtype=torch.float64
    )
    return (x + (1e6 if case == "large mean" else 0)).to(LOW.get(case, torch.float64))


def module(kind: Any, case: str) -> Any:
    """Return the module with weights other than ones and zeros."""
    made = kind(3, **OPTIONS[case])
    if case not in ("bfloat16", "float16"):  # those keep their weights in float32
        made = made.to(LOW.get(case, torch.float64))
    if made.affine:
        with torch.no_grad():
            made.weight.copy_(torch.tensor([0.5, -1.0, 2.0]))
            made.bias.copy_(torch.tensor([0.1, 0.2, 0.3]))
    if case in ("no bias", "no weight"):
        made.register_parameter(case.split()[1], None)
    return made


def weights_for(y: torch.Tensor, rank: int) -> torch.Tensor:
    return torch.cos(torch.arange(float(y.numel()), dtype=torch.float64)).reshape(y.shape) * (
        rank + 1
    )


def run(norm: Any, case: str) -> list[Any]:
    found = []
    for step in range(3):
        x = batch(case, bps.rank(), step).requires_grad_()
        norm.zero_grad()
        y = norm(x)
        (y.double().pow(2) * weights_for(y, bps.rank())).sum().backward()
        grads = [p.grad.clone() for p in norm.parameters()]
        found.append((y.detach(), x.grad, grads, [b.clone() for b in norm.buffers()]))
    norm.eval()
    with torch.no_grad():
        found.append(norm(batch(case, bps.rank(), 0)))
    return found


def job_layers() -> Any:
    return {case: run(module(bps.SyncBatchNorm, case), case) for case in OPTIONS}


def network() -> nn.Sequential:
    torch.manual_seed(6)
    inner = nn.Sequential(nn.Conv2d(2, 3, 3, padding=1), nn.BatchNorm2d(3), nn.ReLU())
    return nn.Sequential(
        inner, nn.Flatten(), nn.Linear(48, 5), nn.BatchNorm1d(5, momentum=None), nn.Linear(5, 2)
    ).double()


def images(step: int, size: int) -> torch.Tensor:
    return torch.randn(
        size * 4, 2, 4, 4, generator=torch.Generator().manual_seed(step), dtype=torch.float64
    )


def job_training() -> Any:
    plain = network()
    model = bps.SyncBatchNorm.convert_sync_batchnorm(plain)
    assert (
        model is plain
        and isinstance(model[0][1], bps.SyncBatchNorm)
        and model[0][1].wire_name == "SyncBatchNorm.0.1"
    )
    optimizer: Any = bps.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), model.named_parameters()
    )
    rank, size = bps.rank(), bps.size()
    for step in range(4):
        optimizer.zero_grad()
        model(images(step, size)[rank * 4 : rank * 4 + 4]).pow(2).mean().backward()
        optimizer.step()
    return {k: v.clone() for k, v in model.state_dict().items()}


def job_other() -> Any:
    norm = bps.SyncBatchNorm.convert_sync_batchnorm(nn.BatchNorm1d(2).eval())
    assert not norm.training and isinstance(norm, bps.SyncBatchNorm)
    messages = []
    for act in (
        lambda: bps.SyncBatchNorm(2)(torch.zeros(2)),
        lambda: bps.SyncBatchNorm(2)(torch.zeros(2, 3)),
        lambda: bps.SyncBatchNorm(2)(torch.zeros(int(bps.rank() == 0), 2)),
        lambda: bps.SyncBatchNorm(2, process_group=1),
        lambda: bps.SyncBatchNorm.convert_sync_batchnorm(None),
    ):
        with pytest.raises(ValueError) as caught:
            act()
        messages.append(str(caught.value))
    torch.manual_seed(0)
    norm = bps.SyncBatchNorm(3)
    x = torch.randn(4, 3, requires_grad=True)
    compiled = torch.compile(lambda v: norm(v * 2) + 1, backend="aot_eager")
    eager = norm(x * 2) + 1
    assert torch.equal(compiled(x), eager)
    return messages


@pytest.fixture(scope="module", params=[2, 4], ids="{} workers".format)
def job(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Finished:
    finished = run_job(
        __file__, ["job_layers", "job_training", "job_other"], tmp_path_factory, request.param
    )
    assert finished.status == 0, finished.output[-5000:]
    return finished


@pytest.mark.parametrize("case", OPTIONS)
def test_equals_batch_norm_on_the_joined_batch(job: Finished, case: str) -> None:
    """Half types are compared with float64 on the same inputs.

    They are computed in float32 and rounded once, to 8 or 11 bits. The gradient of this loss
    depends on the rounded output, hence its wider bounds.
    """
    size = len(job.results)
    norm = module(nn.BatchNorm2d if case == "images" else nn.BatchNorm1d, case).double()
    near = (
        {"rtol": 1e-2, "atol": 1e-2}
        if case in LOW
        else {"rtol": 1e-5, "atol": 1e-5}
        if case == "large mean"
        else {"rtol": 1e-11, "atol": 1e-11}
    )
    for step in range(3):
        parts = [batch(case, r, step).double().requires_grad_() for r in range(size)]
        norm.zero_grad()
        # Picture sizes differ between workers, so the pixels become rows.
        if case == "images":
            rows = torch.cat([p.permute(0, 2, 3, 1).reshape(-1, 3) for p in parts])[
                :, :, None, None
            ]
            flat = torch.split(norm(rows)[:, :, 0, 0], [p.numel() // 3 for p in parts])
            outs = [
                y.reshape(p.shape[0], *p.shape[2:], 3).permute(0, 3, 1, 2)
                for y, p in zip(flat, parts)
            ]
        else:
            outs = list(torch.split(norm(torch.cat(parts)), [len(p) for p in parts]))
        sum(
            ((y.double().pow(2) * weights_for(y, r)).sum() for r, y in enumerate(outs)),
            torch.tensor(0.0),
        ).backward()
        found = [job.results[r]["job_layers"][case][step] for r in range(size)]
        for (y, x_grad, _, buffers), part, out in zip(found, parts, outs):
            assert y.dtype == x_grad.dtype == LOW.get(case, torch.float64)
            torch.testing.assert_close(y.double(), out.detach().contiguous(), **near)
            torch.testing.assert_close(
                x_grad.double(),
                part.grad,
                **({"rtol": 3e-2, "atol": 0.06} if case in LOW else near),
            )
            for ours, theirs, first in zip(buffers, norm.buffers(), found[0][3]):
                torch.testing.assert_close(ours.double(), theirs.double(), **near)
                assert torch.equal(ours, first), "the same bits on all workers"
        for i, p in enumerate(norm.parameters()):
            total = sum((f[2][i].double() for f in found), torch.zeros(3, dtype=torch.float64))
            torch.testing.assert_close(
                total, p.grad.double(), **({"rtol": 2e-2, "atol": 0.1} if case in LOW else near)
            )
    norm.eval()
    for rank in range(size):
        expected = norm(batch(case, rank, 0).double()).detach()
        torch.testing.assert_close(
            job.results[rank]["job_layers"][case][3].double(), expected, **near
        )


def test_a_network_trains_as_on_the_joined_batch(job: Finished) -> None:
    size, model = len(job.results), network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(4):
        optimizer.zero_grad()
        model(images(step, size)).pow(2).mean().backward()
        optimizer.step()
    for result in job.results.values():
        for key, value in model.state_dict().items():
            torch.testing.assert_close(result["job_training"][key], value, rtol=1e-10, atol=1e-11)


def test_refusals(job: Finished) -> None:
    for result in job.results.values():
        dimensions, channels, count, group, nothing = result["job_other"]
        assert "got (2,)" in dimensions and "expected (N, 2, …), got (2, 3)" in channels
        assert "1 values per channel" in count and "process_group=1: expected None" in group
        assert "convert_sync_batchnorm: module is a NoneType; expected a torch.nn.Module" in nothing
