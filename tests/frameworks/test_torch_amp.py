"""Gradient scaling, autocast, and reading or writing gradients under way, on real workers.

``job_*`` functions run in the workers.
"""

from __future__ import annotations

import copy
import io
import warnings
from typing import Any

import pytest
import torch
from torch import nn

import bpsx.torch as bps
from support.torch_job import Finished, each, run_job
from support.torch_release import HAS_FUSED, HAS_GRAD_SCALER, needs_fused, needs_grad_scaler

pytestmark = pytest.mark.timeout(300)
STEPS, OVERFLOW = 6, 2


def network() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2)).double()


def batch(step: int, rank: int) -> torch.Tensor:
    return torch.randn(
        3, 4, generator=torch.Generator().manual_seed(100 * step + rank), dtype=torch.float64
    )


def make(model: nn.Module, fused: bool = False, **options: Any) -> Any:
    base = torch.optim.Adam(model.parameters(), lr=0.02, fused=fused or None)
    return bps.DistributedOptimizer(base, model.named_parameters(), **options)


#: The documented orders of calls, each a function of (scaler, optimizer, model).
def order_plain(scaler: Any, optimizer: Any, model: nn.Module) -> None:
    scaler.step(optimizer)


def order_clipped(scaler: Any, optimizer: Any, model: nn.Module) -> None:
    scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_(model.parameters(), 1e3)
    scaler.step(optimizer)


def order_synchronized(scaler: Any, optimizer: Any, model: nn.Module) -> None:
    optimizer.synchronize()
    scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_(model.parameters(), 1e3)
    with optimizer.skip_synchronize():
        scaler.step(optimizer)


def order_synchronized_late(scaler: Any, optimizer: Any, model: nn.Module) -> None:
    scaler.unscale_(optimizer)
    optimizer.synchronize()
    with optimizer.skip_synchronize():
        scaler.step(optimizer)


ORDERS: dict[str, Any] = {
    "plain": order_plain,
    "clipped": order_clipped,
    "synchronized": order_synchronized,
    "late": order_synchronized_late,
}


def train(order: Any, fused: bool, model_zeroes: bool) -> Any:
    """Train; in one step the gradient of one worker overflows."""
    model = network()
    optimizer = make(model, fused)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=3)
    scales = []
    for step in range(STEPS):
        (model if model_zeroes else optimizer).zero_grad()
        loss = model(batch(step, bps.rank())).pow(2).mean()
        scaler.scale(
            loss * (float("inf") if step == OVERFLOW and bps.rank() == 1 else 1)
        ).backward()
        order(scaler, optimizer, model)
        scaler.update()
        scales.append(scaler.get_scale())
    return [p.detach().clone() for p in model.parameters()], scales


def job_scaler() -> Any:
    found: dict[Any, Any] = {}
    if not HAS_GRAD_SCALER:
        return found
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        for name, order in ORDERS.items():
            for fused in (False, True) if HAS_FUSED else (False,):
                found[name, fused] = train(order, fused, model_zeroes=name == "plain")
    return found


def job_autocast() -> Any:
    model = network().float()
    optimizer = make(model)
    for step in range(STEPS):
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = model(batch(step, bps.rank()).float()).pow(2).mean()
        loss.backward()
        optimizer.step()
    return [p.detach().clone() for p in model.parameters()]


