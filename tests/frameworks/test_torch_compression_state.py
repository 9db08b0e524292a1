"""State of compressed gradients: checkpoints, and the replaced momentum and weight decay of the
optimizer.

Functions named ``job_*`` run in the workers.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import bpsx.torch as bps
from bpsx.errors import ConfigError
from support.torch_job import Finished, each, run_job

STEPS, HALF = 8, 4
NESTEROV = {"momentum": "nesterov"}
RESUMED: dict[str, dict[str, Any]] = {
    "onebit": {"compressor": "onebit", "scaling": True, "ef": "vanilla", **NESTEROV},
    "topk": {"compressor": "topk", "k": 0.05, "ef": "corrected", **NESTEROV},
    "randomk": {"compressor": "randomk", "k": 0.2, "ef": "sparse", "seed": 5},
    "dithering": {"compressor": "dithering", "k": 4, "seed": 5, "ef": "vanilla"},
    "powersgd": {"compressor": "powersgd", "rank": 2, "ef": "vanilla", **NESTEROV},
}


def network(width: int = 64) -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(32, width), nn.Tanh(), nn.Linear(width, 5))


def backward(model: nn.Module, step: int) -> None:
    rows = torch.randn(16, 32, generator=torch.Generator().manual_seed(1000 * bps.rank() + step))
    nn.functional.cross_entropy(model(rows), rows[:, :5].argmax(1)).backward()


def weights(model: nn.Module) -> list[torch.Tensor]:
    return [p.detach().clone() for p in model.parameters()]


def sgd(model: nn.Module, **options: Any) -> torch.optim.SGD:
    return torch.optim.SGD(
        model.parameters(), **{"lr": 0.1, "momentum": 0.9, "nesterov": True, **options}
    )


def distributed(
    model: nn.Module, optimizer: torch.optim.Optimizer, prefix: str, params: Any
) -> Any:
    return bps.DistributedOptimizer(
        optimizer,
        [(f"{prefix}.{n}", p) for n, p in model.named_parameters()],
        compression_params=lambda _: params,
    )


def _trained(case: str, begin: int, end: int) -> list[torch.Tensor]:
    """Train from this worker's checkpoint unless ``begin`` is 0; write a checkpoint at HALF."""
    folder, rank = Path(os.environ["CHECKPOINTS"]), bps.rank()
    model = network()
    momentum = 0.9 if RESUMED[case].get("momentum") else 0.0
    optimizer = distributed(
        model,
        sgd(model, momentum=momentum, nesterov=momentum > 0, weight_decay=0.01),
        case,
        RESUMED[case],
    )
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 3, gamma=0.5)
    if begin:
        state = torch.load(folder / f"{case}.{rank}.pt", weights_only=True)
        for what, name in ((model, "model"), (optimizer, "optimizer"), (schedule, "schedule")):
            what.load_state_dict(state[name])
    for step in range(begin, end):
        optimizer.zero_grad()
        backward(model, step)
        optimizer.step()
        schedule.step()
        assert (
            optimizer.param_groups[0]["momentum"] == momentum
            and optimizer.param_groups[0]["weight_decay"] == 0.01
        )
        if step + 1 == HALF:
            state = {
                "model": model.state_dict(),
                "optimizer": optimizer.state_dict(),
                "schedule": schedule.state_dict(),
            }
            torch.save(state, folder / f"{case}.{rank}.pt")
    return weights(model)


def job_whole() -> Any:
    return {case: _trained(case, 0, STEPS) for case in RESUMED}


def job_second_half() -> Any:
    return {case: _trained(case, HALF, STEPS) for case in RESUMED}


