"""Optimizers that evaluate a closure themselves, and a GAN with two optimizers.

Results must equal those of one process.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch_fake import DATA, FakeSession, network

import bpsx.torch as bps
from bpsx.errors import ConfigError
from bpsx.torch import GradientOrderError
from bpsx.torch.cross_barrier import CrossBarrier


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeSession:
    session = FakeSession()
    monkeypatch.setattr("bpsx.plugin.adapter.session", lambda: session)
    return session


class Ascent(torch.optim.Optimizer):
    """Sharpness-aware minimization: steps by the gradient at a nearby point.

    The first gradient gives the direction to that point.
    """

    def __init__(self, params: Any, lr: float = 0.1, rho: float = 0.05) -> None:
        super().__init__(params, {"lr": lr, "rho": rho})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        closure = torch.enable_grad()(closure)
        moved = []
        for group in self.param_groups:
            for p in group["params"]:
                moved.append(group["rho"] * p.grad)
                p.add_(moved[-1])
        self.zero_grad()
        loss = closure()
        for group in self.param_groups:
            for p, e in zip(group["params"], moved):
                p.sub_(e).sub_(group["lr"] * p.grad)
        return loss


def weights(model: nn.Module) -> list[torch.Tensor]:
    return [p.detach().clone() for p in model.parameters()]


@pytest.mark.parametrize("cross", [False, True])
def test_an_optimizer_that_evaluates_the_closure_itself(fake: FakeSession, cross: bool) -> None:
    def train(distributed: bool) -> tuple[list[torch.Tensor], list[float]]:
        model = network()
        optimizer: Any = Ascent(model.parameters())
        if distributed and cross:
            optimizer = CrossBarrier(model, optimizer, model.named_parameters())
        elif distributed:
            optimizer = bps.DistributedOptimizer(optimizer, model.named_parameters())
        losses = []

        def closure() -> torch.Tensor:
            loss = model(DATA).pow(2).sum()
            loss.backward()
            return loss

        for _ in range(3):
            closure()
            losses.append(optimizer.step(closure).item())
            optimizer.zero_grad()
        return weights(model), losses

    # The other workers push the same, so averages equal this worker's gradients.
    (wanted, losses), (found, told) = train(False), train(True)
    assert losses == told and all(torch.equal(a, b) for a, b in zip(wanted, found))
    assert len(fake.pushes) == 3 * 2 * 4


def gan(distributed: bool, passes: int = 2, own_zero_grad: bool = True) -> list[torch.Tensor]:
    """DCGAN's order of passes.

    Two backward() for the discriminator's step, then one through it for the generator's.
    """
    torch.manual_seed(1)
    generator, critic = nn.Linear(2, 3), nn.Linear(3, 1)
    steps = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (generator, critic)]
    if distributed:
        named = [
            [(f"{n}.{k}", p) for k, p in m.named_parameters()]
            for n, m in (("g", generator), ("c", critic))
        ]
        steps = [
            bps.DistributedOptimizer(s, n, backward_passes_per_step=b)
            for s, n, b in zip(steps, named, (1, passes))
        ]
    of_generator, of_critic = steps
    for i in range(3):
        noise = torch.full((4, 2), i + 1.0)
        (of_critic if own_zero_grad else critic).zero_grad()
        critic(DATA[:, :3]).sum().backward()
        fake_data = generator(noise)
        (-critic(fake_data.detach()).pow(2).sum() / 100).backward()
        of_critic.step()
        (of_generator if own_zero_grad else generator).zero_grad()
        critic(fake_data).sum().backward()
        of_generator.step()
    return weights(generator) + weights(critic)


def test_the_advice_for_a_gan_works(fake: FakeSession) -> None:
    for passes, own in (1, False), (1, True), (2, False):
        with pytest.raises(
            GradientOrderError,
            match=(
                f"backward_passes_per_step={passes} times since the last step.*set "
                "backward_passes_per_step to their number.*"
                r"call this optimizer's own zero_grad\(\), not the model's"
            ),
        ):
            gan(True, passes, own)
    assert all(torch.equal(a, b) for a, b in zip(gan(False), gan(True)))


def test_lbfgs_is_refused_as_before(fake: FakeSession) -> None:
    with pytest.raises(ConfigError, match="LBFGS"):
        bps.DistributedOptimizer(torch.optim.LBFGS(network().parameters()))
