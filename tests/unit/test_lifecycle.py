"""What this process has to do with a job: init(), shutdown(), suspend(), resume(), forks."""

from __future__ import annotations

import os
import threading
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bpsx.api import lifecycle, verbs
from bpsx.api.states import PROCESS, Event, Process
from bpsx.errors import ConfigError, InternalError, JobOverError, NotInitializedError


class FakeSession(SimpleNamespace):
    """A session of no job, whose end runs ``at_close``."""

    def __init__(self, order: dict[str, int], at_close: Any = None) -> None:
        super().__init__(
            order={**order, f"name {len(order)}": len(order)},
            reporter=SimpleNamespace(close_on_sigterm=lambda: None),
            compressing=SimpleNamespace(remembered=dict),
            failure="",
            told=True,
            local_rank=2,
            local_size=3,
        )
        self._at_close = at_close or (lambda: None)

    def close(self, failure: str, waited: float) -> None:
        self._at_close()


class Jobs:
    """Makes sessions in place of :class:`bpsx.session.session.Session`."""

    def __init__(self) -> None:
        self.fails = False
        self.at_begin = self.at_close = None
        self.orders: list[dict[str, int]] = []

    def __call__(
        self, config: Any, order: Any = None, remembered: Any = None, again: bool = False
    ) -> FakeSession:
        if self.at_begin is not None:
            self.at_begin()
        if self.fails:
            raise ConfigError("no job here")
        self.orders.append(order or {})
        return FakeSession(order or {}, self.at_close)


@pytest.fixture
def jobs(monkeypatch: pytest.MonkeyPatch) -> Jobs:
    return prepared(monkeypatch)


def prepared(patch: pytest.MonkeyPatch) -> Jobs:
    """Make this process one that has been in no job, and whose sessions are fakes."""
    made = Jobs()
    for name, value in {
        "_state": Process.OUTSIDE,
        "_state_pid": os.getpid(),
        "_leaver": 0,
        "_session": None,
        "_owner_pid": 0,
        "_kept": None,
        "_placed": False,
        "_again": False,
        "_hooked": True,
        "_engines": [],
        "Session": made,
    }.items():
        patch.setattr(lifecycle, name, value)
    return made


def assert_consistent() -> None:
    inside = lifecycle._state is Process.INSIDE
    assert lifecycle.initialised() == inside == (lifecycle._session is not None)
    assert (lifecycle._kept is not None) == (lifecycle._state is Process.SUSPENDED)
    assert lifecycle._state in (Process.OUTSIDE, Process.INSIDE, Process.SUSPENDED)
    if inside:
        assert lifecycle.session() is lifecycle._session
        return
    with pytest.raises(NotInitializedError):
        verbs.rank()
    if lifecycle._state is Process.SUSPENDED:
        assert (verbs.local_rank(), verbs.local_size()) == (2, 3)
    else:
        with pytest.raises(NotInitializedError):
            verbs.local_rank()


CALLS = st.lists(
    st.tuples(st.sampled_from(["init", "resume", "shutdown", "suspend", "exit"]), st.booleans()),
    max_size=12,
)


