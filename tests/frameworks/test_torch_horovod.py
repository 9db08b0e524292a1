"""Horovod's names between real workers: what they return, against NumPy; their gradients, which are
Horovod's.

Functions named ``job_*`` run in the workers.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import bpsx.torch.horovod as hvd
from bpsx import ConfigError
from bpsx.plugin import adapter
from support.torch_job import Finished, run_job

pytestmark = [
    pytest.mark.timeout(300),
    pytest.mark.filterwarnings("ignore:.*average is deprecated"),
]
OPS = {"Average": np.mean, "Sum": np.sum, "Min": np.min, "Max": np.max, "Product": np.prod}
QUESTIONS = [
    "mpi_threads_supported",
    "mpi_enabled",
    "mpi_built",
    "gloo_enabled",
    "gloo_built",
    "nccl_built",
    "ddl_built",
    "ccl_built",
    "cuda_built",
    "rocm_built",
]
SHAPE = (3, 4)


def given(rank: int, *shape: int, seed: int = 0) -> torch.Tensor:
    """Worker ``rank``'s tensor."""
    return torch.randn(
        shape or SHAPE,
        generator=torch.Generator().manual_seed(1000 * seed + rank),
        dtype=torch.float64,
    )


def mine(*shape: int, seed: int = 0) -> torch.Tensor:
    return given(hvd.rank(), *shape, seed=seed)


def everybody(size: int, *shape: int, seed: int = 0) -> np.ndarray:
    return np.stack([given(r, *shape, seed=seed).numpy() for r in range(size)])


def integers(rank: int) -> torch.Tensor:
    """Whose sums are negative, and do not divide."""
    return torch.tensor([-7 - rank, 5 + rank, -1, 2 * rank], dtype=torch.int64)


# ---- sums


def job_allreduce() -> Any:
    x = mine()
    found: dict[str, Any] = {
        name: hvd.allreduce(x, op=getattr(hvd, name), name=f"op.{name}") for name in OPS
    }
    found |= {f"{name} in place": hvd.allreduce_(x.clone(), op=getattr(hvd, name)) for name in OPS}
    found |= {
        f"{name} async": hvd.synchronize(hvd.allreduce_async(x, op=getattr(hvd, name)))
        for name in OPS
    }
    for name in OPS:
        target = x.clone().t().contiguous().t()  # not plain memory
        found[f"{name} async in place"] = hvd.synchronize(
            hvd.allreduce_async_(target, op=getattr(hvd, name))
        )
        assert found[f"{name} async in place"] is target
    found["default"], found["average=True"], found["average=False"] = (
        hvd.allreduce(x),
        hvd.allreduce(x, True),
        hvd.allreduce(x, False, "old"),
    )
    assert torch.equal(x, mine()), "the input stays as it is"
    factors = {"prescale_factor": 0.5, "postscale_factor": 3.0}
    found["scaled"] = [
        hvd.allreduce(x, op=hvd.Sum, **factors),
        hvd.allreduce_(x.clone(), op=hvd.Sum, **factors),
        hvd.synchronize(hvd.allreduce_async(x, op=hvd.Sum, **factors)),
        hvd.synchronize(hvd.allreduce_async_(x.clone(), op=hvd.Sum, **factors)),
    ]
    found["scaled max"] = hvd.allreduce(x, op=hvd.Max, prescale_factor=-2, postscale_factor=0.5)
    n = integers(hvd.rank())
    found["integers"] = [
        hvd.allreduce(n),
        hvd.allreduce_(n.clone()),
        hvd.synchronize(hvd.allreduce_async(n)),
        hvd.allreduce(n, op=hvd.Min),
    ]
    found["integers scaled"] = hvd.allreduce(n, op=hvd.Sum, prescale_factor=0.5)
    found["fp16"] = [
        hvd.allreduce(x, op=getattr(hvd, o), compression=hvd.Compression.fp16)
        for o in ("Average", "Max")
    ]
    assert all(t.dtype == torch.float64 for t in found["fp16"])
    handle = hvd.allreduce_async(x, op=hvd.Sum, postscale_factor=2.0)
    while not hvd.poll(handle):
        pass
    first = hvd.synchronize(handle)
    assert hvd.synchronize(handle) is first
    torch.testing.assert_close(first, 2 * found["Sum"])  # the factor counts once
    return found