def test_a_run_that_was_interrupted_equals_one_that_was_not(tmp_path: Path) -> None:
    env = {"CHECKPOINTS": str(tmp_path), "BYTEPS_MIN_COMPRESS_BYTES": "1000"}
    whole = run_job(__file__, ["job_whole"], tmp_path / "whole", **env)
    resumed = run_job(__file__, ["job_second_half"], tmp_path / "resumed", **env)
    assert whole.status == resumed.status == 0, whole.output[-3000:] + resumed.output[-3000:]
    for case in RESUMED:
        for want, got in zip(
            each(whole, "job_whole"), each(resumed, "job_second_half"), strict=True
        ):
            assert all(torch.equal(a, b) for a, b in zip(want[case], got[case], strict=True)), case
    assert "start from zero" not in resumed.output
    # All workers load worker 0's checkpoints: there is a warning, and all end with the same
    # weights.
    for case in RESUMED:
        (tmp_path / f"{case}.1.pt").write_bytes((tmp_path / f"{case}.0.pt").read_bytes())
    shared = run_job(__file__, ["job_second_half"], tmp_path / "shared", **env)
    assert (
        shared.status == 0
        and "was saved by worker 0, so residuals and momentum start from zero here" in shared.output
    ), shared.output[-3000:]
    one, two = each(shared, "job_second_half")
    assert all(
        torch.equal(a, b) for case in RESUMED for a, b in zip(one[case], two[case], strict=True)
    )
    assert not torch.equal(one["topk"][0], each(whole, "job_whole")[0]["topk"][0])


def _ten_steps(prefix: str, params: Any, width: int = 64, **options: Any) -> list[torch.Tensor]:
    model = network(width)
    optimizer = distributed(model, sgd(model, **options), prefix, params)
    for step in range(10):
        optimizer.zero_grad()
        backward(model, step)
        optimizer.step()
    return weights(model)


#: Compression without loss, because it keeps all elements of the only tensor that is large enough
#: or compresses none; and options of the optimizer.
LOSSLESS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "all elements": ({"compressor": "topk", "k": 2048, **NESTEROV}, {}),
    "too small": ({"compressor": "onebit", **NESTEROV}, {"momentum": 0.8}),
    "decay, onebit": ({"compressor": "onebit", **NESTEROV}, {"weight_decay": 0.1}),
    "decay, maximize": (
        {"compressor": "onebit", **NESTEROV},
        {"weight_decay": 0.1, "maximize": True, "lr": 0.01},
    ),
    "mu given": (
        {"compressor": "onebit", "mu": 0.5, **NESTEROV},
        {"momentum": 0.0, "nesterov": False, "weight_decay": 0.1},
    ),
}


def job_lossless() -> Any:
    found = {}
    for case, (params, options) in LOSSLESS.items():
        options = {"width": 64 if case == "all elements" else 32, **options}
        alone = {**options, "momentum": 0.5, "nesterov": True} if case == "mu given" else options
        found[case] = (
            _ten_steps(case, params, **options),
            _ten_steps(f"plain {case}", None, **alone),
        )
    return found


def job_decay_of_others() -> Any:
    """Without onebit, weight decay has no momentum.

    The result equals SGD without momentum on gradients that already include it.
    """
    with_params = _ten_steps(
        "others", {"compressor": "topk", "k": 2048, "momentum": "nesterov"}, weight_decay=0.1
    )
    model, kept = network(), {}
    optimizer = distributed(
        model, sgd(model, momentum=0.0, nesterov=False, weight_decay=0.1), "by hand", None
    )
    for step in range(10):
        optimizer.zero_grad()
        backward(model, step)
        optimizer.synchronize()
        for p in model.parameters():
            assert p.grad is not None
            kept[p] = 0.9 * kept.get(p, torch.zeros_like(p)) + p.grad
            p.grad += 0.9 * kept[p]
        with optimizer.skip_synchronize():
            optimizer.step()
    return with_params, weights(model)


def job_second_optimizer() -> Any:
    """Folds of a cross-validation reuse the same names."""
    onebit = {"compressor": "onebit", "scaling": True, "ef": "vanilla", **NESTEROV}
    folds = [
        _ten_steps("folds", onebit),
        _ten_steps("folds", onebit),
        _ten_steps("folds", None),
        _ten_steps("never compressed", None),
    ]
    model = network()
    optimizer = distributed(model, sgd(model), "reloads", onebit)
    begin, runs = optimizer.state_dict(), []
    for state in (None, begin, {k: v for k, v in begin.items() if k != "bpsx"}):
        with torch.no_grad():
            for p, fresh in zip(model.parameters(), network().parameters(), strict=True):
                p.copy_(fresh)
        if state is not None:
            optimizer.load_state_dict(state)
        for step in range(3):
            optimizer.zero_grad()
            backward(model, step)
            optimizer.step()
        runs.append(weights(model))
    return folds, runs


