"""The failure matrix: each role is struck in each way at each stage.

All other processes name the victim, end, and leave nothing behind.
"""

from __future__ import annotations

import signal
import time

import pytest
from matrix import FOR_ALL, PATIENT, ROLES, SHORT, STAGES, WAYS, Matrix, name_of

CASES = [
    (role, stage, way)
    for role in ROLES
    for stage in STAGES
    for way in (WAYS if role == "worker" else FOR_ALL)
]


@pytest.mark.parametrize(("role", "stage", "way"), CASES, ids=lambda part: str(part))
def test_a_failure_is_named_and_ends_everything(role, stage, way):
    with Matrix(stage, SHORT if way == "stop" else PATIENT) as matrix:
        victim = matrix.strike(role, way)
        statuses = matrix.ended(but=(victim,) if way == "stop" else ())
        name = name_of(role, victim, matrix.job.port)
        for worker in matrix.job.workers:
            if worker is victim:
                continue
            assert statuses[worker.name] != 0, worker.text()
            if stage == "shutdown" and worker.name == "worker 0":
                # shutdown() does not raise, so the log and the status must tell.
                assert name in worker.text()
            elif way == "exit":
                assert "worker 1" in matrix.told(worker)  # an orderly goodbye
            else:
                assert name in matrix.told(worker), worker.text()
        if way == "stop":
            victim.signal(signal.SIGCONT)  # it continues alone, and ends
            matrix.go()
            statuses |= matrix.ended()
        assert statuses[victim.name] != 0, victim.text()
        if way != "exit":
            assert all(statuses.values()), (statuses, matrix.text())
        assert matrix.left() == []


@pytest.mark.parametrize("stage", STAGES)
def test_a_short_stop_of_any_process_is_survived_with_right_sums(stage):
    with Matrix(stage, PATIENT, rounds=5) as matrix:
        for role in ROLES:
            victim = matrix.victim(role)
            victim.signal(signal.SIGSTOP)
            time.sleep(1)  # tested here: several heartbeats go unanswered
            victim.signal(signal.SIGCONT)
        if stage == "init":
            matrix.job.start_worker(2)
        if stage in ("init", "connect"):
            for worker in matrix.job.workers:
                worker.wait_for_line("running")
            matrix.go()
        matrix.go()
        assert not any(matrix.ended().values()), matrix.text()
        assert all(worker.reports()[-1] == "done" for worker in matrix.job.workers)
        assert matrix.left() == []
