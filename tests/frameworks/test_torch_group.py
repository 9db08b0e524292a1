"""The torch.distributed backend "bpsx": every collective, compared with its definition.

``job_*`` functions run in the workers.
"""

from __future__ import annotations

import functools
import warnings
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional_collectives

import bpsx.torch as bps
from bpsx.dtypes import BY_NAME
from bpsx.errors import BpsxError
from bpsx.plugin import adapter
from support.torch_job import run_job
from support.torch_release import UINT16

DTYPES = [getattr(torch, name) for name in BY_NAME] + [
    torch.int16,
    torch.bool,
    torch.complex64,
    torch.complex128,
]
Op = dist.ReduceOp
FOLD = {
    "SUM": torch.add,
    "PRODUCT": torch.mul,
    "MIN": torch.minimum,
    "MAX": torch.maximum,
    "BAND": torch.bitwise_and,
    "BOR": torch.bitwise_or,
    "BXOR": torch.bitwise_xor,
}


def given(rank: int, dtype: torch.dtype, *shape: int) -> torch.Tensor:
    """Return worker ``rank``'s input: small integers, so that sums and products are exact."""
    torch.manual_seed(17 * rank + len(shape))
    whole = torch.randint(1, 4, shape or (5,))
    return (
        whole.bool() & (whole > 2)
        if dtype == torch.bool
        else whole.to(dtype) + (1j * whole if dtype.is_complex else 0)
    )


def everybody(dtype: torch.dtype, *shape: int) -> list[torch.Tensor]:
    return [given(r, dtype, *shape) for r in range(dist.get_world_size())]


def error_of(act: Any, *args: Any, **more: Any) -> str:
    try:
        work = act(*args, **more)
        if work is not None and hasattr(work, "wait"):
            work.wait()
    except (BpsxError, ValueError, RuntimeError) as e:
        return f"{type(e).__name__}: {e}"
    return "none"


class Compared:
    """Compares results with expectations and keeps only the pairs that differ."""

    def __init__(self) -> None:
        self.count, self.wrong = 0, []  # type: ignore[var-annotated]

    def check(self, what: str, came: Any, expected: Any) -> None:
        self.count += 1
        equal = (
            torch.equal(came, expected) and came.dtype == expected.dtype
            if isinstance(came, torch.Tensor)
            else came == expected
        )
        if not equal:
            self.wrong.append(f"{what}: {came} instead of {expected}")

    def done(self) -> Any:
        return self.count, self.wrong


# ---- run in the workers, between init_process_group and destroy_process_group


def job_reductions() -> Any:
    found, rank = Compared(), dist.get_rank()
    for dtype in DTYPES:
        for name, fold in FOLD.items():
            if (
                name[0] == "B"
                and (dtype.is_floating_point or dtype.is_complex)
                or name != "SUM"
                and dtype.is_complex
            ):
                continue
            op = getattr(Op, name)
            expected = functools.reduce(fold, everybody(dtype))
            mine = given(rank, dtype)
            dist.all_reduce(mine, op)
            found.check(f"all_reduce {name} {dtype}", mine, expected)
            mine = given(rank, dtype)
            dist.reduce(mine, 1, op)
            found.check(
                f"reduce {name} {dtype}", mine, expected if rank == 1 else given(rank, dtype)
            )
    for dtype in (torch.float32, torch.bfloat16, torch.complex64, torch.int32, torch.int16):
        mine = given(rank, dtype)
        dist.all_reduce(mine, Op.AVG)
        total, size = functools.reduce(torch.add, everybody(dtype)), dist.get_world_size()
        whole = not (dtype.is_floating_point or dtype.is_complex)
        found.check(
            f"AVG {dtype}",
            mine,
            torch.div(total, size, rounding_mode="floor") if whole else total / size,
        )
    return found.done()


