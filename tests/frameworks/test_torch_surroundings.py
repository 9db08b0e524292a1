"""Settings of a script around bpsx: a default device, other gradient dtypes, shared gradient
memory, layouts, compiled steps, and parameters updated by hand.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch_models import STEPS, assert_all_close, batch, tanh_model, train

import bpsx.torch as bps
from bpsx.errors import ConfigError
from bpsx.torch.cross_barrier import CrossBarrier
from bpsx.torch.parallel import DistributedDataParallel
from support import torch_job


def job_default_device() -> Any:
    """Everything that creates tensors works when the default device is another one."""
    mine = float(bps.rank() + 1)
    rows, values, model = torch.full((bps.rank() + 1, 2), mine), torch.tensor([mine]), tanh_model()
    x, y = torch.ones(2, 6, dtype=torch.float64), torch.zeros(2, 3, dtype=torch.float64)
    sparse = torch.sparse_coo_tensor(torch.tensor([[bps.rank()]]), values, (4,))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    functional.mse_loss(model(x), y).backward()
    optimizer.step()
    with torch.device("meta"):
        bps.broadcast_optimizer_state(optimizer, 0)
        functional.mse_loss(DistributedDataParallel(model)(x), y).backward()
        found = [
            bps.all_gather(rows),
            bps.push_pull(sparse, average=False).to_dense(),
            *bps.all_gather_object(values),
            bps.broadcast_object(values),
        ]
    return [*found, *(s["momentum_buffer"] for s in optimizer.state.values())]


class OneEach(nn.Module):
    """Model with one layer per worker, used only by it, in bfloat16 with float32 gradients."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.layers = nn.ModuleList([nn.Linear(3, 3) for _ in range(bps.size())]).to(torch.bfloat16)
        for p in self.parameters():
            p.grad_dtype = torch.float32  # type: ignore[attr-defined]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers[bps.rank()](x)  # type: ignore[no-any-return]


def job_gradient_dtype() -> Any:
    if not hasattr(torch.Tensor, "grad_dtype"):
        return None
    model = DistributedDataParallel(OneEach())
    model(torch.ones(2, 3, dtype=torch.bfloat16)).sum().backward()
    return [p.grad for p in model.parameters()]


def job_compiled_under_cross_barrier() -> Any:
    """Compile a model that is already under CrossBarrier.

    The compiled code must contain neither CrossBarrier's hooks nor its optimizer.
    """
    traced: list[str] = []

    def backend(graph: Any, _: Any) -> Any:
        traced.extend(node.stack_trace or "" for node in graph.graph.nodes)
        return graph.forward

    model = tanh_model()
    optimizer = CrossBarrier(
        model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), model.named_parameters()
    )
    train(torch.compile(model, backend=backend), bps.rank(), bps.size(), optimizer=optimizer)
    optimizer.synchronize()  # type: ignore[attr-defined]
    not_the_model = any(
        part in t
        for t in traced
        for part in ("cross_barrier.py", "pending_updates.py", "exchange.py", "/optim/")
    )
    return {
        "weights": [p.detach().clone() for p in model.parameters()],
        "traced": not_the_model,
        "any": bool(traced),
    }


WAYS = ["optimizer", "crossed", "module"]


def _distributed(
    way: str, model: nn.Module, plain: torch.optim.Optimizer, label: str
) -> tuple[nn.Module, Any]:
    names = [(f"{label}.{way}.{n}", p) for n, p in model.named_parameters()]
    if way == "module":
        return DistributedDataParallel(model), plain
    return model, CrossBarrier(
        model, plain, names
    ) if way == "crossed" else bps.DistributedOptimizer(plain, names)


def _trained(way: str, inner: nn.Module, label: str) -> list[torch.Tensor]:
    model, optimizer = _distributed(
        way, inner, torch.optim.SGD(inner.parameters(), lr=0.1, momentum=0.9), label
    )
    train(model, bps.rank(), bps.size(), optimizer=optimizer)
    if way == "crossed":
        optimizer.synchronize()
    return [p.detach().clone() for p in inner.parameters()]


class Summed(nn.Module):
    """Model with two parameters whose sum autograd differentiates into one block of memory for
    both.

    The block is part of a larger one, and there are layers in between.
    """

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(6)
        self.a, self.b, self.c = (
            nn.Parameter(torch.randn(rows, 6, dtype=torch.float64)) for rows in (5, 5, 1)
        )
        self.deep = nn.Sequential(*[nn.Linear(6, 6) for _ in range(6)]).double()
        self.last = nn.Linear(6, 3).double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        early = self.b.unsqueeze(0)
        x = self.deep(x)
        table = torch.cat([self.a.unsqueeze(0) + early, self.c.unsqueeze(0)], 1)
        return self.last((table * x[:, None]).mean(1) + torch.stack([self.a, self.b]).sum(0)[0])  # type: ignore[no-any-return]