@settings(max_examples=150, deadline=None)
@given(CALLS)
def test_any_order_of_calls_leaves_a_state_that_fits(calls: list[tuple[str, bool]]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        jobs = prepared(patch)
        names: dict[str, int] = {}  # what suspend() has kept
        for call, fails in calls:
            jobs.fails, before, made = fails, lifecycle._state, len(jobs.orders)
            if call == "init":
                with_error(lifecycle.init, fails and before is not Process.INSIDE)
            elif call == "resume":
                inside = before is Process.INSIDE
                with_error(lambda: lifecycle.resume(1, 0), fails or inside)
            elif call == "exit":
                lifecycle._at_exit()
            else:
                getattr(lifecycle, call)()
            if len(jobs.orders) > made:
                assert jobs.orders[-1] == (names if call == "resume" else {})
            if lifecycle._state is Process.SUSPENDED:
                names = lifecycle._kept.order  # type: ignore[union-attr]
            else:
                names = {} if lifecycle._state is Process.OUTSIDE else names
            assert_consistent()


def with_error(call: Any, fails: bool) -> None:
    if fails:
        with pytest.raises(ConfigError):
            call()
    else:
        call()


def test_names_are_forgotten_by_shutdown_and_by_init(jobs: Jobs) -> None:
    for forget in (lifecycle.shutdown, lifecycle.init):
        lifecycle.init(), lifecycle.suspend()
        forget()
        lifecycle.shutdown()
        lifecycle.resume(1, 0)
        assert jobs.orders[-1] == {}
        lifecycle.shutdown()


def test_resume_that_fails_can_be_tried_again_with_the_same_names(jobs: Jobs) -> None:
    lifecycle.init(), lifecycle.suspend()
    jobs.fails = True
    with pytest.raises(ConfigError, match="no job here"):
        lifecycle.resume(1, 0)
    assert lifecycle._state is Process.SUSPENDED
    jobs.fails = False
    lifecycle.resume(1, 0)
    assert jobs.orders[-1] == {"name 0": 0} and lifecycle._kept is None


def test_resume_without_suspend_is_init(jobs: Jobs) -> None:
    """As upstream, whose resume() initialises and then declares the names that there are."""
    lifecycle.resume(1, 0)
    assert lifecycle.initialised() and jobs.orders == [{}]


def test_init_waits_until_another_thread_has_left(jobs: Jobs) -> None:
    closing, may_end = threading.Event(), threading.Event()

    def close() -> None:
        closing.set()
        assert may_end.wait(60)

    jobs.at_close = close
    lifecycle.init()
    leaver = threading.Thread(target=lifecycle.shutdown)
    leaver.start()
    assert closing.wait(60) and lifecycle._state is Process.LEAVING
    jobs.at_begin = lambda: states.append(lifecycle._state)  # type: ignore[func-returns-value]
    states: list[Process] = []
    comer = threading.Thread(target=lifecycle.init)
    comer.start()
    lifecycle.shutdown()  # nothing to leave
    assert not lifecycle.initialised() and states == []
    may_end.set()
    leaver.join(), comer.join()
    assert states == [Process.CONNECTING] and lifecycle.initialised()


def test_shutdown_during_suspend_forgets_the_names(jobs: Jobs) -> None:
    jobs.at_close = lifecycle.shutdown
    lifecycle.init()
    lifecycle.suspend()
    assert lifecycle._state is Process.OUTSIDE and lifecycle._kept is None


@pytest.mark.parametrize("where", ["at_begin", "at_close"])
def test_a_signal_handler_cannot_begin_a_second_session_in_between(jobs: Jobs, where: str) -> None:
    said: list[str] = []

    def handler() -> None:
        for call in (lifecycle.init, lambda: lifecycle.resume(1, 0)):
            with pytest.raises(ConfigError) as e:
                call()
            said.append(str(e.value))

    setattr(jobs, where, handler)
    lifecycle.init()
    lifecycle.shutdown()
    assert len(said) == 2 and said[0].startswith("init: called while init(), resume()")
    assert said[1].startswith("resume: called while")
    assert lifecycle._state is Process.OUTSIDE


def test_shutdown_by_a_signal_handler_during_init_does_nothing(jobs: Jobs) -> None:
    jobs.at_begin = lifecycle.shutdown
    lifecycle.init()
    assert lifecycle.initialised()


def test_a_forked_child_begins_outside(jobs: Jobs, monkeypatch: pytest.MonkeyPatch) -> None:
    lifecycle.init()
    parent = os.getpid()
    monkeypatch.setattr(os, "getpid", lambda: parent + 1)
    assert not lifecycle.initialised()
    lifecycle.init()
    assert lifecycle.initialised() and len(jobs.orders) == 2


def test_the_old_job_is_waited_for_only_by_resume(
    jobs: Jobs, monkeypatch: pytest.MonkeyPatch
) -> None:
    tries: list[None] = []

    def over() -> None:
        tries.append(None)
        if len(tries) < 3:
            raise JobOverError("the job is over")

    jobs.at_begin = over
    monkeypatch.setattr(lifecycle, "_ASK_AGAIN", 0.0)
    lifecycle.resume(1, 0)
    assert len(tries) == 3


def test_an_event_out_of_place_names_itself_and_the_state(jobs: Jobs) -> None:
    with pytest.raises(InternalError, match="this process in state 'outside' .* 'session begins'"):
        lifecycle._move(Event.SESSION_BEGINS)
    assert set(PROCESS.rows) == set(Process)
