"""CrossBarrier gives the same weights as DistributedOptimizer, bit for bit, although it updates in
the next forward pass.

Functions named ``job_*`` run in the workers. ``BPSX_FIXED_ORDER`` makes two runs comparable with
more than two workers.
"""

from __future__ import annotations

import contextlib
import copy
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch_models import Counting

import bpsx.torch as bps
import bpsx.torch.cross_barrier as upstream
from bpsx.errors import BpsxError, ConfigError
from bpsx.plugin import adapter
from bpsx.torch.cross_barrier import CrossBarrier
from support.torch_job import Finished, each, run_job
from support.torch_release import GRADIENTS_ARE_HELD, HAS_FUSED, HAS_GRAD_SCALER, needs_grad_scaler

STEPS, BATCH = 7, 4
Make = Callable[[Any], torch.optim.Optimizer]


class Mixed(nn.Module):
    """Model with the unusual uses of parameters.

    It has attention whose output projection is never called, tied weights, a module called twice, a
    frozen one, a branch that is not always used, and a parameter of the model itself. Some
    parameters are used by another module than their owner, one of them before its owner is called.
    """

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.position = nn.Parameter(torch.zeros(5, 8))
        self.attend = nn.MultiheadAttention(8, 2, batch_first=True)
        self.norm = nn.LayerNorm(8)
        self.twice, self.frozen = nn.Linear(8, 8), nn.Linear(8, 8)
        self.side = nn.ModuleList([nn.Linear(8, 8)])
        self.direct = nn.Linear(8, 8)
        self.out = nn.Linear(8, 11, bias=False)
        self.out.weight = self.embed.weight
        self.frozen.requires_grad_(False)

    def forward(self, tokens: torch.Tensor, side: bool = False) -> torch.Tensor:
        x = self.embed(tokens) + self.position
        x = x * (1 + self.twice.bias)  # used before its module is called
        x = self.norm(x + self.attend(x, x, x, need_weights=False)[0])
        x = torch.tanh(self.frozen(self.twice(torch.tanh(self.twice(x)))))
        if side:
            x = x + self.side[0](x)
        # used without calling its module
        x = nn.functional.linear(x, self.direct.weight, self.direct.bias)
        return self.out(x)


def tokens(step: int, rank: int) -> torch.Tensor:
    return torch.randint(
        0, 11, (BATCH, 5), generator=torch.Generator().manual_seed(1000 * rank + step)
    )


def loss_of(model: nn.Module, step: int, side: bool | None = None) -> torch.Tensor:
    given = tokens(step, bps.rank())
    side = step % 3 == 1 and bps.rank() == step % 2 if side is None else side
    out = model(given, side)
    return nn.functional.cross_entropy(out.flatten(0, 1), given.flatten().roll(1))


def made(dtype: torch.dtype = torch.float64) -> Mixed:
    torch.manual_seed(4)
    return Mixed().to(dtype)


def groups_of(model: nn.Module) -> list[dict[str, Any]]:
    """Return groups with different options."""
    small = [p for p in model.parameters() if p.dim() < 2 and p.requires_grad]
    large = [p for p in model.parameters() if p.dim() >= 2 and p.requires_grad]
    return [{"params": large}, {"params": small, "weight_decay": 0.0, "lr": 0.004}]


MAKERS: dict[str, Make] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.05),
    "momentum": lambda p: torch.optim.SGD(
        p, lr=0.02, momentum=0.9, weight_decay=0.01, nesterov=True
    ),
    "adam": lambda p: torch.optim.Adam(p, lr=0.01, amsgrad=True),
    "adamw": lambda p: torch.optim.AdamW(p, lr=torch.tensor(0.01), foreach=False, weight_decay=0.1),
    "fused adamw": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
    "foreach adam": lambda p: torch.optim.Adam(p, lr=0.01, foreach=True),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.005, momentum=0.5, centered=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.02),
    "nadam": lambda p: torch.optim.NAdam(p, lr=0.005),
    "counting": lambda p: Counting(p, lr=0.5),
}
if not HAS_FUSED:
    del MAKERS["fused adamw"]


def weights(model: nn.Module) -> list[torch.Tensor]:
    return [v.clone() for v in model.state_dict().values()]


