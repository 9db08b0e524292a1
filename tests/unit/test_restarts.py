"""Processes that the launcher starts again: how often, and when."""

from __future__ import annotations

import pytest

from bpsx.launch.backend import Process
from bpsx.launch.restarts import HEALTHY, LATEST, SCHEDULERS, SOONEST, Restarts

SERVER, OTHER = (Process(f"server {i}", "server", ("x",), {}) for i in range(2))
SCHEDULER = Process("scheduler", "scheduler", ("x",), {})


def die(restarts: Restarts, now: float, process: Process = SERVER) -> float:
    """Let a process die at ``now``, and start it again when it is due; returns the delay."""
    assert "started again in" in restarts.ended(process.name, now)
    due = restarts.due
    assert due is not None and restarts.is_due(process.name)
    assert not restarts.take(due - 0.001)
    assert restarts.take(due) == [process] and restarts.due is None
    restarts.started(process, due)
    return due - now


def test_delays_double_and_begin_anew_after_a_healthy_time():
    restarts = Restarts(100)
    restarts.started(SERVER, 0.0)
    delays = [die(restarts, 0.0) for _ in range(8)]
    assert delays == [0.5, 1, 2, 4, 8, 16, 30, 30] and delays[0] == SOONEST
    assert die(restarts, LATEST + HEALTHY - 0.5) == LATEST
    assert die(restarts, 2 * LATEST + 2 * HEALTHY + 1) == SOONEST


def test_each_server_has_its_own_delay_and_all_share_the_count():
    restarts = Restarts(3)
    restarts.started(SERVER, 0.0), restarts.started(OTHER, 0.0)
    assert (die(restarts, 1.0), die(restarts, 2.0), die(restarts, 3.0, OTHER)) == (0.5, 1.0, 0.5)
    assert restarts.ended("server 1", 4.0) == "not started again, as --max-restarts 3 is used up"
    assert restarts.due is None


@pytest.mark.parametrize(
    ("given", "servers", "schedulers"), [(None, 0, SCHEDULERS), (0, 0, 0), (7, 7, 7)]
)
def test_each_role_has_its_own_count(given, servers, schedulers):
    restarts = Restarts(given)
    for process, most in ((SERVER, servers), (SCHEDULER, schedulers)):
        restarts.started(process, 0.0)
        for _ in range(most):
            die(restarts, 0.0, process)
        assert "started again in" not in restarts.ended(process.name, 0.0)
        assert not restarts.is_due(process.name)


def test_workers_are_started_again_as_often_as_servers():
    restarts = Restarts(2)
    worker = Process("worker 0", "worker", ("x",), {})
    restarts.started(worker, 0.0), restarts.started(SERVER, 0.0)
    assert [die(restarts, 1.0, worker) for _ in range(2)] == [0.5, 1.0]
    assert "is used up" in restarts.ended("worker 0", 9.0)
    assert die(restarts, 9.0) == 0.5


def test_a_job_that_ends_starts_nothing():
    restarts = Restarts(5)
    restarts.started(SERVER, 0.0)
    restarts.ended("server 0", 1.0)
    restarts.stop()
    assert restarts.due is None and not restarts.take(100.0)
    assert restarts.ended("server 0", 1.0) == ""


def test_the_processes_of_a_machine_count_once():
    """Unless each may die alone."""
    for reduces, used in (("1", 1), ("0", 2)):
        restarts = Restarts(2)
        for machine in (0, 1):
            for rank in (0, 1):
                variables = {
                    "DMLC_WORKER_ID": str(machine),
                    "BYTEPS_LOCAL_SIZE": "2",
                    "BYTEPS_LOCAL_RANK": str(rank),
                    "BPSX_LOCAL_REDUCE": reduces,
                }
                name = f"worker {2 * machine + rank}"
                restarts.started(Process(name, "worker", ("x",), variables), 0.0)
        assert "(1 of 2)" in restarts.ended("worker 0", 1.0)
        assert f"({used} of 2)" in restarts.ended("worker 1", 1.0)
        then = restarts.ended("worker 2", 1.0)
        assert ("is used up" in then) == (used == 2), then