def job_movements() -> Any:
    """Collectives that only move tensors, for any dtype.

    With lists and single tensors, and with uneven lengths where those are allowed.
    """
    found, rank, size = Compared(), dist.get_rank(), dist.get_world_size()
    for dtype in [*DTYPES, torch.float8_e4m3fn, *UINT16]:
        plain = dtype if dtype in DTYPES else torch.float32
        theirs = [t.to(dtype) for t in everybody(plain, 2, 3)]
        raw = [t.view(torch.uint8) if dtype not in DTYPES else t for t in theirs]

        def same(
            what: str, came: torch.Tensor, source: int, raw: Any = raw, dtype: Any = dtype
        ) -> None:
            found.check(
                f"{what} {dtype}",
                came.view(torch.uint8) if dtype not in DTYPES else came,
                raw[source],
            )

        mine = theirs[rank].clone()
        dist.broadcast(mine, size - 1)
        same("broadcast", mine, size - 1)
        outputs = [torch.empty_like(theirs[0]) for _ in range(size)]
        dist.all_gather(outputs, theirs[rank])
        for r in range(size):
            same("all_gather", outputs[r], r)
        outputs = [torch.empty_like(theirs[0]) for _ in range(size)] if rank == 1 else None
        dist.gather(theirs[rank], outputs, dst=1)
        for r in range(size) if outputs else ():
            same("gather", outputs[r], r)
        mine = torch.empty_like(theirs[0])
        dist.scatter(mine, theirs if rank == 1 else None, src=1)
        same("scatter", mine, rank)
        everything = torch.empty(2 * size, 3, dtype=dtype)
        dist.all_gather_into_tensor(everything, theirs[rank])
        for r in range(size):
            same("all_gather_into_tensor", everything[2 * r : 2 * r + 2], r)
    uneven = [torch.empty(r) for r in range(size)]
    dist.all_gather(uneven, torch.full((rank,), float(rank)))
    found.check("uneven", [u.tolist() for u in uneven], [[float(r)] * r for r in range(size)])
    return found.done()


