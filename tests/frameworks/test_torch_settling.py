"""Which gradients a step, a GradScaler and a saved state wait for, on real workers.

``job_*`` functions run in the workers.
"""

from __future__ import annotations

import weakref
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn

import bpsx.torch as bps
from bpsx.errors import MismatchError
from bpsx.torch.cross_barrier import CrossBarrier
from bpsx.torch.parallel import DistributedDataParallel
from support.torch_job import Finished, each, run_job
from support.torch_release import HAS_FUSED, HAS_GRAD_SCALER, needs_fused, needs_grad_scaler

pytestmark = pytest.mark.timeout(300)
BARRIERS = {"optimizer": False, "barrier": True}


def weight(value: float = 0.0) -> nn.Parameter:
    return nn.Parameter(torch.full((2,), value))


class Sum(nn.Module):
    """The sum of its weights, for optimizers that need a module."""

    def __init__(self, *names: str) -> None:
        super().__init__()
        for name in names:
            self.register_parameter(name, weight())

    def forward(self) -> torch.Tensor:
        return torch.stack(list(self.parameters())).sum()


def make(model: nn.Module, barrier: bool = False, passes: int = 1, **options: Any) -> Any:
    """Return an optimizer that subtracts the gradients from the weights."""
    base = torch.optim.SGD(model.parameters(), lr=1.0, **options)
    given = {"backward_passes_per_step": passes}
    if barrier:
        return CrossBarrier(model, base, model.named_parameters(), num_steps=10**6, **given)
    return bps.DistributedOptimizer(base, model.named_parameters(), **given)


def scaled(model: nn.Module, optimizer: Any, windows: Any) -> list[Any]:
    """Train with a GradScaler; ``windows`` has the factors of the losses of each step."""
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    scales = []
    for factors in windows:
        for factor in factors:
            scaler.scale(model() * factor).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        scales.append(scaler.get_scale())
    if hasattr(optimizer, "synchronize"):
        optimizer.synchronize()
    return [[p.tolist() for p in model.parameters()], scales]


def job_scaler() -> Any:
    """In the first window, which is short, the gradient of worker 0 overflows."""
    found: dict[str, Any] = {}
    if not HAS_GRAD_SCALER:
        return found
    infinite = float("inf") if bps.rank() == 0 else 1.0
    for name, barrier in BARRIERS.items():
        model = Sum(f"short {name}".replace(" ", "_"))
        optimizer = make(model, barrier, passes=2)
        found[f"short {name}"] = scaled(model, optimizer, [[infinite], [1, 1], [1], [1, 1]])
        del optimizer
    if HAS_FUSED:
        model = Sum("short_fused")
        optimizer = make(model, passes=2, fused=True)
        found["short fused"] = scaled(model, optimizer, [[infinite], [1, 1], [1], [1, 1]])
        del optimizer
    model = Sum("frozen")
    model.requires_grad_(False)
    optimizer = make(model)
    model.requires_grad_(True)  # no hook yet
    found["unfrozen"] = scaled(model, optimizer, [[infinite], [1], [1], [1]])
    model = Sum("idle")
    optimizer = make(model)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    if bps.rank() == 0:  # the other worker has no batch
        scaler.scale(model()).backward()
    else:
        scaler.scale(torch.zeros(1))
    scaler.step(optimizer)
    found["idle"] = model.idle.tolist()
    return found


def job_skipping() -> str:
    """A window that ends early, stepped inside skip_synchronize() without synchronize()."""
    model = Sum("skipping")
    optimizer = make(model, passes=2)
    model().backward()
    try:
        with optimizer.skip_synchronize():
            optimizer.step()
    except bps.GradientOrderError as e:
        optimizer.zero_grad()
        return str(e)
    return "none"


def job_replaced() -> Any:
    """``grad`` is set to another tensor before and after the wait."""
    found: dict[str, Any] = {}
    model = Sum("replaced")
    optimizer = make(model)
    mine = bps.rank() + 1.0
    for step in ("first", "later"):
        (model() * mine).backward()
        model.replaced.grad = model.replaced.grad * 0.5
        try:
            optimizer.step()
        except bps.GradientOrderError as e:
            found[step] = str(e)
        optimizer.zero_grad()
    (model() * mine).backward()
    assert optimizer.param_groups  # waits
    model.replaced.grad = model.replaced.grad * 0.5
    optimizer.step()
    found["after the wait"] = model.replaced.tolist()
    optimizer.zero_grad()
    table = nn.Embedding(4, 2, sparse=True)
    table.weight.data.zero_()
    sparse = make(table)
    for step in range(2):  # from the second on hooks push sparse gradients, too
        table(torch.tensor([bps.rank()])).sum().backward()
        if step:
            table.weight.grad = table.weight.grad * 0.5
        try:
            sparse.step()
        except bps.GradientOrderError as e:
            found["sparse"] = str(e)
        sparse.zero_grad()
    return found


