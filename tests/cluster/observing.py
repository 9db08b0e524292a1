"""Jobs that run until a test stops them, for tests of ``bpsx-run top`` and other observers."""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Iterator
from typing import Any

from launching import words

from support.jobs import DEADLINE, Job

# Worker 1 is slow. Runs until worker 0 gets a line; then all workers stop in the same step.
LOOP = """
import numpy as np, bpsx, select, time
bpsx.init()
while True:
    stop = bpsx.rank() == 0 and bool(select.select([sys.stdin], [], [], 0)[0])
    if bpsx.rank() == 1: time.sleep(0.02)
    big = bpsx.push_pull_async(np.ones(100000, np.float32), name="big")
    if bpsx.push_pull(np.full(1, float(stop), np.float32), name="stop", average=False)[0]: break
    bpsx.synchronize(big)
    if not stop: report("stepped")
bpsx.synchronize(big)
bpsx.shutdown()
"""


def launcher(job: Job, *arguments: str, **options: Any) -> subprocess.Popen[str]:
    return subprocess.Popen(
        words(*arguments, "--scheduler", f"127.0.0.1:{job.port}"),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        **options,
    )


def said(process: subprocess.Popen[str], status: int = 0) -> str:
    out, err = process.communicate(timeout=DEADLINE)
    assert process.returncode == status, (out, err)
    return out + err


def end(job: Job) -> None:
    job.workers[0].say("")
    job.results()


@contextlib.contextmanager
def looping(**options: Any) -> Iterator[Job]:
    with Job(LOOP, **options) as job:
        for w in job.workers:
            w.wait_for_line("stepped")
        yield job
