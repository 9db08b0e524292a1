"""broadcast_object and all_gather_object on real workers, with and without a job secret.

``job_*`` functions run in the workers.
"""

from __future__ import annotations

import enum
import math
import os
from collections import OrderedDict, namedtuple
from fractions import Fraction
from http import HTTPStatus
from typing import Any

import numpy as np
import pytest
import torch

import bpsx.torch as bps
from support.jobs import Job
from support.torch_job import HERE, run_job

pytestmark = pytest.mark.timeout(300)
Point = namedtuple("Point", "x y")


class Colour(enum.IntEnum):
    RED = 1


class Unwilling:
    """Object whose pickling raises an exception of its own."""

    def __reduce__(self) -> Any:
        raise OSError("no copies of me")


class Bomb:
    """Object that writes a file when it is unpickled."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (self.path,)


def plain(rank: int) -> dict[Any, Any]:
    """Return an object with every supported type, and some values that differ by ``rank``."""
    state = torch.nn.Linear(2, 2).state_dict()
    return {
        "rank": rank,
        None: [True, 1.5, -0.0, math.inf, "ü\ud800", 10**400, -(2**63), 3 - 4j],
        (1, "a"): (b"\0bytes", bytearray(b"xyz"), b""),
        "sets": {1, "two", (3,)},
        "frozen": frozenset({1}),
        "nothing": ((), [], {}, set()),
        "numpy": np.arange(6, dtype=">i2").reshape(2, 3).T,
        "scalars": [
            np.float32(1.5),
            np.int64(-3),
            np.bool_(True),
            np.str_("text"),
            np.datetime64("2026-11-21", "D"),
            np.array(2.5),
        ],
        "tensors": [
            torch.arange(6.0).reshape(2, 3).t(),
            torch.tensor(True),
            torch.zeros(0, 3),
            torch.ones(2, dtype=torch.bfloat16),
            torch.ones(2, dtype=torch.complex64).conj() * 1j,
            torch.tensor(7, dtype=torch.int16),
        ],
        "state": OrderedDict((k, torch.full_like(v, rank)) for k, v in state.items()),
    }


def alike(a: Any, b: Any) -> bool:
    if type(a) is not type(b):
        return False
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, (np.ndarray, np.generic)):
        return a.dtype == b.dtype and a.shape == b.shape and bool(np.array_equal(a, b))
    if isinstance(a, dict):
        return list(a) == list(b) and all(alike(a[k], b[k]) for k in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(alike(x, y) for x, y in zip(a, b))
    return bool(a == b) and (not isinstance(a, float) or math.copysign(1, a) == math.copysign(1, b))


def error_of(act: Any) -> str:
    with pytest.raises(TypeError) as caught:
        act()
    return f"{type(caught.value).__name__}: {caught.value}"


def job_plain() -> Any:
    rank, size = bps.rank(), bps.size()
    wanted = plain(1)
    mine = plain(rank)
    assert alike(bps.broadcast_object(mine, root_rank=1), wanted)
    assert bps.broadcast_object(mine, rank) is mine if size == 1 else True
    found = bps.all_gather_object(mine)
    assert all(alike(found[r], plain(r)) for r in range(size)) and found[rank] is mine
    for n in (0, 1, 5, 100_000, 3):  # different sizes and types under one name
        assert bps.broadcast_object("x" * n if rank == 0 else None, name="sizes") == "x" * n
        assert bps.all_gather_object(list(range(n * rank)), "sizes") == [
            list(range(n * r)) for r in range(size)
        ]
    assert bps.broadcast_object([1] if rank == 0 else [2, 3]) == [1] and bps.broadcast_object(
        {} if rank else [2]
    ) == [2]
    model = torch.nn.BatchNorm1d(2)
    model.load_state_dict(bps.broadcast_object(model.state_dict()))
    arrived = bps.broadcast_object({"array": np.zeros(2), "tensor": torch.zeros(2)})
    arrived["array"] += 1  # writable
    arrived["tensor"] += 1
    return True


def job_pickled() -> Any:
    """The job has a secret, which ``--local`` creates."""
    rank, size = bps.rank(), bps.size()
    arrived = bps.broadcast_object([Fraction(rank, 7), HTTPStatus.OK], root_rank=size - 1)
    assert arrived == [Fraction(size - 1, 7), 200] and arrived[1] is HTTPStatus.OK
    cycle: list[Any] = [rank]
    cycle.append(cycle)
    arrived = bps.broadcast_object(cycle)
    assert arrived[0] == 0 and arrived[1] is arrived
    everybody = bps.all_gather_object([slice(rank), Fraction(rank)] if rank else "a plain one")
    assert everybody == ["a plain one", *([slice(r), Fraction(r)] for r in range(1, size))]
    optimizer: Any = bps.DistributedOptimizer(
        torch.optim.SGD([torch.ones(2, requires_grad=True)], lr=0.5), None
    )
    assert type(bps.broadcast_object(optimizer)).__name__ == "SGD"
    assert bps.broadcast_object(torch.nn.Parameter(torch.full((2,), float(rank)))).tolist() == [
        0,
        0,
    ]
    return [
        error_of(lambda: bps.broadcast_object(Unwilling() if rank == 0 else 3)),
        error_of(lambda: bps.broadcast_object((lambda: 0) if rank == 1 else None, 1)),
        error_of(lambda: bps.all_gather_object(Unwilling() if rank == size - 1 else 3)),
        bps.broadcast_object("goes on"),
    ]


def state_error(optimizer: Any, root: int) -> str:
    weight = optimizer.param_groups[0]["params"][0]
    before, rate = weight.clone(), optimizer.param_groups[0]["lr"]
    with pytest.raises((TypeError, ValueError)) as caught:
        bps.broadcast_optimizer_state(optimizer, root)
    assert torch.equal(weight, before) and optimizer.param_groups[0]["lr"] == rate
    return f"{type(caught.value).__name__}: {caught.value}"


def job_states() -> Any:
    """All workers raise for an optimizer state that cannot be sent, and for optimizers that differ.

    The job then continues.
    """
    rank, size, found = bps.rank(), bps.size(), []
    endless: list[Any] = []
    endless.append(endless)
    for odd in (endless, Unwilling(), lambda: 0):
        optimizer = torch.optim.SGD([torch.ones(2)], lr=0.1 + rank)
        if rank == 0:
            optimizer.param_groups[0]["odd"] = odd
        found.append(state_error(optimizer, 0))
    kind: Any = torch.optim.SGD if rank < size - 1 else torch.optim.Adam
    found.append(state_error(kind([torch.ones(2)], lr=0.1 + rank), 0))
    parts = [torch.ones(2), torch.ones(2)]
    groups: Any = [{"params": [p]} for p in parts] if rank == 1 else parts
    found.append(state_error(torch.optim.SGD(groups, lr=0.1 + rank), 1))
    fine = torch.optim.SGD(parts, lr=0.1 + rank)
    bps.broadcast_optimizer_state(bps.DistributedOptimizer(fine) if rank else fine, 0)
    return found, fine.param_groups[0]["lr"]


@pytest.mark.parametrize("size", [2, 4])
def test_with_a_secret(tmp_path: Any, size: int) -> None:
    finished = run_job(__file__, ["job_plain", "job_pickled", "job_states"], tmp_path, size)
    assert finished.status == 0, finished.output[-5000:]
    for result in finished.results.values():
        unwilling, function, gathered, after = result["job_pickled"]
        assert (
            unwilling
            == "ObjectError: broadcast_object: Unwilling cannot be pickled: OSError: no copies"
            " of me"
        )
        assert function.startswith("ObjectError: broadcast_object: function cannot be pickled")
        assert gathered.startswith(
            f"ObjectError: worker {size - 1}: all_gather_object: Unwilling cannot be pickled"
        )
        assert after == "goes on"
        (endless, odd, function, other, groups), rate = result["job_states"]
        assert endless.startswith("StateError: worker 0's state cannot be sent: RecursionError")
        assert (
            odd.startswith("StateError: broadcast_optimizer_state: group 0.odd is a Unwilling")
            and "group 0.odd is a function" in function
        )
        differ = (
            "MismatchError: broadcast_optimizer_state: the optimizers differ: worker 0 has SGD with"
            " groups of"
        )
        assert (
            other
            == f"{differ} [1] parameters, worker {size - 1} has Adam with groups of [1] parameters"
        )
        assert (
            groups == f"{differ} [2] parameters, worker 1 has SGD with groups of [1, 1] parameters"
            and rate == 0.1
        )


WITHOUT = """
    import sys, torch
    sys.path[:0] = FOLDERS
    import test_torch_objects as t
    import bpsx.torch as bps
    from bpsx.plugin import adapter
    bps.init()
    rank = bps.rank()
    assert t.job_plain()
    report([t.error_of(lambda: bps.broadcast_object(t.Point(1, 2) if rank == 0 else 1)),
            t.error_of(lambda: bps.broadcast_object({"a": [t.Colour.RED]} if rank == 1 else 1, 1)),
            t.error_of(lambda: bps.all_gather_object(t.Point(1, 2) if rank == 0 else 1))])
    # A sender that pickles without a proof: no worker unpickles the object.
    from bpsx.plugin import objects
    if rank == 0:
        objects._pack = lambda obj, *rest: b"p" + bytes(32) + objects.pickle.dumps(obj)
        bps.broadcast_object(t.Bomb(BOMB))
    else:
        report(t.error_of(lambda: bps.broadcast_object(None)))
    bps.barrier()
