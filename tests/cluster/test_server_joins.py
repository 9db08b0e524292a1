"""Servers that join a running job: a job whose servers die again and again never runs out of them,
and the bits are those of a job in which none dies.
"""

from __future__ import annotations

import signal

import pytest

from cluster.test_server_deaths import _TRAINING, SIZES, undisturbed
from support.jobs import TRANSPORTS, Job


def training(steps: int, transport: str, workers: int = 2, servers: int = 1, **env: str) -> Job:
    """A job that trains for ``steps`` steps, each reported by each worker."""
    return Job(
        _TRAINING.format(sizes=SIZES, steps=steps),
        workers=workers,
        servers=servers,
        env={**TRANSPORTS[transport], "BPSX_FIXED_ORDER": "1", "BPSX_ELASTIC": "servers", **env},
    )


def kill(job: Job, server: int) -> None:
    job.servers[server].signal(signal.SIGKILL)
    job.servers[server].wait()


def check(job: Job, steps: int) -> None:
    """Wait for the end of a job that must have gone well."""
    said = "\n".join(p.text() for p in job.processes)
    for worker in job.workers:
        assert worker.wait() == 0, worker.text() + said
        assert worker.reports()[-1] == undisturbed(len(job.workers), steps)
    assert job.scheduler.wait() == 0, job.scheduler.text()


@pytest.mark.parametrize("transport", ["zmq", "tcp", "shm"])
def test_a_new_server_feeds_a_job_that_has_lost_its_only_one(transport):
    with training(20, transport) as job:
        job.workers[0].wait_for_line("5")
        kill(job, 0)
        job.scheduler.wait_for_line("the last server, and the job waits")
        job.start_server(1)
        check(job, 20)
        assert job.servers[1].wait() == 0, job.servers[1].text()
        assert "server 1" in job.scheduler.text() and "term 1" in job.scheduler.text()


@pytest.mark.parametrize("transport", ["zmq", "tcp", "shm"])
@pytest.mark.parametrize("workers", [2, 3])
def test_a_job_never_runs_out_of_servers(transport, workers):
    """The only server is killed in the middle of a step, and replaced, ten times."""
    steps = 60
    with training(steps, transport, workers) as job:
        for death in range(10):
            for worker in job.workers:
                worker.wait_for_line(str(5 * death))
            kill(job, death)
            job.start_server(death + 1)
            job.scheduler.wait_for_line("has joined", count=death + 1)
        check(job, steps)
        assert "term 10" in job.scheduler.text()


@pytest.mark.parametrize("transport", ["zmq", "tcp", "shm"])
def test_two_servers_die_in_turn_and_come_back(transport):
    """Never both at once: each time all keys move to the other, which has come a moment before."""
    steps = 60
    with training(steps, transport, servers=2) as job:
        for death in range(10):
            for worker in job.workers:
                worker.wait_for_line(str(5 * death))
            kill(job, death)
            job.start_server(death + 2)
            job.scheduler.wait_for_line("has joined", count=death + 1)
        check(job, steps)
        assert "the last server" not in job.scheduler.text()
        assert "term 10" in job.scheduler.text()


def test_a_job_fails_when_no_server_comes_in_time():
    with training(10_000, "tcp", BPSX_ELASTIC_WAIT="0.5") as job:
        job.workers[0].wait_for_line("5")
        kill(job, 0)
        for worker in job.workers:
            assert worker.wait() == 1
            assert "no other has joined within 0.5 s (BPSX_ELASTIC_WAIT)" in worker.text()
            assert "server 0" in worker.text()
        assert job.scheduler.wait() == 1
