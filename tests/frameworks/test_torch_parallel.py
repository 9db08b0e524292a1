"""bpsx.torch.parallel.DistributedDataParallel: ``backward()`` leaves the gradients of the joined
batch in ``grad``.

Functions named ``job_*`` run in the workers. In float64 only the order of additions differs from
one process, hence 1e-11.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import bpsx.torch as bps
from bpsx.errors import BpsxError, ConfigError
from bpsx.plugin import adapter
from bpsx.torch.parallel import DistributedDataParallel
from support.torch_job import Finished, each, run_job

STEPS, BATCH = 6, 4  # BATCH: rows per worker
#: One worker's part of a step: called with (model, its rows, its targets, worker, step), runs
#: backward.
Part = Callable[[nn.Module, torch.Tensor, torch.Tensor, int, int], None]


class Branches(nn.Module):
    """Model with a trunk used twice, tied weights, a frozen layer, two heads and an unused layer.

    Each batch uses one of the heads.
    """

    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.frozen, self.nobody = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6)
        self.heads = nn.ModuleList(nn.Linear(6, 3) for _ in range(2))
        self.tied = nn.Linear(6, 6)
        self.tied.weight = self.trunk.weight
        self.frozen.requires_grad_(False)

    def forward(self, x: torch.Tensor, head: int) -> torch.Tensor:
        out: torch.Tensor = self.heads[head](
            self.tied(torch.tanh(self.trunk(self.trunk(self.frozen(x)))))
        )
        return out


class Checkpointed(nn.Module):
    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.first, self.middle, self.last = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 3)
        self.reentrant = reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.first(x)
        hidden = checkpoint(
            lambda h: torch.tanh(self.middle(h)), hidden, use_reentrant=self.reentrant
        )
        out: torch.Tensor = checkpoint(self.last, hidden, use_reentrant=self.reentrant)
        return out


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 20), nn.Tanh(), nn.Linear(20, 3))


def rows(step: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return worker ``rank``'s part of a step's batch."""
    source = torch.Generator().manual_seed(1000 * rank + step)
    x = torch.randn(BATCH, 6, generator=source, dtype=torch.float64)
    return x, torch.sin(x @ torch.ones(6, 3, dtype=torch.float64))


def mean_square(model: nn.Module, x: torch.Tensor, y: torch.Tensor, rank: int, step: int) -> None:
    (model(x) - y).pow(2).mean().backward()


