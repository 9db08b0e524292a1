"""Partitions get another size while real jobs run: the same sums, after the same push_pull."""

from __future__ import annotations

import signal
import sys
import time
from typing import Any

import pytest
from network import NetJob, Network, needed

from support.jobs import TRANSPORTS, Job

#: A scheduler that changes the size as soon as workers want it.
#: Some scripts tell their rates once: a look that came too early would use them up.
IMPATIENT = """
import runpy
import bpsx.scheduler.resizing as resizing
resizing.FIRST_WAIT = 0.0
runpy.run_module("bpsx.scheduler", run_name="__main__", alter_sys=True)
"""
APART = {i: {"DMLC_NODE_HOST": f"127.0.1.{i}"} for i in range(4)}
#: Bytes per second of links for whose partitions 128 KiB and 2 MiB are right.
RATES = "SLOW, FAST = 12_500_000, 2_500_000_000\n"
TRAINING = (
    RATES
    + """
import os, time
import bpsx, numpy as np
from bpsx.api import verbs
from bpsx.session import liveness
from bpsx.session import session as beginning

# This script says what the links carry.
beginning.measure, liveness.PEAK_SECONDS = lambda *_: (FAST, 1e-4), 1e9
bpsx.init()
session, rank, size = verbs.session(), bpsx.rank(), bpsx.size()
N = 400_000
shapes = {"large": N, "half": N, "small": 100}
bpsx.declare("half", {"fp16": True})

def links(rate):
    # Says what this worker's links carry.
    for told in (FAST, rate, rate, rate):
        session._link.send("PEAK", rate=told)

def generation(name):
    return session._latest[name].generation

def expected(step, name):
    return sum((r + 1) * (step % 5 + 1) for r in range(size))

def step(step):
    tensors = {
        name: np.full(n, (rank + 1) * (step % 5 + 1), np.float32) for name, n in shapes.items()
    }
    handles = [(name, bpsx.push_pull_async(tensors[name], name, False)) for name in shapes]
    for name, handle in handles:
        total = handle.wait()
        want = expected(step, name)
        assert (total == want).all(), (rank, step, name, total[:3], want)
    used.append([generation(name) for name in shapes])

used = []
"""
)


class Impatient(Job):
    """A job whose workers claim to run on machines of their own."""

    def __init__(self, source: str, *args: Any, **more: Any) -> None:
        lanes = {"BYTEPS_SERVER_ENGINE_THREAD": "2"}  # slow links use one of them
        env = {"BYTEPS_LOG_LEVEL": "info", **lanes, **more.pop("env", {})}
        super().__init__(source, *args, env=env, worker_env=APART, **more)

    def command(self, name: str, words: list[str]) -> list[str]:
        return [sys.executable, "-c", IMPATIENT] if name == "scheduler" else words


CHANGES = (
    TRAINING
    + """
for i in range(150):
    if i in (15, 70):
        links(SLOW if i == 15 else FAST)
        time.sleep(0.5 * rank)
    step(i)
report(used)
"""
)


def changed(job: Job) -> list[list[list[int]]]:
    """Return the generations that each worker has used, step by step; all must be equal."""
    assert [worker.wait() for worker in job.workers] == [0] * len(job.workers), job.everything()
    found = [worker.reports()[0] for worker in job.workers]
    assert all(used == found[0] for used in found)
    return found[0]


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_workers_change_to_and_fro_after_the_same_push_pull(transport: str) -> None:
    with Impatient(CHANGES, workers=3, servers=2, env=TRANSPORTS[transport]) as job:
        used = changed(job)
        log = job.scheduler.text()
    large, half, small = (list(column) for column in zip(*used))
    assert len({*large}) == 3 and {*small} == {*half} == {0}
    assert large == sorted(large) and large[0] == 0
    small_ones = "from now on partitions have 128 KiB, on 1 of 2 lanes of a server"
    assert f"{small_ones}, as links carry less" in log
    assert "from now on partitions have 2048 KiB, as links carry more" in log


BESIDE = """
    import bpsx, numpy as np
    from bpsx.api import verbs

    bpsx.init()
    tensor = np.ones(8 << 20, np.float32)
    for _ in range(4):
        bpsx.push_pull(tensor, name="x")
    report(verbs.session()._core.take_peak())
"""


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_answers_of_servers_on_the_same_machine_say_nothing_about_links(transport: str) -> None:
    with Job(BESIDE, servers=2, env=TRANSPORTS[transport], worker_env=APART) as job:
        assert job.results() == [[0], [0]]


UNEVEN = (
    TRAINING
    + """
def expected(step, name):
    # Only those push that have not joined.
    return sum((r + 1) * (step % 5 + 1) for r in range(size) if step < steps_of(r))

def steps_of(r):
    return 40 + 15 * r

for epoch in range(3):
    for i in range(steps_of(rank)):
        if i == 20 and epoch < 2:
            links((SLOW, FAST)[epoch])
        step(i)
    bpsx.join()
report(used[-40:])
"""
)