def job_unnamed() -> Any:
    """Calls without names are matched by order, and make no new names."""

    def round_of_calls(step: int) -> list[torch.Tensor]:
        handles = [
            hvd.allreduce_async(mine(*shape, seed=step + i), op=hvd.Sum)
            for i, shape in enumerate([(2,), (2, 2), (2,), (2,)])
        ]
        hvd.allgather(mine(1 + step % 4, 2))
        hvd.broadcast(mine(2), 0)
        hvd.reducescatter(mine(5))
        hvd.alltoall(mine(hvd.size() + step % 3)[step % 3 :])
        return [hvd.synchronize(h) for h in reversed(handles)][::-1]

    known = adapter.session()._declared
    rounds, declared = [], []
    for step in range(12):
        rounds.append(round_of_calls(step))
        declared.append(len(known))
    return rounds, declared


def job_grouped() -> Any:
    tensors = [mine(2, seed=1), mine(3, 2, seed=2)]
    found = {
        "allreduce": hvd.grouped_allreduce(tensors, op=hvd.Sum, name="g"),
        "allreduce_": hvd.grouped_allreduce_([t.clone() for t in tensors], op=hvd.Sum),
        "async": hvd.synchronize(hvd.grouped_allreduce_async(tensors, op=hvd.Sum)),
        "async_": hvd.synchronize(
            hvd.grouped_allreduce_async_([t.clone() for t in tensors], op=hvd.Sum)
        ),
        "allgather": hvd.grouped_allgather(tensors, "g"),
        "allgather async": hvd.synchronize(hvd.grouped_allgather_async(tensors)),
        "reducescatter": hvd.grouped_reducescatter(tensors, op=hvd.Sum),
        "reducescatter async": hvd.synchronize(
            hvd.grouped_reducescatter_async(tensors, "g", op=hvd.Sum)
        ),
    }
    assert [type(v) for v in found.values()] == [list, list, tuple, tuple, list, tuple, list, tuple]
    assert [
        t.dtype
        for t in hvd.grouped_allreduce(
            [torch.ones(1), torch.ones(1).int()], compression=hvd.Compression.fp16
        )
    ] == [torch.float32, torch.int32]
    assert (
        hvd.grouped_allreduce([]) == [] and hvd.synchronize(hvd.grouped_allgather_async([])) == ()
    )
    return found


def job_sparse() -> Any:
    rank = hvd.rank()
    tensor = torch.sparse_coo_tensor(
        torch.tensor([[rank, 0, rank]]),
        torch.ones(3, 2) * (rank + 1),
        (5, 2),
        check_invariants=True,
    )
    handle = hvd.sparse_allreduce_async(tensor, "rows", hvd.Sum)
    while not hvd.poll(handle):
        pass
    average = hvd.sparse_allreduce_async(tensor, name="rows", op=hvd.Average)
    return [handle().to_dense(), hvd.synchronize(handle).to_dense(), average().to_dense()]


# ---- gathers and broadcasts


