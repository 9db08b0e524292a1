"""Every optimizer of PyTorch, and the uses of a distributed optimizer, compared with one process on
the joined batch.

Functions named ``job_*`` run in the workers.
"""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import bpsx.torch as bps
from bpsx.errors import MismatchError
from bpsx.torch.cross_barrier import CrossBarrier, _CrossBarrier
from bpsx.torch.parallel import DistributedDataParallel
from support.torch_job import Finished, each, run_job
from support.torch_release import HAS_FUSED

pytestmark = pytest.mark.timeout(300)
STEPS, BATCH = 5, 4
optim = torch.optim
WEIGHTS_ONLY = "Muon"  # accepts only matrices

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "SGD nesterov foreach": lambda p: optim.SGD(
        p, lr=0.05, momentum=0.9, nesterov=True, weight_decay=0.01, foreach=True
    ),
    "SGD maximize dampening": lambda p: optim.SGD(
        p, lr=0.01, momentum=0.5, dampening=0.1, maximize=True, foreach=False
    ),
    "SGD fused": lambda p: optim.SGD(p, lr=0.05, momentum=0.9, fused=True),
    "Adam amsgrad foreach": lambda p: optim.Adam(
        p, lr=0.01, amsgrad=True, weight_decay=0.1, foreach=True
    ),
    "Adam fused maximize": lambda p: optim.Adam(p, lr=0.01, fused=True, maximize=True),
    "Adam tensor lr": lambda p: optim.Adam(p, lr=torch.tensor(0.01), foreach=False),
    "AdamW": lambda p: optim.AdamW(p, lr=0.01, weight_decay=0.1),
    "AdamW fused": lambda p: optim.AdamW(p, lr=0.01, weight_decay=0.1, fused=True),
    "RMSprop": lambda p: optim.RMSprop(p, lr=0.01, momentum=0.5, centered=True),
    "Adagrad": lambda p: optim.Adagrad(p, lr=0.05, lr_decay=0.1),
    "NAdam": lambda p: optim.NAdam(p, lr=0.01, decoupled_weight_decay=True, weight_decay=0.1),
    "RAdam": lambda p: optim.RAdam(p, lr=0.01),
    "Adadelta": lambda p: optim.Adadelta(p, lr=1.0),
    "Adamax": lambda p: optim.Adamax(p, lr=0.01),
    "ASGD": lambda p: optim.ASGD(p, lr=0.05, t0=2),
    "Rprop": lambda p: optim.Rprop(p, lr=0.01),
    "Adafactor": lambda p: optim.Adafactor(p, lr=0.05),
    "Muon": lambda p: optim.Muon(p, lr=0.02),
}
# PyTorch 2.1 does not have Adafactor, Muon and fused steps on the CPU.
OPTIMIZERS = {
    k: v
    for k, v in OPTIMIZERS.items()
    if hasattr(optim, k.split()[0]) and (HAS_FUSED or "fused" not in k)
}


def network(seed: int = 1) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Linear(6, 10), nn.Tanh(), nn.Linear(10, 8), nn.Tanh(), nn.Linear(8, 3)
    ).double()


def joined(step: int, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.randn(
        size * BATCH, 6, generator=torch.Generator().manual_seed(step), dtype=torch.float64
    )
    return x, torch.sin(x @ torch.ones(6, 3, dtype=torch.float64))


def loss_of(model: nn.Module, step: int, size: int, mine: slice = slice(None)) -> torch.Tensor:
    x, y = joined(step, size)
    return (model(x[mine]) - y[mine]).pow(2).mean()


def shard() -> slice:
    return slice(bps.rank() * BATCH, (bps.rank() + 1) * BATCH)


def weights(model: nn.Module) -> list[torch.Tensor]:
    return [p.detach().clone() for p in model.parameters()]


def chosen(model: nn.Module, name: str) -> list[nn.Parameter]:
    return [p for p in model.parameters() if p.dim() == 2 or WEIGHTS_ONLY not in name]


Distribute = Callable[[torch.optim.Optimizer, nn.Module], Any]
Story = Callable[[int, slice, Distribute], list[torch.Tensor]]


def plainly(optimizer: torch.optim.Optimizer, model: nn.Module) -> Any:
    return optimizer


def distributed(optimizer: torch.optim.Optimizer, model: nn.Module) -> Any:
    return bps.DistributedOptimizer(optimizer, model.named_parameters())


# ---- scenarios, run by one process on the joined batch and by workers on their parts


def each_optimizer(name: str) -> Story:
    def story(size: int, mine: slice, distribute: Distribute) -> list[torch.Tensor]:
        model = network()
        optimizer = distribute(OPTIMIZERS[name](chosen(model, name)), model)
        for step in range(STEPS):
            optimizer.zero_grad()
            loss_of(model, step, size, mine).backward()
            optimizer.step()
        return weights(model)

    return story


def groups_come_and_thaw(size: int, mine: slice, distribute: Distribute) -> list[torch.Tensor]:
    """Two groups and a third added later, layers frozen and unfrozen, a cosine schedule, and
    closures in every other step.
    """
    model = network()
    model[2].requires_grad_(False)
    base = optim.SGD(
        [
            {"params": model[0].weight, "lr": 0.1},
            {"params": model[2].parameters(), "momentum": 0.5},
        ],
        lr=0.05,
    )
    optimizer = distribute(base, model)
    schedule = optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)
    for step in range(8):
        if step == 2:
            optimizer.add_param_group(
                {"params": list(model[4].parameters()), "lr": 0.02, "momentum": 0.9}
            )
            schedule.base_lrs.append(0.02)
        if step in (3, 6):
            model[2].requires_grad_(step == 3)
        if step == 5:
            model[4].weight.requires_grad_(False)
            model[4].weight.grad = None

        def closure(step: int = step) -> torch.Tensor:
            optimizer.zero_grad()
            loss = loss_of(model, step, size, mine)
            loss.backward()
            return loss

        if step % 2:
            optimizer.step(closure)
        else:
            closure()
            optimizer.step()
        if step < 2:
            schedule.step()
    return weights(model)


