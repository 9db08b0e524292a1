"""Sparse tensors and gradients on real workers, compared with one process on the joined batch.

``job_*`` functions run in the workers.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import bpsx.torch as bps
import bpsx.torch.horovod as hvd
from bpsx.errors import MismatchError, PeerLostError
from support.torch_job import Finished, each, run_job

# PyTorch 2.11 warns about its own code when it loads a sparse tensor.
pytestmark = [
    pytest.mark.timeout(300),
    pytest.mark.filterwarnings("ignore:Sparse invariant checks"),
]
STEPS, ROWS, WIDTH = 6, 12, 3


def given(rank: int, dtype: torch.dtype) -> torch.Tensor:
    """Return an uncoalesced tensor; the number of values differs by worker, and is 0 on the last of
    four.
    """
    n = [3, 5, 1, 0][rank]
    source = torch.Generator().manual_seed(rank)
    indices = torch.randint(0, 4, (2, n), generator=source)
    values = torch.randint(0, 5, (n, 2), generator=source).to(dtype)
    return torch.sparse_coo_tensor(indices, values, (4, 4, 2), check_invariants=True)


def job_tensors() -> Any:
    found = {}
    for dtype in (torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.uint8):
        mine = given(bps.rank(), dtype)
        found[dtype] = (bps.push_pull(mine, average=False), bps.push_pull(mine, name="mean"))
        assert all(r.is_coalesced() and r.dtype == dtype for r in found[dtype])
    found["fp16"] = bps.push_pull(
        given(bps.rank(), torch.float32), average=False, compression=bps.Compression.fp16
    )
    errors = []
    for act in (
        lambda: bps.push_pull(given(bps.rank(), torch.float32).requires_grad_()),
        lambda: bps.push_pull(given(bps.rank(), torch.complex64)),
        lambda: bps.push_pull_async(given(bps.rank(), torch.float32)),
        lambda: bps.push_pull(torch.eye(3 + bps.rank() % 2).to_sparse(), name="shape"),
        lambda: bps.push_pull(torch.eye(3).to_sparse(1 + bps.rank() % 2), name="dims"),
    ):
        with pytest.raises((TypeError, MismatchError)) as caught:
            act()
        errors.append(str(caught.value))
    found["errors"] = errors
    return found


class Model(nn.Module):
    """Model with a sparse table, a second one unused in the first steps, and a dense layer."""

    def __init__(self, sparse: bool = True) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.table, self.rare = (
            nn.Embedding(ROWS, WIDTH, sparse=sparse),
            nn.Embedding(ROWS, WIDTH, sparse=sparse),
        )
        self.out = nn.Linear(WIDTH, 1)
        self.double()

    def forward(self, words: torch.Tensor, rare: bool) -> torch.Tensor:
        out: torch.Tensor = self.out(self.table(words) + (self.rare(words) if rare else 0))
        return out


def words(step: int, rank: int) -> torch.Tensor:
    return torch.randint(0, ROWS, (4,), generator=torch.Generator().manual_seed(10 * step + rank))


def uses_table(step: int, rank: int) -> bool:
    """Return whether the worker uses the table.

    Some worker has no gradient for it in each step; in step 3 no worker has one.
    """
    return step != 3 and (step + rank) % 2 == 0


def loss_of(model: Model, step: int, rank: int) -> torch.Tensor:
    mine = words(step, rank)
    if uses_table(step, rank):
        return model(mine, rare=step >= 2 and rank == 0).pow(2).mean()
    return model.out(torch.ones(4, WIDTH, dtype=torch.float64)).pow(2).mean()


def optimizers(model: Model, name: str) -> list[tuple[str, torch.optim.Optimizer]]:
    tables = [model.table.weight, model.rare.weight]
    if name == "SparseAdam":
        return [
            ("tables", torch.optim.SparseAdam(tables, lr=0.05)),
            ("out", torch.optim.Adam(model.out.parameters(), lr=0.05)),
        ]
    return [("all", torch.optim.SGD([*tables, *model.out.parameters()], lr=0.05))]


def train(
    name: str, sparse_as_dense: bool = False, distributed: Any = bps.DistributedOptimizer
) -> Any:
    model = Model()
    ours: list[Any] = [
        distributed(o, model.named_parameters(), sparse_as_dense=sparse_as_dense)
        for _, o in optimizers(model, name)
    ]
    layouts = []
    for step in range(STEPS):
        for o in ours:
            o.zero_grad()
        loss_of(model, step, bps.rank()).backward()
        for o in ours:
            o.step()
        layouts.append(str(getattr(model.table.weight.grad, "layout", None)))
    return [p.detach().clone() for p in model.parameters()], layouts


def job_sgd() -> Any:
    return train("SGD")


def job_sparse_adam() -> Any:
    return train("SparseAdam")


def job_as_dense() -> Any:
    return train("SGD", sparse_as_dense=True)


def job_adam_as_dense() -> Any:
    return train("SparseAdam", sparse_as_dense=True)


def job_adam_as_dense_horovod() -> Any:
    return train("SparseAdam", sparse_as_dense=True, distributed=hvd.DistributedOptimizer)


def job_passes() -> Any:
    """Sparse gradients of two backward passes are summed locally, then sent."""
    model = nn.Embedding(ROWS, WIDTH, sparse=True).double()
    nn.init.ones_(model.weight)
    optimizer: Any = bps.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=1.0),
        model.named_parameters(),
        backward_passes_per_step=2,
    )
    for _ in range(3):
        optimizer.zero_grad()
        for word in (bps.rank(), 7):
            model(torch.tensor([word])).sum().backward()
        optimizer.step()
    return model.weight.detach().clone()


def job_one_is_dense() -> Any:
    """One worker's gradient is dense in the first step, then in a later step, after sparse ones.

    Training then continues.
    """
    table = nn.Parameter(torch.ones(4, 2))
    other = nn.Parameter(torch.ones(3))
    optimizer: Any = bps.DistributedOptimizer(
        torch.optim.SGD([table, other], lr=1.0), [("table", table), ("other", other)]
    )
    errors = []
    for kinds in ("ds", "ss", "sd"):
        optimizer.zero_grad()
        sparse = kinds[min(bps.rank(), 1)] == "s"
        (
            nn.functional.embedding(torch.tensor([bps.rank(), 3]), table, sparse=sparse).sum()
            + other.sum()
        ).backward()
        try:
            optimizer.step()
            errors.append("none")
        except MismatchError as e:
            errors.append(str(e))
    return errors, table.detach().clone(), bps.push_pull(torch.ones(1), average=False)


def job_becomes_sparse() -> Any:
    """A gradient that was dense in the first step is exchanged as dense on all workers."""
    table = nn.Parameter(torch.ones(4, 2))
    optimizer: Any = bps.DistributedOptimizer(
        torch.optim.SGD([table], lr=1.0), [("becoming", table)]
    )
    for step in range(2):
        optimizer.zero_grad()
        nn.functional.embedding(
            torch.tensor([bps.rank()]), table, sparse=step == 1 and bps.rank() == 0
        ).sum().backward()
        optimizer.step()
    assert table.grad is not None and table.grad.layout == torch.strided
    return table.detach().clone()


def job_becomes_dense() -> Any:
    """A gradient that is sparse only in the first step, because of a penalty on the weights from
    the second on.

    In the last step it is sparse again on one worker.
    """
    table = nn.Parameter(torch.ones(ROWS, 2, dtype=torch.float64))
    optimizer: Any = bps.DistributedOptimizer(
        torch.optim.SGD([table], lr=0.1), [("no longer sparse", table)]
    )
    for step in range(4):
        optimizer.zero_grad()
        penalised(table, step, bps.rank()).backward()
        optimizer.step()
    return table.detach().clone()


def penalised(table: torch.Tensor, step: int, rank: int) -> torch.Tensor:
    loss = nn.functional.embedding(torch.tensor([rank, 3]), table, sparse=True).sum() * (rank + 1)
    return loss if step == 0 or step == 3 and rank == 0 else loss + table.pow(2).sum() * (rank + 2)


JOBS = [
    "job_tensors",
    "job_sgd",
    "job_sparse_adam",
    "job_as_dense",
    "job_adam_as_dense",
    "job_adam_as_dense_horovod",
    "job_passes",
    "job_one_is_dense",
    "job_becomes_sparse",
    "job_becomes_dense",
]


@pytest.fixture(scope="module", params=[(2, 1), (2, 2)], ids=["2 workers", "2 machines of 2"])
def job(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Finished:
    machines, processes = request.param
    finished = run_job(__file__, JOBS, tmp_path_factory, machines, 1, processes)
    assert finished.status == 0, finished.output[-5000:]
    return finished


def test_sums_and_averages(job: Finished) -> None:
    size = len(job.results)
    for found in each(job, "job_tensors"):
        for dtype in (torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.uint8):
            total = sum(
                (given(r, torch.float64).to_dense() for r in range(size)),
                torch.zeros(4, 4, 2, dtype=torch.float64),
            )
            mean = (
                total / size if dtype.is_floating_point else total.div(size, rounding_mode="floor")
            )
            assert torch.equal(found[dtype][0].to_dense(), total.to(dtype)) and torch.equal(
                found[dtype][1].to_dense(), mean.to(dtype)
            )
        assert torch.equal(found["fp16"].to_dense().double(), total)


def test_refusals(job: Finished) -> None:
    for found in each(job, "job_tensors"):
        gradient, dtype, asynchronous, shape, dims = found["errors"]
        assert (
            "no derivative" in gradient
            and "view_as_real" in dtype
            and "sparse_coo tensors cannot be sent" in asynchronous
        )
        assert (
            "worker 0 gave a sparse tensor of shape (3, 3)" in shape
            and "worker 1 gave a sparse tensor of shape (4, 4)" in shape
        )
        assert "with 1 sparse dimensions" in dims and "with 2 sparse dimensions" in dims


def alone(name: str, size: int) -> list[torch.Tensor]:
    model = Model()
    ours = [o for _, o in optimizers(model, name)]
    for step in range(STEPS):
        for o in ours:
            o.zero_grad()
        for rank in range(size):
            (loss_of(model, step, rank) / size).backward()
        for o in ours:
            o.step()
    return [p.detach().clone() for p in model.parameters()]


@pytest.mark.parametrize(
    "case",
    [
        "job_sgd",
        "job_sparse_adam",
        "job_as_dense",
        "job_adam_as_dense",
        "job_adam_as_dense_horovod",
    ],
)
def test_training_equals_one_process(job: Finished, case: str) -> None:
    expected = alone("SparseAdam" if "adam" in case else "SGD", len(job.results))
    everywhere = each(job, case)
    for mine, layouts in everywhere:
        for a, b in zip(mine, expected, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-11)
        assert all(torch.equal(a, b) for a, b in zip(mine, everywhere[0][0]))
        layout = "torch.strided" if case == "job_as_dense" else "torch.sparse_coo"
        assert layouts == [
            layout if any(uses_table(step, r) for r in range(len(everywhere))) else "None"
            for step in range(STEPS)
        ]


def test_passes_add_up(job: Finished) -> None:
    size = len(job.results)
    expected = torch.ones(ROWS, WIDTH, dtype=torch.float64)
    expected[:size] -= 3 / size
    expected[7] -= 3
    for found in each(job, "job_passes"):
        torch.testing.assert_close(found, expected)


def test_dense_here_and_sparse_there(job: Finished) -> None:
    size = len(job.results)
    for (first, second, third), table, after in each(job, "job_one_is_dense"):
        assert (
            f"'table' is sparse on {size - 1} workers and dense on 1" in first
            and "sparse_as_dense" in first
        )
        assert second == "none"
        assert (
            "a sparse tensor of shape (4, 2)" in third
            and "a dense tensor of shape (4, 2)" in third
            and "Gradient.table" in third
        )
        assert after.item() == size
        expected = torch.ones(4, 2)
        expected[:size] -= 1 / size
        expected[3] -= 1
        torch.testing.assert_close(table, expected)


def test_a_gradient_that_was_dense_stays_dense(job: Finished) -> None:
    size = len(job.results)
    for table in each(job, "job_becomes_sparse"):
        expected = torch.ones(4, 2)
        expected[:size] -= 2 / size
        torch.testing.assert_close(table, expected)


def test_a_sparse_gradient_may_become_dense(job: Finished) -> None:
    size, table = len(job.results), nn.Parameter(torch.ones(ROWS, 2, dtype=torch.float64))
    optimizer = torch.optim.SGD([table], lr=0.1)
    for step in range(4):
        optimizer.zero_grad()
        for rank in range(size):
            (penalised(table, step, rank) / size).backward()
        optimizer.step()
    for found in each(job, "job_becomes_dense"):
        torch.testing.assert_close(found, table.detach(), rtol=1e-11, atol=1e-11)


def job_one_dies() -> Any:
    import os

    table = nn.Embedding(ROWS, WIDTH, sparse=True)
    optimizer: Any = bps.DistributedOptimizer(
        torch.optim.SGD(table.parameters(), lr=0.1), table.named_parameters()
    )
    for step in range(3):
        optimizer.zero_grad()
        table(torch.tensor([step])).sum().backward()
        if step == 2 and bps.rank() == 1:
            os._exit(3)
        try:
            optimizer.step()
        except PeerLostError as e:
            return f"{type(e).__name__}: {e}"
    return "not reached"


def test_a_dead_worker_is_named(tmp_path: Path) -> None:
    finished = run_job(__file__, ["job_one_dies"], tmp_path)
    assert finished.status != 0
    message = finished.results[0]["job_one_dies"] if 0 in finished.results else finished.output
    assert "PeerLostError" in message and "worker 1" in message
