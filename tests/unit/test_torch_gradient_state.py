"""States of a gradient: whatever the script calls, state and fields agree with the table."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any
from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch_fake import FakeSession

import bpsx.torch as bps
from bpsx.errors import BpsxError
from bpsx.torch import _bucket, _gradients, bucket
from bpsx.torch._gradient_state import TABLE, Event, State
from bpsx.torch.cross_barrier import CrossBarrier
from support.places import ROOT

PUSHED = {State.BUCKETED, State.IN_FLIGHT, State.NOT_STARTED, State.PENDING}


def assert_state_fits(managed: Any) -> None:
    """Assert that the fields belong to the state."""
    state, pushed = managed.state, managed.pushed
    assert (pushed is not None) == (state in PUSHED) == managed.is_pushed(), (state, pushed)
    assert managed.averaged is None or state in (State.ADDING, State.AVERAGED), state
    if isinstance(pushed, _gradients.Pushed):
        failed = isinstance(pushed.begun, Exception)
        assert (pushed.begun is None) == (state is State.BUCKETED), (state, pushed.begun)
        assert failed if state is State.NOT_STARTED else not failed or state is State.PENDING


@contextmanager
def on_gpu(yes: bool = True) -> Iterator[None]:
    """Have CPU memory count as the GPU's, so that gradients go into buckets."""
    with ExitStack() as stack:
        if yes:
            stack.enter_context(patch.object(_gradients, "ALL_ON_GPU", lambda *_: None))
            stack.enter_context(patch.object(_bucket, "streams_of", lambda device: lambda: 0))
        yield


# ---- one gradient and single events


class One:
    """One gradient, its bucket, and a way to cause each event."""

    def __init__(self) -> None:
        info = bucket.GradientInfo("Gradient.a", "gradient of 'a'", 0)
        self.managed = _gradients.Managed("a", nn.Parameter(torch.zeros(4)), info, 1)
        self.bucket = _bucket.Bucket(self._begin, self._fail, self._fail, lambda: 1 << 20)
        self.refusal: Exception | None = None

    def _begin(self, items: list[Any], *_: Any) -> None:
        for item in items:
            item.begun = self.refusal or object()

    def _fail(self, *_: Any) -> Any:
        raise AssertionError("a plain gradient goes with its bucket")

    def _submit(self, refusal: Exception | None) -> None:
        self.refusal = refusal
        with suppress(ValueError):
            self.bucket.submit()

    def cause(self, event: Event) -> None:
        by_event: dict[Event, Callable[[], object]] = {
            Event.ADD: self.managed.add,
            Event.DEFER: self.managed.defer,
            Event.AGREE: self.managed.agree,
            Event.BUCKET: lambda: self.bucket.add(self.managed, torch.ones(4)),
            Event.START: lambda: self.managed.start(object()),
            Event.SUBMIT: lambda: self._submit(None),
            Event.FAIL: lambda: self._submit(ValueError("on purpose")),
            Event.STEP: self.managed.step,
            Event.RECEIVE: self.managed.receive,
            Event.DROP: self.managed.drop,
            Event.CLEAR: self.managed.clear,
        }
        by_event[event]()


def test_every_state_can_be_reached_and_left() -> None:
    assert set(TABLE) == set(State)
    assert {event for row in TABLE.values() for event in row} == set(Event)
    assert {following for row in TABLE.values() for following in row.values()} == set(State)
    assert all(TABLE.values())


@given(st.lists(st.sampled_from(Event), max_size=40))
@settings(max_examples=300, deadline=None)
def test_events_lead_where_the_table_says_or_are_refused(events: list[Event]) -> None:
    with on_gpu():
        one = One()
        managed = one.managed
        for event in events:
            before, pushed = managed.state, managed.pushed
            assert managed.allows(event) == (event in TABLE[before])
            if event in TABLE[before]:
                one.cause(event)
                assert managed.state is TABLE[before][event]
            elif event in (Event.SUBMIT, Event.FAIL):  # the bucket has nothing to start
                one.cause(event)
                assert managed.state is before and managed.pushed is pushed
            else:
                text = f"internal error: the gradient of 'a' is {before.name}, where {event.name}"
                with pytest.raises(RuntimeError, match=text):
                    one.cause(event)
                assert managed.state is before and managed.pushed is pushed
            assert_state_fits(managed)


# ---- an optimizer and what a script may call


class Net(nn.Module):
    """A dense layer and an embedding whose gradient may be sparse."""

    def __init__(self, sparse: bool) -> None:
        super().__init__()
        self.table = nn.Embedding(3, 2, sparse=sparse)
        self.first, self.last = nn.Linear(2, 2), nn.Linear(2, 2)

    def forward(self, whole: bool) -> torch.Tensor:
        found = self.first(self.table(torch.tensor([0, 2])))
        return (self.last(found) if whole else found).sum()


