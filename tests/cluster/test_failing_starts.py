"""A server or worker that cannot start reports why to all processes, and none waits for it."""

from __future__ import annotations

import contextlib
import sys

import pytest

from support.jobs import Job

#: Runs a module's main() in a process that cannot start a thread of the given name.
REFUSING = """
import runpy, sys, threading
start = threading.Thread.start
def refuse(thread):
    if thread.name == {name!r}:
        raise RuntimeError("can't start new thread")
    start(thread)
threading.Thread.start = refuse
"""


class OddJob(Job):
    """A job whose server 0 cannot start threads named ``refused``."""

    refused = ""

    def command(self, name: str, words: list[str]) -> list[str]:
        if name != "server 0":
            return words
        text = (
            REFUSING.format(name=self.refused)
            + "runpy.run_module('bpsx.server', run_name='__main__', alter_sys=True)"
        )
        return [sys.executable, "-c", text]


@pytest.mark.parametrize("thread", ["bpsx-control", "bpsx-lane-0", "bpsx-lane-1"])
def test_a_server_that_cannot_start_a_thread_ends_with_the_reason(thread: str) -> None:
    class This(OddJob):
        refused = thread

    with This(
        "import bpsx\nbpsx.init()\nhear()\nbpsx.push_pull(__import__('numpy').ones(2), 'x')",
        workers=2,
        servers=2,
        env={"BYTEPS_SERVER_ENGINE_THREAD": "2", "BPSX_ELASTIC": "off"},
    ) as job:
        assert job.servers[0].wait() == 1
        assert (
            "bpsx server: cannot start: RuntimeError: can't start new thread"
            in job.servers[0].text()
        )
        for other in (job.servers[1], job.scheduler):
            assert other is not None
            assert other.wait() == 1
            assert "this server cannot start: RuntimeError: can't start new thread" in other.text()
        for worker in job.workers:
            with contextlib.suppress(BrokenPipeError):  # init() may have raised the error already
                worker.say("")
            assert worker.wait() == 1
            assert "can't start new thread" in worker.text()


#: Failures before a worker contacts the scheduler, by their message. The code runs only in worker
#: 1.
EARLY = {
    "MemoryError: no room": (
        "from bpsx.session import entry\n"
        "def refuse(_): raise MemoryError('no room')\n"
        "entry.keep_memory = refuse"
    ),
    "BPSX_SPIN_US='fast'": "import os\nos.environ['BPSX_SPIN_US'] = 'fast'",
    "cannot be imported": "import os\nos.environ['BPSX_COMPRESSORS'] = 'no_such_module'",
}
_INIT = """
import sys
if os.environ["DMLC_WORKER_ID"] == "1":
    hear()
    exec({early!r})
import bpsx
try:
    bpsx.init()
except BaseException as e:
    report(str(e))
    sys.exit(3)
"""


@pytest.mark.parametrize("reason", EARLY)
def test_a_worker_that_fails_before_the_scheduler_knows_it_is_reported(reason: str) -> None:
    """The others fail long before BPSX_RENDEZVOUS_TIMEOUT, which is a minute here."""
    with Job(
        _INIT.format(early=EARLY[reason]),
        workers=3,
        env={"BPSX_GATHER_GRACE": "0.5", "BPSX_SECRET": "5bd6a3f0" * 8},
    ) as job:
        assert job.scheduler is not None
        job.scheduler.wait_for_line("arrived: ", count=3)
        job.workers[1].say("fail")
        assert [worker.wait() for worker in job.workers] == [3, 3, 3]
        for worker in (job.workers[0], job.workers[2]):
            (text,) = worker.reports()
            assert (
                "worker 1 (127.0.0.1, pid " in text
                and "could not start: " in text
                and reason in text
            ), text
        assert job.scheduler.wait() == 1
        assert "does not know the job secret" not in job.scheduler.text()


def test_a_server_that_fails_before_the_scheduler_knows_it_is_reported() -> None:
    with Job(
        "import bpsx\nbpsx.init()",
        workers=2,
        servers=0,
        env={
            "DMLC_NUM_SERVER": "1",
            "BPSX_GATHER_GRACE": "0.5",
            "BPSX_COMPRESSORS": "no_such_module",
        },
        worker_env={0: {"BPSX_COMPRESSORS": ""}, 1: {"BPSX_COMPRESSORS": ""}},
    ) as job:
        assert job.scheduler is not None
        job.scheduler.wait_for_line("arrived: ", count=2)
        job.start_server(0)
        assert job.servers[0].wait() == 2
        for worker in job.workers:
            assert worker.wait() == 1
            assert (
                "could not start: ConfigError" in worker.text()
                and "no_such_module" in worker.text()
            )


def test_a_worker_restarted_after_that_is_accepted() -> None:
    source = (
        "import bpsx, numpy as np\nbpsx.init()\nreport(float(bpsx.push_pull(np.ones(1), 'x',"
        " average=False)[0]))"
    )
    with Job(
        source, workers=2, env={"BPSX_GATHER_GRACE": "50"}, worker_env={1: {"BPSX_SPIN_US": "fast"}}
    ) as job:
        assert job.scheduler is not None
        job.scheduler.wait_for_line("could not start: ConfigError")
        assert job.workers[1].wait() == 1
        job._worker_env = {}
        job.start_worker(1)
        assert [job.workers[i].wait() for i in (0, 2)] == [0, 0]
        assert job.workers[0].reports() == job.workers[2].reports() == [2.0]


def test_a_worker_that_cannot_start_a_thread_is_reported() -> None:
    """The scheduler already knows the worker, and the others have begun."""
    refuse = (
        "import threading\ndef refuse(_): raise RuntimeError(\"can't start new"
        ' thread")\nthreading.Thread.start = refuse'
    )
    with Job(
        _INIT.format(early=refuse) + "\nimport numpy as np\nbpsx.push_pull(np.ones(1), 'x')",
        workers=3,
    ) as job:
        job.workers[1].say("go on")
        assert job.workers[1].wait() == 3
        for worker in (job.workers[0], job.workers[2]):
            assert worker.wait() in (1, 3)  # init() may have raised the error already
            assert "can't start new thread" in worker.text()


def test_a_worker_whose_session_cannot_begin_is_reported() -> None:
    """The worker is in the job by then; it must close all that it has opened."""
    with Job(
        """
        import os, bpsx
        if os.environ["DMLC_WORKER_ID"] == "1":
            from bpsx.scheduler.client import SchedulerLink
            def start(*args, **more):
                raise RuntimeError("can't start new thread")
            SchedulerLink.start = start
        try:
            bpsx.init()
            bpsx.push_pull(__import__("numpy").ones(3), "x")
        except Exception as e:
            report(str(e))
            sys.exit(3)
    """,
        workers=2,
    ) as job:
        assert [worker.wait() for worker in job.workers] == [3, 3]
        ((other,), (own,)) = [worker.reports() for worker in job.workers]
        assert own == "can't start new thread"
        assert "worker 1 " in other and "cannot start: RuntimeError: can't start" in other, other
        assert job.scheduler is not None
        assert job.scheduler.wait() == 1
