"""DistributedOptimizer: failures, refusals, and that it remains the user's optimizer."""

from __future__ import annotations

import gc
import warnings
import weakref
from typing import Any

import pytest
import torch
from torch import nn
from torch_fake import DATA, NAMES, FakeSession, backward, network, sgd

import bpsx.torch as bps
from bpsx.errors import ConfigError, NotInitializedError, PeerLostError
from bpsx.plugin import adapter
from bpsx.torch.cross_barrier import CrossBarrier
from support.torch_release import needs_grad_scaler


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeSession:
    session = FakeSession()
    monkeypatch.setattr(adapter, "session", lambda: session)
    return session


# ---- failures


def test_a_failure_comes_out_of_step_after_all_pushes_have_ended(fake: FakeSession) -> None:
    model = network()
    optimizer = sgd(model)
    fake.failures[NAMES[1]] = PeerLostError("worker 1 at 10.0.0.2 was lost")
    backward(model)
    before = [p.clone() for p in model.parameters()]
    with pytest.raises(PeerLostError, match="worker 1"):
        optimizer.step()
    assert all(p.done() for p in fake.pushes)
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters())), (
        "a failed step must not change the weights"
    )
    fake.failures.clear()
    optimizer.zero_grad()
    backward(model)
    optimizer.step()
    assert len(fake.pushes) == 8


@pytest.mark.filterwarnings("ignore:Sparse CSR.*")
def test_gradients_in_an_unknown_layout_are_refused_by_step(fake: FakeSession) -> None:
    weight = nn.Parameter(torch.eye(3).to_sparse_csr())
    weight.grad = torch.eye(3).to_sparse_csr()
    with pytest.raises(TypeError, match="parameter 'w': sparse_csr tensors cannot be sent"):
        bps.DistributedOptimizer(torch.optim.SGD([weight], lr=0.1), [("w", weight)])


@pytest.mark.parametrize(
    "parameter, message",
    [
        (torch.zeros(2, dtype=torch.complex64), "parameter 'w': dtype complex64 cannot be summed"),
        (torch.zeros(2, device="meta"), "parameter 'w': tensors on meta cannot be sent"),
    ],
)
def test_parameters_that_cannot_be_sent(
    fake: FakeSession, parameter: torch.Tensor, message: str
) -> None:
    parameter.requires_grad_(True)
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    with pytest.raises(TypeError, match=message):
        bps.DistributedOptimizer(optimizer, [("w", parameter)])
    assert type(optimizer) is torch.optim.SGD, "a refused optimizer stays what it was"


def wrong_names() -> dict[str, tuple[Any, str]]:
    model = network()
    named = list(model.named_parameters())
    return {
        "missing": (
            named[:2],
            (
                r"lacks 2 of the optimizer's parameters: group 0, index 2, shape \(2, 4\); group 0,"
                r" index 3, shape \(2,\)"
            ),
        ),
        "twice": (
            named + [("0.weight", torch.zeros(1)), ("2.bias", torch.zeros(1))],
            "these names twice: 0.weight, 2.bias",
        ),
        "no names": (model.parameters(), r"\(name, parameter\) pairs"),
        "not a tensor": ([("a", 3)], r"\(name, parameter\) pairs"),
        "not a string": ([(1, named[0][1])], r"\(name, parameter\) pairs"),
        "a model": (
            model,
            r"\(name, parameter\) pairs, as model.named_parameters\(\) gives them, not Sequential",
        ),
        "a mapping": (model.state_dict(), r"\(name, parameter\) pairs.*not OrderedDict"),
        "a name": ("weight", r"\(name, parameter\) pairs.*not str"),
        "other tensors": (
            list(model.state_dict().items()),
            r"lacks 4 .*it contains none of them: the tensors of model.state_dict\(\) are not",
        ),
    }


@pytest.mark.parametrize("case", wrong_names())
def test_wrong_names(fake: FakeSession, case: str) -> None:
    model = network()
    given, message = wrong_names()[case]
    named = (
        [(n, dict(model.named_parameters()).get(n, p)) for n, p in given]
        if case in ("missing", "twice")
        else given
    )
    with pytest.raises(ValueError, match=message):
        sgd(model, named)


def test_names_of_unknown_parameters_are_accepted(fake: FakeSession) -> None:
    model = network()
    optimizer = torch.optim.SGD(model[2].parameters(), lr=0.1)
    bps.DistributedOptimizer(optimizer, model.named_parameters())
    assert fake.declared == NAMES[2:]


