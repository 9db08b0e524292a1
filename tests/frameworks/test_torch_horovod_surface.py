"""Arguments of Horovod's functions, accepted and rejected, without a job.

Arguments are rejected before anything is sent, so no other worker waits.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import bpsx.torch.horovod as hvd
from bpsx import BpsxError, ConfigError
from bpsx.api import verbs as verbs_module
from bpsx.dtypes import UnsupportedDType
from bpsx.plugin import adapter
from bpsx.torch import UnsupportedTensor

Refusal = tuple[Callable[[], object], type[Exception], str]


def refused_sets() -> list[Refusal]:
    """Return calls with process sets of some workers, and the expected errors."""
    x, some = torch.ones(4), hvd.ProcessSet([0])
    subset = (
        r"process_set=ProcessSet\(\[0\]\).*not all \d workers.*new_group\(ranks, backend=\"gloo\"\)"
    )
    verbs: list[Callable[..., object]] = [
        hvd.allreduce,
        hvd.allreduce_,
        hvd.allreduce_async,
        hvd.allreduce_async_,
        hvd.allgather,
        hvd.allgather_async,
        hvd.reducescatter,
        hvd.reducescatter_async,
        hvd.alltoall,
        hvd.alltoall_async,
        hvd.broadcast_object,
        hvd.allgather_object,
    ]
    groups: list[Callable[..., object]] = [
        hvd.grouped_allreduce,
        hvd.grouped_allreduce_,
        hvd.grouped_allreduce_async,
        hvd.grouped_allreduce_async_,
        hvd.grouped_allgather,
        hvd.grouped_allgather_async,
        hvd.grouped_reducescatter,
        hvd.grouped_reducescatter_async,
    ]
    roots: list[Callable[..., object]] = [
        hvd.broadcast,
        hvd.broadcast_,
        hvd.broadcast_async,
        hvd.broadcast_async_,
    ]
    calls: list[Callable[[], object]] = [
        *[lambda v=v: v(x, process_set=some) for v in verbs],
        *[lambda v=v: v([x], process_set=some) for v in groups],
        *[lambda v=v: v(x, 0, process_set=some) for v in roots],
        lambda: hvd.sparse_allreduce_async(x.to_sparse(), "n", hvd.Sum, some),
        made(process_set=some),
        lambda: hvd.barrier(some),
        lambda: hvd.add_process_set([0]),
    ]
    return [
        *[(call, ConfigError, subset) for call in calls],
        (lambda: hvd.init(process_sets=[some]), ConfigError, "init: process_sets=ProcessSet"),
        (lambda: hvd.init([0]), ConfigError, "init: comm"),
        (lambda: hvd.ProcessSet("all"), ConfigError, "a list of ranks"),
        (lambda: hvd.allreduce(x, process_set=[0]), ConfigError, "must be a ProcessSet, not list"),
    ]


MODEL = nn.Linear(2, 2)


def made(**options: Any) -> Callable[[], object]:
    return lambda: hvd.DistributedOptimizer(torch.optim.SGD(MODEL.parameters(), lr=0.1), **options)


def refusals() -> list[Refusal]:
    """Return calls that must be rejected before they send anything."""
    x, scalar, adasum = (
        torch.ones(4),
        torch.ones(()),
        "op=hvd.Adasum is not supported, because summation servers only add; use op=hvd.Average",
    )
    rows: list[Callable[[], object]] = [
        lambda: hvd.reducescatter(scalar),
        lambda: hvd.grouped_reducescatter([scalar]),
        lambda: hvd.allgather(scalar),
        lambda: hvd.reducescatter_async(scalar),
        lambda: hvd.allgather_async(scalar),
        lambda: hvd.alltoall(scalar),
    ]
    return [
        *[
            (lambda v=v: v(x, op=hvd.Adasum), ConfigError, adasum)
            for v in (
                hvd.allreduce,
                hvd.allreduce_,
                hvd.allreduce_async,
                hvd.allreduce_async_,
                hvd.reducescatter,
            )
        ],
        (lambda: hvd.grouped_allreduce([x], op=hvd.Adasum), ConfigError, adasum),
        (made(op=hvd.Adasum), ConfigError, f"DistributedOptimizer: {adasum}"),
        (made(op=hvd.Min), ConfigError, "op=hvd.Min; expected"),
        (
            lambda: hvd.reducescatter(x, op=hvd.Max),
            ConfigError,
            "op=hvd.Max; expected hvd.Average or hvd.Sum",
        ),
        (
            lambda: hvd.sparse_allreduce_async(x.to_sparse(), "n", hvd.Min),
            ConfigError,
            "op=hvd.Min; expected",
        ),
        (
            lambda: hvd.sparse_allreduce_async(x, "n", hvd.Sum),
            UnsupportedTensor,
            "expected a torch.sparse_coo tensor",
        ),
        (
            lambda: hvd.allreduce(x, op=7),
            ConfigError,
            "op=7; expected one of hvd.Average, hvd.Sum, hvd.Min",
        ),
        (lambda: hvd.allreduce(x, True, op=hvd.Sum), ConfigError, "op and average are both given"),
        (
            lambda: hvd.allreduce(x, "loss"),
            ConfigError,
            "average must be True or False, not 'loss'",
        ),
        (
            lambda: hvd.allreduce(x, prescale_factor="2"),
            ConfigError,
            "prescale_factor must be a number",
        ),
        (lambda: hvd.allreduce(x, name=3), ConfigError, "name must be a string"),
        (lambda: hvd.allreduce([1.0]), UnsupportedTensor, "not list"),
        (lambda: hvd.allreduce(x > 0, op=hvd.Min), UnsupportedDType, "bool cannot be summed"),
        (
            lambda: hvd.allreduce_(x.clone().requires_grad_() * 2),
            UnsupportedTensor,
            r"use allreduce\(\), which has a gradient",
        ),
        (lambda: hvd.broadcast_(torch.ones(1).expand(4), 0), UnsupportedTensor, "share memory"),
        (lambda: hvd.broadcast(x, 9), ConfigError, "root_rank=9"),
        (lambda: hvd.grouped_allreduce(x), ConfigError, "a list of tensors"),
        (lambda: hvd.alltoall(torch.ones(hvd.size() + 1)), ConfigError, "cannot be divided evenly"),
        (lambda: hvd.alltoall(x, [1.0] * hvd.size()), ConfigError, r"splits=\[1.0"),
        (lambda: hvd.alltoall(x, torch.ones(2)), ConfigError, "float32"),
        (lambda: hvd.alltoall(x, [1]), ConfigError, r"splits=\[1\]"),
        (lambda: hvd.alltoall(x, [5] + [0] * (hvd.size() - 1)), ConfigError, "4 rows"),
        *[(call, UnsupportedTensor, "at least one dimension") for call in rows],
        (lambda: hvd.synchronize(3), ConfigError, "expected a handle"),
        (lambda: hvd.poll(None), ConfigError, "expected a handle"),
        (lambda: hvd.broadcast_parameters(x, 0), ConfigError, "state_dict"),
        (made(gradient_predivide_factor=0), ConfigError, "above 0"),
        (
            made(gradient_predivide_factor=2.0, op=hvd.Sum),
            ConfigError,
            "with op=hvd.Sum leave it out",
        ),
        (made(groups=-1), ConfigError, "groups=-1"),
        (made(num_groups="a"), ConfigError, "num_groups='a'"),
        (made(groups=list(MODEL.parameters())), ConfigError, "lists of parameters"),
        (made(groups=[[MODEL.weight, MODEL.weight]]), ConfigError, "each parameter once"),
        (made(num_groups=-1), ConfigError, "num_groups=-1"),
        (made(num_groups=True), ConfigError, "num_groups=True"),
        *[
            (
                lambda s=s: hvd.alltoall(x, s),
                ConfigError,
                r"^alltoall: splits=[\s\S]*: must be \d integers from 0, one for each worker",
            )
            for s in (
                3,
                "22",
                [1.9, 1.9],
                [True, True],
                [[1, 1], [1, 1]],
                np.ones((2, 2), int),
                np.ones(2),
                [-1, 2],
                [None, 2],
            )
        ],
        (
            lambda: hvd.alltoall(x, torch.ones(2, 2, dtype=torch.int64)),
            ConfigError,
            r"^alltoall: splits is a tensor of shape \(2, 2\)",
        ),
        *[
            (
                lambda p=p: hvd.start_timeline(p),
                ConfigError,
                "^start_timeline: file_path=.*the path of a file",
            )
            for p in (5, None, "", ["a"])
        ],
        *[
            (lambda r=r: hvd.ProcessSet(r), ConfigError, "^ProcessSet: ranks=.*each once")
            for r in ([0, 0, 1], [0, -1], [0, True], [0.0], 3, "01")
        ],
        (lambda: hvd.remove_process_set(3), ConfigError, "must be a ProcessSet, not int"),
        *[
            (
                lambda r=r: hvd.broadcast(x, r),
                ConfigError,
                f"^broadcast: root_rank={r!r}: expected 0 to",
            )
            for r in (None, True, "1", 1.0)
        ],
        *[
            (
                lambda r=r: hvd.broadcast_parameters({"x": x}, r),
                ConfigError,
                "^broadcast_parameters: root_rank=",
            )
            for r in (True, "0")
        ],
        (lambda: hvd.broadcast_parameters(None, 0), ConfigError, "pairs, not NoneType"),
        (lambda: hvd.broadcast_optimizer_state(MODEL, 0), ConfigError, "optimizer is a Linear"),
        (lambda: hvd.DistributedOptimizer(MODEL), ConfigError, "optimizer is a Linear"),
    ]


class Session(SimpleNamespace):
    """The attributes of a session that argument checks read; owners of names refer to it weakly."""


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Worker 0 of two, which cannot send anything."""
    session = Session(config=SimpleNamespace(asynchronous=False), size=2, rank=0)
    monkeypatch.setattr(adapter, "session", lambda: session)
    monkeypatch.setattr(verbs_module, "session", lambda: session)
    monkeypatch.setattr("bpsx.torch.init", lambda: None)
    return session