def test_workers_that_join_have_changed_when_all_go_on() -> None:
    """One joins before its last push_pull of the old size; the others may have passed theirs."""
    with Impatient(UNEVEN, workers=3, servers=2) as job:
        found = [reports[0] for reports in job.results()]
        log = job.scheduler.text()
    assert found[0][0] == found[1][0] == found[2][0]
    assert log.count("from now on") == 2


AHEAD = (
    TRAINING
    + """
import threading

def run(name, n):
    # Up to eight push_pulls of a name under way.
    handles = []
    for i in range(n):
        tensor = np.full(N, (rank + 1) * (i % 5 + 1), np.float32)
        handles.append((i, bpsx.push_pull_async(tensor, name=name, average=False)))
        if len(handles) == 8 or i + 1 == n:
            for at, handle in handles:
                total = handle.wait()
                assert (total == expected(at, name)).all(), (rank, at, name, total[:3])
            handles.clear()

threads = [threading.Thread(target=run, args=(f"tensor {t}", 120)) for t in range(4)]
for t in threads:
    t.start()
for rate in (SLOW, FAST, SLOW):
    time.sleep(0.4)
    links(rate)
for t in threads:
    t.join()
report([generation(f"tensor {t}") for t in range(4)])
"""
)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_threads_that_are_ahead_get_the_right_sums(transport: str) -> None:
    """Several push_pulls of a name are under way, begun by its thread, while it changes."""
    with Impatient(AHEAD, workers=2, servers=2, env=TRANSPORTS[transport]) as job:
        (first,), (second,) = job.results()
        log = job.scheduler.text()
    assert first == second and "from now on" in log


STRUCK = (
    TRAINING
    + """
print("begun", flush=True)
for i in range(400):
    if i % 40 == 20 and i < 200:
        links(FAST if i % 80 == 60 else SLOW)
    step(i)
    time.sleep(0.005)
report(used)
"""
)


@pytest.mark.parametrize("role", ["server", "scheduler"])
def test_a_process_dies_while_sizes_change(role: str) -> None:
    with Impatient(STRUCK, workers=3, servers=3, env={"BPSX_ELASTIC": "servers"}) as job:
        assert job.scheduler is not None
        log = job.scheduler
        job.workers[0].wait_for_line("begun")
        log.wait_for_line("from now on partitions have 128 KiB")
        if role == "server":
            job.servers[1].signal(signal.SIGKILL)
        else:
            job.scheduler.signal(signal.SIGKILL)
            job.scheduler.wait()
            job.start_scheduler(int(job.port))
        changed(job)


CAUGHT = (
    TRAINING
    + """
def steps(n):
    for i in range(n):
        step(i)

steps(15), links(SLOW), steps(30)
before = used[-1]
try:
    bpsx.push_pull(np.ones(9, np.float32), name=f"only worker {rank} has this")
except bpsx.StallError:
    used.clear()
steps(15), links(FAST), steps(30)
report([before, used[0], used[-1]])
"""
)


def test_sizes_change_before_and_after_a_caught_error() -> None:
    env = {"BPSX_STALL_WARN_SECONDS": "1", "BPSX_DEADLOCK_SECONDS": "1"}
    with Impatient(CAUGHT, servers=2, env=env) as job:
        before, anew, after = changed(job)
        log = job.scheduler.text()
    assert anew == [0, 0, 0] and before[0] and after[0] > before[0]
    assert log.count("from now on") == 2


LINKS = """
    import time, bpsx, numpy as np
    from bpsx.api import verbs
    from bpsx.session import session as beginning

    # Begins with large partitions, also if the machine is too busy for such a rate.
    beginning.measure = lambda *_: (2_500_000_000, 1e-4)
    bpsx.init()
    session = verbs.session()
    tensor = np.ones(5_000_000, np.float32)
    begin = time.monotonic()
    while session._decisions.held < 1 and time.monotonic() < begin + 150:
        bpsx.push_pull(tensor, name="x", average=False)
        if not bpsx.rank():
            print("step", flush=True)
    report(session._decisions.held)
"""


@needed
def test_links_that_become_slow_get_small_partitions() -> None:
    """Nobody tells the workers: they notice."""
    names = ["scheduler", "server 0", "server 1", "worker 0", "worker 1"]
    with (
        Network(names) as network,
        ImpatientInNetwork(LINKS, network, env={"BYTEPS_LOG_LEVEL": "info"}, servers=2) as job,
    ):
        job.workers[0].wait_for_line("step")
        begin = time.monotonic()
        job.workers[0].wait_for_line("step", count=21)
        # A tenth of what a step's 160 Mbit were at least: a busy machine's links are not fast.
        rate = 16 * 20 / (time.monotonic() - begin)
        for name in names[1:]:
            network.slow(name, f"{min(200, round(rate))}mbit")
        assert job.results(timeout=200) == [[1], [1]]
        assert "from now on partitions have 128 KiB, as links carry less" in job.scheduler.text()


class ImpatientInNetwork(NetJob):
    def command(self, name: str, words: list[str]) -> list[str]:
        own = [sys.executable, "-c", IMPATIENT] if name == "scheduler" else words
        return super().command(name, own)
