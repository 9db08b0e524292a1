"""DistributedOptimizer: when gradients are pushed, in which order, and unusual use by scripts."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch_fake import DATA, NAMES, FakeSession, backward, network, sgd

import bpsx.torch as bps
from bpsx.errors import ConfigError
from bpsx.plugin import adapter
from support.torch_release import GRADIENTS_ARE_HELD


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeSession:
    session = FakeSession()
    monkeypatch.setattr(adapter, "session", lambda: session)
    return session


# ---- when and how gradients are pushed


def test_gradients_are_sent_during_backward_in_place_and_most_urgent_first(
    fake: FakeSession,
) -> None:
    model = network()
    optimizer = sgd(model)
    assert fake.declared == NAMES
    backward(model)
    assert sorted(fake.names) == sorted(NAMES) and fake.names[0].startswith("Gradient.2")
    assert {p.name: p.priority for p in fake.pushes} == {n: -i for i, n in enumerate(NAMES)}
    gradients = {f"Gradient.{n}": p.grad for n, p in model.named_parameters()}
    for push in fake.pushes:
        assert push.average and push.source == push.target
        in_place = push.source.address == gradients[push.name].data_ptr()
        assert in_place or GRADIENTS_ARE_HELD
    optimizer.step()
    assert len(fake.pushes) == 4 and all(p.done() for p in fake.pushes)


@pytest.mark.parametrize(
    "kind, options",
    [
        (torch.optim.SGD, {"lr": 0.1}),
        (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
        (torch.optim.Adam, {}),
        (torch.optim.AdamW, {"weight_decay": 0.1}),
        (torch.optim.RMSprop, {}),
        (torch.optim.Adagrad, {}),
    ],
)
@pytest.mark.parametrize("set_to_none", [True, False])
def test_equal_gradients_train_as_one_process_does(
    fake: FakeSession, kind: Any, options: dict[str, Any], set_to_none: bool
) -> None:
    ours, plain = network(), network()
    distributed: Any = bps.DistributedOptimizer(
        kind(ours.parameters(), **options), ours.named_parameters()
    )
    reference = kind(plain.parameters(), **options)
    assert isinstance(distributed, kind) and type(distributed).__name__ == kind.__name__
    for _ in range(5):
        for model, optimizer in ((ours, distributed), (plain, reference)):
            optimizer.zero_grad(set_to_none=set_to_none)
            backward(model)
            optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(ours.parameters(), plain.parameters()))


def test_the_step_takes_the_average(fake: FakeSession) -> None:
    fake.others = lambda name, mine: np.full_like(mine, 4.0)
    layer = nn.Linear(2, 1, bias=False)
    nn.init.ones_(layer.weight)
    optimizer = bps.DistributedOptimizer(torch.optim.SGD(layer.parameters(), lr=1.0))
    layer(torch.tensor([[2.0, 6.0]])).sum().backward()
    optimizer.step()
    assert layer.weight.grad is not None and layer.weight.grad.tolist() == [[3.0, 5.0]]
    assert layer.weight.tolist() == [[-2.0, -4.0]]


@pytest.mark.parametrize("distributed, pushes", [(False, 0), (True, 4)])
def test_a_single_worker_pushes_only_if_forced(
    fake: FakeSession, distributed: bool, pushes: int
) -> None:
    fake.size, fake.distributed = 1, distributed
    model = network()
    optimizer = sgd(model)
    before = [p.clone() for p in model.parameters()]
    backward(model)
    optimizer.synchronize()
    with optimizer.skip_synchronize():
        optimizer.step()
    assert len(fake.pushes) == pushes
    assert not any(torch.equal(a, b) for a, b in zip(before, model.parameters()))


def test_generated_names(fake: FakeSession) -> None:
    model = network()
    groups = [{"params": model[0].parameters()}, {"params": model[2].parameters(), "lr": 0.5}]
    bps.DistributedOptimizer(torch.optim.SGD(groups, lr=0.1))
    assert fake.declared == [f"Gradient.push_pull.noname.{g}.{i}" for g in (0, 1) for i in (0, 1)]


# ---- special parameters


def test_parameters_without_gradient_are_pushed_as_zeros(fake: FakeSession) -> None:
    fake.others_use = True
    fake.others = lambda name, mine: np.full_like(mine, 2.0)
    model = nn.ModuleDict({"used": nn.Linear(3, 1), "unused": nn.Linear(3, 1)})
    optimizer = bps.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=1.0), model.named_parameters()
    )
    model["used"](DATA).sum().backward()
    assert len(fake.pushes) == 2
    optimizer.step()
    assert sorted(fake.names) == sorted(fake.declared)
    assert torch.equal(model["unused"].weight.grad, torch.ones(1, 3)), (
        "another worker's gradient counts here as well"
    )


def test_a_step_without_backward_pushes_everything_once(fake: FakeSession) -> None:
    fake.others_use = True
    model = network()
    optimizer = sgd(model)
    for steps in (1, 2):
        optimizer.step()
        assert sorted(fake.names) == sorted(NAMES * steps)


def test_a_parameter_unused_on_all_workers_stays_without_gradient(fake: FakeSession) -> None:
    model = network()
    optimizer = bps.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=1.0, weight_decay=0.5), model.named_parameters()
    )
    optimizer.step()
    assert fake.names == []  # all workers know that no worker has gradients, so nothing is sent
    fake.others_use = True
    optimizer.step()
    assert all(p.grad is not None for p in model.parameters())
    fake.others_use = False
    optimizer.zero_grad()
    before = [p.detach().clone() for p in model.parameters()]
    optimizer.step()  # known to be dense, so it is sent
    assert sorted(fake.names) == sorted(NAMES * 2) and all(
        p.grad is None for p in model.parameters()
    )
    assert all(torch.equal(b, p) for b, p in zip(before, model.parameters(), strict=True))


def test_frozen_parameters_stay_and_can_be_thawed(fake: FakeSession) -> None:
    model = network()
    model[0].requires_grad_(False)
    optimizer = sgd(model)
    backward(model)
    optimizer.step()
    assert sorted(fake.names) == sorted(NAMES[2:])
    assert model[0].weight.grad is None
    model[0].requires_grad_(True)
    for _ in range(2):  # in the first step after thawing it is pushed late, in the second by hooks
        optimizer.zero_grad()
        backward(model)
        optimizer.step()
    assert sorted(fake.names) == sorted(NAMES[2:] + NAMES * 2)
    optimizer.zero_grad()
    backward(model)
    assert len(fake.pushes) == 14


def test_shared_parameters_travel_once(fake: FakeSession) -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False)
            self.b.weight = self.a.weight

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.b(self.a(x))

    model = Tied()
    named = model.named_parameters(remove_duplicate=False)
    optimizer = bps.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), named)
    backward(model)
    optimizer.step()
    assert fake.names == ["Gradient.a.weight"]


def test_gradients_in_another_layout(fake: FakeSession) -> None:
    fake.others = lambda name, mine: mine * 0
    conv = nn.Conv2d(2, 3, 3).to(memory_format=torch.channels_last)
    optimizer = bps.DistributedOptimizer(torch.optim.SGD(conv.parameters(), lr=0.0))
    conv.weight.grad = torch.arange(54.0).reshape(3, 2, 3, 3).to(memory_format=torch.channels_last)
    optimizer.step()
    assert torch.equal(conv.weight.grad, torch.arange(54.0).reshape(3, 2, 3, 3) / 2)


def test_more_parameters_later(fake: FakeSession) -> None:
    model, more = network(), nn.Linear(2, 2)
    optimizer = sgd(model)
    optimizer.add_param_group({"params": list(more.parameters()), "lr": 0.5})
    more(model(DATA)).sum().backward()
    optimizer.step()
    added = {p.name: p.priority for p in fake.pushes if p.name not in NAMES}
    assert added == {f"Gradient.push_pull.noname.1.{i} beside 0.weight": -4 - i for i in (0, 1)}


# ---- accumulation


def test_backward_passes_add_up(fake: FakeSession) -> None:
    ours, plain = network(), network()
    optimizer, reference = (
        sgd(ours, backward_passes_per_step=3),
        torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9),
    )
    for _ in range(2):
        optimizer.zero_grad()
        reference.zero_grad()
        for i in range(3):
            assert len(fake.pushes) % 4 == 0
            backward(ours, i + 1.0)
            backward(plain, i + 1.0)
        assert len(fake.pushes) % 4 == 0
        optimizer.step()
        reference.step()
    assert len(fake.pushes) == 8
    assert all(torch.equal(a, b) for a, b in zip(ours.parameters(), plain.parameters()))


def test_an_early_step_pushes_the_present_gradients(fake: FakeSession) -> None:
    model = network()
    optimizer = sgd(model, backward_passes_per_step=3)
    backward(model)
    optimizer.step()
    assert len(fake.pushes) == 4
    backward(model)
    backward(model)
    assert len(fake.pushes) == 4, "the count begins anew after a step"


def test_changing_the_number_of_passes(fake: FakeSession) -> None:
    model = network()
    optimizer = sgd(model)
    optimizer.set_backward_passes_per_step(2)
    backward(model)
    assert not fake.pushes
    backward(model)
    assert len(fake.pushes) == 4
    for wrong in (0, -1, 1.5, "2"):
        with pytest.raises(ConfigError, match="expected an integer from 1"):
            optimizer.set_backward_passes_per_step(wrong)


@pytest.mark.parametrize("passes", [1, 2])
def test_one_backward_too_many(fake: FakeSession, passes: int) -> None:
    model = network()
    optimizer = sgd(model, backward_passes_per_step=passes)
    for _ in range(passes):
        backward(model)
    with pytest.raises(
        bps.GradientOrderError,
        match=rf"'2\.\w+' was computed more than backward_passes_per_step={passes} times",
    ):
        backward(model)
    optimizer.zero_grad()
    assert all(p.grad is None for p in model.parameters())
    assert all(p.done() for p in fake.pushes)
    for _ in range(passes):
        backward(model)
    optimizer.step()
    assert len(fake.pushes) == 8


def test_zero_grad_waits_for_exchanges_under_way(fake: FakeSession) -> None:
    model = network()
    optimizer = sgd(model)
    backward(model)
    optimizer.zero_grad(set_to_none=False)
    assert all(p.done() for p in fake.pushes)
    assert all(not p.grad.any() for p in model.parameters())  # type: ignore[union-attr]


# ---- synchronize and skip_synchronize


def test_clipping_between_synchronize_and_step(fake: FakeSession) -> None:
    model = network()
    optimizer = sgd(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(2):
            optimizer.zero_grad()
            backward(model)
            optimizer.synchronize()
            nn.utils.clip_grad_norm_(model.parameters(), 0.01)
            clipped = [p.grad.clone() for p in model.parameters()]  # type: ignore[union-attr]
            with optimizer.skip_synchronize():
                optimizer.step()
            assert all(torch.equal(c, p.grad) for c, p in zip(clipped, model.parameters()))  # type: ignore[arg-type]
    assert len(fake.pushes) == 8


def test_step_after_synchronize_warns_and_pushes_again(fake: FakeSession) -> None:
    model = network()
    optimizer = sgd(model)
    backward(model)
    optimizer.synchronize()
    with pytest.warns(UserWarning, match="skip_synchronize"):
        optimizer.step()
    assert len(fake.pushes) == 8
    backward(model)
    optimizer.synchronize()
    backward(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizer.step()


def test_skipping_with_gradients_under_way_is_refused(fake: FakeSession) -> None:
    model = network()
    optimizer = sgd(model)
    backward(model)
    with (
        optimizer.skip_synchronize(),
        pytest.raises(bps.GradientOrderError, match="call synchronize"),
    ):
        optimizer.step()
    optimizer.step()


def test_a_gradient_removed_during_its_exchange_returns_averaged(fake: FakeSession) -> None:
    fake.others = lambda name, mine: np.full_like(mine, 2.0)
    layer = nn.Linear(2, 1, bias=False)
    optimizer = bps.DistributedOptimizer(torch.optim.SGD(layer.parameters(), lr=0.1))
    layer(torch.zeros(1, 2)).sum().backward()
    layer.zero_grad()
    optimizer.step()
    assert torch.equal(layer.weight.grad, torch.ones(1, 2))


def test_step_calls_a_closure_once_and_pushes_the_gradients(fake: FakeSession) -> None:
    model = network()
    optimizer = sgd(model)
    calls = []

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(DATA).pow(2).sum()
        loss.backward()
        calls.append(loss)
        return loss

    with torch.no_grad():
        assert optimizer.step(closure) is calls[0]
    assert len(calls) == 1 and len(fake.pushes) == 4


# ---- compression


def test_fp16_compression_pushes_and_leaves_rounded_gradients(fake: FakeSession) -> None:
    model = network()
    optimizer = sgd(model, compression=bps.Compression.fp16)
    backward(model)
    expected = [p.grad.half().float() for p in model.parameters()]  # type: ignore[union-attr]
    assert {p.source.dtype for p in fake.pushes} == {"float16"}
    optimizer.step()
    assert all(torch.equal(e, p.grad) for e, p in zip(expected, model.parameters()))  # type: ignore[arg-type]