def train(
    kind: str, optimizer: Any, model: nn.Module, steps: range = range(STEPS), zero: str = "before"
) -> None:
    """Train; ``zero`` says when zero_grad() is called."""
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)
    for step in steps:
        if zero == "before":
            optimizer.zero_grad()
        loss_of(model, step).backward()
        optimizer.step()
        scheduler.step()
        if zero == "after":
            optimizer.zero_grad()
        elif zero == "in place":
            optimizer.zero_grad(set_to_none=False)
        elif zero == "model":
            model.zero_grad()


def both(
    run: Callable[[Any, nn.Module], Any], make: Make = MAKERS["momentum"], **options: Any
) -> tuple[Any, Any]:
    """Return the result of ``run``, the weights and the state, with DistributedOptimizer and with
    CrossBarrier.
    """
    found = []
    for cross in (False, True):
        model = made()
        base = make(groups_of(model))
        named = [(f"{cross}.{n}", p) for n, p in model.named_parameters()]
        optimizer: Any = (
            CrossBarrier(model, base, named, **options)
            if cross
            else bps.DistributedOptimizer(base, named, **options)
        )
        assert optimizer is base and isinstance(optimizer, type(base).__bases__[1])
        said = run(optimizer, model)
        found.append([said, weights(model), optimizer.state_dict()])
    return found[0], found[1]


def alike(a: Any, b: Any) -> bool:
    """Compare bit for bit."""
    if isinstance(a, torch.Tensor):
        return a.shape == b.shape and torch.equal(
            a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8)
        )
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(alike, a, b))
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(alike(a[k], b[k]) for k in a)
    return bool(a == b)


def outcome(
    run: Callable[[Any, nn.Module], Any], make: Make = MAKERS["momentum"], **options: Any
) -> tuple[bool, Any]:
    """Return whether both optimizers gave the same results, and the weights."""
    plain, cross = both(run, make, **options)
    return alike(plain, cross), cross[1]


# ---- run in the workers


def job_optimizers() -> Any:
    return {
        kind: outcome(lambda o, m, kind=kind: train(kind, o, m), make)
        for kind, make in MAKERS.items()
    }


def job_zero_grad() -> Any:
    return {
        zero: outcome(lambda o, m, zero=zero: train("", o, m, zero=zero))
        for zero in ("after", "in place", "never", "model")
    }


def _passes(optimizer: Any, model: nn.Module) -> None:
    for step in range(STEPS):
        optimizer.zero_grad()
        for inner in (0, 1):
            loss_of(model, step + 50 * inner).backward()
        optimizer.step()


def _looks(optimizer: Any, model: nn.Module) -> Any:
    """Read and change the whole model and optimizer between steps, on one worker only where
    allowed.

    Also evaluates the model and calls synchronize() after step().
    """
    seen: list[Any] = []
    for step in range(2 * STEPS):
        optimizer.zero_grad()
        loss_of(model, step).backward()
        if step == 3:
            optimizer.synchronize()
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            with optimizer.skip_synchronize():
                optimizer.step()
        else:
            optimizer.step()
        if step == 1 and bps.rank() == 0:
            seen.append(weights(model))
        elif step == 2:
            with torch.inference_mode(), torch.autocast("cpu", dtype=torch.bfloat16):
                seen.append(model(tokens(0, 0)).float())
        elif step == 4:
            seen.append(optimizer.state_dict())
        elif step == 10:
            plain = copy.deepcopy(optimizer)
            seen.append((type(plain).__name__, plain.state_dict()))
            assert type(plain) is type(optimizer).__bases__[1]
        elif step == 5:
            seen.append(copy.deepcopy(optimizer.state[model.position]))
        elif step == 6:
            if hasattr(optimizer, "_barrier"):
                optimizer.synchronize()
            seen.append([p.detach().clone() for p in model.parameters()])
        elif step == 7:
            for group in optimizer.param_groups:
                with torch.no_grad():
                    for p in group["params"]:
                        p.clamp_(-0.5, 0.5)
        elif step == 8:
            state = copy.deepcopy(weights(model)), optimizer.state_dict()
            model.load_state_dict(dict(zip(model.state_dict(), state[0], strict=True)))
            optimizer.load_state_dict(state[1])
        elif step == 9:
            extra = nn.Parameter(torch.ones(3, dtype=torch.float64))
            optimizer.add_param_group({"params": [extra], "lr": 0.1})
    return seen


