"""Servers that get SIGTERM hand their keys over and end with status 0; no sum is lost."""

from __future__ import annotations

import itertools
import os
import random
import re
import signal
import sys
from pathlib import Path

import pytest
import zmq
from deaths import OPERATIONS, Striking, Struck

from bpsx.config import Config
from bpsx.scheduler import messages
from bpsx.scheduler.sockets import open_socket
from cluster.test_server_deaths import undisturbed
from cluster.test_server_deaths_compressed import _TRAINING as COMPRESSED
from cluster.test_server_deaths_compressed import STEPS, Trained, environment
from cluster.test_server_deaths_compressed import undisturbed as undisturbed_compressed
from cluster.test_server_joins import assert_went_well, kill, launched, training
from support.jobs import TRANSPORTS, Gates, Job, Process

#: Each operation once, each transport several times.
SOME = list(zip(itertools.cycle(TRANSPORTS), OPERATIONS))


def left_well(server: Process) -> bool:
    """Whether a server ends with status 0 because others have its keys."""
    return server.wait() == 0 and "other servers take the keys over" in server.text()


def ask_to_leave(server: Process) -> None:
    """Send SIGTERM to a server, which may be stopped."""
    server.signal(signal.SIGTERM)
    server.signal(signal.SIGCONT)


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_server_leaves_in_the_middle_of_an_operation(transport, operation):
    with Struck(operation, transport) as job:
        job.begin()
        ask_to_leave(job.servers[0])
        assert left_well(job.servers[0]), job.everything()
        job.resume(job.servers[0])
        job.end_well(job.servers[0])
        assert "leaves the job: SIGTERM; the job goes on with term 1" in job.scheduler.text()
        assert "leaves the job: SIGTERM; the job goes on" in job.workers[0].text()


@pytest.mark.parametrize("transport", ["zmq", "tcp", "shm"])
def test_servers_leave_a_training_one_after_the_other(tmp_path, transport):
    """Two of three leave at random moments, in a job of three workers."""
    steps, seed = 90, random.randrange(2**32)
    print(f"seed {seed}")
    rng, gates = random.Random(seed), Gates(tmp_path)
    gates.close(steps - 1)
    env = {**gates.env, "BPSX_ELASTIC_WAIT": "0"}
    with training(steps, transport, workers=3, servers=3, **env) as job:
        for server, step in zip(rng.sample(job.servers, 2), (5, 40)):
            job.workers[rng.randrange(3)].wait_for_line(str(step))
            ask_to_leave(server)
            assert left_well(server), server.text()
        gates.open(steps - 1)
        assert_went_well(job, steps)
        assert "term 2: 3 workers have moved" in job.scheduler.text()