def job_frozen() -> Any:
    """A parameter is frozen between the passes of a window, on all workers alike."""
    found: dict[str, Any] = {}
    for name, barrier in BARRIERS.items():
        model = Sum(f"kept_{name}", f"frozen_{name}")
        kept, frozen = model.parameters()
        optimizer = make(model, barrier, passes=2)
        for turn in range(6):
            if turn == 3:
                frozen.requires_grad_(False)
            (model() * (bps.rank() + 1)).backward()
            if turn % 2:
                optimizer.step()
                optimizer.zero_grad()
        optimizer.synchronize()
        found[name] = [kept.tolist(), frozen.tolist()]
        del optimizer
    module = Sum("kept", "frozen")
    model = DistributedDataParallel(module)
    for turn in range(3):
        if turn == 1:
            module.frozen.requires_grad_(False)
        with nullcontext() if turn else model.no_sync():
            (model() * (bps.rank() + 1)).backward()
    found["module"] = [p.grad.tolist() for p in module.parameters()]
    return found


def job_frozen_by_one() -> list[str]:
    """A parameter that no worker has used so far is frozen on one worker."""
    found = []
    for options in ({}, {"compression_params": {"compressor": "onebit"}}):
        model = Sum("used", "nobody")
        base = torch.optim.SGD(model.parameters(), lr=1.0)
        optimizer = bps.DistributedOptimizer(base, model.named_parameters(), **options)
        for step in range(4):
            model.nobody.requires_grad_(step != 2 or bps.rank() == 1)
            optimizer.zero_grad()
            model.used.sum().backward()
            try:
                optimizer.step()
            except MismatchError as e:
                found.append(str(e))
        del optimizer
    return found


def job_alone() -> Any:
    """A GAN's generator pushes gradients of the discriminator; then one worker saves its state."""
    found: dict[str, Any] = {}
    for name, barrier in BARRIERS.items():
        model = Sum(f"alone_{name}")
        optimizer = make(model, barrier, momentum=0.5)
        for _ in range(2):
            optimizer.zero_grad()
            (model() * (bps.rank() + 1)).backward()
            optimizer.step()
        optimizer.zero_grad()
        model().backward()  # for another optimizer
        if bps.rank() == 0:
            (state,) = optimizer.state_dict()["state"].values()
            found[name] = state["momentum_buffer"].tolist()
        bps.barrier()
        optimizer.zero_grad()
        del optimizer
    return found


def job_boundary() -> bool:
    """At a boundary of an elastic job nothing is left that workers who join would not know."""
    model = Sum("boundary")
    optimizer = make(model)
    state = bps.elastic.TorchState(model, optimizer)
    model().backward()
    state.check_host_updates()
    left: bool = optimizer._exchange.under_way
    optimizer.zero_grad()
    return left


def job_released() -> Any:
    """An averaged gradient that the optimizer has used goes with the model's own zero_grad()."""
    model = Sum("released")
    optimizer = make(model)
    model().backward()
    assert optimizer.param_groups  # waits
    seen = weakref.ref(model.released.grad)
    optimizer.step()
    model.zero_grad()
    return seen() is None


def job_strides() -> Any:
    """A fused optimizer goes on after its state was sent; its weights are channels_last."""
    found: dict[str, Any] = {}
    for fused in (False, True) if HAS_FUSED else (False,):
        torch.manual_seed(0)
        model = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
        base = torch.optim.Adam(model.parameters(), lr=0.1, fused=fused or None)
        named = [(f"{fused}.{name}", p) for name, p in model.named_parameters()]
        optimizer = bps.DistributedOptimizer(base, named)
        made = torch.Generator().manual_seed(bps.rank())
        for step in range(4):
            optimizer.zero_grad()
            images = torch.randn(2, 3, 8, 8, generator=made)
            model(images.to(memory_format=torch.channels_last)).pow(2).sum().backward()
            optimizer.step()
            if step == 1:
                bps.broadcast_optimizer_state(optimizer, 0)
        found[str(fused)] = model.weight.detach().flatten().tolist()
    return found


def job_join() -> Any:
    """Different numbers of batches, with a rate that changes with each; then equally many."""
    model = Sum("joined")
    optimizer = make(model)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    for batches in (3 + 2 * bps.rank(), 2):
        for _ in range(batches):
            optimizer.zero_grad()
            model().backward()
            optimizer.step()
            scheduler.step()
        last = bps.join()
        bps.broadcast_parameters(model.state_dict(), root_rank=last)
        bps.broadcast_optimizer_state(optimizer, root_rank=last)
        scheduler.load_state_dict(bps.broadcast_object(scheduler.state_dict(), root_rank=last))
        kept = model.joined.tolist()
    return [kept, scheduler.get_last_lr(), optimizer.param_groups[0]["lr"]]