def _closure(optimizer: Any, model: nn.Module) -> Any:
    losses = []
    for step in range(STEPS):

        def closure(step: int = step) -> torch.Tensor:
            optimizer.zero_grad()
            loss = loss_of(model, step)
            loss.backward()
            return loss

        losses.append(float(optimizer.step(closure).detach()))
    return losses


def _hooked(optimizer: Any, model: nn.Module) -> Any:
    """A step hook sees averages and the weights after the step, which cannot be deferred."""
    seen: list[Any] = []
    optimizer.register_step_pre_hook(lambda o, *_: seen.append(model.position.grad.clone()))
    optimizer.register_step_post_hook(lambda o, *_: seen.append(model.position.detach().clone()))
    train("", optimizer, model)
    return seen


def _scaled(optimizer: Any, model: nn.Module) -> Any:
    """GradScaler reads gradients before the step; an overflow skips the step on all workers."""
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2)
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = loss_of(model, step)
        scaler.scale(loss * (float("inf") if step == 3 and bps.rank() == 0 else 1.0)).backward()
        scaler.step(optimizer)
        scaler.update()
    return scaler.get_scale()


def _exception(optimizer: Any, model: nn.Module) -> None:
    """A forward pass fails on all workers, and training continues."""
    train("", optimizer, model, range(2))
    with contextlib.suppress(IndexError):
        model(torch.full((1, 5), 99))
    train("", optimizer, model, range(2, STEPS))


def _frozen(optimizer: Any, model: nn.Module) -> None:
    """A parameter that is frozen with a gradient of zeros still moves by its momentum.

    One worker reads the parameters before each step.
    """
    for step in range(STEPS):
        model.direct.requires_grad_(step not in (2, 3))
        optimizer.zero_grad(set_to_none=False)
        loss_of(model, step).backward()
        if bps.rank() == 0:
            assert optimizer.param_groups[0]["params"]
        optimizer.step()


def job_uses() -> Any:
    return {
        "frozen": outcome(_frozen),
        "passes": outcome(_passes, backward_passes_per_step=2),
        "looks": outcome(_looks, MAKERS["adam"]),
        "closure": outcome(_closure),
        "hooks": outcome(_hooked),
        "exception": outcome(_exception),
        "fp16": outcome(lambda o, m: train("", o, m), compression=bps.Compression.fp16),
        **({"scaler": outcome(_scaled)} if HAS_GRAD_SCALER else {}),
    }


def job_sparse() -> Any:
    found = []
    for cross in (False, True):
        torch.manual_seed(2)
        model = nn.Sequential(nn.Embedding(11, 8, sparse=True), nn.Linear(8, 11)).double()
        named = [(f"sparse.{cross}.{n}", p) for n, p in model.named_parameters()]
        base = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer: Any = (
            CrossBarrier(model, base, named) if cross else bps.DistributedOptimizer(base, named)
        )
        for step in range(3):
            optimizer.zero_grad()
            nn.functional.cross_entropy(
                model(tokens(step, bps.rank())).flatten(0, 1), tokens(step, bps.rank()).flatten()
            ).backward()
            optimizer.step()
        found.append(weights(model))
    return alike(*found), found[1]


def job_last_step() -> Any:
    """The last of num_steps and later steps are not deferred; earlier ones are."""
    model = made()
    optimizer: Any = CrossBarrier(
        model, MAKERS["sgd"](groups_of(model)), model.named_parameters(), num_steps=3
    )
    moved = []
    for step in range(4):
        before = [p.detach().clone() for p in model.parameters() if p.requires_grad]
        loss_of(model, step).backward()
        now = [p.detach().clone() for p in model.parameters() if p.requires_grad]
        optimizer.step()
        moved.append(
            any(
                not torch.equal(a, p)
                for a, p in zip(
                    now, (p for p in model.parameters() if p.requires_grad), strict=True
                )
            )
        )
        moved.append(any(not torch.equal(a, b) for a, b in zip(before, now, strict=True)))
    return moved


def _raised(act: Callable[[], Any]) -> str:
    try:
        act()
    except (BpsxError, TypeError, ValueError) as e:
        return f"{type(e).__name__}: {e} {getattr(e, '__notes__', '')}"
    return "nothing"


class SAM(torch.optim.SGD):
    """Optimizer that CrossBarrier rejects by its name."""


class Prodigal(torch.optim.SGD):
    """Optimizer with an option that depends on all parameters."""

    def step(self, closure: Any = None) -> Any:
        self.param_groups[0]["distance"] = float(
            sum(p.grad.sum() for p in self.param_groups[0]["params"])
        )
        return super().step(closure)


