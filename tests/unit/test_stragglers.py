"""Processes that the launcher has to end alone: which, and when."""

from __future__ import annotations

import signal
from types import SimpleNamespace
from typing import Any

import pytest

from bpsx.launch.backend import Process
from bpsx.launch.scheduler_state import SchedulerState
from bpsx.launch.stragglers import Stragglers

WORKER = Process("worker 1", "worker", ("x",), {"DMLC_WORKER_ID": "1"})


class Running:
    """A child that runs, and notes its signals."""

    status, overdue, role = None, "", "worker"

    def __init__(self) -> None:
        self.got: list[int] = []
        self.process = SimpleNamespace(pid=7)
        self.over = False

    def has_ended(self) -> bool:
        return self.over

    def send(self, number: int) -> None:
        self.got.append(number)


def ended(lines: list[str], before: int, process: Process = WORKER) -> tuple[list[list[int]], str]:
    """The signals of a process by 2 s, 3 s and 5 s after it was seen, and why it got them."""
    scheduler = SchedulerState()
    stragglers, child = Stragglers(scheduler, 3.0, 2.0), Running()
    anything: Any = child
    child.role = process.role
    stragglers.started(anything, process, before)
    scheduler.far += lines
    stragglers.look(0.0)
    got = []
    for now in (2.0, 3.0, 5.0):
        stragglers.send(now)
        got.append([*child.got])
    assert (anything in stragglers) == bool(child.got) and stragglers.due is None
    return got, child.overdue


def lost() -> tuple[Stragglers, Running]:
    """A worker that the job has lost, seen at 0 s."""
    scheduler = SchedulerState()
    stragglers, child = Stragglers(scheduler, 3.0, 2.0), Running()
    anything: Any = child
    stragglers.started(anything, WORKER)
    scheduler.far += ["gone worker 1"]
    stragglers.look(0.0)
    return stragglers, child


BOTH = [signal.SIGTERM, signal.SIGKILL]


@pytest.mark.parametrize("lines", [["gone worker 1"], ["entered worker 2", "gone worker 1"]])
def test_a_lost_worker_has_its_grace_time(lines):
    got, why = ended(lines, before=-1)
    assert got == [[], BOTH[:1], BOTH]
    assert why == "was still running 3 s after the job had lost it, got SIGTERM and "


@pytest.mark.parametrize("lines", [[], ["gone worker 11", "gone machine 1"], ["lost worker 1 7"]])
def test_others_are_left_alone(lines):
    assert ended(lines, before=-1) == ([[], [], []], "")


@pytest.mark.parametrize("before", [-1, 0])
def test_a_lost_server_has_its_grace_time(before):
    server = Process("server 0", "server", ("x",), {})
    assert ended(["gone server 7"], before, server)[0] == [[], BOTH[:1], BOTH]
    assert ended(["gone server 71", "gone worker 7", "over"], before, server)[1] == ""


@pytest.mark.parametrize(
    ("lines", "is_meant"),
    [
        (["gone worker 1"], False),
        (["gone worker 1", "entered worker 1"], False),
        (["gone worker 1", "entered worker 1", "gone worker 1"], True),
    ],
)
def test_a_worker_that_was_started_again_is_not_taken_for_the_one_before(lines, is_meant):
    assert bool(ended(lines, before=0)[1]) == is_meant


def test_one_that_has_not_joined_when_the_job_is_over_has_no_grace_time():
    got, why = ended(["gone worker 1", "over"], before=0)
    assert got == [BOTH[:1], BOTH[:1], BOTH]
    assert why == "had not joined when the job was over, got SIGTERM and "
    assert ended(["gone worker 1", "entered worker 1", "over"], before=0)[1] == ""


def test_processes_of_a_machine_that_was_started_again_have_to_join():
    """Their launcher starts each of them for the first time."""
    late = "had not joined when the job was over, got SIGTERM and "
    assert ended(["again", "over"], before=-1) == ([BOTH[:1], BOTH[:1], BOTH], late)
    assert ended(["again", "entered worker 2", "over"], before=-1)[1] == late
    assert ended(["again", "gone worker 1", "entered worker 1", "over"], before=-1)[1] == ""
    assert ended(["over"], before=-1)[1] == ""


def test_one_that_has_got_sigterm_gets_no_second_one():
    stragglers, child = lost()
    child.overdue = "was still running, got SIGTERM and "
    for now in (3.0, 5.0):
        stragglers.send(now)
    assert child.got == BOTH[1:]


def test_one_that_has_ended_unseen_is_not_called_late():
    """Between the launcher's look at its children and the signal."""
    stragglers, child = lost()
    child.over = True
    for now in (3.0, 5.0):
        stragglers.send(now)
    assert not child.got and not child.overdue