def job_gradients_in_one_memory() -> Any:
    return {way: _trained(way, Summed(), "summed") for way in WAYS}


class Images(nn.Module):
    """Treats each row as an image, in channels-last layout."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(9)
        self.conv, self.out = nn.Conv2d(3, 4, (1, 2)), nn.Linear(4, 3)
        self.double().to(memory_format=torch.channels_last)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(torch.tanh(self.conv(x.reshape(-1, 3, 1, 2))).flatten(1))  # type: ignore[no-any-return]


def job_channels_last() -> Any:
    return {way: _trained(way, Images(), "images") for way in WAYS}


def job_compiled_step() -> Any:
    """Compile forward, backward and step in one function."""
    model = tanh_model()
    optimizer: Any = bps.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
        [(f"compiled.{n}", p) for n, p in model.named_parameters()],
    )

    @torch.compile(backend="eager")  # type: ignore[untyped-decorator]
    def step(x: torch.Tensor, y: torch.Tensor) -> None:
        optimizer.zero_grad()
        functional.mse_loss(model(x), y).backward()
        optimizer.step()

    for i in range(STEPS):
        step(*batch(i, bps.rank(), bps.size()))
    return [p.detach().clone() for p in model.parameters()]


def job_parameter_by_hand() -> Any:
    said = []
    for way in ("optimizer", "crossed"):
        model, optimizer = _distributed(
            way, inner := tanh_model(), torch.optim.SGD(inner.parameters(), lr=0.1), "by hand"
        )
        optimizer.param_groups[0]["params"].append(nn.Parameter(torch.zeros(7)))
        with pytest.raises(ConfigError) as caught:
            optimizer.step()
        said.append(str(caught.value))
    return said


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Iterator[torch_job.Finished]:
    finished = torch_job.run_job(
        __file__, [name for name in globals() if name.startswith("job_")], tmp_path_factory
    )
    assert finished.status == 0, finished.output
    yield finished


def test_a_default_device_does_not_affect_exchanges(job: torch_job.Finished) -> None:
    for gathered, total, first, second, root, *momenta in torch_job.each(job, "job_default_device"):
        assert gathered.tolist() == [[1.0, 1.0], [2.0, 2.0], [2.0, 2.0]]
        assert total.tolist() == [1.0, 2.0, 0.0, 0.0]
        assert (first, second, root) == (
            torch.tensor([1.0]),
            torch.tensor([2.0]),
            torch.tensor([1.0]),
        )
        assert len(momenta) == 6 and all(m.device.type == "cpu" for m in momenta)


def test_gradients_of_another_dtype_than_the_weights(job: torch_job.Finished) -> None:
    """A worker that has not used a parameter sends zeros of the other workers' gradient dtype."""
    for gradients in torch_job.each(job, "job_gradient_dtype"):
        if gradients is None:
            pytest.skip("this PyTorch has no grad_dtype")
        assert all(
            g.dtype == torch.float32 and torch.equal(g, torch.ones_like(g)) for g in gradients
        )


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    "name, model", [("job_gradients_in_one_memory", Summed), ("job_channels_last", Images)]
)
def test_equals_one_process(
    job: torch_job.Finished, name: str, model: type[nn.Module], way: str
) -> None:
    found = {rank: {"weights": results[name][way]} for rank, results in job.results.items()}
    assert_all_close(torch_job.Finished(0, "", found), len(found), "weights", train(model()))


def test_a_step_may_be_compiled_as_a_whole(job: torch_job.Finished) -> None:
    assert_all_close(job, len(job.results), "job_compiled_step", train(tanh_model()))


def test_a_parameter_put_into_the_optimizer_by_hand_is_refused(job: torch_job.Finished) -> None:
    for said in torch_job.each(job, "job_parameter_by_hand"):
        assert len(said) == 2
        for text in said:
            assert "group 0, index 6, shape (7,)" in text and "add_param_group()" in text


def test_hooks_are_not_compiled(job: torch_job.Finished) -> None:
    results = torch_job.each(job, "job_compiled_under_cross_barrier")
    assert all(r["any"] and not r["traced"] for r in results)
    finished = torch_job.Finished(
        0, "", {rank: {"weights": r["weights"]} for rank, r in enumerate(results)}
    )
    assert_all_close(finished, len(results), "weights", train(tanh_model()))