def job_rate() -> list[float]:
    """The script keeps a learning rate that is a tensor, and changes it after a broadcast."""
    rates = [torch.tensor(0.5 + bps.rank()) for _ in range(2)]
    shared = torch.tensor(3.0 + bps.rank())
    groups = [{"params": [weight()], "lr": rate} for rate in (*rates, shared, shared)]
    optimizer = torch.optim.SGD(groups, lr=1.0)
    if bps.rank() == 0:
        optimizer.param_groups[3]["lr"] = torch.tensor(7.0)  # no longer the same as the third's
    bps.broadcast_optimizer_state(optimizer, 0, prefix="rates.")
    rates[0].fill_(0.25)
    return [float(group["lr"]) for group in optimizer.param_groups]


JOBS = [name for name in list(globals()) if name.startswith("job_")]


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Finished:
    finished = run_job(__file__, JOBS, tmp_path_factory, 2)
    assert finished.status == 0, finished.output[-5000:]
    return finished


@needs_grad_scaler
@pytest.mark.parametrize("way", [*BARRIERS, pytest.param("fused", marks=needs_fused)])
def test_an_overflow_in_a_short_window_is_one_on_all_workers(job: Finished, way: str) -> None:
    """The first step is skipped. Two of the others have two passes, one has one: 5 in all."""
    for found in each(job, "job_scaler"):
        assert found[f"short {way}"] == [[[-5.0, -5.0]], [512.0] * 4]


@needs_grad_scaler
def test_an_overflow_is_one_on_all_workers_before_there_are_hooks(job: Finished) -> None:
    for found in each(job, "job_scaler"):
        assert found["unfrozen"] == [[[-3.0, -3.0]], [512.0] * 4]


@needs_grad_scaler
def test_a_worker_without_a_gradient_steps_with_a_scaler(job: Finished) -> None:
    assert [found["idle"] for found in each(job, "job_scaler")] == [[-0.5, -0.5]] * 2


def test_a_step_that_skips_the_wait_refuses_a_short_window(job: Finished) -> None:
    for message in each(job, "job_skipping"):
        assert "have still to be pushed; call synchronize() first" in message


def test_a_gradient_that_is_replaced_under_way_is_an_error(job: Finished) -> None:
    for found in each(job, "job_replaced"):
        for step, name in (("first", "replaced"), ("later", "replaced"), ("sparse", "weight")):
            assert f"{name!r} was set to another tensor while it was under way" in found[step]


def test_a_gradient_that_is_replaced_after_the_wait_is_used(job: Finished) -> None:
    """The refused steps have not moved the weights; the average of 1 and 2 is halved."""
    assert [f["after the wait"] for f in each(job, "job_replaced")] == [[-0.75, -0.75]] * 2


@pytest.mark.parametrize("way", BARRIERS)
def test_a_parameter_frozen_within_a_window_gets_the_average(job: Finished, way: str) -> None:
    """As in one process: its gradient of the passes before counts in that step."""
    for found in each(job, "job_frozen"):
        assert found[way] == [[-9.0, -9.0], [-4.5, -4.5]]


def test_a_parameter_frozen_after_no_sync_gets_the_average(job: Finished) -> None:
    for found in each(job, "job_frozen"):
        assert found["module"] == [[4.5, 4.5], [1.5, 1.5]]


def test_an_unused_parameter_frozen_by_one_worker_is_an_error_on_all(job: Finished) -> None:
    for plain, compressed in each(job, "job_frozen_by_one"):
        message = plain if plain == compressed else ""
        assert "'nobody' is trained on 1 workers and frozen (requires_grad=False) on 1" in message


@pytest.mark.parametrize("way", BARRIERS)
def test_one_worker_saves_its_state_while_gradients_are_under_way(job: Finished, way: str) -> None:
    first, other = each(job, "job_alone")
    assert first[way] == [2.25, 2.25] and other == {}


def test_nothing_is_under_way_after_a_boundary(job: Finished) -> None:
    assert each(job, "job_boundary") == [False, False]


def test_a_used_average_is_not_kept(job: Finished) -> None:
    assert each(job, "job_released") == [True, True]


@pytest.mark.parametrize("fused", ["False", pytest.param("True", marks=needs_fused)])
def test_sent_state_has_the_strides_of_its_parameter(job: Finished, fused: str) -> None:
    first, other = each(job, "job_strides")
    assert first[fused] == other[fused]


def test_a_scheduler_goes_on_alike_after_a_join(job: Finished) -> None:
    """Of five steps the last two count half, as one worker had joined; two more follow."""
    rates = [1 / (1 + step) for step in range(7)]
    moved = sum(rates[:3]) + sum(rates[3:5]) / 2 + sum(rates[5:])
    for kept, told, used in each(job, "job_join"):
        assert kept == pytest.approx([-moved] * 2, rel=1e-6)
        assert told == [used] == [1 / 8]


def test_a_learning_rate_that_is_a_tensor_stays_the_same_object(job: Finished) -> None:
    assert each(job, "job_rate") == [[0.25, 0.5, 3.0, 7.0]] * 2