class Shared(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.a, self.b, self.last = (
            nn.Linear(6, 6).double(),
            nn.Linear(6, 6).double(),
            nn.Linear(6, 3).double(),
        )
        self.b.weight = self.a.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.last(self.b(torch.tanh(self.a(x))))
        return out


def shared_parameters(size: int, mine: slice, distribute: Distribute) -> list[torch.Tensor]:
    model = Shared()
    optimizer = distribute(optim.AdamW(model.parameters(), lr=0.02), model)
    for step in range(STEPS):
        optimizer.zero_grad(set_to_none=bool(step % 2))
        loss_of(model, step, size, mine).backward()
        optimizer.step()
    return weights(model)


def storage_moves(size: int, mine: slice, distribute: Distribute) -> list[torch.Tensor]:
    """Parameters and gradients get new memory between steps."""
    model = network()
    optimizer = distribute(optim.SGD(model.parameters(), lr=0.05), model)
    for step in range(6):
        if step != 3:
            optimizer.zero_grad(set_to_none=step == 2)
        if step == 1:
            for p in model.parameters():
                p.data = p.data.clone()
        if step == 3:
            for p in model.parameters():
                p.grad = (
                    torch.zeros_like(p).t().contiguous().t()
                    if p.dim() == 2
                    else torch.zeros_like(p)
                )
        if step == 4:
            for p in model.parameters():
                assert p.grad is not None
                p.grad.set_(torch.zeros_like(p))
        if step == 5:
            for p in model.parameters():
                assert p.grad is not None
                p.grad.resize_(0).resize_(p.shape).zero_()
        loss_of(model, step, size, mine).backward()
        optimizer.step()
    return weights(model)


STORIES: dict[str, Story] = {
    **{name: each_optimizer(name) for name in OPTIMIZERS},
    "groups": groups_come_and_thaw,
    "shared": shared_parameters,
    "storage": storage_moves,
}


def frozen_after_backward(size: int, mine: slice, distribute: Distribute) -> list[torch.Tensor]:
    """Freeze between backward and step, on all workers, for one step; the exchanged gradient still
    counts.
    """
    model = network()
    optimizer = distribute(optim.SGD(model.parameters(), lr=0.05, momentum=0.9), model)
    for step in range(STEPS):
        loss_of(model, step, size, mine).backward()
        model[0].requires_grad_(step not in (1, 3))
        optimizer.step()
        optimizer.zero_grad()
        model[0].requires_grad_()
    applied(optimizer)
    return weights(model)


def unused_and_zeroed(size: int, mine: slice, distribute: Distribute) -> list[torch.Tensor]:
    """A part of the model that no worker uses has no gradient, so momentum must not move it.

    That holds with and without zero_grad(set_to_none=False).
    """
    model = network()
    optimizer = distribute(optim.Adam(model.parameters(), lr=0.02), model)
    for step in range(STEPS):
        x, y = joined(step, size)
        hidden = model[1](model[0](x[mine]))
        out = model[4](model[3](model[2](hidden))) if step in (0, 3) else hidden[:, :3]
        (out - y[mine]).pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=step in (0, 3))
    applied(optimizer)
    return weights(model)


def applied(optimizer: Any) -> None:
    """Apply CrossBarrier's update, which would otherwise wait for the next forward pass."""
    if isinstance(optimizer, _CrossBarrier):
        optimizer.synchronize()


CROSSED: dict[str, Story] = {"frozen": frozen_after_backward, "unused": unused_and_zeroed}


