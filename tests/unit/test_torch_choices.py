"""compression_params in a later job than the one in which the optimizer was created."""

from __future__ import annotations

import pytest
import torch
from torch_fake import FakeSession, backward, network

import bpsx.torch as bps
from bpsx.plugin import adapter


@pytest.mark.parametrize(
    ("alone", "more"),
    [(False, {}), (True, {}), (True, {"momentum": "nesterov", "mu": 0.5})],
    ids=["another job", "from no job to one", "the same with momentum"],
)
def test_compression_params_carry_over_into_another_job(
    monkeypatch: pytest.MonkeyPatch, alone: bool, more: dict[str, object]
) -> None:
    jobs = [FakeSession(distributed=not alone, size=1 if alone else 2), FakeSession()]
    now = jobs[:1]
    monkeypatch.setattr(adapter, "session", lambda: now[0])
    model = network()
    params = {"0.weight": {"compressor": "topk", "k": 2, **more}}
    optimizer = bps.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1),
        model.named_parameters(),
        compression_params=params,
    )
    backward(model)
    optimizer.step()
    now[0] = jobs[1]
    for _ in range(2):
        optimizer.zero_grad()
        backward(model)
        optimizer.step()
        assert list(jobs[1].compressions) == ["Gradient.0.weight"]
    # A single worker compresses nothing, but has the momentum.
    assert (list(jobs[0].compressions) == ["Gradient.0.weight"]) == (not alone or bool(more))