def job_gathers() -> Any:
    rank, size = hvd.rank(), hvd.size()
    x = mine(rank, 2)  # worker 0 has no rows
    handle = hvd.allgather_async(x, "rows")
    found: dict[str, Any] = {
        "allgather": [
            hvd.allgather(x, name="rows"),
            hvd.synchronize(hvd.allgather_async(x.t().contiguous().t())),
        ]
    }
    while not hvd.poll(handle):
        pass
    found["allgather"].append(hvd.synchronize(handle))
    found["bool"] = hvd.allgather(torch.tensor([rank == 1]))
    found["reducescatter"] = [
        hvd.reducescatter(mine(5, 2), op=hvd.Sum),
        hvd.synchronize(hvd.reducescatter_async(mine(5, 2), "r", hvd.Sum)),
    ]
    found["reducescatter average"] = hvd.reducescatter(
        mine(5, 2), prescale_factor=2.0, compression=hvd.Compression.fp16
    )
    for root in range(size):
        x, target, columns = mine(), mine(), mine(4, 6)
        results = [
            hvd.broadcast(x, root, "b"),
            hvd.synchronize(hvd.broadcast_async(x, root)),
            hvd.broadcast_(target, root, name="b"),
            hvd.synchronize(hvd.broadcast_async_(columns[:, ::2], root)),
        ]
        assert torch.equal(x, mine()) and results[2] is target
        assert torch.equal(columns[:, 1::2], mine(4, 6)[:, 1::2]), "what lies between stays"
        found[f"broadcast {root}"] = results
    even = mine(2 * size, 3)
    output, received = hvd.synchronize(hvd.alltoall_async(even))
    assert received.tolist() == [2] * size and received.dtype == torch.int32
    found["alltoall"] = [hvd.alltoall(even), output]
    splits = torch.tensor([(rank + r) % 3 for r in range(size)])
    rows = mine(int(splits.sum()) + 1, 2)  # the last row is not sent
    pairs = [
        hvd.alltoall(rows, splits, name="uneven"),
        hvd.alltoall(rows, splits.numpy()),
        hvd.synchronize(hvd.alltoall_async(rows, splits=splits)),
    ]
    assert [p[1].dtype for p in pairs] == [torch.int64, torch.int32, torch.int64]
    found["alltoall uneven"] = pairs
    return found


def losses(size: int) -> list[Callable[[torch.Tensor], Any]]:
    """Verbs to be differentiated."""
    return [
        lambda x: hvd.allreduce(x, op=hvd.Sum, prescale_factor=2.0, postscale_factor=0.25),
        lambda x: hvd.allreduce(x, name="a"),
        lambda x: hvd.grouped_allreduce([x, x * x], op=hvd.Sum)[1],
        lambda x: hvd.allgather(x[: hvd.rank() + 1]),
        lambda x: hvd.grouped_allgather([x, 2 * x])[1],
        lambda x: hvd.broadcast(x, size - 1),
        lambda x: hvd.reducescatter(x, op=hvd.Sum),
        lambda x: hvd.reducescatter(x, postscale_factor=2.0),
        lambda x: hvd.grouped_reducescatter([x, 2 * x])[1],
        lambda x: hvd.alltoall(x[:size]),
        lambda x: hvd.alltoall(x, [5 - hvd.rank()] + [0] * (size - 2) + [hvd.rank()])[0],
    ]


def job_gradients() -> Any:
    """Gradients of sum(weights * verb(x)) with different weights on each worker."""
    found = []
    for verb in losses(hvd.size()):
        x = mine(5, 2).requires_grad_()
        y = verb(x)
        y.mul_(1.0)  # the result is writable
        weights = mine(*y.shape, seed=7)
        (y * weights).sum().backward()
        found.append(x.grad)
    with torch.no_grad():
        assert not hvd.allreduce(mine().requires_grad_()).requires_grad
    assert not hvd.synchronize(hvd.allreduce_async(mine().requires_grad_())).requires_grad
    refused = hvd.allreduce(mine().requires_grad_(), op=hvd.Max)
    with pytest.raises(ConfigError, match="allreduce with op=hvd.Max has no derivative"):
        refused.sum().backward()
    return found


# ---- training


def network(seed: int) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2)).double()


def trained(
    optimizer: torch.optim.Optimizer, model: nn.Module, inputs: Callable[[int], torch.Tensor]
) -> list[torch.Tensor]:
    for step in range(4):
        optimizer.zero_grad()
        model(inputs(step)).pow(2).mean().backward()
        optimizer.step()
    return [p.detach().clone() for p in model.parameters()]


