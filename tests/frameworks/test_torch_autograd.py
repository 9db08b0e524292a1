"""push_pull and all_gather under autograd and torch.compile, on real workers.

``job_*`` functions run in the workers.
"""

from __future__ import annotations

import shutil
from typing import Any

import pytest
import torch
from torch import nn

import bpsx.torch as bps
from support.torch_job import Finished, each, run_job
from support.torch_release import UINT16

pytestmark = pytest.mark.timeout(300)


def inputs(size: int) -> torch.Tensor:
    """Return one row per worker, the same on all workers."""
    return torch.randn(size, 2, generator=torch.Generator().manual_seed(3), dtype=torch.float64)


def total_loss(rows: torch.Tensor, average: bool) -> torch.Tensor:
    """Return the total of all workers' losses, on every worker, as a function of all workers'
    inputs.

    Worker r uses only row r of ``rows``, and each worker has a different loss function. The outer
    push_pulls make the total the same function on all workers. Forward, they change nothing (an
    average of equal rows) or add up the losses. Backward, the first one averages the gradients over
    the workers. Each of these is ``size()`` times the worker's part, because every worker's (equal)
    total counts as a loss.
    """
    rank = bps.rank()
    mine = bps.push_pull(rows, average=True, name="in")[rank]
    joined = bps.push_pull(mine.sin() * (rank + 1), average=average, name=f"joined {average}")
    loss = (
        joined.pow(3) * torch.arange(1.0, 3.0, dtype=torch.float64) * (rank + 0.5)
    ).sum() + mine.prod() * joined.sum()
    return bps.push_pull(loss, average=False, name="out")


def alone(rows: torch.Tensor, average: bool) -> torch.Tensor:
    size = len(rows)
    joined = sum(
        (row.sin() * (r + 1) for r, row in enumerate(rows)), torch.zeros(2, dtype=torch.float64)
    ) / (size if average else 1)
    return sum(
        (
            (joined.pow(3) * torch.arange(1.0, 3.0, dtype=torch.float64) * (r + 0.5)).sum()
            + row.prod() * joined.sum()
            for r, row in enumerate(rows)
        ),
        torch.zeros((), dtype=torch.float64),
    )


def job_gradcheck() -> Any:
    """All workers run the check in lock step on the same numbers.

    Each entry of each worker's input is perturbed in turn, by all workers.
    """
    for average in (True, False):
        rows = inputs(bps.size()).requires_grad_()
        # With more than two workers the order of arrival can change the last bit.
        assert torch.autograd.gradcheck(
            lambda r, a=average: total_loss(r, a), (rows,), nondet_tol=1e-12
        )
    assert torch.autograd.gradgradcheck(lambda r: total_loss(r, True), (rows,), nondet_tol=1e-10)
    return True


def job_gradient() -> Any:
    """Differentiate as users do: this worker's loss by this worker's input; then the second
    derivative.
    """
    rank, rows, found = bps.rank(), inputs(bps.size()), {}
    for average in (True, False):
        mine = rows[rank].clone().requires_grad_()
        joined = bps.push_pull(mine.sin() * (rank + 1), average=average, name="y")
        loss = (
            joined.pow(3) * torch.arange(1.0, 3.0, dtype=torch.float64) * (rank + 0.5)
        ).sum() + mine.prod() * joined.sum()
        (first,) = torch.autograd.grad(loss, mine, create_graph=True)
        (second,) = torch.autograd.grad((first * (rank + 1)).sum(), mine)
        found[average] = (first.detach(), second)
    return found


def job_tracking() -> Any:
    """Results that require a gradient; expanded gradients; fp16 on the wire; unnamed calls."""
    x = torch.ones(4, requires_grad=True)
    with torch.no_grad():
        assert not bps.push_pull(x).requires_grad
    assert not bps.push_pull(x.detach()).requires_grad
    assert not bps.synchronize(bps.push_pull_async(x)).requires_grad
    (bps.push_pull(x, average=False) * 2).sum().backward()
    half = torch.full((4,), 3.0, requires_grad=True)
    bps.push_pull(half, compression=bps.Compression.fp16).sum().backward()
    both = torch.ones(2, requires_grad=True)
    y = bps.push_pull(both, name="twice")
    (y * bps.push_pull(y, name="twice")).sum().backward()  # one name twice in a graph
    return x.grad, half.grad, both.grad