def job_looking() -> Any:
    """Reading param_groups yields averaged gradients, also if only one worker reads."""
    rank, found = bps.rank(), {}
    layer = nn.Linear(2, 1, bias=False)
    layer.weight.data.fill_(0.25)  # the same on all workers
    optimizer: Any = bps.DistributedOptimizer(
        torch.optim.SGD(layer.parameters(), lr=0.5), layer.named_parameters()
    )
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for step in range(4):
            optimizer.zero_grad()
            (layer(torch.ones(1, 2)).sum() * (rank + 1)).backward()
            if rank == 0 and step % 2 == 0:
                (group,) = optimizer.param_groups
                found["seen"] = group["params"][0].grad.clone()
                assert "lr: 0.5" in repr(optimizer)
            optimizer.step()
    found["weight"] = layer.weight.detach().clone()
    # After reading, another backward of the same step must fail: other workers would not have its
    # gradients.
    optimizer.zero_grad()
    layer(torch.ones(1, 2)).sum().backward()
    assert optimizer.param_groups
    with pytest.raises(
        bps.GradientOrderError,
        match="'weight' was computed after the optimizer's param_groups had been read",
    ):
        layer(torch.ones(1, 2)).sum().backward()
    optimizer.zero_grad()
    # A skipped step, then the model's zero_grad() instead of the optimizer's, starts a new step.
    for set_to_none in (True, False):
        layer(torch.ones(1, 2)).sum().backward()
        assert optimizer.param_groups
        layer.zero_grad(set_to_none=set_to_none)
    (layer(torch.ones(1, 2)).sum() * (rank + 1)).backward()
    optimizer.step()
    found["after"] = layer.weight.grad.clone()
    # The worker that reads param_groups has no batch after a skipped step.
    layer(torch.ones(1, 2)).sum().backward()
    assert optimizer.param_groups
    layer.zero_grad()
    if rank:
        layer(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    found["without a batch"] = layer.weight.grad.clone()
    return found


def job_written() -> Any:
    """After user code writes to a gradient under way, step() raises an error once all exchanges
    have ended.

    Writes by bpsx itself must not raise it.
    """
    torch.manual_seed(0)
    found, model = [], nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2))
    for options in ({}, {"compression": bps.Compression.fp16}):
        optimizer: Any = bps.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters(), **options
        )
        for harm in (
            lambda: nn.utils.clip_grad_norm_(model[1].parameters(), 1e-3),
            lambda: model[1].zero_grad(set_to_none=False),
            lambda: model[1].weight.grad.mul_(2),
            lambda: None,
        ):
            optimizer.zero_grad()
            model(torch.ones(1, 3)).sum().backward()
            harm()
            try:
                optimizer.step()
                found.append("none")
            except bps.GradientOrderError as e:
                found.append(str(e))
        optimizer.zero_grad()
        model(torch.ones(1, 3)).sum().backward()
        model[1].weight.grad.mul_(2)
        optimizer.zero_grad()  # the gradients are discarded, so there is no error
        del optimizer
    return found


def job_data_replaced() -> Any:
    """A value assigned to ``grad.data`` during the exchange is not noticed, and lost.

    Every worker gets the average of what was sent.
    """
    layer = nn.Linear(300, 300)
    optimizer: Any = bps.DistributedOptimizer(
        torch.optim.SGD(layer.parameters(), lr=1.0), layer.named_parameters(prefix="replaced")
    )
    (layer(torch.ones(1, 300)).sum() * (bps.rank() + 1)).backward()
    layer.weight.grad.data = layer.weight.grad.data * 100
    if bps.rank() == 0:
        layer.bias.grad.data = torch.zeros(300)
    optimizer.step()
    return [layer.weight.grad.unique().tolist(), layer.bias.grad.unique().tolist()]


def job_shared_memory() -> Any:
    """Gradients in one flat tensor, or views that autograd made of one, share a version counter.

    That must not raise a false error.
    """
    model = network()
    flat = torch.zeros(sum(p.numel() for p in model.parameters()), dtype=torch.float64)
    begin = 0
    for p in model.parameters():
        p.grad = flat[begin : begin + p.numel()].view_as(p)
        begin += p.numel()
    stacked = [nn.Parameter(torch.ones(2)) for _ in range(3)]
    optimizer: Any = make(model)
    other: Any = bps.DistributedOptimizer(
        torch.optim.SGD(stacked, lr=0.1), [(f"stacked.{i}", p) for i, p in enumerate(stacked)]
    )
    for step in range(3):
        optimizer.zero_grad(set_to_none=False)
        other.zero_grad()
        model(batch(step, bps.rank())).pow(2).mean().backward()
        (torch.stack(stacked) * (bps.rank() + 1)).sum().backward()
        optimizer.step()
        other.step()
    return [p.detach().clone() for p in (*model.parameters(), *stacked)]


def job_copies() -> Any:
    model = network()
    optimizer = make(model)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    model(batch(0, bps.rank())).sum().backward()
    optimizer.step()
    scheduler.step()
    kept = [p.detach().clone() for p in model.parameters()]
    twin, its = copy.deepcopy((model, optimizer))
    stream = io.BytesIO()
    torch.save(optimizer, stream)
    stream.seek(0)
    loaded = torch.load(stream, weights_only=False)
    for plain in (its, loaded, copy.copy(optimizer)):
        assert type(plain) is torch.optim.Adam and plain.param_groups[0]["lr"] == 0.01
        assert str(plain.state_dict()) == str(optimizer.state_dict())
    assert its.param_groups[0]["params"][0] is next(twin.parameters())
    twin(batch(0, 0)).sum().backward()
    its.step()
    assert all(torch.equal(a, b) for a, b in zip(kept, model.parameters())), (
        "the copy's step moves its own parameters only"
    )
    again = bps.DistributedOptimizer(its, [(f"twin.{n}", p) for n, p in twin.named_parameters()])
    again.zero_grad()
    twin(batch(1, bps.rank())).sum().backward()
    again.step()
    return [p.detach().clone() for p in twin.parameters()]