WAYS: dict[str, dict[str, Any]] = {
    "Average": {},
    "Sum": {"op": hvd.Sum},
    "predivided": {"op": hvd.Average, "gradient_predivide_factor": 4.0},
    "num_groups": {"num_groups": 2},
    "groups": {"groups": 3},
    "named": {"sparse_as_dense": True, "process_set": hvd.global_process_set},
}


def job_training() -> Any:
    found = {}
    for way, options in WAYS.items():
        model = network(hvd.rank())
        hvd.broadcast_parameters(model.parameters(), root_rank=0)
        base = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)
        optimizer = hvd.DistributedOptimizer(base, model.named_parameters(), **options)
        assert optimizer is base and isinstance(optimizer, torch.optim.SGD)
        found[way] = trained(optimizer, model, lambda step: mine(5, 4, seed=step))
    embedding = nn.Embedding(4, 2, sparse=True)
    nn.init.ones_(embedding.weight)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(embedding.parameters(), lr=1.0),
        embedding.named_parameters(prefix="e"),
        op=hvd.Sum,
    )
    embedding(torch.tensor([0, 1])).sum().backward()
    optimizer.step()
    found["sparse"] = [embedding.weight.detach()]
    return found


def job_state() -> Any:
    rank, size = hvd.rank(), hvd.size()
    root = network(size - 1).state_dict()
    for form in (
        lambda m: m.state_dict(),
        lambda m: m.named_parameters(),
        lambda m: m.parameters(),
        lambda m: list(m.parameters()),
        lambda m: list(m.named_parameters()),
    ):
        model = network(rank)
        hvd.broadcast_parameters(form(model), size - 1)
        assert all(torch.equal(v, root[k]) for k, v in model.state_dict().items())
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1 * (rank + 1))
    if rank == 0:
        model(mine(2, 4)).sum().backward()
        optimizer.step()
    hvd.broadcast_optimizer_state(optimizer, root_rank=0, model=model)
    assert hvd.broadcast_object({"epoch": rank}, 1, name="o") == {"epoch": 1}
    norm = hvd.SyncBatchNorm(2)
    norm(torch.full((2, 2), float(rank)))
    return hvd.allgather_object(
        (rank, optimizer.state_dict()["param_groups"][0]["lr"], len(optimizer.state))
    ), norm.running_mean


def job_who() -> Any:
    hvd.init()  # a repeated init() does nothing
    assert (
        hvd.is_initialized()
        and not any(getattr(hvd, q)() for q in QUESTIONS)
        and hvd.is_homogeneous()
    )
    everyone = hvd.add_process_set(list(range(hvd.size())))
    assert hvd.allreduce(
        torch.ones(1), op=hvd.Sum, process_set=everyone
    ).item() == hvd.size() and not hvd.remove_process_set(everyone)
    for members in (everyone, hvd.global_process_set):
        assert (members.size(), members.rank(), members.included()) == (
            hvd.size(),
            hvd.rank(),
            True,
        )
    hvd.init([], process_sets="dynamic")
    hvd.init(process_sets=[everyone])
    hvd.barrier()
    if hvd.rank() == 0:  # has more data than the others
        hvd.allreduce(torch.ones(2))
        last = hvd.join()
    else:
        last = hvd.join(device=-1)
    return (
        hvd.rank(),
        hvd.size(),
        hvd.local_rank(),
        hvd.local_size(),
        hvd.cross_rank(),
        hvd.cross_size(),
        last,
    )


def near(found: Any, expected: Any, tolerance: float = 1e-11) -> None:
    np.testing.assert_allclose(found.numpy(), expected, rtol=tolerance, atol=tolerance)


def of_all(job: Finished, function: str) -> list[Any]:
    return [job.results[r][function] for r in range(len(job.results))]


def assert_who_and_join(job: Finished) -> None:
    size = len(job.results)
    assert [r[:6] for r in of_all(job, "job_who")] == [
        (r, size, 0, 1, r, size) for r in range(size)
    ]
    assert len({r[6] for r in of_all(job, "job_who")}) == 1