@pytest.mark.parametrize(
    "refused", refused_sets() + refusals(), ids=lambda refused: refused[2][:30]
)
def test_refusals(alone: SimpleNamespace, refused: Refusal) -> None:
    call, kind, match = refused
    with pytest.raises(kind, match=match):
        call()


def test_constants_are_horovods() -> None:
    assert not hvd.is_initialized()
    assert [hvd.Average, hvd.Sum, hvd.Adasum, hvd.Min, hvd.Max, hvd.Product] == list(range(6))
    assert hvd.HorovodInternalError is BpsxError
    with pytest.raises(AttributeError, match="no attribute 'elastik'"):
        _ = hvd.elastik
    assert not hasattr(hvd, "broadcast_object_fn"), "that is TensorFlow's"


SIGNATURES = {
    "allreduce": (
        "tensor average=None name=None compression op=None prescale_factor=1.0 postscale_factor=1.0"
        " process_set"
    ),
    "allreduce_async": (
        "tensor average=None name=None op=None prescale_factor=1.0 postscale_factor=1.0 process_set"
    ),
    "grouped_allreduce": (
        "tensors average=None name=None compression op=None prescale_factor=1.0"
        " postscale_factor=1.0 process_set"
    ),
    "grouped_allreduce_async": (
        "tensors average=None name=None op=None prescale_factor=1.0 postscale_factor=1.0"
        " process_set"
    ),
    "sparse_allreduce_async": "tensor name op process_set",
    "allgather": "tensor name=None process_set",
    "grouped_allgather": "tensors name=None process_set",
    "broadcast": "tensor root_rank name=None process_set",
    "alltoall": "tensor splits=None name=None process_set",
    "join": "device=-1",
    "barrier": "process_set",
    "init": "comm=None process_sets=None",
    "reducescatter": (
        "tensor name=None compression op=0 process_set prescale_factor=1.0 postscale_factor=1.0"
    ),
    "reducescatter_async": (
        "tensor name=None op=0 process_set prescale_factor=1.0 postscale_factor=1.0"
    ),
    "grouped_reducescatter": (
        "tensors name=None compression op=0 process_set prescale_factor=1.0 postscale_factor=1.0"
    ),
    "grouped_reducescatter_async": (
        "tensors name=None op=0 process_set prescale_factor=1.0 postscale_factor=1.0"
    ),
    "broadcast_parameters": "params root_rank",
    "broadcast_optimizer_state": "optimizer root_rank model=None",
    "broadcast_object": "obj root_rank=0 name=None process_set",
    "allgather_object": "obj name=None process_set",
    "start_timeline": "file_path mark_cycles=False",
    "DistributedOptimizer": (
        "optimizer named_parameters=None compression backward_passes_per_step=1 op=0"
        " gradient_predivide_factor=1.0 num_groups=0 groups=None sparse_as_dense=False process_set"
    ),
}
for alike, like in (
    ("allreduce_", "allreduce_async"),
    ("allreduce_async_", "allreduce_async"),
    ("grouped_allreduce_", "grouped_allreduce_async"),
    ("grouped_allreduce_async_", "grouped_allreduce_async"),
    ("allgather_async", "allgather"),
    ("alltoall_async", "alltoall"),
    ("grouped_allgather_async", "grouped_allgather"),
    ("broadcast_", "broadcast"),
    ("broadcast_async", "broadcast"),
    ("broadcast_async_", "broadcast"),
):
    SIGNATURES[alike] = SIGNATURES[like]


