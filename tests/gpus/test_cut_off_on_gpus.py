"""After a death, no work on a GPU keeps waiting, and no memory there looks like a result."""

from __future__ import annotations

import os
import signal
from pathlib import Path

from gpus.machines import gpu_job


def test_a_result_that_cannot_arrive_is_nan(pretend: Path) -> None:
    job = gpu_job(
        """
        bpsx.init()
        x = PretendArray(np.ones(1000, np.float32), main)
        push_pull("first", x).wait(60)
        y = PretendArray(np.ones(1000, np.float32), main)
        if bpsx.rank() == 0:
            cuda.hold(main)             # its gradient is never made
        handle = push_pull("second", y)
        handle.wait(60)                 # a wait only means that the work is queued
        report("queued")
        if bpsx.rank() == 0:
            sys.stdin.readline()
        cuda.sync(main)                 # ends, because NCCL is aborted
        report(bool(np.isnan(y.get()).all()))
        try:
            push_pull("third", x).wait(60)
        except bpsx.errors.PeerLostError as e:
            report(str(e))
    """,
        pretend,
        1,
        2,
    )
    with job:
        for worker in job.workers:
            worker.wait_for_line('"queued"')
        os.kill(job.workers[0].popen.pid, signal.SIGKILL)
        left = job.workers[1]
        left.wait(60)
        assert left.reports()[1] is True, left.text()
        assert "worker 0" in left.reports()[2]
        assert "'second'" in left.text() or "second" in left.text() and "NaN" in left.text(), (
            left.text()
        )