def job_scatters() -> Any:
    found, rank, size = Compared(), dist.get_rank(), dist.get_world_size()
    for dtype in (torch.float32, torch.int16, torch.complex64):
        theirs = everybody(dtype, size, 2, 3)
        total = functools.reduce(torch.add, theirs)
        output = torch.empty(2, 3, dtype=dtype)
        dist.reduce_scatter(output, list(theirs[rank].unbind(0)))
        found.check("reduce_scatter", output, total[rank])
        output = torch.empty(2, 3, dtype=dtype)
        dist.reduce_scatter_tensor(output, theirs[rank].reshape(-1, 3))
        found.check("reduce_scatter_tensor", output, total[rank])
        outputs = [torch.empty(2, 3, dtype=dtype) for _ in range(size)]
        dist.all_to_all(outputs, list(theirs[rank].unbind(0)))
        for r in range(size):
            found.check("all_to_all", outputs[r], theirs[r][rank])
        single = torch.empty(size, 2, 3, dtype=dtype)
        dist.all_to_all_single(single, theirs[rank])
        found.check(
            "all_to_all_single", single, torch.stack([theirs[r][rank] for r in range(size)])
        )
    # Worker r sends a + 1 rows of value r to worker a.
    mine = torch.full((size * (size + 1) // 2, 2), float(rank))
    output = torch.empty(size * (rank + 1), 2)
    dist.all_to_all_single(output, mine, [rank + 1] * size, [a + 1 for a in range(size)])
    found.check(
        "uneven all_to_all_single",
        output,
        torch.cat([torch.full((rank + 1, 2), float(r)) for r in range(size)]),
    )
    return found.done()


def job_shapes() -> Any:
    """Strided, negated, empty and 0-dimensional tensors, and a leaf that requires a gradient.

    Also many asynchronous calls at once, waited for in any order.
    """
    found, rank, size = Compared(), dist.get_rank(), dist.get_world_size()
    strided = given(rank, torch.float32, 3, 4).t()
    dist.all_reduce(strided)
    found.check("strided", strided, functools.reduce(torch.add, everybody(torch.float32, 3, 4)).t())
    strided = given(rank, torch.int16, 3, 4).t()
    dist.broadcast(strided, 1)
    found.check("strided broadcast", strided, given(1, torch.int16, 3, 4).t())
    outputs = [torch.empty(4, 3).t() for _ in range(size)]
    dist.all_gather(outputs, given(rank, torch.float32, 4, 3).t())
    found.check(
        "strided all_gather",
        torch.stack(outputs),
        torch.stack([t.t() for t in everybody(torch.float32, 4, 3)]),
    )
    negated = given(rank, torch.complex64).conj().imag
    dist.all_reduce(negated)
    found.check(
        "negated",
        negated.resolve_neg(),
        -functools.reduce(torch.add, everybody(torch.complex64)).imag,
    )
    empty, scalar, leaf = torch.empty(0, 3), torch.tensor(2.0), torch.ones(3, requires_grad=True)
    for tensor in (empty, scalar, leaf):
        dist.all_reduce(tensor)
    found.check("scalar", scalar, torch.tensor(2.0 * size))
    found.check("leaf", leaf.detach(), torch.full((3,), float(size)))
    saved = leaf * leaf
    dist.all_reduce(leaf)
    found.check(
        "autograd notices",
        "modified by an inplace operation" in error_of(saved.sum().backward),
        True,
    )
    works, tensors = [], [torch.full((i + 1,), 1.0) for i in range(20)]
    for tensor in tensors:
        works.append(dist.all_reduce(tensor, async_op=True))
        works.append(
            dist.all_gather([torch.empty(2) for _ in range(size)], torch.ones(2), async_op=True)
        )
    for work in reversed(works):
        work.wait()
    found.check(
        "async",
        all(w.is_completed() and w.is_success() and w.exception() is None for w in works),
        True,
    )
    found.check("async sums", all(t.eq(size).all() for t in tensors), True)
    with dist._coalescing_manager():
        for tensor in tensors:
            dist.all_reduce(tensor)
    found.check("coalesced", all(t.eq(size * size).all() for t in tensors), True)
    work = dist.all_gather(
        [torch.empty(2, 2).t() for _ in range(size)], torch.ones(2, 2), async_op=True
    )
    found.check(
        "future",
        [t.tolist() for t in work.get_future().wait()[0]],
        [[[1.0, 1.0], [1.0, 1.0]]] * size,
    )
    work = dist.broadcast(torch.empty(2, 2).t() if rank else torch.ones(2, 2), 0, async_op=True)
    while not work.is_completed():
        pass
    found.check("completed means complete", work.result()[0].tolist(), [[1.0, 1.0], [1.0, 1.0]])
    return found.done()


def job_objects() -> Any:
    found, rank, size = Compared(), dist.get_rank(), dist.get_world_size()
    objects = [{"from": rank, "text": "x" * (1 + 10 * rank)}, rank]
    for turn in range(3):
        gathered = [None] * size
        dist.all_gather_object(gathered, (turn, objects))
        found.check(
            "all_gather_object",
            gathered[-1],
            (turn, [{"from": size - 1, "text": "x" * (10 * size - 9)}, size - 1]),
        )
    dist.broadcast_object_list(objects, src=1)
    found.check("broadcast_object_list", objects, [{"from": 1, "text": "x" * 11}, 1])
    gathered = [None] * size if rank == 1 else None
    dist.gather_object(rank, gathered, dst=1)
    found.check("gather_object", gathered, list(range(size)) if rank == 1 else None)
    mine = [None]
    dist.scatter_object_list(mine, [f"for {r}" for r in range(size)] if rank == 0 else None, src=0)
    found.check("scatter_object_list", mine, [f"for {rank}"])
    known = adapter.session()._declared  # there is no public way to count them
    before, gathered = len(known), [None] * size
    for n in range(1, 100):
        dist.all_gather_object(gathered, "x" * (n + rank))
        dist.broadcast_object_list(["y" * n], src=0)
    found.check("declared for 198 lengths", len(known) - before < 20 * (size + 1), True)
    return found.done()


def job_lengths_of_bytes() -> Any:
    """Bytes are padded for transport, so a wrong length must be detected explicitly."""
    expected = torch.zeros(100 + dist.get_rank() % 2, dtype=torch.uint8)
    work = dist.broadcast(expected, src=0, async_op=True)
    said = [error_of(work.wait), error_of(work.wait)]
    gathered = [
        torch.zeros(100 + (r == 0 and dist.get_rank() == 1), dtype=torch.uint8)
        for r in range(dist.get_world_size())
    ]
    return [*said, error_of(lambda: dist.all_gather(gathered, torch.zeros(100, dtype=torch.uint8)))]


def job_functional() -> Any:
    """PyTorch's C++ code calls the group, too."""
    functional = functional_collectives
    found, rank, size = Compared(), dist.get_rank(), dist.get_world_size()
    ones = torch.ones(size, 2)
    found.check("all_reduce", functional.all_reduce(ones, "sum", dist.group.WORLD) + 0, ones * size)
    found.check(
        "gather",
        functional.all_gather_tensor(ones[:1] * rank, 0, dist.group.WORLD) + 0,
        torch.arange(float(size))[:, None].expand(-1, 2),
    )
    found.check(
        "scatter",
        functional.reduce_scatter_tensor(ones, "sum", 0, dist.group.WORLD) + 0,
        ones[:1] * size,
    )
    if hasattr(functional, "broadcast"):  # this and the next function came after PyTorch 2.1
        found.check("broadcast", functional.broadcast(ones * rank, 1, dist.group.WORLD) + 0, ones)
        found.check(
            "all_to_all",
            functional.all_to_all_single(torch.arange(float(size)), None, None, dist.group.WORLD)
            + 0,
            torch.full((size,), float(rank)),
        )
    return found.done()


def job_groups() -> Any:
    """Groups of all workers and of one worker work; calls on other groups raise and do not hang."""
    found, rank, size = Compared(), dist.get_rank(), dist.get_world_size()
    everyone = dist.new_group(list(range(size)), timeout=timedelta(seconds=20))
    tensor = torch.ones(2)
    dist.all_reduce(tensor, group=everyone)
    found.check("all", tensor, torch.full((2,), float(size)))
    alone = [dist.new_group([r]) for r in range(size)][rank]
    outputs = [torch.empty(2)]
    for op in (Op.SUM, Op.AVG, Op.MAX):
        dist.all_reduce(tensor, op, group=alone)
    dist.all_gather(outputs, tensor, group=alone)
    dist.broadcast(tensor, rank, group=alone)
    dist.barrier(group=alone)
    found.check("one", outputs[0], torch.full((2,), float(size)))
    single = torch.empty(2)
    dist.reduce_scatter_tensor(single, tensor, group=alone)
    dist.all_to_all_single(single, tensor, group=alone)
    found.check("one, again", single, tensor)
    gloo = dist.new_group(backend="gloo")
    dist.all_reduce(tensor, group=gloo)
    found.check("gloo beside", tensor, torch.full((2,), float(size * size)))
    text = ""
    if size > 2:
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            some = dist.new_group([0, 1])
        found.check(
            "warned",
            [str(w.message) for w in said if "will fail" in str(w.message)] != [],
            rank < 2,
        )
        text = error_of(dist.all_reduce, tensor, group=some) if rank < 2 else "not a member"
    dist.barrier()
    return found.done(), text


def job_refused() -> Any:
    rank, size = dist.get_rank(), dist.get_world_size()
    one = torch.ones(2)
    found = {
        "send": error_of(dist.send, one, (rank + 1) % size),
        "recv": error_of(dist.recv, one, (rank + 1) % size),
        "any": error_of(dist.recv, one),
        "monitored": error_of(dist.group.WORLD.monitored_barrier),
        "torch's own": error_of(dist.monitored_barrier),
        "premul": error_of(dist.all_reduce, one, dist._make_nccl_premul_sum(2.0)),
        "complex max": error_of(dist.all_reduce, one.to(torch.complex64), Op.MAX),
        "float band": error_of(dist.all_reduce, one, Op.BAND),
        "bool average": error_of(dist.all_reduce, one.bool(), Op.AVG),
        "float8": error_of(dist.all_reduce, one.to(torch.float8_e4m3fn)),
        "sparse": error_of(dist.all_reduce, one.to_sparse()),
        "expanded": error_of(dist.all_reduce, torch.ones(1).expand(3)),
        "meta": error_of(dist.all_reduce, torch.ones(2, device="meta")),
        "length": error_of(dist.all_gather_into_tensor, torch.empty(3), torch.empty(2)),
        "rows": error_of(dist.all_to_all_single, torch.empty(size + 1), torch.empty(size)),
        "second init": error_of(dist.init_process_group, "bpsx"),
    }
    dist.all_reduce(one)
    return found, one


def job_disagreement() -> Any:
    """Lengths differ, then operations: all workers raise, and the group continues.

    If both lengths have been summed before, they have names of their own, so the call is a
    deadlock.
    """
    rank = dist.get_rank()
    length = error_of(dist.all_reduce, torch.ones(300 + (rank == 1)))
    for count in (3, 4):  # the earlier error has cleared the group's known lengths
        dist.all_reduce(torch.ones(count))
    known = error_of(dist.all_reduce, torch.ones(3 + (rank == 1)))
    operation = error_of(dist.all_reduce, torch.ones(7), Op.AVG if rank == 1 else Op.SUM)
    good = torch.ones(3)
    dist.all_reduce(good)
    return length, known, operation, good


def job_timeout() -> Any:
    """Worker 0 makes a call that worker 1 makes only later."""
    group = dist.new_group(list(range(dist.get_world_size())), timeout=timedelta(seconds=1.5))
    text, future = "", ""
    tensor = torch.ones(3)
    if dist.get_rank() == 0:
        work = dist.all_reduce(tensor, group=group, async_op=True)
        future = error_of(work.get_future().wait)
        text = error_of(work.wait)
        given = error_of(work.wait, timedelta(milliseconds=1))
    dist.barrier()
    if dist.get_rank() != 0:
        return dist.all_reduce(tensor, group=group) or tensor
    work.wait(timedelta(seconds=60))
    return tensor, text, future, given


def job_again() -> Any:
    """After the other tests' group is destroyed, bpsx still works and can open another group."""
    dist.destroy_process_group()
    total = bps.push_pull(torch.ones(2), average=False)
    found = [
        error_of(dist.init_process_group, "bpsx", rank=5, world_size=bps.size()),
        error_of(dist.init_process_group, "bpsx", world_size=17),
    ]
    dist.init_process_group(init_method="bpsx://", backend="cpu:bpsx")
    dist.all_reduce(total)
    return total, found, dist.get_backend()


def job_all() -> Any:
    """Run all functions above in one group, which ends with the interpreter."""
    dist.init_process_group("bpsx")
    return {
        name: function()
        for name, function in list(globals().items())
        if name.startswith("job_") and name != "job_all"
    }


# ---- tests


def assert_collectives(results: list[dict[str, Any]]) -> None:
    functional = 5 if hasattr(functional_collectives, "broadcast") else 3
    for function, least in (
        ("reductions", 120),
        ("movements", 60),
        ("scatters", 14),
        ("shapes", 12),
        ("objects", 6),
        ("functional", functional),
    ):
        for result in results:
            count, wrong = result[f"job_{function}"]
            assert not wrong, wrong
            assert count >= least, function


def assert_groups_of_all_and_of_one(results: list[dict[str, Any]]) -> None:
    for rank, result in enumerate(results):
        (count, wrong), text = result["job_groups"]
        assert not wrong and count >= 4, wrong
        if len(results) > 2:
            assert (
                'backend="gloo"' in text and "ranks [0, 1] are not all 4 workers" in text
                if rank < 2
                else text == "not a member"
            )


def assert_what_is_refused_says_what_to_use(results: list[dict[str, Any]]) -> None:
    # Before 2.14, PyTorch itself rejects all backends but gloo; since then it asks the backend.
    own = "GLOO" if tuple(map(int, torch.__version__.split(".")[:2])) < (2, 14) else "barrier()"
    for result in results:
        found, total = result["job_refused"]
        assert total.eq(len(results)).all()
        for name, word in (
            ("send", "gloo"),
            ("recv", "gloo"),
            ("any", "gloo"),
            ("monitored", "barrier()"),
            ("torch's own", own),
            ("premul", "PREMUL"),
            ("complex max", "MAX"),
            ("float band", "does not support BAND of float32"),
            ("bool average", "use SUM"),
            ("float8", "does not support SUM of float8"),
            ("sparse", "sparse"),
            ("expanded", "share memory"),
            ("meta", "meta"),
            ("length", "output has 3 elements"),
            ("rows", "rows"),
            ("second init", "twice"),
        ):
            assert word in found[name], (name, found[name])


def assert_disagreement_is_an_error_on_all_workers(results: list[dict[str, Any]]) -> None:
    for result in results:
        length, known, operation, good = result["job_disagreement"]
        assert known.startswith("StallError") and "'torch.0.all_reduce'" in known
        assert length.startswith("MismatchError") and "'torch.0.all_reduce'" in length
        assert operation.startswith("MismatchError")
        assert good.eq(len(results)).all()


def assert_wrong_lengths_of_bytes_are_an_error_where_they_are_expected(
    results: list[dict[str, Any]],
) -> None:
    for rank, result in enumerate(results):
        once, again, gathered = result["job_lengths_of_bytes"]
        assert once == again
        assert (
            once.startswith(
                "MismatchError: broadcast from worker 0: received 100 bytes, expected 101"
            )
            if rank % 2
            else once == "none"
        ), once
        assert (
            gathered.startswith("MismatchError: all_gather: worker 0: received 100 bytes")
            if rank == 1
            else gathered == "none"
        ), gathered


def assert_the_groups_timeout_is_kept(results: list[dict[str, Any]]) -> None:
    total, text, future, given = results[0]["job_timeout"]
    assert (
        text.startswith("GroupTimeoutError") and "timeout of 1.5 s" in text and "all_reduce" in text
    )
    assert "GroupTimeoutError" in future and "timeout of 0.001 s" in given
    assert total.eq(len(results)).all() and results[1]["job_timeout"].eq(len(results)).all()


def assert_a_destroyed_group_leaves_bpsx_and_can_be_made_again(
    results: list[dict[str, Any]],
) -> None:
    for rank, result in enumerate(results):
        total, (wrong_rank, wrong_size), backend = result["job_again"]
        assert total.eq(len(results) ** 2).all() and backend == "cpu:bpsx"
        assert f"rank=5, but bpsx has {rank}" in wrong_rank and "world_size=17" in wrong_size


@pytest.mark.parametrize(
    ("workers", "servers", "processes"),
    [(2, 1, 1), (2, 1, 2)],
    ids=["2 workers", "4 workers on 2 machines"],
)
def test_the_backend(tmp_path: Path, workers: int, servers: int, processes: int) -> None:
    """Results match the definitions; rejections name an alternative; timeouts raise errors."""
    finished = run_job(
        __file__,
        ["job_all"],
        tmp_path,
        workers=workers,
        servers=servers,
        processes=processes,
        BPSX_DEADLOCK_SECONDS="4",
    )
    assert sorted(finished.results) == list(range(workers * processes)), finished.output[-4000:]
    assert finished.status == 0, finished.output[-4000:]
    results = [finished.results[rank]["job_all"] for rank in sorted(finished.results)]
    assert_collectives(results)
    assert_groups_of_all_and_of_one(results)
    assert_what_is_refused_says_what_to_use(results)
    assert_disagreement_is_an_error_on_all_workers(results)
    assert_wrong_lengths_of_bytes_are_an_error_where_they_are_expected(results)
    assert_the_groups_timeout_is_kept(results)
    assert_a_destroyed_group_leaves_bpsx_and_can_be_made_again(results)


pytestmark = pytest.mark.timeout(300)