def branches(model: nn.Module, x: torch.Tensor, y: torch.Tensor, rank: int, step: int) -> None:
    """All workers use head 0, or one of them uses the other head."""
    (model(x, int(step % 2 == 1 and rank == step // 2 % 2)) - y).pow(2).mean().backward()


def two_forwards(model: nn.Module, x: torch.Tensor, y: torch.Tensor, rank: int, step: int) -> None:
    a, b = model(x[:2]), model(x[2:])
    ((a - y[:2]).pow(2).mean() + (b - y[2:]).pow(2).mean()).backward()


def two_passes(model: nn.Module, x: torch.Tensor, y: torch.Tensor, rank: int, step: int) -> None:
    """Call backward twice on one graph: each pass exchanges, and the second adds to the first's
    average.
    """
    loss = (model(x) - y).pow(2).mean()
    loss.backward(retain_graph=True)
    loss.backward()


def penalty(model: nn.Module, x: torch.Tensor, y: torch.Tensor, rank: int, step: int) -> None:
    """autograd.grad() does not exchange gradients; backward through its result does."""
    x = x.clone().requires_grad_()
    out = model(x)
    (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)
    ((out - y).pow(2).mean() + slope.pow(2).mean()).backward()


MODELS: dict[str, tuple[Callable[[], nn.Module], Part]] = {
    "plain": (network, mean_square),
    "branches": (Branches, branches),
    "two forwards": (network, two_forwards),
    "two passes": (network, two_passes),
    "gradient penalty": (network, penalty),
    "checkpointed": (lambda: Checkpointed(False), mean_square),
    "reentrant": (lambda: Checkpointed(True), mean_square),
    "compiled": (lambda: torch.compile(network(), backend="aot_eager"), mean_square),
}
MAKERS: dict[str, Any] = dict.fromkeys(
    ("plain", "compiled"), lambda p: torch.optim.Adam(p, lr=0.01)
)


def made(name: str, seed: int = 1) -> nn.Module:
    torch.manual_seed(seed)
    return MODELS[name][0]().to(torch.float64)


def optimizer_for(name: str, model: nn.Module) -> torch.optim.Optimizer:
    make = MAKERS.get(name, lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9))
    return make(p for p in model.parameters() if p.requires_grad)


def found_in(model: nn.Module) -> list[torch.Tensor | None]:
    """Return the weights, then the gradients."""
    both = [*model.parameters(), *(p.grad for p in model.parameters())]
    return [None if t is None else t.detach().clone() for t in both]


def same_bits(a: list[torch.Tensor | None], b: list[torch.Tensor | None]) -> bool:
    return all(
        x is y
        or x is not None
        and y is not None
        and torch.equal(x.view(torch.uint8), y.view(torch.uint8))
        for x, y in zip(a, b, strict=True)
    )


# ---- run in the workers


def job_compiled() -> Any:
    return job_models("compiled")


def job_models(*names: str) -> Any:
    found = {}
    for name in names or [n for n in MODELS if n != "compiled"]:
        part = MODELS[name][1]
        model = DistributedDataParallel(
            made(name, seed=1 + bps.rank())
        )  # the seeds differ, so the constructor must broadcast
        optimizer = optimizer_for(name, model)
        for step in range(STEPS):
            optimizer.zero_grad()
            part(model, *rows(step, bps.rank()), bps.rank(), step)
            optimizer.step()
        found[name] = found_in(model)
    return found


def job_no_sync() -> Any:
    """Two local passes, then one that exchanges; the branches differ by worker and pass."""
    model = DistributedDataParallel(made("branches"))
    optimizer = optimizer_for("branches", model)
    for step in range(STEPS):
        optimizer.zero_grad()
        with model.no_sync():
            for inner in range(2):
                branches(model, *rows(100 * inner + step, bps.rank()), bps.rank(), step + inner)
        branches(model, *rows(step, bps.rank()), bps.rank(), step)
        optimizer.step()
    return found_in(model)


def job_several() -> Any:
    """Two models in one loss, in opposite orders on the workers.

    Then workers that use one model, none, or part of them.
    """
    a, b = DistributedDataParallel(made("plain")), DistributedDataParallel(made("plain", 7))
    rank, found = bps.rank(), []
    for step in range(STEPS):
        for p in [*a.parameters(), *b.parameters()]:
            p.grad = None
        x, y = rows(step, rank)
        losses = [(m(x) - y).pow(2).mean() for m in ((a, b) if rank % 2 else (b, a))]
        sum(losses).backward()
        found.append([*found_in(a), *found_in(b)])
    for p in a.parameters():
        p.grad = None
    loss = (a(x) - y).pow(2).mean()
    if rank == 0:
        loss.backward()
    else:
        a.synchronize()  # this worker's loss does not use the model
    a.synchronize()  # a repeated call does nothing
    found.append(found_in(a))
    return found


class Through(nn.Module):
    """Output depends on the input's gradient, and on the parameter only on request."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(3, dtype=torch.float64))

    def forward(self, x: torch.Tensor, use: bool) -> dict[str, Any]:
        return {"deep": [x * 2 * self.scale if use else x * 2]}


def job_uses_nothing() -> Any:
    """All workers run backward through a model, but worker 0 uses none of its parameters."""
    model = DistributedDataParallel(Through())
    found = []
    for use in (bps.rank() != 0, False):
        model.module.scale.grad = None
        x = torch.ones(3, dtype=torch.float64, requires_grad=True)
        model(x, use)["deep"][0].sum().backward()
        found.append(model.module.scale.grad)
    return found


class Buffered(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.last = nn.BatchNorm1d(6), nn.Linear(6, 3)
        self.register_buffer("mask", torch.full((6,), 1.0 + bps.rank(), dtype=torch.float64))
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen += 1 + bps.rank()
        out: torch.Tensor = self.last(self.norm(x) * self.mask)
        return out


def job_buffers() -> Any:
    """Buffers are worker 0's before each forward pass, but not in eval and no_sync.

    Includes a forward pass of the inner module, and two forward passes before backward.
    """
    torch.manual_seed(3)
    model = DistributedDataParallel(Buffered().double())
    found: dict[str, Any] = {"mask": model.module.mask.clone()}
    for step in range(3):
        x, y = rows(step, bps.rank())
        ((model(x) - y).pow(2).mean() + (model(x) - y).pow(2).mean()).backward()
    found["seen"] = int(model.module.seen)
    model.module.norm.running_mean.fill_(bps.rank())
    model.eval()
    with torch.no_grad():
        model(x)
    model.train()
    with model.no_sync():
        model(x)
    found["mine"] = int(model.module.seen)
    model(x)
    found["mean"], found["seen again"] = (
        model.module.norm.running_mean.clone(),
        int(model.module.seen),
    )
    still = DistributedDataParallel(Buffered().double(), broadcast_buffers=False)
    still(x)
    found["not broadcast"] = int(still.module.seen)
    return found


def job_checkpoint() -> Any:
    """Load the state into new objects halfway: training continues unchanged."""
    model = DistributedDataParallel(made("plain", seed=1 + bps.rank()))
    optimizer = optimizer_for("plain", model)
    for step in range(STEPS):
        if step == STEPS // 2:
            state, inner, optim = copy.deepcopy(
                (model.state_dict(), model.module.state_dict(), optimizer.state_dict())
            )
            assert list(state) == [f"module.{k}" for k in inner]
            model = DistributedDataParallel(made("plain", seed=5))
            model.load_state_dict(state)
            optimizer = optimizer_for("plain", model)
            optimizer.load_state_dict(optim)
        optimizer.zero_grad()
        mean_square(model, *rows(step, bps.rank()), bps.rank(), step)
        optimizer.step()
    return found_in(model)


def job_fp16() -> Any:
    model = DistributedDataParallel(made("plain"), compression=bps.Compression.fp16)
    mean_square(model, *rows(0, bps.rank()), bps.rank(), 0)
    return found_in(model)


def _raised(act: Callable[[], Any]) -> str:
    try:
        act()
    except (BpsxError, TypeError, ValueError) as e:
        return f"{type(e).__name__}: {e}"
    return "nothing"


def job_failed_pass() -> Any:
    """backward fails on worker 0 after gradients have been sent.

    Worker 0 gets an error, takes part with synchronize(), and training continues.
    """
    model = DistributedDataParallel(made("plain"))
    x, y = rows(0, bps.rank())
    failing = model.module[0].weight.register_hook(lambda g: 1 / 0) if bps.rank() == 0 else None
    said = []
    if failing is not None:
        try:
            mean_square(model, x, y, 0, 0)
        except ZeroDivisionError:
            said.append("ZeroDivisionError")
        failing.remove()
        said.append(_raised(lambda: model(x)))
        model.synchronize()
    else:
        mean_square(model, x, y, 0, 0)
    first = found_in(model)
    for p in model.parameters():
        p.grad = None
    mean_square(model, x, y, 0, 0)
    return said, first, found_in(model)


def job_refused() -> Any:
    model, refused = network(), []
    for options in (
        {"device_ids": [0]},
        {"process_group": object()},
        {"output_device": 0},
        {"dim": 1},
        {"no_such": 1},
        {"broadcast_buffers": "no"},
        {"init_sync": "no"},
    ):
        refused.append(_raised(lambda options=options: DistributedDataParallel(model, **options)))
    refused += [
        _raised(lambda given=given: DistributedDataParallel(given))
        for given in (3, network().requires_grad_(False))
    ]
    fine = DistributedDataParallel(
        model,
        None,
        True,
        bps.Compression.none,
        find_unused_parameters=True,
        gradient_as_bucket_view=True,
        static_graph=False,
        bucket_cap_mb=25,
        output_device=None,
        process_group=None,
    )
    refused.append(_raised(lambda: copy.deepcopy(fine)))
    return refused, copy.deepcopy(fine.module)(torch.ones(1, 6)).shape


def job_worker_dies() -> Any:
    model = DistributedDataParallel(made("plain"))
    mean_square(model, *rows(0, bps.rank()), bps.rank(), 0)
    if bps.rank() == 1:
        os._exit(3)
    return _raised(lambda: mean_square(model, *rows(1, bps.rank()), bps.rank(), 1))


# ---- the same in one process


def alone(
    name: str, size: int, passes: Callable[[nn.Module, int, int], None]
) -> list[torch.Tensor | None]:
    """Run the same steps with the averaged gradients of all workers' parts."""
    model = made(name)
    optimizer = optimizer_for(name, model)
    for step in range(STEPS):
        optimizer.zero_grad()
        for rank in range(size):
            passes(model, rank, step)
        for p in model.parameters():
            if p.grad is not None:
                p.grad /= size
        optimizer.step()
    return found_in(model)


def joined(model: nn.Module, size: int) -> nn.Module:
    """Return ``model`` with the gradients of the first step's joined batch."""
    for rank in range(size):
        x, y = rows(0, rank)
        ((model(x) - y).pow(2).mean() / size).backward()
    return model


def assert_close(ours: list[Any], expected: list[Any]) -> None:
    assert [t is None for t in ours] == [t is None for t in expected]
    for a, b in zip(ours, expected, strict=True):
        if a is not None:
            torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-11)


# ---- tests

JOBS = [
    "job_models",
    "job_no_sync",
    "job_several",
    "job_uses_nothing",
    "job_buffers",
    "job_checkpoint",
    "job_fp16",
    "job_failed_pass",
    "job_refused",
]


@pytest.fixture(scope="module", params=[(2, 1), (4, 2)], ids=["2 workers", "4 workers"])
def job(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Finished:
    workers, servers = request.param
    # torch.compile takes seconds to import, so only one job uses it.
    finished = run_job(
        __file__, JOBS + ["job_compiled"] * (workers == 2), tmp_path_factory, workers, servers
    )
    assert finished.status == 0, finished.output[-5000:]
    assert sorted(finished.results) == list(range(workers))
    return finished


@pytest.mark.parametrize("name", MODELS)
def test_equals_one_process_on_the_joined_batch(job: Finished, name: str) -> None:
    part = MODELS[name][1]
    if name == "compiled":
        if len(job.results) > 2:
            pytest.skip("compiled in the job of two")
        # The compiled module computes the same as the plain one.
        expected = alone(
            "plain", 2, lambda model, rank, step: part(model, *rows(step, rank), rank, step)
        )
        found = [f[name] for f in each(job, "job_compiled")]
    else:
        expected = alone(
            name,
            len(job.results),
            lambda model, rank, step: part(model, *rows(step, rank), rank, step),
        )
        found = [f[name] for f in each(job, "job_models")]
    for ours in found:
        assert_close(ours, expected)
        assert same_bits(ours, found[0])


def test_no_sync_adds_up_and_the_next_pass_exchanges(job: Finished) -> None:
    def passes(model: nn.Module, rank: int, step: int) -> None:
        for inner in range(2):
            branches(model, *rows(100 * inner + step, rank), rank, step + inner)
        branches(model, *rows(step, rank), rank, step)

    found = each(job, "job_no_sync")
    expected = alone("branches", len(found), passes)
    for ours in found:
        assert_close(ours, expected)
        assert same_bits(ours, found[0])


def test_several_models_and_a_worker_without_a_backward_pass(job: Finished) -> None:
    found = each(job, "job_several")
    for step in range(STEPS):
        expected: list[Any] = []
        for seed in (1, 7):
            model = made("plain", seed)
            for rank in range(len(found)):
                x, y = rows(step, rank)
                ((model(x) - y).pow(2).mean() / len(found)).backward()
            expected += found_in(model)
        for ours in found:
            assert_close(ours[step], expected)
            assert same_bits(ours[step], found[0][step])
    model = made("plain")
    x, y = rows(STEPS - 1, 0)
    ((model(x) - y).pow(2).mean() / len(found)).backward()
    for ours in found:
        assert_close(ours[-1], found_in(model))


def test_a_pass_that_uses_no_parameter(job: Finished) -> None:
    found = each(job, "job_uses_nothing")
    share = 2 * (len(found) - 1) / len(found)
    for used, unused in found:
        assert used.tolist() == pytest.approx([share] * 3) and unused is None


def test_buffers(job: Finished) -> None:
    found = each(job, "job_buffers")
    for rank, f in enumerate(found):
        assert f["mask"].tolist() == [1.0] * 6  # worker 0's, from construction
        assert f["seen"] == 5 + 1 + rank  # worker 0's 5, plus the worker's own forward pass
        assert f["mine"] == f["seen"] + 2 * (1 + rank)
        assert f["seen again"] == 8 + 1 + rank
        assert f["not broadcast"] == 1 + rank
    x, _ = rows(
        2, 0
    )  # worker 0's running mean after one forward pass in no_sync, then each worker's own
    mean = 0.9 * (0.1 * x.mean(0))
    for rank, f in enumerate(found):
        torch.testing.assert_close(f["mean"], mean + 0.1 * rows(2, rank)[0].mean(0))


def test_checkpoint_and_resume(job: Finished) -> None:
    found = each(job, "job_checkpoint")
    for ours in found:
        assert_close(ours, job.results[0]["job_models"]["plain"])
        assert same_bits(ours, found[0])


def test_fp16_on_the_wire(job: Finished) -> None:
    model, found = joined(made("plain"), len(job.results)), each(job, "job_fp16")
    for ours in found:
        assert same_bits(ours, found[0])
        for a, b in zip(ours, found_in(model), strict=True):
            torch.testing.assert_close(a, b, rtol=2e-3, atol=2e-3)


def test_a_pass_that_fails_half_way(job: Finished) -> None:
    said = [f[0] for f in each(job, "job_failed_pass")]
    assert said[0][0] == "ZeroDivisionError" and all(
        "GradientOrderError" in s and "synchronize()" in s for s in said[0][1:]
    )
    for which in (1, 2):
        found = [f[which] for f in each(job, "job_failed_pass")]
        assert all(same_bits(f, found[0]) for f in found)
    assert_close(
        each(job, "job_failed_pass")[0][2], found_in(joined(made("plain"), len(job.results)))
    )


def test_unsupported_arguments_are_refused_by_name(job: Finished) -> None:
    for refused, shape in each(job, "job_refused"):
        names = (
            "device_ids",
            "process_group",
            "output_device",
            "dim=1",
            "'no_such'",
            "broadcast_buffers must",
            "init_sync must",
            "is a int",
            "gradient",
            ".module",
        )
        for said, name in zip(refused, names, strict=True):
            assert name in said, said
        assert [s.split(":")[0] for s in refused] == ["ConfigError"] * 4 + ["TypeError"] + [
            "ConfigError"
        ] * 5
        assert shape == (1, 3)


def test_a_dead_worker_is_an_exception_in_backward(tmp_path: Path) -> None:
    finished = run_job(__file__, ["job_worker_dies"], tmp_path)
    said = finished.results[0]["job_worker_dies"]
    assert finished.status != 0 and said.startswith("PeerLostError") and "worker 1" in said


@pytest.mark.parametrize("asynchronous", [False, True])
def test_one_worker_works_alone_and_asynchronous_training_is_refused(
    monkeypatch: pytest.MonkeyPatch, asynchronous: bool
) -> None:
    config = SimpleNamespace(asynchronous=asynchronous, distributed=False)
    alone_here = SimpleNamespace(
        config=config, rank=0, size=1, shrinks=False, require_all=lambda what: None
    )
    monkeypatch.setattr(adapter, "session", lambda: alone_here)
    monkeypatch.setattr(bps, "rank", lambda: 0)
    if asynchronous:
        with pytest.raises(ConfigError, match="BYTEPS_ENABLE_ASYNC"):
            DistributedDataParallel(network())
        return
    part = MODELS["branches"][1]
    expected = alone(
        "branches", 1, lambda model, rank, step: part(model, *rows(step, rank), rank, step)
    )
    assert same_bits(job_models("branches")["branches"], expected)