def _used_in(prefix: str, used: list[bool]) -> list[torch.Tensor]:
    """Train a layer that some steps leave out, on all workers; return its weights."""
    torch.manual_seed(4)
    model = nn.ModuleList([nn.Linear(32, 64), nn.Linear(32, 64)])
    params = {"compressor": "topk", "k": 0.1, "ef": "vanilla", **NESTEROV}
    optimizer = distributed(model, sgd(model), prefix, params)
    for step, use in enumerate(used):
        optimizer.zero_grad()
        rows = torch.randn(
            8, 32, generator=torch.Generator().manual_seed(10 * step + bps.rank() if use else 0)
        )
        model[0](rows).square().mean().backward()
        if use:
            rows = torch.randn(8, 32, generator=torch.Generator().manual_seed(sum(used[:step])))
            model[1](rows).square().mean().backward()
        optimizer.step()
    return weights(model[1])


def job_unused() -> Any:
    return _used_in("some", [True, False, True, False, False, True]), _used_in(
        "all", [True, True, True]
    )


def job_decay_without_momentum() -> Any:
    """Groups without momentum, and zero gradients, so only weight decay changes the weights."""
    found = {}
    for case, params in {
        "uncompressed": None,
        "no momentum": {"compressor": "onebit", "scaling": True},
        "momentum": {"compressor": "onebit", "scaling": True, "mu": 0.5, **NESTEROV},
    }.items():
        model = nn.Linear(32, 64)
        with torch.no_grad():
            for p in model.parameters():
                p.fill_(1.0)
        optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1, weight_decay=0.1)
        optimizer = bps.DistributedOptimizer(
            optimizer,
            [(f"{case}.{n}", p) for n, p in model.named_parameters()],
            compression_params={
                f"{case}.weight": params or {"fp16": True},
                f"{case}.bias": {"compressor": "onebit", "mu": 0.5, **NESTEROV}
                if case == "momentum"
                else None,
            },
        )
        for _ in range(5):
            (model(torch.zeros(1, 32)).sum() * 0).backward()
            optimizer.step()
            optimizer.zero_grad()
        found[case] = [float(p.mean()) for p in model.parameters()]
    return found


def job_rate_0() -> Any:
    model = network()
    optimizer = distributed(
        model,
        sgd(model, lr=0.0),
        "rate 0",
        {"compressor": "topk", "k": 0.1, "ef": "corrected", **NESTEROV},
    )
    for rate in (0.0, 0.1, 0.0):
        optimizer.param_groups[0]["lr"] = rate
        optimizer.zero_grad()
        backward(model, 0)
        optimizer.step()
    with pytest.warns(UserWarning, match="not compressed"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(3))]})
    return weights(model)


def _said(act: Any) -> str:
    try:
        act()
    except ConfigError as e:
        return str(e)
    return "nothing"