def job_refused() -> Any:
    said, model = [], made()
    ours = list(model.parameters())
    bases = {
        "SAM": SAM(ours, lr=0.1),
        "LBFGS": torch.optim.LBFGS(ours),
        "max_grad_norm": torch.optim.SGD([{"params": ours, "max_grad_norm": 1.0}], lr=0.1),
    }
    for optimizer in bases.values():
        said.append(_raised(lambda o=optimizer: CrossBarrier(model, o)))
    said.append(
        _raised(
            lambda: CrossBarrier(torch.jit.script(nn.Linear(1, 1)), torch.optim.SGD(ours, lr=0.1))
        )
    )
    said.append(_raised(lambda: CrossBarrier(model, torch.optim.SGD(ours, lr=0.1), num_steps=0)))
    for name, base in (("prodigal", Prodigal), ("unseen", torch.optim.SGD)):
        model = made()
        optimizer: Any = CrossBarrier(
            model,
            base(model.parameters(), lr=0.1),
            [(f"{name}.{n}", p) for n, p in model.named_parameters()],
        )
        assert loss_of(copy.deepcopy(model), 0, False).isfinite()
        loss_of(model, 0, False).backward()
        optimizer.step()
        if name == "prodigal":
            said.append(_raised(lambda m=model: loss_of(m, 1, False)))
        else:
            said.append(_raised(lambda m=model: copy.deepcopy(m)))
            said.append(_raised(lambda m=model: pickle.dumps(m.norm)))
            # Uses the weight in another way than the first forward pass.
            out = nn.functional.linear(
                torch.ones(2, 8, dtype=torch.float64), model.twice.weight
            ).sum()
            # Backward adds to a gradient whose average is still outstanding.
            said += [_raised(out.backward), _raised(optimizer.synchronize)]
    return said


def job_ends() -> Any:
    """Call shutdown() with updates pending: averages that have arrived are applied afterwards.

    The job's own shutdown then has nothing to do.
    """
    model, plain = made(), made()
    optimizer: Any = CrossBarrier(
        model, MAKERS["momentum"](groups_of(model)), model.named_parameters()
    )
    reference: Any = bps.DistributedOptimizer(
        MAKERS["momentum"](groups_of(plain)),
        [(f"plain.{n}", p) for n, p in plain.named_parameters()],
    )
    train("", optimizer, model, range(3))
    train("", reference, plain, range(3))
    pending = optimizer._barrier.pending
    bps.shutdown()
    held = optimizer.state_dict()
    del optimizer
    return pending, alike(held, reference.state_dict()), alike(weights(model), weights(plain))


left: Any = None


def job_left() -> None:
    """Updates that are pending at the end of the interpreter are dropped without a message."""
    global left
    model = made()
    left = (
        model,
        CrossBarrier(
            model,
            MAKERS["momentum"](groups_of(model)),
            [(f"left.{n}", p) for n, p in model.named_parameters()],
        ),
    )
    train("", left[1], model, range(2))
    assert left[1]._barrier.pending


def job_dropped() -> Any:
    """Delete the optimizer while its last update is pending; another one then takes over the same
    model and names.
    """
    model, plain = made(), made()
    for which, name in ((model, "x"), (plain, "y")):
        for turn in range(2):
            base = MAKERS["momentum"](groups_of(which))
            named = [(f"{name}.{n}", p) for n, p in which.named_parameters()]
            optimizer: Any = (
                CrossBarrier(which, base, named)
                if name == "x"
                else bps.DistributedOptimizer(base, named)
            )
            train("", optimizer, which, range(2 * turn, 2 * turn + 2))
            del optimizer, base
            if turn:
                which(tokens(0, 0))
            else:
                weights(which)
            which.zero_grad()
    assert not any(m._forward_pre_hooks for m in model.modules())
    return alike(weights(model), weights(plain))


def job_dies() -> Any:
    model = made()
    optimizer: Any = CrossBarrier(
        model, MAKERS["momentum"](groups_of(model)), model.named_parameters()
    )
    train("", optimizer, model, range(2))
    if bps.rank() == 1:
        os._exit(3)
    optimizer.zero_grad()
    # The error comes in a forward pass, because the next step() waits for nothing.
    said = [_raised(lambda: train("", optimizer, model, range(2, 4)))]
    return said, len(weights(model))


# ---- tests

