"""Leave a job and join one of a different size, in the same process."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from support.jobs import Job, run

SURVIVOR = """
    import bpsx, numpy as np

    bpsx.init()
    for name in "abc":
        bpsx.declare(name)
    bpsx.push_pull(np.ones(5), "grad")
    report([bpsx.rank(), bpsx.size()])
    bpsx.suspend()
    try:
        bpsx.rank()
    except bpsx.NotInitializedError:
        report("suspended")
    assert (bpsx.local_rank(), bpsx.local_size()) == (0, 1), (
        "as they were: a script finds its next rank by them"
    )
    size, rank = json.loads(sys.stdin.readline())
    bpsx.resume(size, 2, global_rank=rank)
    report([bpsx.rank(), bpsx.size(), [bpsx.declare(n) for n in ("c", "a", "new", "grad")]])
    report(float(bpsx.push_pull(np.full(70_000, 1.0 + bpsx.rank()), "grad", average=False)[0]))
"""
NEWCOMER = """
    import bpsx, numpy as np
    bpsx.init()
    report([bpsx.rank(), bpsx.size()])
    report(float(bpsx.push_pull(np.full(70_000, 1.0 + bpsx.rank()), "grad", average=False)[0]))
"""


@pytest.mark.parametrize("early", [True, False], ids=["before the new scheduler", "after it"])
def test_a_job_grows_and_its_workers_change_ranks(early):
    """With `early`, resume() finds the old scheduler or, for a while, none."""
    with Job(SURVIVOR, workers=2) as job:
        for worker in job.workers:
            worker.wait_for_line("suspended")
        if early:
            for rank, worker in enumerate(job.workers):
                worker.say(f"[3, {2 - rank}]")
        old = [job.scheduler, *job.servers]
        assert [p.wait() for p in old] == [0, 0]
        for p in old:
            p.end()
        port, job.servers = int(job.port), []
        job._env.update(DMLC_NUM_WORKER="3", DMLC_NUM_SERVER="2")
        job.start_scheduler(port)
        job.start_server(0), job.start_server(1)
        job.start_worker(0, NEWCOMER)
        if not early:
            for rank, worker in enumerate(job.workers[:2]):
                worker.say(f"[3, {2 - rank}]")
        found = job.results()
    assert found[0] == [[0, 2], "suspended", [2, 3, [2, 0, 4, 3]], 6.0]
    assert found[1] == [[1, 2], "suspended", [1, 3, [2, 0, 4, 3]], 6.0]
    assert found[2] == [[0, 3], 6.0]


def test_a_job_shrinks_to_a_single_worker():
    with Job("""
        import bpsx, numpy as np

        bpsx.init()
        bpsx.suspend()
        bpsx.suspend()  # a repeated call does nothing
        if os.environ["DMLC_WORKER_ID"] == "1":
            bpsx.resume(1, 0, 0)
            report(
                [bpsx.rank(), bpsx.size(), float(bpsx.push_pull(np.ones(3), "x", average=False)[0])]
            )
            bpsx.suspend()
    """) as job:
        assert job.results()[1] == [[0, 1, 1.0]]


def test_wrong_arguments_of_resume_are_refused_by_name():
    found = run(
        """
        import bpsx

        bpsx.init()


        def text(*args):
            try:
                bpsx.resume(*args)
            except bpsx.ConfigError as e:
                return str(e)


        report(text(2, 1))
        bpsx.suspend()
        os.environ.update(BYTEPS_LOCAL_SIZE="2", BYTEPS_LOCAL_RANK="1")
        report(
            [text(0, 1), text(2, -1), text(True, 1), text(2, 1, 4), text(2, 1, "x"), text(2, 1, 2)]
        )
    """,
        workers=1,
        env={"BYTEPS_FORCE_DISTRIBUTED": "1"},
    )
    first, rest = found[0]
    assert "call suspend() first" in first
    named = [
        "num_workers=0",
        "num_servers=-1",
        "num_workers=True",
        "global_rank=4",
        "global_rank='x'",
        "BYTEPS_LOCAL_RANK=1",
    ]
    assert len(rest) == len(named) and all(part in text for part, text in zip(named, rest))


def test_resume_names_missing_processes():
    with Job(
        """
        import bpsx
        bpsx.init()
        bpsx.suspend()
        os.environ["BPSX_RENDEZVOUS_TIMEOUT"] = "2"
        try:
            bpsx.resume(2, 1)
        except bpsx.RendezvousError as e:
            report(str(e))
    """,
        workers=1,
        env={"BYTEPS_FORCE_DISTRIBUTED": "1"},
    ) as job:
        assert "no reply from the scheduler at" in job.results()[0][0]


LIVES = """
import os, sys, threading
import bpsx, numpy as np
from bpsx.config import Config
from bpsx.scheduler.hub import Hub
from bpsx.server.__main__ import Server

for cycle in range(20):
    hub = Hub(Config(role="scheduler"))
    os.environ["DMLC_PS_ROOT_PORT"] = str(hub.port)
    server, ends = Server(Config(role="server")), []
    roles = [
        threading.Thread(target=lambda: ends.append(hub.run())),
        threading.Thread(target=lambda: ends.append(server.run())),
    ]
    for role in roles:
        role.start()
    bpsx.init() if cycle % 2 else bpsx.resume(1, 1)
    assert (bpsx.push_pull(np.ones(50_000), "x") == 1).all() and bpsx.join() == 0
    bpsx.suspend() if cycle % 3 else bpsx.shutdown()
    for role in roles:
        role.join()
    assert ends == [0, 0], ends
    os.environ["DMLC_PS_ROOT_PORT"] = "0"
    print(
        threading.active_count(),
        len(os.listdir("/proc/self/task")),
        len(os.listdir("/proc/self/fd")),
        flush=True,
    )
"""


def test_many_lives_of_one_process_leave_no_thread_and_no_descriptor():
    """20 jobs in one process, each with its own scheduler and server; half begin by resume()."""
    clean = {
        k: v
        for k, v in os.environ.items()
        if not k.startswith(("DMLC_", "BYTEPS_", "BPSX_", "PS_"))
    }
    job = {
        "DMLC_PS_ROOT_URI": "127.0.0.1",
        "DMLC_PS_ROOT_PORT": "0",
        "DMLC_NUM_WORKER": "1",
        "DMLC_NUM_SERVER": "1",
        "DMLC_WORKER_ID": "0",
        "BYTEPS_FORCE_DISTRIBUTED": "1",
        "BPSX_RENDEZVOUS_TIMEOUT": "60",
    }
    done = subprocess.run(
        [sys.executable, "-c", LIVES],
        env={**clean, **job},
        capture_output=True,
        text=True,
        timeout=150,
    )
    counts = [tuple(map(int, line.split())) for line in done.stdout.splitlines()]
    assert done.returncode == 0 and len(counts) == 20, done.stdout + done.stderr
    assert len({(python, descriptors) for python, _, descriptors in counts[2:]}) == 1, counts
    # A joined thread may be visible for a moment longer; growth by one per job would show.
    tasks = [tasks for _, tasks, _ in counts]
    assert min(tasks[10:]) <= min(tasks[2:10]), counts
