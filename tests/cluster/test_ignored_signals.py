"""Signals that the parent process ignores: background jobs of a script ignore SIGINT, nohup's
ignore SIGHUP.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from support.jobs import Job

IGNORABLE = (signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
TOLD = (
    "import signal; print([signal.getsignal(s) is signal.SIG_IGN for s in"
    f" {[*map(int, IGNORABLE)]}])"
)
#: Starts the given module like a background job of a script.
IGNORES = (
    "import os, signal, sys; signal.signal(signal.SIGINT, signal.SIG_IGN);"
    "os.execv(sys.executable, [sys.executable, *sys.argv[1:]])"
)


def ignore() -> None:
    for number in IGNORABLE:
        signal.signal(number, signal.SIG_IGN)


def test_processes_of_the_tests_ignore_no_signal() -> None:
    done = subprocess.run([sys.executable, "-c", TOLD], capture_output=True, text=True, check=True)
    assert done.stdout == "[False, False, False]\n"


def test_pytest_receives_ctrl_c() -> None:
    with pytest.raises(KeyboardInterrupt):
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(10)


@pytest.mark.parametrize(
    "test", ["test_processes_of_the_tests_ignore_no_signal", "test_pytest_receives_ctrl_c"]
)
def test_a_pytest_started_with_ignored_signals_passes_the_tests_above(test: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"{__file__}::{test}"],
        cwd=Path(__file__).parents[2],
        preexec_fn=ignore,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0 and "1 passed" in done.stdout, done.stdout


class Background(Job):
    """A job whose scheduler and servers ignore SIGINT."""

    def command(self, name: str, words: list[str]) -> list[str]:
        if name.startswith("worker"):
            return words
        return [words[0], "-c", IGNORES, *words[1:]]


@pytest.mark.parametrize("role", ["scheduler", "server"])
def test_helpers_continue_when_ctrl_c_is_ignored(role: str) -> None:
    source = """
        import numpy as np
        import bpsx
        bpsx.init()
        report("ready")
        hear()
        x = np.ones(4, np.float32)
        report(bpsx.push_pull(x, "x", average=False).tolist())
        bpsx.shutdown()
    """
    with Background(source) as job:
        for worker in job.workers:
            worker.wait_for_line("ready")
        assert job.scheduler is not None
        struck = job.scheduler if role == "scheduler" else job.servers[0]
        struck.signal(signal.SIGINT)
        for worker in job.workers:
            worker.say("go on")
        assert job.results() == [["ready", [2.0] * 4]] * 2
