"""Jobs that lose a worker and their scheduler: the next scheduler learns from the servers which
worker has died, and does not wait for it.
"""

from __future__ import annotations

import random
import signal

import pytest

from cluster.test_scheduler_deaths import everywhere, kill
from support.jobs import TRANSPORTS, Job

WAYS = {**TRANSPORTS, "shm over tcp": {**TRANSPORTS["shm"], **TRANSPORTS["tcp"]}}
#: Without the servers' word the next scheduler would wait for longer than the test does.
ENV = {"BPSX_ELASTIC": "shrink", "BPSX_SCHEDULER_WAIT": "1000", "BYTEPS_LOG_LEVEL": "info"}
#: Workers that push until some result lacks one of them.
_PUSHING = """
    import bpsx, time, numpy as np

    bpsx.init()
    number = bpsx.rank()
    report("connected")
    {pause}
    sums = [111.0]
    while 111.0 in sums:
        sums = [
            float(bpsx.push_pull(np.full(n, 10.0**number), name=f"x{{n}}", average=False)[-1])
            for n in (3, 300_000)
        ]
        assert len(set(sums) | {{111.0}}) <= 2, sums
        report("pushed")
    while bpsx.size() == 3:  # a sum may come a moment before this process hears of the loss
        time.sleep(0.001)
    report(["end", sums, bpsx.size()])
    bpsx.shutdown()
"""


class Bereaved(Job):
    """A job of three workers and two servers. Worker ``victim`` and the scheduler die."""

    def __init__(self, way: str, pause: bool) -> None:
        source = _PUSHING.format(pause="hear()" if pause else "")
        super().__init__(source, workers=3, servers=2, env={**ENV, **WAYS[way]})
        self.victim, self._pauses = random.randrange(3), pause

    def kill_scheduler(self) -> None:
        kill(self.scheduler)
        for process in [*self.workers, *self.servers]:
            process.wait_for_line("the scheduler at")

    def kill_worker(self) -> None:
        kill(self.workers[self.victim])

    def await_loss(self) -> None:
        """Wait until the servers have noticed the worker's death."""
        for server in self.servers:
            server.wait_for_line(f"the connection of worker {self.victim} ")

    def end_well(self) -> None:
        """The job goes on with the others, once there is a scheduler."""
        assert self.scheduler is not None
        self.scheduler.wait_for_line("workers go on without")
        living = [w for i, w in enumerate(self.workers) if i != self.victim]
        for worker in living if self._pauses else ():
            worker.say("go")
        # A third server, which has no keys yet, is sent away.
        for process in [*living, *self.servers[:2], self.scheduler]:
            assert process.wait() == 0, "\n".join(p.text() for p in self.processes)
        left = 111.0 - 10.0**self.victim
        assert [w.reports()[-1] for w in living] == [["end", [left, left], 2]] * 2


@pytest.mark.parametrize("way", sorted(WAYS))
@pytest.mark.parametrize("order", ["worker first", "scheduler first", "without a scheduler"])
def test_the_next_scheduler_does_not_wait_for_a_worker_that_has_died(order, way):
    with Bereaved(way, pause=False) as job:
        everywhere(job, "pushed")
        assert job.scheduler is not None
        if order == "worker first":
            job.scheduler.signal(signal.SIGSTOP)  # as if both died at once
            job.kill_worker()
            kill(job.scheduler)
        elif order == "scheduler first":
            kill(job.scheduler)
            job.kill_worker()
        else:
            job.kill_scheduler()
            before = len(job.workers[0].reports())
            job.workers[0].wait_for_line("pushed", count=before + 5)
            job.kill_worker()
        job.await_loss()
        job.start_scheduler(int(job.port))
        job.end_well()


@pytest.mark.parametrize("way", sorted(WAYS))
@pytest.mark.parametrize("late", [False, True])
def test_a_worker_dies_that_has_pushed_nothing(late, way):
    """Servers know it from their first contact, also one that has come to the running job."""
    with Bereaved(way, pause=True) as job:
        everywhere(job, "connected")
        assert job.scheduler is not None
        if late:
            job.start_server(2)
            job.scheduler.wait_for_line("has joined")
        job.kill_scheduler()
        job.kill_worker()
        job.await_loss()
        job.start_scheduler(int(job.port))
        job.end_well()


@pytest.mark.parametrize("way", sorted(WAYS))
def test_a_worker_dies_while_the_next_scheduler_awaits_others(way):
    """The servers have introduced themselves before they notice the death."""
    with Bereaved(way, pause=True) as job:
        everywhere(job, "connected")
        job.kill_scheduler()
        silent = job.workers[job.victim - 1]
        silent.signal(signal.SIGSTOP)
        job.start_scheduler(int(job.port))
        for process in [*job.workers, *job.servers]:
            if process is not silent:
                job.scheduler.wait_for_line(f"pid {process.popen.pid}) is back")
        job.kill_worker()
        job.await_loss()
        silent.signal(signal.SIGCONT)
        job.end_well()


_OWN_NAMES = """
    import bpsx, numpy as np, time
    from bpsx.api.verbs import session

    bpsx.init()
    number = bpsx.rank()
    bpsx.push_pull(np.ones(3), name="all")
    if number == 1:
        before = session().counters()["bytes_sent"]
        for i in range(10):
            bpsx.push_pull_async(np.ones(100, np.float32), name=f"own{i}")
        while session().counters()["bytes_sent"] < before + 5000:  # of 5,360: all messages
            time.sleep(0.001)
    report("ready")
    hear()
    sums = [
        float(bpsx.push_pull(np.full(50 + n, 10.0**number), name=f"new{n}", average=False)[-1])
        for n in range(20)
    ]
    report(["end", sums])
    bpsx.shutdown()
"""


def test_numbers_that_only_the_dead_worker_knew_are_not_given_out_again():
    """Lanes know its tensors; the others' new ones must not get the same slots and keys."""
    env = {**ENV, **TRANSPORTS["tcp"]}
    with Job(_OWN_NAMES, workers=3, servers=2, env=env) as job:
        everywhere(job, "ready")
        assert job.scheduler is not None
        job.scheduler.signal(signal.SIGSTOP)
        kill(job.workers[1])
        for server in job.servers:
            server.wait_for_line("the connection of worker 1 ")
        kill(job.scheduler)
        job.start_scheduler(int(job.port))
        living = [job.workers[0], job.workers[2]]
        for worker in living:
            worker.say("go")
        for worker in living:
            assert worker.wait() == 0, worker.text()
            assert worker.reports()[-1] == ["end", [101.0] * 20]