@pytest.mark.parametrize("name", SIGNATURES)
def test_arguments_are_in_horovods_order(name: str) -> None:
    defaults = {"compression": hvd.Compression.none, "process_set": hvd.global_process_set}
    found = []
    for parameter in inspect.signature(getattr(hvd, name)).parameters.values():
        if parameter.default is inspect.Parameter.empty:
            found.append(parameter.name)
        elif parameter.name in defaults:
            assert parameter.default is defaults[parameter.name]
            found.append(parameter.name)
        else:
            default = (
                int(parameter.default)
                if isinstance(parameter.default, int) and parameter.name == "op"
                else parameter.default
            )
            found.append(f"{parameter.name}={default!r}")
    assert " ".join(found) == SIGNATURES[name]


def test_average_is_deprecated(alone: SimpleNamespace) -> None:
    alone.config.asynchronous = True
    for verb in (hvd.allreduce, hvd.allreduce_, hvd.allreduce_async, hvd.allreduce_async_):
        with (
            pytest.warns(DeprecationWarning, match="op=hvd.Average") as seen,
            pytest.raises(ConfigError),
        ):
            verb(torch.ones(1), average=True)
        assert seen[0].filename == __file__


def test_in_asynchronous_training(alone: SimpleNamespace) -> None:
    """A sum would be a value that servers keep."""
    alone.config.asynchronous = True
    for verb in (
        hvd.allreduce,
        hvd.allreduce_,
        hvd.allreduce_async,
        hvd.allreduce_async_,
        hvd.reducescatter,
    ):
        with pytest.raises(ConfigError, match="BYTEPS_ENABLE_ASYNC=1"):
            verb(torch.ones(2))
    with pytest.raises(ConfigError, match=r"op=Sum cannot be used with BYTEPS_ENABLE_ASYNC=1"):
        made(op=hvd.Sum)()