class Script:
    """A training script whose calls come in any order."""

    def __init__(self, cross: bool, sparse: bool, passes: int) -> None:
        self.net = Net(sparse)
        plain, names = torch.optim.SGD(self.net.parameters(), lr=0.1), self.net.named_parameters()
        self.optimizer: Any = (
            CrossBarrier(self.net, plain, names, backward_passes_per_step=passes)
            if cross
            else bps.DistributedOptimizer(plain, names, backward_passes_per_step=passes)
        )
        self.exchange = self.optimizer._exchange

    def backward(self) -> None:
        self.net(True).backward()

    def backward_of_a_part(self) -> None:
        self.net(False).backward()

    def step(self) -> None:
        self.optimizer.step()

    def synchronize(self) -> None:
        self.optimizer.synchronize()

    def step_without_wait(self) -> None:
        with self.optimizer.skip_synchronize():
            self.optimizer.step()

    def zero_grad(self) -> None:
        self.optimizer.zero_grad()

    def models_zero_grad(self) -> None:
        self.net.zero_grad()

    def read(self) -> None:
        list(self.optimizer.param_groups[0]["params"])

    def write_to_a_gradient(self) -> None:
        gradient = self.net.first.weight.grad
        if gradient is not None:
            gradient.add_(1)

    def freeze(self) -> None:
        self.net.first.bias.requires_grad_(not self.net.first.bias.requires_grad)

    def check(self) -> None:
        managed = self.exchange._managed
        for one in managed:
            assert_state_fits(one)
        pending = {id(m.parameter) for m in managed if m.state is State.PENDING}
        assert pending == set(getattr(self.exchange, "_pending", ()))


CALLS = [name for name, what in vars(Script).items() if name[0] != "_" and callable(what)]
CALLS.remove("check")
CALLS += 3 * ["backward", "step"]


@given(
    calls=st.lists(
        st.tuples(
            st.sampled_from(CALLS),
            st.sampled_from(["", "", "", "failures", "refusals"]),
            st.sampled_from(["first.weight", "last.bias"]),
        ),
        min_size=8,
        max_size=25,
    ),
    cross=st.booleans(),
    sparse=st.booleans(),
    gpu=st.booleans(),
    passes=st.sampled_from([1, 1, 2]),
)
@settings(max_examples=300, deadline=None)
@pytest.mark.filterwarnings("ignore:step\\(\\) after synchronize\\(\\)")
def test_fields_agree_with_the_state_whatever_a_script_calls(
    calls: list[tuple[str, str, str]], cross: bool, sparse: bool, gpu: bool, passes: int
) -> None:
    fake = FakeSession()
    with on_gpu(gpu), patch("bpsx.plugin.adapter.session", lambda: fake):
        script = Script(cross, sparse, passes)
        for call, trouble, name in calls:
            fake.failures, fake.refusals = {}, {}
            if trouble:
                getattr(fake, trouble)[f"Gradient.{name}"] = ValueError("on purpose")
            try:
                getattr(script, call)()
            except (BpsxError, ValueError):
                pass
            except RuntimeError as e:  # PyTorch's, of a pass that nothing requires
                assert "internal error" not in str(e), e
            script.check()
        script.exchange.finalizer()


def test_a_sparse_gradient_may_be_frozen_before_the_workers_agree_on_it() -> None:
    fake = FakeSession()
    with patch("bpsx.plugin.adapter.session", lambda: fake):
        script = Script(cross=False, sparse=True, passes=1)
        script.backward()
        table = script.net.table.weight
        table.requires_grad_(False)
        script.step()
        assert not script.exchange.under_way
        table.requires_grad_(True)
        script.models_zero_grad()
        script.backward()  # an error, were the gradient of the step before still deferred
        script.step()
        script.exchange.finalizer()


# ---- the documentation


def rows_of_the_page() -> dict[State, dict[Event, State]]:
    """Return the table of docs/internals/states.md that tells a gradient's states."""
    page = (ROOT / "docs" / "internals" / "states.md").read_text()
    section = page.partition("\n## A gradient in torch\n")[2].partition("\n## ")[0]
    found: dict[State, dict[Event, State]] = {}
    for line in section.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        event = re.match(r"([A-Z]+)\b", cells[1]) if len(cells) == 4 else None
        if event is not None:
            for name in cells[0].split(", "):
                row = found.setdefault(State[name], {})
                assert Event[event[1]] not in row, line
                row[Event[event[1]]] = State[cells[3]]
    return found


def test_the_page_tells_the_table() -> None:
    assert rows_of_the_page() == TABLE
