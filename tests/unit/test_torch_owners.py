"""Who owns which names: live optimizers do not share them; deleted ones release them."""

from __future__ import annotations

import copy
import gc
from typing import Any

import pytest
import torch
from torch import nn
from torch_fake import DATA, FakeSession, network, sgd

from bpsx.errors import ConfigError
from bpsx.torch import GradientOrderError
from bpsx.torch.cross_barrier import CrossBarrier


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeSession:
    session = FakeSession()
    monkeypatch.setattr("bpsx.plugin.adapter.session", lambda: session)
    return session


def train(model: nn.Module, optimizer: Any, steps: int = 2) -> None:
    for _ in range(steps):
        optimizer.zero_grad()
        model(DATA).sum().backward()
        optimizer.step()


def test_a_name_that_a_live_optimizer_has(fake: FakeSession) -> None:
    first, second = network(), network()
    kept = sgd(first)
    with pytest.raises(
        ConfigError,
        match=(
            r"'0.weight' is also the name of a parameter of the DistributedOptimizer \(SGD\)"
            r" made at "
            r"torch_fake.py:\d+, which is still alive.*second\."
        ),
    ):
        sgd(second)
    train(first, kept)
    other = sgd(second, [(f"second.{n}", p) for n, p in second.named_parameters()])
    train(second, other)
    train(first, kept)
    assert {n for n in fake.names if "second." in n} == {
        f"Gradient.second.{n}" for n, _ in second.named_parameters()
    }


def test_a_deleted_optimizer_releases_its_names(fake: FakeSession) -> None:
    first, second = network(), network()
    optimizer = sgd(first)
    train(first, optimizer)
    del optimizer
    optimizer = sgd(second)
    train(second, optimizer)
    cycle: list[Any] = [optimizer]
    cycle.append(cycle)
    gc.disable()
    try:
        del optimizer, cycle
        train(first, sgd(first))
    finally:
        gc.enable()


def test_the_next_fold_with_the_last_ones_optimizer_still_there(fake: FakeSession) -> None:
    for _ in range(3):
        model = network()
        optimizer = sgd(model)  # the variable still refers to the previous optimizer
        train(model, optimizer)


@pytest.mark.parametrize("named", ["model", None])
def test_a_new_optimizer_for_the_same_model_takes_the_olds_place(
    fake: FakeSession, named: Any
) -> None:
    model = network()
    old = sgd(model, named)
    scheduler = torch.optim.lr_scheduler.StepLR(old, 1)
    train(model, old)
    scheduler.step()
    new = sgd(model, named)
    sent = len(fake.pushes)
    train(model, new)
    assert len(fake.pushes) == sent + 8, "the old one pushes no more"
    scheduler.step()  # reads the old optimizer's groups
    with pytest.raises(
        ConfigError,
        match="can no longer exchange anything: the DistributedOptimizer .* has taken over",
    ):
        old.step()
    train(model, new)


def test_a_second_optimizer_during_an_exchange_is_refused(fake: FakeSession) -> None:
    model = network()
    old = sgd(model)
    model(DATA).sum().backward()
    with pytest.raises(
        ConfigError, match="has gradients of the same parameters under way; call its step"
    ):
        sgd(model)
    old.step()
    train(model, sgd(model))


def test_two_names_for_one_parameter_are_two_optimizers(fake: FakeSession) -> None:
    model = network()
    one, two = sgd(model), sgd(model, [(f"two.{n}", p) for n, p in model.named_parameters()])
    model(DATA).sum().backward()
    one.step()
    two.step()
    model(DATA).sum().backward()
    one.step()
    with pytest.raises(
        GradientOrderError, match="Another live distributed optimizer has this parameter"
    ):
        model(DATA).sum().backward()


def test_generated_names_carry_the_optimizers_number(fake: FakeSession) -> None:
    models = [network() for _ in range(3)]
    optimizers = [sgd(m, None) for m in models]
    assert fake.declared == [
        f"Gradient.push_pull.noname.{n}0.{i}" for n in ("", "1.", "2.") for i in range(4)
    ]
    for model, optimizer in zip(models, optimizers):
        train(model, optimizer)


def test_groups_that_are_added_to_two_optimizers(fake: FakeSession) -> None:
    models = [network(), network(), network(), network()]
    named = [
        [(f"m{i}.{n}", p) for n, p in m.named_parameters()] if i < 2 else None
        for i, m in enumerate(models)
    ]
    optimizers = [sgd(m, n) for m, n in zip(models, named)]
    for optimizer in optimizers:
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2))]})
    assert len(set(fake.declared)) == 4 * 5
    assert fake.declared[-4:-2] == [
        f"Gradient.push_pull.noname.1.0 beside m{i}.0.weight" for i in (0, 1)
    ]
    assert fake.declared[-2:] == [
        "Gradient.push_pull.noname.1.0",
        "Gradient.push_pull.noname.1.1.0",
    ]


def test_generated_numbers_restart_in_another_job(
    fake: FakeSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    sgd(network(), None)
    later = FakeSession()
    monkeypatch.setattr("bpsx.plugin.adapter.session", lambda: later)
    sgd(network(), None)
    assert later.declared[0] == "Gradient.push_pull.noname.0.0"


def test_a_single_worker_may_reuse_names(fake: FakeSession) -> None:
    fake.size, fake.distributed = 1, False
    models = network(), network()
    optimizers = [sgd(m) for m in models]
    for model, optimizer in zip(models, optimizers):
        train(model, optimizer)


def test_an_idle_cross_barrier_releases_its_names(fake: FakeSession) -> None:
    """A CrossBarrier may be kept alive by its model, so it learns of a new one at its next step."""
    first, second = network(), network()
    kept = CrossBarrier(
        first, torch.optim.SGD(first.parameters(), lr=0.1), first.named_parameters()
    )
    first(DATA).sum().backward()
    with pytest.raises(ConfigError, match=r"of the CrossBarrier \(SGD\) made at"):
        sgd(second)
    kept.step()
    kept.synchronize()
    train(second, sgd(second))
    first(DATA).sum().backward()
    with pytest.raises(ConfigError, match="can no longer exchange anything"):
        kept.step()


def test_copies_own_nothing(fake: FakeSession) -> None:
    model = network()
    optimizer = sgd(model)
    copied = copy.deepcopy(optimizer)
    train(model, optimizer)
    assert type(copied) is torch.optim.SGD


def test_an_optimizer_of_an_ended_job_releases_its_names(
    fake: FakeSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = network(), network()
    old = sgd(first)
    train(first, old)
    later = FakeSession()
    monkeypatch.setattr("bpsx.plugin.adapter.session", lambda: later)
    train(second, sgd(second))
    with pytest.raises(ConfigError, match="can no longer exchange anything"):
        old.step()
