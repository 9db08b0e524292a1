"""Repeated starts and stops, in one process and of whole jobs.

``python -m bench soak`` repeats each 1,000 times; these tests do fewer.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from support.jobs import Job

ROOT = Path(__file__).resolve().parents[2]


def test_many_cycles_in_one_process_without_a_job_leave_nothing():
    job = Job(
        """
        import bpsx, gc, numpy as np
        def resources():
            gc.collect()
            return [len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))]
        def cycle():
            bpsx.init()
            assert bpsx.push_pull(np.ones(1000), name="x")[0] == 1
            bpsx.shutdown()
        cycle()
        before = resources()
        for _ in range(300):
            cycle()
        report([before, resources()])
    """,
        workers=1,
        servers=0,
    )
    try:
        job.start_worker(0)
        assert job.workers[0].wait() == 0, job.workers[0].text()
        ((before, after),) = job.workers[0].reports()
        assert before == after
    finally:
        job.__exit__()


@pytest.mark.parametrize("way", ["cycles", "jobs"])
def test_a_share_of_the_soak(way):
    words = [sys.executable, "-m", "bench", "soak", "--cycles", "4", "--only", way, "--json"]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=170, check=False)
    assert done.returncode == 0, done.stderr
    cases = {c["case"]: c["value"] for c in json.loads(done.stdout)["cases"]}
    assert cases[way] == 4
    for name, value in cases.items():
        assert (
            value <= 0
            or not name.startswith(("left-", "growth-"))
            or name in ("growth-objects", "growth-rss")
        ), (name, done.stderr)
    assert cases.get("growth-objects", 0) <= 100, done.stderr


_SURVIVOR = """
    import bpsx, numpy as np
    bpsx.init()
    assert bpsx.push_pull(np.ones(1), name="x", average=False) == 2
    report("running")
    try:
        bpsx.push_pull(np.ones(1), name="y")
    except bpsx.PeerLostError as e:
        report(str(e))
    bpsx.shutdown()
    os.environ["DMLC_PS_ROOT_PORT"] = sys.stdin.readline().strip()
    bpsx.init()
    for name in "xyz":
        assert bpsx.push_pull(np.ones(1), name=name, average=False) == 2
    bpsx.shutdown()
    report("end")
"""
_VICTIM = """
    import bpsx, numpy as np
    bpsx.init()
    bpsx.push_pull(np.ones(1), name="x", average=False)
    report("running")
    sys.stdin.read()
"""
_NEWCOMER = """
    import bpsx, numpy as np
    bpsx.init()
    for name in "xyz":
        assert bpsx.push_pull(np.ones(1), name=name, average=False) == 2
"""


def test_after_a_failed_job_the_same_process_can_join_the_next():
    job = Job("")
    try:
        job.start_scheduler()
        job.start_server(0)
        job.start_worker(0, _SURVIVOR)
        job.start_worker(1, _VICTIM)
        for worker in job.workers:
            worker.wait_for_line("running")
        first, victim = job.workers
        victim.signal(signal.SIGKILL)
        first.wait_for_line(f"worker 1 (127.0.0.1, pid {victim.popen.pid})")
        ended = [*job.servers, job.scheduler]
        assert all(p.wait() for p in ended)
        job.start_scheduler()
        job.start_server(0)
        job.start_worker(1, _NEWCOMER)
        first.say(job.port)
        for p in (first, job.workers[2], job.servers[1], job.scheduler):
            assert p.wait() == 0, p.text()
        assert first.reports()[-1] == "end"
        for p in ended:
            p.end()
    finally:
        job.__exit__()