def test_other_refusals(fake: FakeSession) -> None:
    model = network()
    with pytest.raises(ValueError, match="LBFGS evaluates its closure several times"):
        bps.DistributedOptimizer(torch.optim.LBFGS(model.parameters()))
    with pytest.raises(ValueError, match="distributed already"):
        bps.DistributedOptimizer(sgd(model))
    for passes in (0, 1.5, "1", True):
        with pytest.raises(
            ConfigError,
            match=(
                f"DistributedOptimizer: backward_passes_per_step={passes!r}: expected an integer"
                " from 1"
            ),
        ):
            sgd(model, backward_passes_per_step=passes)
    with pytest.raises(
        ConfigError, match="set_backward_passes_per_step: backward_passes_per_step=0"
    ):
        sgd(model).set_backward_passes_per_step(0)
    with pytest.raises(
        ConfigError, match="DistributedOptimizer: sparse_as_dense must be True or False, not 'no'"
    ):
        sgd(model, sparse_as_dense="no")
    with pytest.raises(
        ConfigError,
        match="DistributedOptimizer: optimizer is a Sequential; expected a torch.optim.Optimizer",
    ):
        bps.DistributedOptimizer(model)  # type: ignore[arg-type]
    replaced = torch.optim.SGD(model.parameters(), lr=0.1)
    replaced.step = lambda: None  # type: ignore[method-assign]
    with pytest.raises(ValueError, match=r"this optimizer's step\(\) has been replaced"):
        bps.DistributedOptimizer(replaced)


@pytest.mark.parametrize(
    "swapped, options, message",
    [
        (True, {}, "CrossBarrier: optimizer is a Sequential; expected a torch.optim.Optimizer"),
        (
            False,
            {"named_parameters": 3},
            r"CrossBarrier: named_parameters must be \(name, parameter\) pairs",
        ),
        (
            False,
            {"sparse_as_dense": "no"},
            "CrossBarrier: sparse_as_dense must be True or False, not 'no'",
        ),
        (
            False,
            {"backward_passes_per_step": 0},
            "CrossBarrier: backward_passes_per_step=0: expected an integer from 1",
        ),
    ],
)
def test_wrong_arguments_of_cross_barrier(
    fake: FakeSession, swapped: bool, options: dict[str, Any], message: str
) -> None:
    model = network()
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ConfigError, match=message):
        CrossBarrier(*((optimizer, model) if swapped else (model, optimizer)), **options)
    assert not fake.declared


def test_before_init() -> None:
    with pytest.raises(NotInitializedError, match="init"):
        sgd(network())


# ---- it is still the user's optimizer


@pytest.mark.parametrize("scheduler_first", [True, False])
def test_schedulers(fake: FakeSession, scheduler_first: bool) -> None:
    model = network()
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=1.0)
    if scheduler_first:
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
        optimizer = bps.DistributedOptimizer(optimizer, model.named_parameters())
    else:
        optimizer = bps.DistributedOptimizer(optimizer, model.named_parameters())
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for i in range(3):
            backward(model)
            optimizer.step()
            scheduler.step()
            assert len(fake.pushes) == 4 * (i + 1)
            assert optimizer.param_groups[0]["lr"] == 0.5 ** (i + 1)
            optimizer.zero_grad()


def test_state_dict_round_trip_and_step_hooks(fake: FakeSession) -> None:
    ours, plain = network(), network()
    optimizer, reference = sgd(ours), torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9)
    seen: list[float] = []
    optimizer.register_step_pre_hook(lambda o, *_: seen.append(float(fake.pushes[-1].done())))
    for _ in range(3):
        for model, each in ((ours, optimizer), (plain, reference)):
            each.zero_grad()
            backward(model)
            each.step()
        saved = optimizer.state_dict()
        assert str(saved) == str(reference.state_dict())
        optimizer.load_state_dict(saved)
    assert seen == [1.0] * 3, "a step hook runs once a step, when the gradients are averaged"
    assert all(torch.equal(a, b) for a, b in zip(ours.parameters(), plain.parameters()))


def test_a_released_optimizer_stops_pushing(fake: FakeSession) -> None:
    model = network()
    optimizer = sgd(model)
    gone = weakref.ref(optimizer)
    del optimizer
    gc.collect()
    assert gone() is None
    backward(model)
    assert not fake.pushes
    again = sgd(model)
    again.zero_grad()
    backward(model)
    assert len(fake.pushes) == 4


@needs_grad_scaler
def test_grad_scaler(fake: FakeSession) -> None:
    model = network()
    optimizer = sgd(model)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    scaler.scale(model(DATA).pow(2).sum()).backward()
    optimizer.synchronize()
    scaler.unscale_(optimizer)
    with optimizer.skip_synchronize():
        scaler.step(optimizer)
    scaler.update()
    assert len(fake.pushes) == 4