JOBS = [
    "job_optimizers",
    "job_zero_grad",
    "job_uses",
    "job_sparse",
    "job_last_step",
    "job_refused",
    "job_dropped",
    "job_left",
    "job_ends",
]


@pytest.fixture(scope="module", params=[(2, 1, 1), (4, 2, 1)], ids=["2 workers", "4 workers"])
def job(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Finished:
    machines, servers, processes = request.param
    finished = run_job(
        __file__, JOBS, tmp_path_factory, machines, servers, processes, BPSX_FIXED_ORDER="1"
    )
    assert finished.status == 0 and "excepthook" not in finished.output, finished.output[-5000:]
    assert sorted(finished.results) == list(range(machines * processes))
    return finished


def assert_as_distributed_optimizer(job: Finished, name: str, case: str) -> None:
    found = [f[case] for f in each(job, name)]
    for same, mine in found:
        assert same, "differs from DistributedOptimizer"
        assert alike(mine, found[0][1]), "differs between workers"


@pytest.mark.parametrize("kind", MAKERS)
def test_every_optimizer_ends_as_with_distributed_optimizer(job: Finished, kind: str) -> None:
    assert_as_distributed_optimizer(job, "job_optimizers", kind)


@pytest.mark.parametrize("zero", ["after", "in place", "never", "model"])
def test_gradients_may_be_zeroed_at_any_time_or_not_at_all(job: Finished, zero: str) -> None:
    assert_as_distributed_optimizer(job, "job_zero_grad", zero)


@pytest.mark.parametrize(
    "case",
    [
        "frozen",
        "passes",
        "looks",
        "closure",
        "hooks",
        pytest.param("scaler", marks=needs_grad_scaler),
        "exception",
        "fp16",
    ],
)
def test_other_uses_give_the_bits_of_distributed_optimizer(job: Finished, case: str) -> None:
    assert_as_distributed_optimizer(job, "job_uses", case)


def test_sparse_gradients(job: Finished) -> None:
    found = each(job, "job_sparse")
    assert all(same and alike(mine, found[0][1]) for same, mine in found)


def test_updates_wait_for_the_forward_pass_except_in_the_last_step(job: Finished) -> None:
    for moved in each(job, "job_last_step"):
        # Whether weights moved in step(), then in forward and backward, for steps 0 to 3.
        assert moved == [False, False, False, True, True, True, True, False]


def test_refusals_name_the_cause(job: Finished) -> None:
    names = [
        "SAM",
        "LBFGS",
        "max_grad_norm",
        "scripted",
        "num_steps=0",
        "'distance'",
        "synchronize()",
        "state_dict()",
        "'unseen.twice.weight' was used",
        "'unseen.twice.weight' was changed",
    ]
    for said in each(job, "job_refused"):
        if GRADIENTS_ARE_HELD and said[-1] == "nothing":  # then the push sent a copy
            said[-1] = f"GradientOrderError: {names[-1]}"
        assert len(said) == len(names)
        for text, name in zip(said, names, strict=True):
            assert name in text, text
            assert text.startswith(
                "GradientOrderError" if name.startswith("'unseen") else "ConfigError"
            )


def test_shutdown_and_dropped_optimizers_lose_no_update(job: Finished) -> None:
    assert each(job, "job_ends") == [(True, True, True)] * len(job.results)
    assert each(job, "job_dropped") == [True] * len(job.results)


def test_a_dead_worker_is_an_exception_in_the_forward_pass_that_waits(tmp_path: Path) -> None:
    finished = run_job(__file__, ["job_dies"], tmp_path)
    (said,), count = finished.results[0]["job_dies"]
    assert (
        finished.status != 0
        and count
        and said.startswith("PeerLostError")
        and "worker 1" in said
        and "from two different steps" in said
    )


@pytest.mark.parametrize("asynchronous", [False, True])
def test_one_worker_and_asynchronous_training(
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
            CrossBarrier(made(), MAKERS["sgd"](made().parameters()))
        return
    assert outcome(lambda o, m: train("", o, m))[0]


def test_upstreams_names() -> None:
    for name in (
        "broadcast_parameters",
        "broadcast_optimizer_state",
        "Compression",
        "byteps_push_pull",
        "poll",
        "synchronize",
        "init",
        "shutdown",
        "size",
        "local_size",
        "rank",
        "local_rank",
    ):
        assert getattr(upstream, name) is getattr(bps, name)
