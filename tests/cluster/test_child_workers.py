"""Workers that are children of multiprocessing: however they end, the job detects it."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from support.jobs import Job

SCRIPT = """
import multiprocessing, os, sys
import numpy as np
import bpsx

def train(how):
    bpsx.init()
    print("sum", float(bpsx.push_pull(np.ones(2, "f4"), "x", average=False)[0]), flush=True)
    if bpsx.rank() == 1:
        if how == "raise":
            raise ValueError("no such number")
        if how == "exit":
            sys.exit(3)
    elif how == "untold":
        print("waiting", flush=True)
        sys.stdin = open(0, closefd=False)
        sys.stdin.readline()

if __name__ == "__main__":
    context = multiprocessing.get_context(sys.argv[1])
    child = context.Process(target=train, args=(sys.argv[2],))
    child.start()
    child.join()
    print("child", child.exitcode, flush=True)
    sys.exit(abs(child.exitcode))
"""


def job(tmp_path: Path, method: str, how: str) -> Job:
    (tmp_path / "script.py").write_text(SCRIPT)
    return Job(
        f"os.execv(sys.executable, [sys.executable, {str(tmp_path / 'script.py')!r}, {method!r},"
        f" {how!r}])"
    )


@pytest.mark.parametrize("method", ["fork", "forkserver", "spawn"])
def test_a_child_that_returns_has_left_in_good_order(tmp_path: Path, method: str) -> None:
    with job(tmp_path, method, "return") as run:
        for process in run.processes:
            assert process.wait() == 0, process.text()
        assert all(
            "sum 2.0" in worker.lines and "child 0" in worker.lines for worker in run.workers
        )


@pytest.mark.parametrize("method", ["fork", "forkserver", "spawn"])
def test_an_exception_in_a_child_is_reported_to_all(tmp_path: Path, method: str) -> None:
    with job(tmp_path, method, "raise") as run:
        assert run.workers[1].wait() == 1
        assert run.scheduler is not None
        assert run.scheduler.wait() == 1
        assert "ended by ValueError: no such number" in run.scheduler.text()


def test_a_childs_own_status_is_a_good_end(tmp_path: Path) -> None:
    with job(tmp_path, "fork", "exit") as run:
        assert run.workers[1].wait() == 3
        assert run.workers[0].wait() == 0, run.workers[0].text()
        assert run.scheduler is not None
        assert run.scheduler.wait() == 0, run.scheduler.text()


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_a_child_that_did_not_learn_of_the_failure_has_status_1(
    tmp_path: Path, method: str
) -> None:
    with job(tmp_path, method, "untold") as run:
        run.workers[0].wait_for_line("waiting")
        run.servers[0].signal(signal.SIGKILL)
        assert run.scheduler is not None
        assert run.scheduler.wait() == 1
        run.workers[0].say("")
        assert run.workers[0].wait() == 1, run.workers[0].text()
        assert "exit status 1, because the job has failed" in run.workers[0].text()