def job_refusals() -> Any:
    onebit = {"compressor": "onebit", **NESTEROV}
    said = {}
    model = network()
    said["no momentum"] = _said(
        lambda: distributed(model, torch.optim.Adam(model.parameters()), "a", onebit)
    )
    said["dampening"] = _said(
        lambda: distributed(model, sgd(model, nesterov=False, dampening=0.5), "b", onebit)
    )
    said["rmsprop"] = _said(
        lambda: distributed(
            model, torch.optim.RMSprop(model.parameters(), momentum=0.9), "r", onebit
        )
    )
    said["fused"] = _said(
        lambda: distributed(model, sgd(model, fused=True, weight_decay=0.1), "f", onebit)
    )
    said["mu 0"] = _said(lambda: distributed(model, sgd(model), "m", {**onebit, "mu": 0.0}))
    said["neither"] = _said(
        lambda: bps.DistributedOptimizer(
            sgd(model),
            model.named_parameters(),
            compression_params={"0.weight": onebit, "2.weight": 3},
        )
    )
    said["some"] = _said(
        lambda: bps.DistributedOptimizer(
            sgd(model), model.named_parameters(), compression_params={"0.weight": onebit}
        )
    )
    said["k"] = _said(lambda: _step(network(), "k", {"compressor": "topk", "k": 2049}))
    optimizer = _step(model, "d", onebit)
    optimizer.param_groups[0]["momentum"] = 0.7
    backward(model, 1)
    said["changed"] = _said(optimizer.step)
    optimizer.param_groups[0]["momentum"] = 0.9
    optimizer.zero_grad()
    for key, entry in (
        ("entry", 5),
        ("version", {"version": 99}),
        ("inside", {"version": 1, "compression": {"d.0.weight": 3}}),
    ):
        said[key] = _said(
            lambda entry=entry: optimizer.load_state_dict({**optimizer.state_dict(), "bpsx": entry})
        )
    # state of a run without compression
    optimizer.load_state_dict({k: v for k, v in optimizer.state_dict().items() if k != "bpsx"})
    embedding = nn.Embedding(500, 16, sparse=True)
    sparse = bps.DistributedOptimizer(
        torch.optim.SGD(embedding.parameters(), lr=0.1, momentum=0.9),
        embedding.named_parameters(),
        compression_params=onebit,
    )
    embedding(torch.tensor([1, 2])).sum().backward()
    said["sparse"] = _said(sparse.step)
    return said


def _step(model: nn.Module, prefix: str, params: Any) -> Any:
    optimizer = distributed(model, sgd(model), prefix, params)
    backward(model, 0)
    optimizer.step()
    return optimizer


JOBS = [
    "job_lossless",
    "job_decay_of_others",
    "job_second_optimizer",
    "job_unused",
    "job_decay_without_momentum",
    "job_rate_0",
]


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Finished:
    finished = run_job(__file__, JOBS, tmp_path_factory, 2, BYTEPS_MIN_COMPRESS_BYTES="6000")
    assert finished.status == 0, finished.output[-5000:]
    return finished


@pytest.mark.parametrize("case", LOSSLESS)
def test_momentum_before_compression_is_the_optimizers(job: Finished, case: str) -> None:
    for ours, plain in (r[case] for r in each(job, "job_lossless")):
        for a, b in zip(ours, plain, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)


def test_weight_decay_has_momentum_only_with_onebit(job: Finished) -> None:
    for ours, by_hand in each(job, "job_decay_of_others"):
        for a, b in zip(ours, by_hand, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)


def test_a_second_optimizer_starts_without_the_firsts_state(job: Finished) -> None:
    for (first, second, then_plain, plain), (run, again, without) in each(
        job, "job_second_optimizer"
    ):
        assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
        assert all(
            torch.equal(a, b) for a, b in zip(then_plain, plain, strict=True)
        ) and not torch.equal(first[0], plain[0])
        assert all(
            torch.equal(a, b) and torch.equal(a, c)
            for a, b, c in zip(run, again, without, strict=True)
        )


def test_steps_without_a_parameter_keep_its_compression_state(job: Finished) -> None:
    for some, every in each(job, "job_unused"):
        assert all(torch.equal(a, b) for a, b in zip(some, every, strict=True))


def test_weight_decay_of_groups_without_momentum(job: Finished) -> None:
    plain, kept, m = 1.0, 1.0, 0.0
    for _ in range(5):
        plain -= 0.1 * 0.1 * plain
        m = 0.5 * m + 0.1 * kept
        kept -= 0.1 * (0.1 * kept + 0.5 * m)
    for found in each(job, "job_decay_without_momentum"):
        assert (
            found["uncompressed"] == found["no momentum"] == pytest.approx([plain, plain], rel=1e-5)
        )
        assert found["momentum"] == pytest.approx([kept, kept], rel=1e-5)


def test_a_learning_rate_of_0_corrects_nothing(job: Finished) -> None:
    one, two = each(job, "job_rate_0")
    assert all(torch.equal(a, b) and a.isfinite().all() for a, b in zip(one, two, strict=True))