def crossed(optimizer: torch.optim.Optimizer, model: nn.Module) -> Any:
    return CrossBarrier(model, optimizer, model.named_parameters(prefix="crossed"))


def job_crossed() -> Any:
    return {
        (name, distribute): story(bps.size(), shard(), globals()[distribute])
        for name, story in CROSSED.items()
        for distribute in ("distributed", "crossed")
    }


def job_stories() -> Any:
    return {name: story(bps.size(), shard(), distributed) for name, story in STORIES.items()}


def job_passes() -> Any:
    """Change the number of passes during training."""
    model = network()
    optimizer = distributed(optim.SGD(model.parameters(), lr=0.05, momentum=0.9), model)
    for step in range(6):
        passes = [1, 1, 2, 2, 4, 1][step]
        if step in (2, 4, 5):
            optimizer.set_backward_passes_per_step(passes)
        optimizer.zero_grad()
        begin = shard().start
        for part in range(passes):
            rows = BATCH // passes
            (
                loss_of(
                    model, step, bps.size(), slice(begin + part * rows, begin + (part + 1) * rows)
                )
                / passes
            ).backward()
        optimizer.step()
    return weights(model)


def steps(model: nn.Module, optimizer: Any, first: int, last: int) -> None:
    for step in range(first, last):
        optimizer.zero_grad()
        loss_of(model, step, bps.size(), shard()).backward()
        optimizer.step()


def job_checkpoint() -> Any:
    """Continue from worker 0's checkpoint with new optimizers.

    Either worker 0 reads the checkpoint and broadcasts it, or all workers read it.
    """
    model = network()
    optimizer = distributed(optim.Adam(model.parameters(), lr=0.02), model)
    steps(model, optimizer, 0, 3)
    stream = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, stream)
    saved = bps.broadcast_object(stream.getvalue() if bps.rank() == 0 else None)
    steps(model, optimizer, 3, 6)
    found = [weights(model)]
    for everybody in (False, True):
        del optimizer
        model = network(seed=7 + bps.rank())
        optimizer = distributed(optim.Adam(model.parameters(), lr=0.5), model)
        if everybody or bps.rank() == 0:
            read = torch.load(io.BytesIO(saved), weights_only=True)
            model.load_state_dict(read["model"])
            optimizer.load_state_dict(read["optimizer"])
        if not everybody:
            bps.broadcast_parameters(model.state_dict(), root_rank=0)
            bps.broadcast_optimizer_state(optimizer, root_rank=0)
        steps(model, optimizer, 3, 6)
        found.append(weights(model))
    return found


def job_layouts() -> Any:
    """Workers may have different strides for the same tensor, because elements travel in logical
    order.

    A result keeps the layout of its input.
    """
    rank, found = bps.rank(), []
    x = torch.arange(2 * 3 * 4 * 4.0).reshape(2, 3, 4, 4)
    mine = x.to(memory_format=torch.channels_last) if rank % 2 else x.clone()
    result = bps.push_pull(mine, average=False, name="layouts")
    assert result.stride() == mine.stride() and torch.equal(result, x * bps.size())
    conv = nn.Conv2d(3, 5, 3).double()
    torch.manual_seed(3)
    conv.weight.data.normal_()
    conv.bias.data.zero_()  # type: ignore[union-attr]
    if rank % 2:
        conv = conv.to(memory_format=torch.channels_last)
    optimizer = distributed(optim.SGD(conv.parameters(), lr=0.1), conv)
    for step in range(3):
        optimizer.zero_grad()
        conv(
            torch.randn(
                2,
                3,
                6,
                6,
                generator=torch.Generator().manual_seed(10 * step + rank),
                dtype=torch.float64,
            )
        ).pow(2).mean().backward()
        optimizer.step()
    found += weights(conv)
    for shape in ((), (0,), (3, 0)):
        assert (
            bps.push_pull(torch.ones(shape, dtype=torch.bfloat16), average=False).tolist()
            == (torch.ones(shape) * bps.size()).tolist()
        )
    return found


def _frozen_somewhere(kind: str, when: int) -> tuple[str, list[torch.Tensor]]:
    """Freeze a parameter on the last worker in step ``when``.

    Returns the errors of all workers, and the weights after they have continued together.
    """
    torch.manual_seed(8)
    model: Any = nn.ModuleDict(
        {"table": nn.Embedding(5, 4, sparse=kind == "sparse"), "out": nn.Linear(4, 2)}
    ).double()
    names = [(f"{kind}.{when}.{n}", p) for n, p in model.named_parameters()]
    plain, inner = optim.SGD(model.parameters(), lr=0.1), model
    if kind == "ddp":
        inner.forward = lambda rows: inner.out(inner.table(rows))
        model, optimizer = DistributedDataParallel(inner), plain
    else:
        optimizer = (
            CrossBarrier(model, plain, names)
            if kind == "crossed"
            else bps.DistributedOptimizer(plain, names)
        )
        model = lambda rows: inner.out(inner.table(rows))  # noqa: E731
    said = ""
    for step in range(4):
        inner.table.weight.requires_grad_(not (step == when and bps.rank() == bps.size() - 1))
        optimizer.zero_grad()
        try:
            model(torch.tensor([bps.rank(), 4])).pow(2).sum().backward()
            optimizer.step()
            applied(optimizer)
        except MismatchError as e:
            said += str(e)
    return said, weights(inner)