def assert_allreduce(job: Finished) -> None:
    size = len(job.results)
    x, n = everybody(size), np.stack([integers(r).numpy() for r in range(size)])
    for found in of_all(job, "job_allreduce"):
        for op, expected in OPS.items():
            for form in ("", " in place", " async", " async in place"):
                near(found[op + form], expected(x, axis=0))
                assert torch.equal(found[op + form], job.results[0]["job_allreduce"][op + form]), (
                    "the same bits"
                )
        for name in ("default", "average=True"):
            near(found[name], x.mean(axis=0))
        near(found["average=False"], x.sum(axis=0))
        for scaled in found["scaled"]:
            near(scaled, 1.5 * x.sum(axis=0))
        near(found["scaled max"], 0.5 * (-2 * x).max(axis=0))
        for average in found["integers"][:3]:
            assert average.tolist() == np.trunc(n.sum(axis=0) / size).tolist(), "towards zero"
        assert found["integers"][3].tolist() == n.min(axis=0).tolist()
        assert found["integers scaled"].tolist() == np.trunc(n * 0.5).sum(axis=0).tolist()
        near(found["fp16"][0], x.mean(axis=0), 2e-3)
        near(found["fp16"][1], x.max(axis=0), 2e-3)


def assert_calls_without_a_name(job: Finished) -> None:
    size = len(job.results)
    for rounds, declared in of_all(job, "job_unnamed"):
        for step, found in enumerate(rounds):
            for i, (tensor, shape) in enumerate(zip(found, [(2,), (2, 2), (2,), (2,)])):
                near(tensor, everybody(size, *shape, seed=step + i).sum(axis=0))
        assert declared[3] == declared[-1], "names are not made without end"


def assert_grouped(job: Finished) -> None:
    size = len(job.results)
    inputs = [everybody(size, 2, seed=1), everybody(size, 3, 2, seed=2)]
    for rank, found in enumerate(of_all(job, "job_grouped")):
        for i, x in enumerate(inputs):
            for form in ("allreduce", "allreduce_", "async", "async_"):
                near(found[form][i], x.sum(axis=0))
            for form in ("allgather", "allgather async"):
                near(found[form][i], x.reshape(-1, *x.shape[2:]))
            for form in ("reducescatter", "reducescatter async"):
                near(found[form][i], np.array_split(x.sum(axis=0), size)[rank])


def assert_sparse(job: Finished) -> None:
    size = len(job.results)
    total = torch.zeros(5, 2)
    for rank in range(size):
        total[rank] += 2 * (rank + 1)
        total[0] += rank + 1
    for found in of_all(job, "job_sparse"):
        assert (
            torch.equal(found[0], total)
            and torch.equal(found[1], total)
            and torch.equal(found[2], total / size)
        )


def assert_gathers(job: Finished) -> None:
    size = len(job.results)
    total = everybody(size, 5, 2).sum(axis=0)
    for rank, found in enumerate(of_all(job, "job_gathers")):
        for gathered in found["allgather"]:
            assert torch.equal(gathered, torch.cat([given(r, r, 2) for r in range(size)]))
        assert found["bool"].tolist() == [r == 1 for r in range(size)]
        for form in found["reducescatter"]:
            near(form, np.array_split(total, size)[rank])
        near(found["reducescatter average"], np.array_split(2 * total / size, size)[rank], 4e-3)
        for root in range(size):
            expected = [given(root)] * 3 + [given(root, 4, 6)[:, ::2]]
            assert all(
                torch.equal(a, b) for a, b in zip(found[f"broadcast {root}"], expected, strict=True)
            )
        for form in found["alltoall"]:
            assert torch.equal(
                form,
                torch.cat([given(r, 2 * size, 3)[2 * rank : 2 * rank + 2] for r in range(size)]),
            )
        splits = [[(r + s) % 3 for s in range(size)] for r in range(size)]
        parts = [
            given(r, sum(splits[r]) + 1, 2)[sum(splits[r][:rank]) : sum(splits[r][: rank + 1])]
            for r in range(size)
        ]
        for output, received in found["alltoall uneven"]:
            assert torch.equal(output, torch.cat(parts)) and received.tolist() == [
                row[rank] for row in splits
            ]