@pytest.fixture(scope="module")
def refusals(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, str]]:
    finished = run_job(
        __file__, ["job_refusals"], tmp_path_factory, 2, BYTEPS_MIN_COMPRESS_BYTES="1000"
    )
    assert finished.status == 0, finished.output[-5000:]
    return each(finished, "job_refusals")


@pytest.mark.parametrize(
    "case, texts",
    {
        "no momentum": ("'a.0.weight'", "needs mu", "between 0 and 1"),
        "rmsprop": ("the momentum of group 0 of RMSprop (0.9)",),
        "fused": ("group 0 with fused=True",),
        "mu 0": ("mu=0.0", "between 0 and 1"),
        "neither": ("'2.weight': 3", "mappings or None"),
        "dampening": ("group 0 has dampening=0.5",),
        "some": ("group 0 of SGD", "not for '0.bias', '2.weight', '2.bias'"),
        "k": ("k=2049", "320 elements", "Gradient.k.2.weight"),
        "changed": ("group 0 of SGD has changed from 0.9 to 0.7", "cycle_momentum=False"),
        "entry": ("cannot read the compression state in 'bpsx'",),
        "version": ("cannot read the compression state in 'bpsx'",),
        "inside": ("d.0.weight", "expected a mapping, not int"),
        "sparse": ("'weight'", "sparse_as_dense=True"),
    }.items(),
    ids=lambda v: v if isinstance(v, str) else "",
)
def test_refusals(refusals: list[dict[str, str]], case: str, texts: tuple[str, ...]) -> None:
    for said in refusals:
        assert all(text in said[case] for text in texts), said[case]


def job_root_loads() -> Any:
    """Only worker 0 has a checkpoint, and broadcasts it."""
    params = {"compressor": "onebit", "scaling": True, "ef": "vanilla", **NESTEROV}
    model = network()
    optimizer = distributed(model, sgd(model, weight_decay=0.1), "loads", params)
    if bps.rank() == 0:
        first = network()
        other = distributed(first, sgd(first, weight_decay=0.1), "saves", None)
        state = other.state_dict()
        state["state"] = {
            i: {"weight_decay_momentum": torch.ones_like(p)}
            for i, p in enumerate(first.parameters())
        }
        optimizer.load_state_dict(state)
    bps.broadcast_optimizer_state(optimizer, 0)
    for step in range(5):
        optimizer.zero_grad()
        backward(model, step)
        optimizer.step()
    return weights(model), [
        optimizer.state[p]["weight_decay_momentum"].clone() for p in model.parameters()
    ]


def job_after_shutdown() -> Any:
    optimizer = _step(network(), "end", {"compressor": "onebit"})
    bps.shutdown()
    with pytest.warns(UserWarning, match="after shutdown"):
        return sorted(optimizer.state_dict())


def test_common_state_is_broadcast_and_state_dict_works_after_shutdown(tmp_path: Path) -> None:
    finished = run_job(
        __file__,
        ["job_root_loads", "job_after_shutdown"],
        tmp_path,
        BYTEPS_MIN_COMPRESS_BYTES="1000",
    )
    assert finished.status == 0, finished.output[-3000:]
    one, two = each(finished, "job_root_loads")
    assert all(
        torch.equal(a, b)
        for mine, yours in zip(one, two, strict=True)
        for a, b in zip(mine, yours, strict=True)
    )
    assert one[1][0].mean() > 0.5, "what was loaded has gone on"
    assert each(finished, "job_after_shutdown") == [["param_groups", "state"]] * 2


def job_alone() -> Any:
    return _ten_steps("ours", {"compressor": "onebit", **NESTEROV}, weight_decay=0.1), _alone()


def _alone() -> list[torch.Tensor]:
    model = network()
    optimizer = sgd(model, weight_decay=0.1)
    for step in range(10):
        optimizer.zero_grad()
        backward(model, step)
        optimizer.step()
    return weights(model)


def test_a_single_worker_has_the_same_momentum_and_compresses_nothing(tmp_path: Path) -> None:
    finished = run_job(__file__, ["job_alone"], tmp_path, 1, 0)
    assert finished.status == 0, finished.output[-3000:]
    ((ours, plain),) = each(finished, "job_alone")
    torch.testing.assert_close(ours, plain, rtol=1e-4, atol=1e-6)