@pytest.mark.parametrize(
    ("transport", "compressor"),
    [("zmq", "onebit"), ("tcp", "topk"), ("shm", "dithering"), ("shm", "powersgd")],
)
def test_compressed_keys_of_a_server_that_leaves(tmp_path, transport, compressor):
    gates = Gates(tmp_path)
    gates.close(STEPS - 1)
    env = {**environment(compressor, transport), **gates.env}
    with Job(COMPRESSED, workers=2, servers=3, env=env) as job:
        for server, step in zip(job.servers, (STEPS // 3, 2 * STEPS // 3)):
            job.workers[0].wait_for_line(str(step))
            ask_to_leave(server)
            assert left_well(server), server.text()
        gates.open(STEPS - 1)
        trained = Trained(job)
    assert "term 2" in trained.scheduler
    assert trained.hashes == undisturbed_compressed(compressor, 2)


@pytest.mark.parametrize("transport", ["zmq", "tcp", "shm"])
def test_the_last_server_leaves_when_another_has_come(tmp_path, transport):
    gates = Gates(tmp_path)
    gates.close(39)
    with training(40, transport, **gates.env) as job:
        job.workers[0].wait_for_line("5")
        ask_to_leave(job.servers[0])
        job.servers[0].wait_for_line("has to stay until the job ends")
        assert "no other server can take its keys over" in job.servers[0].text()
        job.start_server(1)
        assert left_well(job.servers[0]), job.servers[0].text()
        gates.open(39)
        assert_went_well(job, 40)
        assert job.servers[1].wait() == 0


def test_the_last_server_ends_when_its_time_is_over():
    """From then on it is a death, after which the job waits for another server."""
    with training(10_000, "tcp", BPSX_TERM_GRACE="0.5", BPSX_ELASTIC_WAIT="0.5") as job:
        job.workers[0].wait_for_line("5")
        ask_to_leave(job.servers[0])
        assert job.servers[0].wait() == 1
        assert "got SIGTERM: it leaves when others have its keys" in job.servers[0].text()
        for worker in job.workers:
            assert worker.wait() == 1
            assert "ended by SIGTERM; the job cannot go on without it" in worker.text()


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_all_servers_are_asked_to_leave_at_once(transport):
    """One of them stays. The job ends before its time is over."""
    with Struck("many", transport, servers=3) as job:
        job.begin()
        for server in job.servers:
            ask_to_leave(server)
        assert job.scheduler is not None
        job.scheduler.wait_for_line("leaves the job", count=2)
        log = job.scheduler.text()
        left = [s for s in job.servers if f"pid {s.popen.pid}) leaves the job" in log]
        (stayed,) = (server for server in job.servers if server not in left)
        stayed.wait_for_line("has to stay")  # it may hear SIGTERM last, when the job is over
        job.end_well(terms=2)
        assert all("other servers take" in server.text() for server in left), job.everything()
        assert not any("has to stay" in server.text() for server in left), job.everything()


@pytest.mark.parametrize("transport", ["zmq", "tcp", "shm"])
def test_a_server_is_killed_after_sigterm(tmp_path, transport):
    """It may have left already, or not, or be about to."""
    gates = Gates(tmp_path)
    gates.close(19)
    for _ in range(3):
        with training(20, transport, servers=2, BPSX_ELASTIC_WAIT="0", **gates.env) as job:
            job.workers[0].wait_for_line("5")
            ask_to_leave(job.servers[0])
            kill(job, 0)
            gates.open(19)
            assert_went_well(job, 20)
            assert "term 1" in job.scheduler.text()


@pytest.mark.parametrize(("transport", "operation"), SOME)
def test_a_server_leaves_while_it_takes_keys_over(transport, operation):
    with Struck(operation, transport, servers=3) as job:
        job.begin()
        job.servers[0].signal(signal.SIGKILL)
        job.await_line("goes on with term 1")
        ask_to_leave(job.servers[1])
        job.resume(*job.servers[:2])
        assert left_well(job.servers[1]), job.everything()
        job.end_well(*job.servers[:2], terms=2)


class Uneven(Striking):
    """A job whose second worker goes on for a while when the first has left."""


_UNEVEN = """
    import bpsx, numpy as np
    bpsx.init()
    bpsx.push_pull(np.ones(5000), name="x")
    report("pushed")
    first = bpsx.rank() == 0
    if first:
        bpsx.shutdown()
    report("left")
    hear()
    if not first:
        bpsx.shutdown()
"""


def test_a_server_stays_when_a_worker_has_left():
    """That worker may have held results which others would need to hand keys over."""
    env = {**TRANSPORTS["tcp"], "BPSX_ELASTIC": "servers"}
    with Uneven(_UNEVEN, servers=2, env=env) as job:
        job.await_line("left")
        ask_to_leave(job.servers[0])
        job.servers[0].wait_for_line("has to stay until the job ends")
        assert "worker 0" in job.servers[0].text() and "has left" in job.servers[0].text()
        job.go_on()
        for process in job.processes:
            assert process.wait() == 0, job.everything()


def test_a_server_of_a_job_that_is_not_elastic_stays_as_before():
    with Struck("small", "tcp", env={"BPSX_ELASTIC": "off"}) as job:
        job.begin()
        ask_to_leave(job.servers[0])
        job.servers[0].wait_for_line("it serves workers for 30 s more")
        job.resume()
        job.end_well()


def test_a_departure_is_quick(tmp_path):
    """The weights are right, and no step waits for a time-out of some sort."""
    gates = Gates(tmp_path)
    gates.close(59)
    with training(60, "tcp", servers=2, PS_HEARTBEAT_TIMEOUT="1000", **gates.env) as job:
        job.workers[0].wait_for_line("20")
        ask_to_leave(job.servers[1])
        job.scheduler.wait_for_line("workers have moved")
        gates.open(59)
        assert_went_well(job, 60)
    (line,) = [line for line in job.scheduler.errors if "workers have moved" in line]
    assert float(line.split("bytes again, ")[1].split(" s ")[0]) < 1.0, line
    assert undisturbed(2, 60) in str(job.workers[0].reports()[-1])


@pytest.mark.parametrize("leaves", [True, False])
def test_the_launcher_hears_of_a_server_that_is_gone_unless_it_has_left(
    tmp_path: Path, leaves: bool
):
    """It ends one that is gone. Standard output stands for the launcher."""
    gates = Gates(tmp_path)
    gates.close(59)
    with training(60, "tcp", servers=2, BPSX_STATE_FD="1", **gates.env) as job:
        job.workers[0].wait_for_line("20")
        pid = job.servers[1].popen.pid
        if leaves:
            ask_to_leave(job.servers[1])
        else:
            job.servers[1].signal(signal.SIGKILL)
        job.scheduler.wait_for_line("workers have moved")
        gates.open(59)
        for worker in job.workers:
            assert worker.wait() == 0, job.everything()
        assert job.scheduler.wait() == 0, job.everything()
    told = [line for line in job.scheduler.lines if line.endswith(str(pid))]
    (lost,) = (line for line in told if re.fullmatch(f"lost server [01] {pid}", line))
    assert told == [lost] + [f"gone server {pid}"] * (not leaves)


#: What a server hears that has come to a running job of two workers and two servers.
WELCOME = {
    "job": 77,
    "rank": 2,
    "first": 2,
    "size": 2,
    "workers": 2,
    "processes": 1,
    "peers": [[0, "worker 0"], [1, "worker 1"]],
    "elastic": True,
    "shrinks": False,
    "may_lose_scheduler": True,
    "joins": 0,
    "term": 0,
    **dict.fromkeys(("vacant", "left", "joined", "dropped"), []),
}


def _heard(hub: zmq.Socket, kind: str) -> tuple[bytes, dict]:
    """Return the next message of this kind, after its sender's name."""
    while True:
        ident, text = hub.recv_multipart()
        message = messages.decode(text)
        if message["type"] == kind:
            return ident, message


def test_a_server_leaves_that_had_asked_to_before_the_scheduler_died():
    """The next one, which this test speaks for, hears so, and goes on without the server."""
    context = zmq.Context()
    hub = open_socket(context, zmq.ROUTER, Config({}))
    port = hub.bind_to_random_port("tcp://127.0.0.1")
    env = {
        **os.environ,
        "DMLC_ROLE": "server",
        "DMLC_PS_ROOT_URI": "127.0.0.1",
        "DMLC_PS_ROOT_PORT": str(port),
        "DMLC_NUM_SERVER": "2",
        "DMLC_NUM_WORKER": "2",
        "BPSX_ELASTIC": "servers",
        "BYTEPS_LOG_LEVEL": "info",
    }
    server = Process("server", [sys.executable, "-m", "bpsx.server"], env)
    try:
        ident, _ = _heard(hub, "HELLO")
        hub.send_multipart([ident, messages.encode("WELCOME", **WELCOME)])
        server.wait_for_line("server 2: ")
        hub.close(0)
        server.wait_for_line("is gone")
        server.signal(signal.SIGTERM)
        server.wait_for_line("got SIGTERM")
        hub = open_socket(context, zmq.ROUTER, Config({}))
        hub.bind(f"tcp://127.0.0.1:{port}")
        ident, report = _heard(hub, "AGAIN")
        assert report["state"]["leaves"] is True
        hub.send_multipart([ident, messages.encode("GOODBYE")])
        assert left_well(server), server.text()
    finally:
        server.end()
        context.destroy(0)


def test_the_launcher_lets_a_server_leave(tmp_path: Path):
    """It is no failure, and the server is not started again."""
    steps, gates = 60, Gates(tmp_path)
    gates.close(20)
    run = launched(tmp_path, steps, "tcp", "--servers", "2", "--max-restarts", "9")
    try:
        run.wait_for_line("[worker 0] 10")
        line = next(line for line in run.errors + run.lines if "arrived: server" in line)
        os.kill(int(re.search(r"server \d+ \(.*?, pid (\d+)\)", line)[1]), signal.SIGTERM)
        run.wait_for_line("other servers take the keys over")
        gates.open(20)
        assert run.wait() == 0, run.text()
        want = undisturbed(2, steps)
        assert sum(want in line for line in run.lines) == 2, run.text()
        assert "started again" not in run.text() and "went on without" not in run.text()
    finally:
        run.end()