def job_compiled_step() -> Any:
    model = network()
    optimizer = make(model)

    @torch.compile(backend="aot_eager")
    def step() -> None:
        optimizer.step()

    compiled = torch.compile(model, backend="aot_eager")
    for i in range(STEPS):
        optimizer.zero_grad()
        compiled(batch(i, bps.rank())).pow(2).mean().backward()
        step()
    return [p.detach().clone() for p in model.parameters()]


JOBS = [
    "job_scaler",
    "job_autocast",
    "job_looking",
    "job_written",
    "job_data_replaced",
    "job_shared_memory",
    "job_copies",
    "job_compiled_step",
]


@pytest.fixture(scope="module", params=[4], ids="{} workers".format)
def job(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Finished:
    finished = run_job(__file__, JOBS, tmp_path_factory, request.param)
    assert finished.status == 0, finished.output[-5000:]
    return finished


def alone(size: int, steps: Any = range(STEPS)) -> list[torch.Tensor]:
    model = network()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    for step in steps:
        optimizer.zero_grad()
        model(torch.cat([batch(step, r) for r in range(size)])).pow(2).mean().backward()
        optimizer.step()
    return [p.detach() for p in model.parameters()]


@needs_grad_scaler
@pytest.mark.parametrize("fused", [False, pytest.param(True, marks=needs_fused)])
@pytest.mark.parametrize("order", ORDERS)
def test_grad_scaler(job: Finished, order: str, fused: bool) -> None:
    """All workers skip the step in which one overflows, and continue with the same scale."""
    expected = alone(len(job.results), [s for s in range(STEPS) if s != OVERFLOW])
    for found in each(job, "job_scaler"):
        weights, scales = found[order, fused]
        assert scales == [1024, 1024, 512, 512, 512, 1024]
        torch.testing.assert_close(weights, expected, rtol=1e-10, atol=1e-11)


def test_autocast(job: Finished) -> None:
    everywhere = each(job, "job_autocast")
    for found in everywhere:
        assert all(torch.equal(a, b) for a, b in zip(found, everywhere[0]))
        torch.testing.assert_close(
            [f.double() for f in found], alone(len(job.results)), rtol=0.1, atol=0.03
        )


def test_looking_at_gradients(job: Finished) -> None:
    size = len(job.results)
    mean = sum(range(1, size + 1)) / size
    torch.manual_seed(100)
    for rank, found in enumerate(each(job, "job_looking")):
        if rank == 0:
            assert found["seen"].tolist() == [[mean, mean]]
        assert found["after"].tolist() == [[mean, mean]]
        assert found["without a batch"].tolist() == [[(size - 1) / size] * 2]


def test_writing_to_gradients_under_way(job: Finished) -> None:
    for found in each(job, "job_written"):
        for message in [f for i, f in enumerate(found) if i % 4 != 3]:
            assert (
                "gradient of '1." in message
                and "synchronize()" in message
                and "skip_synchronize()" in message
            )
        assert found[3] == found[7] == "none"


def test_data_of_gradients_is_replaced_under_way(job: Finished) -> None:
    size = len(job.results)
    assert each(job, "job_data_replaced") == [[[(size + 1) / 2]] * 2] * size


def test_gradients_in_shared_memory(job: Finished) -> None:
    size = len(job.results)
    for found in each(job, "job_shared_memory"):
        torch.testing.assert_close(found[:4], alone(size, range(3)), rtol=1e-10, atol=1e-11)
        for p in found[4:]:
            torch.testing.assert_close(p, torch.ones(2) - 0.3 * sum(range(1, size + 1)) / size)


def test_copies_are_plain_and_can_be_distributed(job: Finished) -> None:
    everywhere = each(job, "job_copies")
    assert all(torch.equal(a, b) for found in everywhere for a, b in zip(found, everywhere[0]))


def test_compiled_step(job: Finished) -> None:
    for found in each(job, "job_compiled_step"):
        torch.testing.assert_close(found, alone(len(job.results)), rtol=1e-10, atol=1e-11)
