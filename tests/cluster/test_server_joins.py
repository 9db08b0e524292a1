"""Servers that join a running job: a job whose servers die again and again never runs out of them,
and the bits are those of a job in which none dies.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import sys
import textwrap
from pathlib import Path

import pytest

from cluster.test_server_deaths import _TRAINING, CUT, SIZES, undisturbed
from support.jobs import _PRELUDE, TRANSPORTS, Gates, Job, Process


def training(steps: int, transport: str, workers: int = 2, servers: int = 1, **env: str) -> Job:
    """A job that trains for ``steps`` steps, each reported by each worker."""
    return Job(
        _TRAINING.format(sizes=SIZES, steps=steps),
        workers=workers,
        servers=servers,
        env={
            **TRANSPORTS[transport],
            **CUT,
            "BPSX_FIXED_ORDER": "1",
            "BPSX_ELASTIC": "servers",
            "BPSX_ELASTIC_WAIT": "60",
            **env,
        },
    )


def kill(job: Job, server: int) -> None:
    job.servers[server].signal(signal.SIGKILL)
    job.servers[server].wait()


def replace_servers(job: Job, gates: Gates, deaths: int, servers: int) -> None:
    """Kill ``servers`` servers in turn, and start others; one death every five steps."""
    for death in range(deaths):
        for worker in job.workers:
            worker.wait_for_line(str(5 * death))
        kill(job, death)
        job.start_server(death + servers)
        job.scheduler.wait_for_line("has joined", count=death + 1)
        gates.open(5 * death + 4)


def assert_went_well(job: Job, steps: int) -> None:
    """Wait for the end of a job that must have gone well."""
    said = "\n".join(p.text() for p in job.processes)
    for worker in job.workers:
        assert worker.wait() == 0, worker.text() + said
        assert worker.reports()[-1] == undisturbed(len(job.workers), steps)
    assert job.scheduler.wait() == 0, job.scheduler.text()


@pytest.mark.parametrize("transport", ["zmq", "tcp", "shm"])
def test_a_new_server_feeds_a_job_that_has_lost_its_only_one(tmp_path, transport):
    gates = Gates(tmp_path)
    gates.close(19)
    with training(20, transport, **gates.env) as job:
        job.workers[0].wait_for_line("5")
        kill(job, 0)
        job.scheduler.wait_for_line("the last server, and the job waits")
        job.start_server(1)
        gates.open(19)
        assert_went_well(job, 20)
        assert job.servers[1].wait() == 0, job.servers[1].text()
        assert "server 1" in job.scheduler.text() and "term 1" in job.scheduler.text()


@pytest.mark.parametrize("transport", ["zmq", "tcp", "shm"])
@pytest.mark.parametrize("workers", [2, 3])
def test_a_job_never_runs_out_of_servers(tmp_path, transport, workers):
    """The only server is killed in the middle of a step, and replaced, ten times."""
    steps = 60
    gates = Gates(tmp_path)
    gates.close(*range(4, 50, 5))
    with training(steps, transport, workers, **gates.env) as job:
        replace_servers(job, gates, 10, 1)
        assert_went_well(job, steps)
        assert "term 10" in job.scheduler.text()


@pytest.mark.parametrize("transport", ["zmq", "tcp", "shm"])
def test_two_servers_die_in_turn_and_come_back(tmp_path, transport):
    """Never both at once: each time all keys move to the other, which has come a moment before."""
    steps = 60
    gates = Gates(tmp_path)
    gates.close(*range(4, 50, 5))
    with training(steps, transport, servers=2, **gates.env) as job:
        replace_servers(job, gates, 10, 2)
        assert_went_well(job, steps)
        assert "the last server" not in job.scheduler.text()
        assert "term 10" in job.scheduler.text()


def test_a_job_fails_when_no_server_comes_in_time():
    with training(10_000, "tcp", BPSX_ELASTIC_WAIT="0.5") as job:
        job.workers[0].wait_for_line("5")
        kill(job, 0)
        for worker in job.workers:
            assert worker.wait() == 1
            assert "no other has joined within 0.5 s (BPSX_ELASTIC_WAIT)" in worker.text()
            assert "server 0" in worker.text()
        assert job.scheduler.wait() == 1


def launched(
    tmp_path: Path, steps: int, transport: str, *options: str, **variables: str
) -> Process:
    """A training of two workers that bpsx-run starts, with one or two servers."""
    script = tmp_path / "train.py"
    source = textwrap.dedent(_TRAINING.format(sizes=SIZES, steps=steps))
    script.write_text(_PRELUDE + source)
    env = {
        **{k: v for k, v in os.environ.items() if not k.startswith(("DMLC_", "BYTEPS_", "BPSX_"))},
        **{k: v for k, v in os.environ.items() if k == "BPSX_CACHE_DIR"},
        "BYTEPS_ENABLE_IPC": "0",
        **TRANSPORTS[transport],
        **CUT,
        "BPSX_FIXED_ORDER": "1",
        "BYTEPS_LOG_LEVEL": "info",
        **variables,
        **Gates(tmp_path).env,
    }
    command = [sys.executable, "-m", "bpsx.launch", "--local", "--workers", "2", *options]
    return Process("bpsx-run", [*command, sys.executable, str(script)], env)


def kill_newest(run: Process, count: int) -> None:
    """Kill the server that has arrived as the ``count``-th, with its first lane or later."""
    run.wait_for_line("arrived: server", count=count)
    lines = [line for line in run.errors + run.lines if "arrived: server" in line]
    pid = int(re.search(r"server \d+ \(.*?, pid (\d+)\)", lines[count - 1])[1])
    os.kill(pid, signal.SIGKILL)


@pytest.mark.parametrize("transport", ["zmq", "tcp", "shm"])
@pytest.mark.parametrize("servers", [1, 2])
def test_the_launcher_starts_servers_again(tmp_path, transport, servers):
    """Four servers are killed, the oldest first; with two, in turn."""
    steps = 60
    gates = Gates(tmp_path)
    gates.close(*range(7, 40, 10))
    run = launched(tmp_path, steps, transport, "--servers", str(servers), "--max-restarts", "9")
    try:
        for death in range(4):
            run.wait_for_line(f"[worker 0] {10 * death}")
            kill_newest(run, death + 1)
            run.wait_for_line("has joined: all workers", count=death + 1)
            gates.open(10 * death + 7)
        assert run.wait() == 0, run.text()
        want = undisturbed(2, steps)
        assert sum(want in line for line in run.lines) == 2, run.text()
        line = run.errors[-1]
        died = r"server [01] \(pid \d+\) was killed by SIGKILL, and the job went on without it"
        assert re.fullmatch(f"bpsx-run: {died}(; {died}){{3}}", line), line
        assert "(1 of 9)" in run.text() and "(4 of 9)" in run.text()
    finally:
        run.end()


def test_restarts_are_used_up(tmp_path):
    """The launcher says so, and the job ends as it would without them."""
    options = ["--servers", "1", "--max-restarts", "1", "--grace", "0.2"]
    run = launched(tmp_path, 100_000, "tcp", *options, BPSX_ELASTIC_WAIT="5")
    try:
        for death in range(2):
            run.wait_for_line(f"[worker 0] {10 * death}")
            kill_newest(run, death + 1)
        run.wait_for_line("not started again, as --max-restarts 1 is used up")
        assert run.wait() != 0
        assert "no other has joined within 5 s (BPSX_ELASTIC_WAIT)" in run.text()
    finally:
        run.end()


def two_free_ports() -> int:
    """The first of two ports that follow each other and are free."""
    while True:
        with socket.socket() as one, socket.socket() as two, contextlib.suppress(OSError):
            one.bind(("127.0.0.1", 0))
            port = int(one.getsockname()[1])
            two.bind(("127.0.0.1", port + 1))
            return port


@pytest.mark.parametrize("transport", ["zmq", "tcp", "shm"])
def test_a_new_server_may_have_the_address_of_the_old_one(tmp_path, transport):
    """With two ports, of which the scheduler has one, it must."""
    steps, first = 40, two_free_ports()
    ports = {"BPSX_PORTS": f"{first}-{first + 1}", "BYTEPS_SERVER_ENGINE_THREAD": "1"}
    gates = Gates(tmp_path)
    gates.close(*range(4, 30, 5))
    with training(steps, transport, **gates.env, **ports) as job:
        replace_servers(job, gates, 6, 1)
        assert_went_well(job, steps)


@pytest.mark.parametrize("transport", ["zmq", "tcp", "shm"])
def test_servers_that_die_while_workers_connect_to_them(tmp_path, transport):
    """Each is killed as soon as the scheduler knows it; the job waits on."""
    gates = Gates(tmp_path)
    gates.close(19)
    with training(20, transport, **gates.env) as job:
        job.workers[0].wait_for_line("5")
        kill(job, 0)
        for i in range(1, 6):
            job.start_server(i)
            job.scheduler.wait_for_line("joins the running job", count=i)
            kill(job, i)
        job.start_server(6)
        gates.open(19)
        assert_went_well(job, 20)


@pytest.mark.parametrize("transport", ["zmq", "tcp", "shm"])
def test_a_new_server_knows_the_workers_that_have_joined(transport):
    """Rounds go on without them on a server that has come after their join()."""
    source = """
        import bpsx, numpy as np
        bpsx.init()
        for epoch in range(2):
            for step in range(10 + 10 * bpsx.rank()):
                if bpsx.rank() == 1 and step in (5, 14):
                    input()  # the next steps meet the killed server
                got = bpsx.push_pull(np.full(50_000, step, np.float32), name="x", average=False)
                report([epoch, step, float(got[0]), float(got[-1])])
            report(bpsx.join())
        bpsx.shutdown()
    """
    env = {**TRANSPORTS[transport], "BPSX_ELASTIC": "servers", "BPSX_ELASTIC_WAIT": "60"}
    with Job(source, env=env) as job:
        for death, line in enumerate(("[0, 4,", "[0, 13,", "[1, 4,", "[1, 13,")):
            job.workers[1].wait_for_line(line)
            kill(job, death)
            job.workers[1].say("")
            job.start_server(death + 1)
            job.scheduler.wait_for_line("has joined", count=death + 1)
        for worker in job.workers:
            assert worker.wait() == 0, worker.text() + job.scheduler.text()
        rows = [r for r in job.workers[1].reports() if isinstance(r, list)]
        assert rows == [
            [epoch, step, both * step, both * step]
            for epoch in range(2)
            for step in range(20)
            for both in [2.0 if step < 10 else 1.0]
        ]
