"""Jobs whose scheduler dies: steps go on, and another one at its address takes the job over."""

from __future__ import annotations

import signal

from support.jobs import Job

_NUMPY = """
    import bpsx, numpy as np

    bpsx.init()
    x = np.zeros(50_000, np.float32)

    def step(name="x"):
        global x
        mine = np.full(50_000, bpsx.rank() + 1, np.float32)
        x = x + bpsx.push_pull(mine, name=name, average=False)

    for i in range(5):
        step()
    report("before")
    hear()
    for i in range(5):
        step()
    report("without")
    hear()
    step("new")
    report("declared")
    hear()
    for i in range(5):
        step()
        step("new")
    report(float(x.sum()))
    bpsx.shutdown()
"""


def kill(process) -> None:
    process.signal(signal.SIGKILL)
    process.wait()


def everywhere(job: Job, text: str) -> None:
    for worker in job.workers:
        try:
            worker.wait_for_line(text, 15)
        except AssertionError as e:
            raise AssertionError("\n".join(p.text() for p in job.processes)) from e


def tell(job: Job) -> None:
    for worker in job.workers:
        worker.say("go")


def test_steps_go_on_and_another_scheduler_takes_over():
    """No step is lost, new names can be declared, and terms go on after a server's death."""
    with Job(_NUMPY, workers=2, servers=2) as job:
        everywhere(job, "before")
        kill(job.scheduler)
        tell(job)
        everywhere(job, "without")
        job.start_scheduler(int(job.port))
        tell(job)
        everywhere(job, "declared")
        job.servers[0].signal(signal.SIGKILL)
        tell(job)
        for worker in job.workers:
            assert worker.wait() == 0, worker.text() + job.scheduler.text()
            assert worker.reports()[-1] == 3 * 50_000 * 21
        assert job.scheduler.wait() == 0, job.scheduler.text()
        assert "term 1" in job.scheduler.text()
        assert job.servers[1].wait() == 0
