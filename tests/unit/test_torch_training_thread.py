"""Reading param_groups, state and state_dict() outside the training loop.

Signal handlers, other threads and hooks of a backward pass read them. Nothing waits there, and
training is not disturbed.
"""

from __future__ import annotations

import functools
import os
import signal
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch_fake import DATA, FakeSession, Push, network, sgd

from bpsx.torch.cross_barrier import CrossBarrier
from bpsx.torch.training_thread import in_signal_handler


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeSession:
    session = FakeSession()
    monkeypatch.setattr("bpsx.plugin.adapter.session", lambda: session)
    return session


@pytest.fixture
def usr1() -> Iterator[None]:
    before = signal.getsignal(signal.SIGUSR1)
    yield
    signal.signal(signal.SIGUSR1, before)


def strike() -> None:
    os.kill(os.getpid(), signal.SIGUSR1)
    for _ in range(3):
        pass  # the interpreter checks for signals between instructions


class Handler:
    def __init__(self, act: Any) -> None:
        self.act = act

    def method(self, number: int, frame: Any) -> None:
        self.act()

    def __call__(self, *args: Any) -> None:
        self.act()


@pytest.mark.parametrize("kind", ["function", "method", "object", "partial"])
def test_a_handler_is_known(usr1: None, kind: str) -> None:
    found: list[bool] = []

    def act() -> None:
        found.append(in_signal_handler())

    def function(number: int, frame: Any) -> None:
        act()

    def with_more(more: str, number: int, frame: Any) -> None:
        act()

    signal.signal(
        signal.SIGUSR1,
        {
            "function": function,
            "method": Handler(act).method,
            "object": Handler(act),
            "partial": functools.partial(with_more, "more"),
        }[kind],
    )
    act()
    strike()
    act()
    assert found == [False, True, False]


def in_a_thread(act: Any) -> None:
    thread = threading.Thread(target=act)
    thread.start()
    thread.join()


def in_a_handler(act: Any) -> None:
    signal.signal(signal.SIGUSR1, lambda number, frame: act())
    strike()


@pytest.mark.parametrize("aside", [in_a_thread, in_a_handler])
@pytest.mark.parametrize("make", ["optimizer", "barrier"])
def test_reading_from_threads_and_handlers_changes_nothing(
    fake: FakeSession, usr1: None, monkeypatch: pytest.MonkeyPatch, aside: Any, make: str
) -> None:
    """Checked in hooks of backward, between backward and step, in step's waits, and after it."""
    failures: list[BaseException] = []
    looks = 0

    def trained(looking: bool) -> list[torch.Tensor]:
        nonlocal looks
        model = network()
        if make == "optimizer":
            optimizer = sgd(model)
        else:
            plain = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
            optimizer = CrossBarrier(model, plain, model.named_parameters())

        def look() -> None:
            nonlocal looks
            looks += 1
            try:
                state = optimizer.state_dict()
                for group in optimizer.param_groups:
                    assert len(group["params"]) == 4 and group["lr"] == 0.1
                assert state["param_groups"][0]["params"] == [0, 1, 2, 3]
            except BaseException as e:
                failures.append(e)

        def besides(*_: Any) -> None:
            if looking:
                aside(look)

        wait = Push.wait

        def waiting(push: Push, timeout: float | None = None) -> Any:
            besides()
            return wait(push, timeout)

        with monkeypatch.context() as patch:
            patch.setattr(Push, "wait", waiting)
            hooks = [p.register_post_accumulate_grad_hook(besides) for p in model.parameters()]
            for _ in range(3):
                optimizer.zero_grad()
                half = DATA.chunk(2)
                (model(half[0]).sum() + model(half[1]).pow(2).sum()).backward()
                besides()
                optimizer.step()
                besides()
            for hook in hooks:
                hook.remove()
        optimizer.synchronize()
        return [p.detach().clone() for p in model.parameters()]

    wanted, found = trained(False), trained(True)
    assert not failures and looks > 20
    assert all(torch.equal(a, b) for a, b in zip(wanted, found))


def test_reading_in_the_training_thread_waits(fake: FakeSession) -> None:
    model = network()
    optimizer = sgd(model)
    model(DATA).sum().backward()
    assert not any(p.delivered for p in fake.pushes)
    assert optimizer.param_groups and all(p.delivered for p in fake.pushes)


def test_training_may_move_to_another_thread(fake: FakeSession) -> None:
    model = network()
    optimizer = sgd(model)
    seen: list[bool] = []

    def train() -> None:
        model(DATA).sum().backward()
        assert optimizer.param_groups
        seen.append(all(p.delivered for p in fake.pushes))
        optimizer.step()

    train()
    in_a_thread(train)
    train()
    assert seen == [True] * 3
