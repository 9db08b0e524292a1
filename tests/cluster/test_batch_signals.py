"""Signals from a batch system, which sends them to every process of a job: the script has time to
save.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from launching import Launcher, finish, launching, local_words

from support.jobs import Job

TRAIN = """
import os, queue, signal
import numpy as np
import bpsx

bpsx.init()
told = queue.SimpleQueue()
signal.signal(int(os.environ["STRUCK"]), lambda *_: told.put(1))
bpsx.push_pull(np.ones(4, "f4"), "x")
print("ready", os.getpid(), flush=True)
told.get()
# the signal comes twice, and Python drops handlers at its exit
signal.signal(int(os.environ["STRUCK"]), signal.SIG_IGN)
print("saved", bpsx.push_pull(np.full(4, bpsx.rank() + 1, "f4"), "y", average=False)[0], flush=True)
"""


@pytest.fixture
def launcher(tmp_path: Path) -> Iterator[Launcher]:
    with launching(tmp_path) as made:
        yield made


#: Output of scheduler and server after SIGTERM.
_SERVES = b"serves workers for 30 s more (BPSX_TERM_GRACE)"


def strike(pids: list[int], number: signal.Signals) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def job_processes(launcher: Launcher, *roles: str) -> list[int]:
    """Return the pids of all processes of ``launcher``'s jobs, or of those in ``roles``."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                environment = (entry / "environ").read_bytes()
                if launcher.mark.encode() in environment and (
                    not roles or any(f"DMLC_ROLE={r}\0".encode() in environment for r in roles)
                ):
                    found.append(int(entry.name))
            except OSError:
                continue
    return found


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP])
def test_push_pull_works_after_every_process_got_the_signal(
    launcher: Launcher, number: signal.Signals
) -> None:
    job = launcher.start(
        local_words("--workers", "2", "--servers", "1", sys.executable, "-c", TRAIN),
        {"STRUCK": str(int(number))},
    )
    assert job.stdout and job.stderr
    ready = [job.stdout.readline().split()[1:3] for _ in range(2)]
    assert [words[1] for words in ready] == [b"ready", b"ready"]
    # Scheduler and servers first, and workers only after those have handled it: otherwise the job
    # may be over before.
    helpers = job_processes(launcher, "scheduler", "server")
    strike(helpers, number)
    told: list[bytes] = []
    while number == signal.SIGTERM and len(told) < 2:
        line = job.stderr.readline()
        assert line, "ended before scheduler and server had heard of the signal"
        told += [line] if _SERVES in line else []
    strike([pid for pid in job_processes(launcher) if pid not in helpers], number)
    status, out, err = finish(job)
    assert (status, out) == (0, ["[worker 0] saved 3.0", "[worker 1] saved 3.0"]), err
    assert not any(_SERVES.decode() in line for line in err) and len(told) == (
        2 if number == signal.SIGTERM else 0
    )


@pytest.mark.parametrize("role", ["scheduler", "server"])
def test_a_helper_ends_after_its_time(role: str) -> None:
    with Job(
        "import bpsx\nbpsx.init()\nprint('up',"
        " flush=True)\nhear()\nbpsx.push_pull(__import__('numpy').ones(2), 'x')",
        env={"BPSX_TERM_GRACE": "0.3"},
    ) as job:
        for worker in job.workers:
            worker.wait_for_line("up")
        struck = job.scheduler if role == "scheduler" else job.servers[0]
        assert struck is not None
        struck.signal(signal.SIGTERM)
        assert struck.wait() == 1
        assert f"bpsx {role}: got SIGTERM: it serves workers for 0.3 s more" in struck.text()
        for worker in job.workers:
            worker.say("")
            assert worker.wait() == 1
            assert "SIGTERM" in worker.text()


@pytest.mark.parametrize("role", ["scheduler", "server"])
def test_the_second_sigterm_ends_a_helper_at_once(role: str) -> None:
    with Job(
        "import bpsx\nbpsx.init()\nprint('up', flush=True)\nhear()", env={"BPSX_TERM_GRACE": "1000"}
    ) as job:
        for worker in job.workers:
            worker.wait_for_line("up")
        struck = job.scheduler if role == "scheduler" else job.servers[0]
        assert struck is not None
        struck.signal(signal.SIGTERM)
        struck.wait_for_line("got SIGTERM")
        struck.signal(signal.SIGTERM)
        assert struck.wait() == 1


def test_a_scheduler_ended_while_the_job_gathers_does_not_report_refusals() -> None:
    with Job(
        "import bpsx\nbpsx.init()",
        workers=1,
        servers=1,
        env={"BYTEPS_LOG_LEVEL": "info", "DMLC_NUM_WORKER": "2"},
    ) as job:
        assert job.scheduler is not None
        job.workers[0].wait_for_line("known to the scheduler")
        job.scheduler.signal(signal.SIGTERM)
        assert job.workers[0].wait() == 1
        assert "was ended by SIGTERM" in job.workers[0].text()
        assert "refused" not in job.workers[0].text()