"""


@pytest.mark.parametrize("secret", ["", "a secret that is long enough"])
def test_an_unproven_object_is_not_unpickled(tmp_path: Any, secret: str) -> None:
    source = WITHOUT.replace("FOLDERS", repr([str(HERE), str(HERE.parent)])).replace(
        "BOMB", repr(str(tmp_path / "bomb"))
    )
    if secret:
        source = source.replace("report([t.error_of", "[lambda: [t.error_of").replace(
            "rank == 0 else 1))])", "rank == 0 else 1))]]"
        )
    with Job(source, env={"BPSX_SECRET": secret} if secret else None) as job:
        reports = job.results()
    if not secret:
        for first, second, third in (r[0] for r in reports):
            assert (
                "the object is a Point" in first and "BPSX_SECRET" in first and "--local" in first
            )
            assert "the object.a.0 is a Colour" in second and "BPSX_SECRET" in second
            assert third.startswith(
                "ObjectError: worker 0: all_gather_object: the object is a Point"
            )
    assert "has no proof that its sender knows the job secret" in reports[1][-1]
    assert not (tmp_path / "bomb").exists()


def job_replayed() -> Any:
    from bpsx.plugin import objects

    sent: list[bytes] = []
    pack = objects._pack
    objects._pack = lambda *given: (sent.append(pack(*given)), sent[0])[1]  # type: ignore[assignment]
    try:
        said = []
        for name in ("again", "again", "other"):
            try:
                bps.broadcast_object(Point(1, 2), name=name)
                said.append("")
            except TypeError as e:
                said.append(str(e))
    finally:
        objects._pack = pack
    return said


def test_a_proof_for_one_call_is_refused_in_another(tmp_path: Any) -> None:
    finished = run_job(__file__, ["job_replayed"], tmp_path)
    assert finished.status == 0, finished.output[-5000:]
    ours, theirs = (finished.results[rank]["job_replayed"] for rank in range(2))
    assert ours == ["", "", ""]
    assert theirs[0] == "" and all("made it for this call" in said for said in theirs[1:])


def job_wrong_arguments() -> Any:
    return [
        str(pytest.raises(ValueError, lambda: bps.broadcast_object(1, 7)).value),
        str(pytest.raises(ValueError, lambda: bps.broadcast_object(1, name=3)).value),
    ]  # type: ignore[arg-type]


def job_root_dies() -> Any:
    if bps.rank() == 0:
        os._exit(3)
    with pytest.raises(ConnectionError) as caught:
        bps.broadcast_object(None)
    return str(caught.value)


def test_a_dead_root_is_named(tmp_path: Any) -> None:
    finished = run_job(__file__, ["job_wrong_arguments", "job_root_dies"], tmp_path)
    assert finished.status != 0
    if 1 in finished.results:
        assert "expected 0 to 1" in finished.results[1]["job_wrong_arguments"][0]
        assert "worker 0" in finished.results[1]["job_root_dies"]
    else:
        assert "worker 0" in finished.output