def job_all_gather() -> Any:
    rank, size, found = bps.rank(), bps.size(), {}
    for dtype in (
        torch.float32,
        torch.bfloat16,
        torch.int64,
        torch.bool,
        torch.complex64,
        *UINT16,
        torch.float8_e4m3fn,
    ):
        found[str(dtype)] = (
            bps.all_gather(torch.arange(1, rank * 2 + 1).to(dtype).reshape(-1, 2)).float().tolist()
        )
    found["matrix"] = bps.all_gather(torch.full((3, 2), float(rank)).t(), name="rows")
    found["none"] = bps.all_gather(torch.zeros(0, 5))
    x = torch.full((rank + 1, 2), float(rank + 1), requires_grad=True)
    gathered = bps.all_gather(x, name="rows")
    weights = torch.arange(float(gathered.numel())).reshape(gathered.shape)
    (gathered.pow(2) * weights * (rank + 1)).sum().backward()
    found["gradient"] = (gathered.detach(), x.grad)
    errors = []
    for bad in (
        lambda: bps.all_gather(torch.zeros(2, 2 + rank // (size - 1)), name="bad"),
        lambda: bps.all_gather(
            torch.zeros(1, 1, dtype=[torch.int16, torch.float16][rank == 1]), name="bad"
        ),
        lambda: bps.all_gather(torch.tensor(1.0)),
    ):
        with pytest.raises(bps.UnsupportedTensor if len(errors) == 2 else ValueError) as caught:
            bad()
        errors.append(str(caught.value))
    found["errors"] = errors
    return found


def job_shapes_stay_few() -> Any:
    """Varying row counts must declare few shapes under a name, because declarations are never
    removed.
    """
    from bpsx.plugin import adapter

    declared = adapter.session()._declared  # there is no public way to count them
    before = len(declared)
    for n in range(1, 60):
        assert len(bps.all_gather(torch.zeros(n + bps.rank(), 2), name="few")) == sum(
            n + r for r in range(bps.size())
        )
        bps.broadcast_object("x" * n, name="few")
    return len(declared) - before


class Net(nn.Module):
    """Network with an exchange in the middle, like a model-parallel layer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.first, self.last = nn.Linear(2, 4).double(), nn.Linear(4, 2).double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        joined = bps.push_pull(torch.tanh(self.first(x)), average=True, name="middle")
        out: torch.Tensor = self.last(joined)
        return out + bps.all_gather(out, name="outs").sum()


def run_net(call: Any, model: Net) -> list[torch.Tensor]:
    x = inputs(bps.size())[bps.rank()].reshape(1, 2) * 2
    found = []
    for _ in range(2):
        model.zero_grad()
        loss = call(x).pow(2).sum()
        loss.backward()
        found += [loss.detach(), *(p.grad.clone() for p in model.parameters())]  # type: ignore[union-attr]
    return found


def job_compile() -> Any:
    model = Net()
    eager = run_net(model, model)
    model = Net()
    # A different backend on each worker, because inductor is slow.
    backend = "inductor" if bps.rank() == 0 and shutil.which("gcc") else "aot_eager"
    compiled = run_net(torch.compile(model, backend=backend), model)
    found = max(float((a - b).abs().max()) for a, b in zip(eager, compiled, strict=True))

    @torch.compile(backend="aot_eager")
    def verbs(x: torch.Tensor) -> torch.Tensor:
        handle = bps.push_pull_async(x * 2, average=False, name="a")
        y = x + 1
        z = bps.synchronize(handle) + y
        bps.push_pull_inplace(z, average=False, name="b")
        return z * 3

    x = torch.full((3,), bps.rank() + 1.0)
    return found, [verbs(x) for _ in range(2)][1]


JOBS = ["job_gradcheck", "job_gradient", "job_tracking", "job_all_gather", "job_shapes_stay_few"]


@pytest.fixture(scope="module", params=[2, 4], ids="{} workers".format)
def job(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Finished:
    functions = JOBS + ["job_compile"] * (request.param == 2)
    finished = run_job(__file__, functions, tmp_path_factory, request.param, 1)
    assert finished.status == 0, finished.output[-5000:]
    return finished


def test_gradcheck_of_the_total_over_workers(job: Finished) -> None:
    """Check against the numerical derivative of the total loss by every entry of every worker's
    input.

    Also for the second derivative.
    """
    assert all(each(job, "job_gradcheck"))


@pytest.mark.parametrize("average", [True, False])
def test_gradients_are_those_of_the_total(job: Finished, average: bool) -> None:
    size = len(job.results)
    rows = inputs(size).requires_grad_()
    (first,) = torch.autograd.grad(alone(rows, average), rows, create_graph=True)
    weights = torch.arange(1.0, size + 1, dtype=torch.float64).reshape(-1, 1)
    (second,) = torch.autograd.grad((first * weights).sum(), rows)
    for rank, found in enumerate(each(job, "job_gradient")):
        torch.testing.assert_close(found[average][0], first[rank].detach(), rtol=1e-11, atol=1e-11)
        torch.testing.assert_close(found[average][1], second[rank], rtol=1e-11, atol=1e-11)


def test_gradients_are_tracked_where_autograd_records(job: Finished) -> None:
    size = float(len(job.results))
    for ones, half, twice in each(job, "job_tracking"):
        assert (
            ones.tolist() == [2 * size] * 4
            and half.tolist() == [1] * 4
            and twice.tolist() == [2, 2]
        )


def test_all_gather(job: Finished) -> None:
    size = len(job.results)
    counting = [
        row for r in range(size) for row in torch.arange(1.0, r * 2 + 1).reshape(-1, 2).tolist()
    ]
    gathered = torch.cat([torch.full((r + 1, 2), r + 1.0) for r in range(size)])
    weights = torch.arange(float(gathered.numel())).reshape(gathered.shape)
    wanted = 2 * gathered * weights * sum(range(1, size + 1))
    for rank, found in enumerate(each(job, "job_all_gather")):
        for dtype in (
            "float32",
            "bfloat16",
            "int64",
            "complex64",
            *(str(d).removeprefix("torch.") for d in UINT16),
            "float8_e4m3fn",
        ):
            assert found[f"torch.{dtype}"] == counting, dtype
        assert found["torch.bool"] == [[1, 1]] * len(counting)
        assert found["matrix"].tolist() == [[float(r)] * 3 for r in range(size) for _ in range(2)]
        assert found["none"].shape == (0, 5)
        begin = rank * (rank + 1) // 2
        assert torch.equal(found["gradient"][0], gathered)
        torch.testing.assert_close(found["gradient"][1], wanted[begin : begin + rank + 1])


def test_all_gather_refuses_on_all_workers(job: Finished) -> None:
    size = len(job.results)
    for found in each(job, "job_all_gather"):
        shape, dtype, scalar = found["errors"]
        assert (
            "float32 rows of shape (2,)" in shape
            and f"worker {size - 1} gave float32 rows of shape (3,)" in shape
        )
        assert "int16 rows" in dtype and "worker 1 gave float16 rows" in dtype
        assert "reshape(1)" in scalar


def test_shapes_stay_few(job: Finished) -> None:
    assert all(n < 25 * len(job.results) for n in each(job, "job_shapes_stay_few"))


def test_compiled(job: Finished) -> None:
    if len(job.results) == 2:
        assert all(difference < 1e-12 for difference, _ in each(job, "job_compile"))
        # x is 1 and 2: the doubled values sum to 6, and 2 or 3 is added to it; then both are
        # summed.
        assert all(r.tolist() == [(6 + 2 + 6 + 3) * 3] * 3 for _, r in each(job, "job_compile"))
