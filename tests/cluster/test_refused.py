"""Processes refused while the job gathers: the others learn of it soon, except if it is a stranger,
which cannot end the job.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from support.jobs import Job

SECRET = "a secret for these tests"
_SUM = (
    "import bpsx, numpy as np\nbpsx.init()\nreport(float(bpsx.push_pull(np.ones(1),"
    " average=False)[0]))"
)


@contextmanager
def gathering(**env: str) -> Iterator[Job]:
    """A job of two workers whose scheduler, server and worker 0 have arrived."""
    job = Job(_SUM, env={"BPSX_SECRET": SECRET, **env})
    try:
        job.start_scheduler()
        assert job.scheduler is not None
        job.start_server(0)
        job.start_worker(0)
        for who in ("server", "worker 0"):
            job.scheduler.wait_for_line(f"arrived: {who}")
        yield job
    finally:
        job.__exit__()


def start_worker_1(job: Job, **env: str) -> None:
    job._worker_env[1] = env
    job.start_worker(1)


@pytest.mark.parametrize(
    ("env", "why"),
    [
        ({"BPSX_ENCRYPT": "1"}, "BPSX_ENCRYPT=1 on this worker, 0 on a "),
        ({"BYTEPS_ENABLE_ASYNC": "1"}, "BYTEPS_ENABLE_ASYNC=1 on this worker"),
        ({"BPSX_AUTOTUNE": "0"}, "BPSX_AUTOTUNE=0 on worker 1, 1 on worker 0"),
        ({"BYTEPS_PARTITION_BYTES": "8192"}, "BYTEPS_PARTITION_BYTES=8192 on worker 1"),
        ({"DMLC_NUM_WORKER": "3"}, "DMLC_NUM_WORKER=3 on this worker"),
    ],
)
@pytest.mark.parametrize("secret", [SECRET, ""])
def test_waiting_processes_report_who_was_refused_and_why(env, why, secret):
    with gathering(BPSX_SECRET=secret) as job:
        begun = time.monotonic()
        start_worker_1(job, **env)
        assert job.workers[1].wait() == 1
        for other in (job.workers[0], job.servers[0], job.scheduler):
            assert other.wait() == 1
            text = other.text()
            assert (
                f"worker 1 (127.0.0.1, pid {job.workers[1].popen.pid}) was refused ({why}" in text
            ), text
            assert (
                "and did not come back within 3 s (BPSX_GATHER_GRACE) while the job was gathering"
            ) in text, text
        assert time.monotonic() - begun < 30, "the deadline of the rendezvous is 150 s"


def test_a_server_that_was_refused_is_named_too():
    with Job(
        _SUM, servers=0, workers=1, env={"DMLC_NUM_SERVER": "1", "BYTEPS_FORCE_DISTRIBUTED": "1"}
    ) as job:
        job.scheduler.wait_for_line("arrived: worker 0")
        job._env["BPSX_ENCRYPT"] = "1"
        job.start_server(0)
        assert job.servers[0].wait() == 1 and job.workers[0].wait() == 1
        assert (
            f"server (127.0.0.1, pid {job.servers[0].popen.pid}) was refused (BPSX_ENCRYPT=1 on"
            " this server, 0 on a worker" in job.workers[0].text()
        )


def test_a_refused_process_may_return_with_the_right_options():
    with gathering(BPSX_GATHER_GRACE="60") as job:
        start_worker_1(job, BPSX_ENCRYPT="1")
        refused = job.workers.pop()
        assert refused.wait() == 1
        start_worker_1(job)
        assert job.results() == [[2.0], [2.0]]
        refused.end()


def test_a_stranger_cannot_end_the_job():
    """The grace time is over long before the right worker arrives.

    A process that has not proven the secret does not count as lost.
    """
    with gathering(BPSX_GATHER_GRACE="0") as job:
        start_worker_1(job, BPSX_SECRET="another secret, long enough")
        stranger = job.workers.pop()
        assert stranger.wait() == 1
        start_worker_1(job)
        assert job.results() == [[2.0], [2.0]]
        stranger.end()


def test_waiting_processes_report_refused_strangers():
    with gathering(BPSX_RENDEZVOUS_TIMEOUT="8") as job:
        start_worker_1(job, BPSX_SECRET="another secret, long enough")
        assert job.workers[1].wait() == 1 and job.workers[0].wait() == 1
        text = job.workers[0].text()
        assert (
            "still missing: worker 1 (" in text
            and "refused for not knowing the job secret, the last from 127.0.0.1:" in text
        ), text
