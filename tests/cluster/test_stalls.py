"""Workers that wait for each other: what counts as a stall, how soon and how often it is reported,
and how the job ends.
"""

from __future__ import annotations

import re
import signal
import subprocess

import pytest

from support.jobs import Job, run

FAST = {"BPSX_DEADLOCK_SECONDS": "2", "BPSX_STALL_WARN_SECONDS": "0.5"}


def test_an_exchange_that_no_thread_waits_for_is_no_stall():
    """Worker 0 starts a push_pull and does other work for longer than the stall limit.

    Also from a background thread.
    """
    found = run(
        """
        import bpsx, numpy as np, threading, time
        bpsx.init()
        one = np.ones(3, np.float32)
        def sum_of(name):
            return float(bpsx.push_pull(one, name, average=False)[0])
        got = []
        if bpsx.rank() == 0:
            handle = bpsx.push_pull_async(one, "x", average=False)
            time.sleep(4.5)
            got += [sum_of("y"), float(bpsx.synchronize(handle)[0])]
            aside = threading.Thread(target=lambda: got.append(sum_of("aside")))
            aside.start()
            time.sleep(4.5)
            got.append(sum_of("z"))
            aside.join()
        else:
            got += [sum_of("y"), sum_of("x"), sum_of("z"), sum_of("aside")]
        report(got)
    """,
        env=FAST,
    )
    assert found == [[[2.0] * 4]] * 2


@pytest.mark.parametrize("count", [100, 400, 20_000])
def test_a_stall_of_any_number_of_tensors_is_timely_with_one_warning_per_worker(count):
    """`if rank() == 0` around a broadcast of all parameters."""
    with Job(
        f"""
        import bpsx, numpy as np, time
        bpsx.init()
        bpsx.barrier()
        begun = met = time.monotonic()
        try:
            if bpsx.rank() == 0:
                one = np.ones(1, np.float32)
                handles = [bpsx.push_pull_async(one, f"parameter {{i}}") for i in range({count})]
                begun = time.monotonic()
                bpsx.synchronize(handles[0])
            else:
                bpsx.push_pull(np.ones(1), "gradient")
        except bpsx.StallError as e:
            report(["the job has to end" in str(e), time.monotonic() - begun, begun - met])
    """,
        env={**FAST, "BPSX_DEADLOCK_SECONDS": "12", "BPSX_STALL_WARN_SECONDS": "0.8"},
    ) as job:
        for worker in job.workers:
            worker.wait()
        # A slow machine needs seconds to submit so many, and to end the job. Warnings come again
        # every 8 s until then.
        ((*_, submitting),) = job.workers[0].reports()
        for rank, worker in enumerate(job.workers):
            ((ends, seconds, before),) = worker.reports()
            most = 1 + int((before + seconds) // 8)
            warnings = [
                line for line in worker.errors if "not pushed by" in line and "WARNING" in line
            ]
            assert ends and seconds < 60 + submitting and len(warnings) <= most, warnings
            if rank:
                assert "tensor 'gradient' round 0: pushed" in warnings[-1], warnings
                continue
            more = re.search(r"'parameter 0' round 0 and (\d+) more", warnings[-1])
            assert more, warnings
            # The first warning may come while some of many are still being submitted; the second
            # comes eight seconds later.
            assert len(warnings) >= 2 and int(more[1]) == count - 1, warnings


def test_workers_that_leave_wait_for_a_scheduler_that_is_slow():
    """The scheduler is silent for less than the heartbeat time-out.

    It must process unread goodbyes before the ends of their connections.
    """
    with Job("""
        import bpsx, numpy as np
        bpsx.init()
        assert bpsx.push_pull(np.ones(5), "x", average=False)[0] == 2
        report("ready")
        hear()
        bpsx.shutdown()
        report("left")
    """) as job:
        for worker in job.workers:
            worker.wait_for_line("ready")
        job.scheduler.signal(signal.SIGSTOP)
        try:
            for worker in job.workers:
                worker.say("leave")
            with pytest.raises(subprocess.TimeoutExpired):  # longer than BPSX_SHUTDOWN_TIMEOUT
                job.workers[0].popen.wait(7)
            assert [worker.reports() for worker in job.workers] == [["ready"], ["ready"]]
        finally:
            job.scheduler.signal(signal.SIGCONT)
        assert [worker.wait() for worker in job.workers] == [0, 0] and job.scheduler.wait() == 0
        assert [worker.reports()[-1] for worker in job.workers] == ["left", "left"]