def job_frozen_somewhere() -> Any:
    return {(kind, when): _frozen_somewhere(kind, when) for kind in FROZEN for when in (0, 2)}


FROZEN = ["optimizer", "sparse", "crossed", "ddp"]
JOBS = [
    "job_frozen_somewhere",
    "job_stories",
    "job_crossed",
    "job_passes",
    "job_checkpoint",
    "job_layouts",
]


@pytest.fixture(scope="module", params=[4], ids="{} workers".format)
def job(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Finished:
    finished = run_job(__file__, JOBS, tmp_path_factory, request.param)
    assert finished.status == 0, finished.output[-5000:]
    return finished


def assert_all_close(
    found: list[list[torch.Tensor]], expected: list[torch.Tensor], near: float = 1e-11
) -> None:
    for mine in found:
        torch.testing.assert_close(mine, expected, rtol=near, atol=near)
        assert all(torch.equal(a, b) for a, b in zip(mine, found[0])), (
            "the same bits on all workers"
        )


@pytest.mark.filterwarnings("ignore:grad and param do not obey the gradient layout contract")
@pytest.mark.parametrize("story", STORIES)
def test_equals_one_process_on_the_joined_batch(job: Finished, story: str) -> None:
    """Muon orthogonalises in bfloat16, which enlarges a difference in the last bit."""
    size = len(job.results)
    expected = STORIES[story](size, slice(None), plainly)
    assert_all_close(
        [job.results[r]["job_stories"][story] for r in range(size)],
        expected,
        5e-3 if story == "Muon" else 1e-9 if story == "Adadelta" else 1e-11,
    )


@pytest.mark.parametrize("distribute", ["distributed", "crossed"])
@pytest.mark.parametrize("story", CROSSED)
def test_scenarios_across_the_barrier_equal_one_process(
    job: Finished, story: str, distribute: str
) -> None:
    expected = CROSSED[story](len(job.results), slice(None), plainly)
    assert_all_close([found[story, distribute] for found in each(job, "job_crossed")], expected)


def test_the_number_of_passes_may_change(job: Finished) -> None:
    size, model = len(job.results), network()
    optimizer = optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for step in range(6):
        optimizer.zero_grad()
        loss_of(model, step, size).backward()
        optimizer.step()
    assert_all_close([r["job_passes"] for r in job.results.values()], weights(model))


@pytest.mark.parametrize("read_by", ["worker 0", "all"])
def test_checkpoint_and_resume(job: Finished, read_by: str) -> None:
    through = job.results[0]["job_checkpoint"][0]
    assert_all_close(
        [r["job_checkpoint"][2 if read_by == "all" else 1] for r in job.results.values()], through
    )


@pytest.mark.parametrize("when", [0, 2])
@pytest.mark.parametrize("kind", FROZEN)
def test_a_parameter_that_is_frozen_on_one_worker_only(job: Finished, kind: str, when: int) -> None:
    told = [found[kind, when] for found in each(job, "job_frozen_somewhere")]
    for said, mine in told:
        assert (
            f"table.weight' is trained on {len(told) - 1} workers and frozen (requires_grad=False)"
            " on 1" in said
        )
        assert all(map(torch.equal, mine, told[0][1])), "the same bits on all workers"


def test_a_convolution_trains_as_in_one_process(job: Finished) -> None:
    size = len(job.results)
    torch.manual_seed(3)
    conv = nn.Conv2d(3, 5, 3).double()
    torch.manual_seed(3)
    conv.weight.data.normal_()
    conv.bias.data.zero_()  # type: ignore[union-attr]
    optimizer = optim.SGD(conv.parameters(), lr=0.1)
    for step in range(3):
        optimizer.zero_grad()
        x = torch.cat(
            [
                torch.randn(
                    2,
                    3,
                    6,
                    6,
                    generator=torch.Generator().manual_seed(10 * step + r),
                    dtype=torch.float64,
                )
                for r in range(size)
            ]
        )
        conv(x).pow(2).mean().backward()
        optimizer.step()
    assert_all_close([r["job_layouts"] for r in job.results.values()], weights(conv))
