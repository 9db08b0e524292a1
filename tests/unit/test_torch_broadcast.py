"""Broadcasting weights and optimizer state: what is sent, and that it arrives unchanged."""

from __future__ import annotations

import json
import math
from collections import OrderedDict
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch_fake import FakeSession

import bpsx.torch as bps
from bpsx.errors import ConfigError, MismatchError
from bpsx.plugin import adapter
from bpsx.torch.broadcast import _pack
from bpsx.torch.serialization import Encoder, StateError, decode, device_for
from support.torch_release import UINT16


class Pair:
    """Worker 0, the root, runs first; then worker 1 gets its bytes."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.root, self.other = FakeSession(rank=0), FakeSession(rank=1)
        self.other.broadcasts = self.root.broadcasts
        self._patch = monkeypatch

    def run(self, verb: Any, root_argument: Any, other_argument: Any) -> None:
        for session, argument in ((self.root, root_argument), (self.other, other_argument)):
            self._patch.setattr(adapter, "session", lambda session=session: session)
            verb(argument, root_rank=0)


@pytest.fixture
def pair(monkeypatch: pytest.MonkeyPatch) -> Pair:
    return Pair(monkeypatch)


@pytest.mark.parametrize(
    "dtype",
    [
        torch.float16,
        torch.bfloat16,
        torch.float32,
        torch.float64,
        torch.uint8,
        torch.int8,
        torch.int16,
        torch.int32,
        torch.int64,
        torch.bool,
        torch.complex64,
        torch.complex128,
        *UINT16,
        torch.float8_e4m3fn,
    ],
    ids=str,
)
def test_every_dtype_arrives(pair: Pair, dtype: torch.dtype) -> None:
    mine, theirs = torch.tensor([0, 1, 1, 0, 1]).to(dtype), torch.zeros(5).to(dtype)
    pair.run(bps.broadcast_parameters, {"x": mine}, {"x": theirs})
    assert torch.equal(mine.view(torch.uint8), theirs.view(torch.uint8))
    assert list(pair.root.broadcasts) == ["Parameter.x"]


def test_layouts_arrive(pair: Pair) -> None:
    mine = {
        "t": torch.arange(6.0).reshape(2, 3).t(),
        "0d": torch.tensor(7),
        "empty": torch.zeros(0, 3),
    }
    mine["conjugated lazily"] = torch.ones(2).mul(1j).conj()
    base = torch.zeros(4, 6)
    theirs = {"t": base[:3, ::3], "0d": torch.tensor(0), "empty": torch.zeros(0, 3)}
    theirs["conjugated lazily"] = torch.zeros(2, dtype=torch.complex64)
    pair.run(bps.broadcast_parameters, mine, theirs)
    assert all(torch.equal(mine[k], theirs[k]) for k in mine)
    assert int(base.count_nonzero()) == 5


@pytest.mark.parametrize(
    "form",
    [
        lambda m: m.state_dict(),
        lambda m: m.named_parameters(),
        lambda m: list(m.named_parameters()),
        lambda m: dict(m.named_parameters()),
        lambda m: OrderedDict(m.named_parameters()),
    ],
)
def test_forms_of_parameters(pair: Pair, form: Any) -> None:
    mine, theirs = nn.Linear(3, 2), nn.Linear(3, 2)
    pair.run(bps.broadcast_parameters, form(mine), form(theirs))
    assert torch.equal(mine.weight, theirs.weight) and torch.equal(mine.bias, theirs.bias)
    assert theirs.weight.requires_grad


@pytest.mark.parametrize(
    "params, message",
    [
        (nn.Linear(2, 2).parameters, "pairs, not method"),
        (torch.zeros(2), "pairs, not Tensor"),
        ([torch.zeros(2)], r"entry 0 is a Tensor, not a \(name, tensor\) pair"),
        ([("a", torch.zeros(2)), (3, torch.zeros(2))], "entry 1 is a tuple"),
        ([("a", torch.zeros(2)), ("a", torch.zeros(2))], "the name 'a' is given twice"),
        ({"a": torch.zeros(2), "lr": 0.1}, "'lr': expected a torch.Tensor, not float"),
        ({"a": None}, "'a': expected a torch.Tensor, not NoneType"),
        ({"a": torch.eye(2).to_sparse()}, "'a': sparse_coo tensors cannot be sent"),
        ({"a": torch.zeros(2, device="meta")}, "'a': tensors on meta"),
        ({"a": torch.zeros(1).expand(3)}, "'a': elements share memory"),
    ],
)
def test_wrong_parameters(pair: Pair, params: Any, message: str) -> None:
    with pytest.raises((ConfigError, bps.UnsupportedTensor), match=message):
        pair.run(bps.broadcast_parameters, params, params)
    assert not pair.root.broadcasts


def test_a_root_may_be_an_integer_of_any_kind(pair: Pair) -> None:
    pair._patch.setattr(adapter, "session", lambda: pair.root)
    bps.broadcast_parameters({"a": torch.zeros(2)}, np.int64(0))  # type: ignore[arg-type]
    assert list(pair.root.broadcasts) == ["Parameter.a"]


@pytest.mark.parametrize("root", [-1, 2, "0", None, True, 1.0])
def test_wrong_root(pair: Pair, root: Any) -> None:
    pair.run(bps.broadcast_parameters, {}, {})
    for verb, argument in (
        (bps.broadcast_parameters, {}),
        (bps.broadcast_optimizer_state, torch.optim.SGD([torch.zeros(1)], lr=0.1)),
    ):
        with pytest.raises(ConfigError, match="expected 0 to 1"):
            verb(argument, root)


def test_wrong_optimizers_and_prefixes(pair: Pair) -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(
        ConfigError,
        match="broadcast_optimizer_state: optimizer is a Linear; expected a torch.optim.Optimizer",
    ):
        pair.run(bps.broadcast_optimizer_state, model, model)
    verbs: list[tuple[Any, Any]] = [
        (bps.broadcast_parameters, model.state_dict()),
        (bps.broadcast_optimizer_state, optimizer),
    ]
    for verb, argument in verbs:
        with pytest.raises(ConfigError, match=f"{verb.__name__}: prefix must be a string, not 5"):
            verb(argument, 0, prefix=5)
    assert not pair.root.broadcasts


SCALARS = (
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters(codec="utf-8"))
)
KEYS = SCALARS.filter(lambda x: x == x)
VALUES = st.recursive(
    SCALARS,
    lambda v: st.lists(v) | st.lists(v).map(tuple) | st.dictionaries(KEYS, v),
    max_leaves=10,
)


def same(a: Any, b: Any) -> bool:
    if type(a) is not type(b):
        return False
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b))
    if isinstance(a, dict):
        return len(a) == len(b) and all(same(x, y) and same(a[x], b[y]) for x, y in zip(a, b))
    if isinstance(a, float):
        return (math.isnan(a) and math.isnan(b)) or (
            a == b and math.copysign(1, a) == math.copysign(1, b)
        )
    return bool(a == b)


@given(VALUES)
def test_values_come_back_as_they_were(value: Any) -> None:
    assert same(decode(json.loads(json.dumps(Encoder().encode(value, "x"))), []), value)


OPTIMIZERS: dict[str, Any] = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    "Adam": lambda p: torch.optim.Adam(p, lr=0.01, betas=(0.8, 0.99), amsgrad=True),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=torch.tensor(0.01), weight_decay=0.1, foreach=False),
    "RMSprop": lambda p: torch.optim.RMSprop(p, centered=True),
    "two groups": lambda p: torch.optim.Adam(_groups(p)),
}


def _groups(p: Any) -> list[dict[str, Any]]:
    weight, bias = p
    return [{"params": [weight], "lr": 0.5}, {"params": [bias], "weight_decay": 0.1}]


def trained(make: Any, steps: int, seed: int = 0) -> tuple[nn.Linear, Any]:
    torch.manual_seed(seed)
    model = nn.Linear(3, 2)
    optimizer = make(model.parameters())
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(4, 3)).pow(2).sum().backward()
        optimizer.step()
    return model, optimizer


@pytest.mark.parametrize(
    "steps", [(3, 0), (0, 3), (0, 0), (2, 5)], ids=lambda s: f"root {s[0]} steps, other {s[1]}"
)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizer_state_arrives_and_weights_stay(
    pair: Pair, name: str, steps: tuple[int, int]
) -> None:
    _, mine = trained(OPTIMIZERS[name], steps[0])
    model, theirs = trained(OPTIMIZERS[name], steps[1], seed=7)
    mine.param_groups[0]["initial_lr"] = 0.75  # as a scheduler sets it
    theirs.param_groups[0]["stray"] = "gone after it"
    before = [(p.clone(), None if p.grad is None else p.grad.clone()) for p in model.parameters()]
    pair.run(bps.broadcast_optimizer_state, mine, theirs)
    assert same_state(mine.state_dict(), theirs.state_dict())
    for (weight, grad), p in zip(before, model.parameters()):
        assert (
            torch.equal(weight, p)
            and (grad is None) == (p.grad is None)
            and (grad is None or torch.equal(grad, p.grad))
        )
    model(torch.ones(1, 3)).sum().backward()
    theirs.step()


def same_state(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict):
        return set(a) == set(b) and all(same_state(a[k], b[k]) for k in a)
    if isinstance(a, (list, tuple)):
        return (
            type(a) is type(b) and len(a) == len(b) and all(same_state(x, y) for x, y in zip(a, b))
        )
    return type(a) is type(b) and bool(a == b)


def test_state_of_another_dtype_than_the_parameter_is_not_converted(pair: Pair) -> None:
    model = nn.Linear(2, 2).bfloat16()
    mine, theirs = (torch.optim.SGD(model.parameters(), lr=0.1) for _ in range(2))
    mine.state[model.weight] = {"master": torch.full((2, 2), 1 / 3), "step": torch.tensor(3)}
    pair.run(bps.broadcast_optimizer_state, mine, theirs)
    assert torch.equal(theirs.state[model.weight]["master"], torch.full((2, 2), 1 / 3))
    assert theirs.state[model.weight]["step"].dtype == torch.int64


@pytest.mark.parametrize(
    "value, message",
    [(object(), "state 0.odd is a object"), (torch.eye(2).to_sparse(), "state 0.odd: sparse_coo")],
)
def test_state_that_cannot_be_sent_fails_on_all_workers(
    pair: Pair, value: Any, message: str
) -> None:
    weight = torch.zeros(2)
    mine, theirs = (torch.optim.SGD([weight], lr=0.1) for _ in range(2))
    mine.state[weight]["odd"] = value
    for run in (
        lambda: pair.run(bps.broadcast_optimizer_state, mine, theirs),
        lambda: bps.broadcast_optimizer_state(theirs, 0),
    ):
        with pytest.raises(StateError, match=message):
            run()
        pair._patch.setattr(adapter, "session", lambda: pair.other)


def test_state_that_is_no_parameters(pair: Pair) -> None:
    mine = torch.optim.SGD([torch.zeros(2)], lr=0.1)
    mine.state["global"] = {"a": 1}  # type: ignore[index]
    with pytest.raises(StateError, match="keeps state under str 'global'"):
        pair.run(bps.broadcast_optimizer_state, mine, mine)


@pytest.mark.parametrize(
    "kind, apart, what",
    [("SGD", True, r"SGD with groups of \[1, 1\]"), ("Adam", False, r"Adam with groups of \[2\]")],
)
def test_other_optimizers_are_refused_before_anything_changes(
    pair: Pair, kind: str, apart: bool, what: str
) -> None:
    a, b = torch.zeros(2), torch.zeros(2)
    mine = torch.optim.SGD([a, b], lr=0.1)
    theirs = getattr(torch.optim, kind)(
        [{"params": [a]}, {"params": [b]}] if apart else [a, b], lr=0.2
    )
    with pytest.raises(
        MismatchError,
        match=(
            r"optimizers differ: worker 0 has SGD with groups of \[2\] parameters, worker 1 has"
            rf" {what} parameters"
        ),
    ):
        pair.run(bps.broadcast_optimizer_state, mine, theirs)
    assert theirs.param_groups[0]["lr"] == 0.2


def test_a_single_worker_sends_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    alone = FakeSession(size=1)
    monkeypatch.setattr(adapter, "session", lambda: alone)
    bps.broadcast_parameters({"a": torch.zeros(2)}, 0)
    bps.broadcast_optimizer_state(torch.optim.SGD([torch.zeros(2)], lr=0.1), 0)
    assert not alone.broadcasts


def test_state_goes_to_the_device_of_its_parameter() -> None:
    """Or to the host, if it is there at the sender, or if the parameter is."""
    params = [torch.zeros(2), torch.zeros(2, device="meta")]
    found = [
        [device_for({"device": device, "param": param}, params).type for param in (-1, 0, 1)]
        for device in ("cpu", "meta")
    ]
    assert found == [["cpu", "cpu", "cpu"], ["cpu", "cpu", "meta"]]


def test_the_sender_says_to_which_parameter_state_belongs() -> None:
    weights = [torch.zeros(2, requires_grad=True) for _ in range(3)]
    groups = [{"params": weights[:1]}, {"params": weights[1:], "lr": torch.tensor(0.1)}]
    optimizer = torch.optim.Adam(groups, lr=0.1, foreach=False, capturable=False)
    weights[2].grad = torch.ones(2)
    optimizer.step()
    told = {m["name"]: m["param"] for m in _pack(optimizer).structure["tensors"]}
    assert told.pop("group 1.lr") == 1 and set(told.values()) == {2}