def expected_gradients(size: int, rank: int) -> list[np.ndarray]:
    """Return Horovod's derivatives, in the order of :func:`losses`."""

    def weights(*shape: int) -> np.ndarray:
        return everybody(size, *shape, seed=7)

    x, all_rows = given(rank, 5, 2).numpy(), weights(5, 2)
    begin = rank * (rank + 1) // 2
    uneven = np.zeros((5, 2))
    uneven[: rank + 1] = weights(size * (size + 1) // 2, 2).mean(axis=0)[begin : begin + rank + 1]
    scattered = np.concatenate(
        [given(r, len(part), 2, seed=7).numpy() for r, part in enumerate(np.array_split(x, size))]
    )
    even = np.zeros((5, 2))
    even[:size] = weights(size, 2)[:, rank]
    # alltoall with splits: worker 0 gets 5 - r rows from each worker r, the last worker r rows.
    first, last = (
        given(0, sum(5 - r for r in range(size)), 2, seed=7).numpy(),
        given(size - 1, sum(range(size)), 2, seed=7).numpy(),
    )
    before, before_last = sum(5 - r for r in range(rank)), sum(range(rank))
    back = np.concatenate(
        [first[before : before + 5 - rank], last[before_last : before_last + rank]]
    )
    return [
        0.5 * all_rows.sum(axis=0),
        all_rows.mean(axis=0),
        2 * x * all_rows.sum(axis=0),
        uneven,
        2 * weights(5 * size, 2).mean(axis=0)[5 * rank : 5 * rank + 5],
        all_rows.mean(axis=0) * (rank == size - 1),
        size * scattered,
        2 * scattered,
        2 * scattered,
        even,
        back,
    ]


def assert_gradients(job: Finished) -> None:
    size = len(job.results)
    for rank, found in enumerate(of_all(job, "job_gradients")):
        for gradient, expected in zip(found, expected_gradients(size, rank), strict=True):
            near(gradient, expected)


def assert_training(job: Finished) -> None:
    size = len(job.results)
    for way in WAYS:
        model = network(0)
        scale = size if way == "Sum" else 1
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)
        for step in range(4):
            optimizer.zero_grad()
            (
                model(torch.cat([given(r, 5, 4, seed=step) for r in range(size)])).pow(2).mean()
                * scale
            ).backward()
            optimizer.step()
        for found in of_all(job, "job_training"):
            for weight, expected in zip(found[way], model.parameters(), strict=True):
                near(weight, expected.detach().numpy())
    assert (
        of_all(job, "job_training")[0]["sparse"][0].tolist() == [[1 - size] * 2] * 2 + [[1, 1]] * 2
    )


def assert_state_and_objects(job: Finished) -> None:
    size = len(job.results)
    for everyone, running_mean in of_all(job, "job_state"):
        assert everyone == [(r, 0.1, 4) for r in range(size)]
        near(running_mean, np.full(2, 0.1 * np.mean(range(size))), 1e-6)


#: Checks by job. The first step of an optimizer imports PyTorch modules for seconds, so only the
#: job of two workers takes one.
CHECKS = {
    "job_who": assert_who_and_join,
    "job_allreduce": assert_allreduce,
    "job_unnamed": assert_calls_without_a_name,
    "job_grouped": assert_grouped,
    "job_sparse": assert_sparse,
    "job_gathers": assert_gathers,
    "job_gradients": assert_gradients,
    "job_training": assert_training,
    "job_state": assert_state_and_objects,
}


@pytest.mark.parametrize("workers", [2, 4])
def test_each_verb_follows_its_definition(tmp_path: Path, workers: int) -> None:
    """This is one test, because with several each pytest-xdist process would start its own job."""
    jobs = list(CHECKS)[: 9 if workers == 2 else 7]
    finished = run_job(__file__, jobs, tmp_path, workers)
    assert finished.status == 0, finished.output[-5000:]
    for job in jobs:
        CHECKS[job](finished)
