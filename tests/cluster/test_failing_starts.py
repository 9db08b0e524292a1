"""A server or a worker that cannot start says why to everybody, and nobody waits for it."""

from __future__ import annotations

import contextlib
import sys

import pytest

from jobs import Job

#: Runs a module's main() in a process in which no thread of the named kind can be started.
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
    """A job whose server 0 cannot start a thread called ``refused``."""

    refused = ""

    def command(self, name: str, words: list[str]) -> list[str]:
        if name != "server 0":
            return words
        text = REFUSING.format(name=self.refused) + "runpy.run_module('bpsx.server', run_name='__main__', alter_sys=True)"
        return [sys.executable, "-c", text]


@pytest.mark.parametrize("thread", ["bpsx-control", "bpsx-lane-0", "bpsx-lane-1"])
def test_a_server_without_a_thread_ends_and_says_why(thread: str) -> None:
    class This(OddJob):
        refused = thread

    with This("import bpsx\nbpsx.init()\nhear()\nbpsx.push_pull(__import__('numpy').ones(2), 'x')", workers=2, servers=2,
              env={"BYTEPS_SERVER_ENGINE_THREAD": "2"}) as job:
        assert job.servers[0].wait() == 1
        assert "bpsx server: cannot start: RuntimeError: can't start new thread" in job.servers[0].text()
        for other in (job.servers[1], job.scheduler):
            assert other is not None
            assert other.wait() == 1
            assert "this server cannot start: RuntimeError: can't start new thread" in other.text()
        for worker in job.workers:
            with contextlib.suppress(BrokenPipeError):      # init() may have raised it already
                worker.say("")
            assert worker.wait() == 1
            assert "can't start new thread" in worker.text()
