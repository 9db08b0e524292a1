"""Processes that a worker starts after init(): forked, spawned or run.

None may disturb the job, hang, or hide its parent's death.
"""

from __future__ import annotations

import os
import signal

import pytest

from support.jobs import Job, run


def test_a_death_is_noticed_although_a_forked_child_lives_on():
    """Like data-loader workers after kill -9 of the training script.

    Heartbeats alone would take a minute here.
    """
    with Job(
        """
        import bpsx, numpy as np, time
        bpsx.init()
        bpsx.push_pull(np.ones(1), name="x")
        if bpsx.rank() == 1:
            pid = os.fork()
            if pid == 0:
                report("child")
                time.sleep(600)
                os._exit(0)
            report(pid)
        report("running")
        try:
            while True:
                bpsx.push_pull(np.ones(1), name="x")
        except bpsx.PeerLostError as e:
            report(str(e))
    """,
        env={"PS_HEARTBEAT_INTERVAL": "0", "BPSX_DEADLOCK_SECONDS": "600"},
    ) as job:
        job.workers[0].wait_for_line("running")
        job.workers[1].wait_for_line("child")
        job.workers[1].wait_for_line("running")
        child = next(r for r in job.workers[1].reports() if isinstance(r, int))
        try:
            job.workers[1].signal(signal.SIGKILL)
            assert job.workers[0].wait() == 0 and "worker 1" in job.workers[0].reports()[-1]
            assert job.servers[0].wait() == 1 and job.scheduler.wait() == 1
        finally:
            os.kill(child, signal.SIGKILL)


@pytest.mark.parametrize(
    "ending",
    [
        "os._exit(4)",
        "sys.exit(4)",
        "os.kill(os.getpid(), signal.SIGKILL)",
        "bpsx.shutdown(); sys.exit(4)",
        "bpsx.shutdown(); bpsx.shutdown(); assert not bpsx_is_up(); sys.exit(4)",
    ],
)
def test_the_job_continues_however_a_forked_child_ends(ending):
    found = run(f"""
        import bpsx, numpy as np, signal
        def bpsx_is_up():
            try: bpsx.rank()
            except bpsx.NotInitializedError: return False
            return True
        bpsx.init()
        for round in range(3):
            ours = np.full(1_000_000, round + 1, np.float32)
            under_way = bpsx.push_pull_async(ours, name="large", average=False)
            pid = os.fork()
            if pid == 0:
                {ending}
            status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
            assert status in (4, -9), status
            assert (bpsx.synchronize(under_way) == 2 * (round + 1)).all()
        report("done")
    """)
    assert found == [["done"], ["done"]]


def test_init_in_a_forked_child_is_refused_with_a_reason_and_the_parent_continues():
    found = run("""
        import bpsx, numpy as np
        bpsx.init()
        bpsx.push_pull(np.ones(1), name="x")
        pid = os.fork()
        if pid == 0:
            try:
                bpsx.init()
            except bpsx.RendezvousError as e:
                os._exit(9 if "refused" in str(e) else 1)
            os._exit(2)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 9
        report(float(bpsx.push_pull(np.ones(1), name="x", average=False)[0]))
    """)
    assert found == [[2.0], [2.0]]


def test_a_forked_child_may_have_a_job_of_its_own():
    found = run("""
        import bpsx, numpy as np
        bpsx.init()
        bpsx.push_pull(np.ones(1), name="x")
        pid = os.fork()
        if pid == 0:
            os.environ.update(DMLC_NUM_WORKER="1", DMLC_NUM_SERVER="0", DMLC_WORKER_ID="0")
            bpsx.init()
            assert bpsx.size() == 1 and bpsx.push_pull(np.ones(1))[0] == 1
            sys.exit(9)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 9
        report(float(bpsx.push_pull(np.ones(1), name="x", average=False)[0]))
    """)
    assert found == [[2.0], [2.0]]


def test_a_pool_of_forked_processes_works_during_sums():
    found = run("""
        import multiprocessing
        import bpsx, numpy as np
        def load(i):
            return np.full(10, i)
        bpsx.init()
        context = multiprocessing.get_context("fork")
        for epoch in range(2):
            with context.Pool(2) as pool:
                for i, data in enumerate(pool.imap(load, range(40))):
                    h = bpsx.push_pull_async(data.astype(np.float32), name="x", average=False)
                    assert (bpsx.synchronize(h) == 2 * i).all()
                pool.close()
                pool.join()
        report("done")
    """)
    assert found == [["done"], ["done"]]


def test_the_verbs_fail_in_a_forked_process_with_the_reason():
    found = run("""
        import multiprocessing
        import bpsx, numpy as np
        def use(queue):
            try:
                bpsx.push_pull(np.ones(1), name="x")
            except bpsx.NotInitializedError as e:
                queue.put(str(e))
        bpsx.init()
        context = multiprocessing.get_context("fork")
        queue = context.Queue()
        child = context.Process(target=use, args=(queue,))
        child.start()
        text = queue.get(timeout=60)
        child.join()
        assert child.exitcode == 0
        bpsx.barrier()
        report("forked child" in text and "spawn" in text)
    """)
    assert found == [[True], [True]]


def test_spawned_and_other_processes_do_not_disturb_the_job(tmp_path):
    script = tmp_path / "script.py"
    script.write_text("""
import multiprocessing, subprocess, sys
import numpy as np
import bpsx

def load(i):
    return i * i

if __name__ == "__main__":
    bpsx.init()
    h = bpsx.push_pull_async(np.ones(1_000_000, np.float32), name="x", average=False)
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        assert pool.map(load, range(5)) == [0, 1, 4, 9, 16]
        pool.close()
        pool.join()
    subprocess.run([sys.executable, "-c", "pass"], check=True)
    subprocess.run(["true"], check=True, close_fds=False)
    assert (bpsx.synchronize(h) == 2).all()
""")
    run(f"import runpy\nrunpy.run_path({str(script)!r}, run_name='__main__')\nreport(1)")


def test_a_program_that_inherits_everything_does_not_hide_a_death():
    with Job(
        """
        import bpsx, numpy as np, subprocess

        bpsx.init()
        bpsx.push_pull(np.ones(1), name="x")
        if bpsx.rank() == 1:
            report(
                subprocess.Popen(["sleep", "600"], close_fds=False, stdin=subprocess.DEVNULL).pid
            )
        report("running")
        try:
            while True:
                bpsx.push_pull(np.ones(1), name="x")
        except bpsx.PeerLostError as e:
            report(str(e))
    """,
        env={"PS_HEARTBEAT_INTERVAL": "0", "BPSX_DEADLOCK_SECONDS": "600"},
    ) as job:
        for worker in job.workers:
            worker.wait_for_line("running")
        program = next(r for r in job.workers[1].reports() if isinstance(r, int))
        try:
            job.workers[1].signal(signal.SIGKILL)
            assert job.workers[0].wait() == 0 and "worker 1" in job.workers[0].reports()[-1]
        finally:
            os.kill(program, signal.SIGKILL)