def test_one_worker_without_a_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A script without a launcher."""
    monkeypatch.setenv("BYTEPS_TRACE_DIR", str(tmp_path / "traces"))
    hvd.init()
    try:
        x = torch.arange(6.0).reshape(3, 2)
        assert (hvd.rank(), hvd.size(), hvd.cross_size(), hvd.join()) == (0, 1, 1, 0)
        for op in (hvd.Average, hvd.Sum, hvd.Min, hvd.Product):
            assert torch.equal(hvd.allreduce(x, op=op), x) and torch.equal(
                hvd.grouped_allreduce_([x.clone()], op=op)[0], x
            )
        for verb in (
            hvd.allgather,
            hvd.reducescatter,
            hvd.alltoall,
            lambda x: hvd.broadcast(x, 0),
            lambda x: hvd.alltoall(x, [3])[0],
        ):
            mine = x.clone().requires_grad_()
            result = verb(mine)
            result.sum().backward()
            assert torch.equal(result, x) and torch.equal(mine.grad, torch.ones(3, 2))
        assert hvd.allgather_object("a") == ["a"] and hvd.broadcast_object("b") == "b"
        hvd.broadcast_parameters([x], 0)
        hvd.start_timeline(str(tmp_path / "timeline.json"), mark_cycles=True)
        hvd.allreduce(x, name="seen")
        hvd.stop_timeline()
        assert "allreduce.seen" in json.dumps(json.loads((tmp_path / "timeline.json").read_text()))
        hvd.stop_timeline()  # does nothing
    finally:
        hvd.shutdown()
    assert not hvd.is_initialized()
