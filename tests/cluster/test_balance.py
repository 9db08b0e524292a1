"""Servers that join a running job get their share of the keys: no sum is lost, and the bits are
those of a job in which no key moves.
"""

from __future__ import annotations

import re
import signal

import pytest
from deaths import OPERATIONS, Struck

from cluster.test_server_deaths import CUT, SIZES
from cluster.test_server_deaths_compressed import _TRAINING as COMPRESSED
from cluster.test_server_deaths_compressed import STEPS, Trained, environment
from cluster.test_server_deaths_compressed import undisturbed as undisturbed_compressed
from cluster.test_server_joins import assert_went_well, kill, training
from cluster.test_struck_servers import KINDS
from support.jobs import TRANSPORTS, Gates, Job, Process

#: A training whose workers wait before step 10.
_GATED = """
    import bpsx, hashlib, numpy as np

    bpsx.init()
    weights = [np.linspace(-1, 1, n, dtype=np.float32) for n in {sizes}]
    for step in range({steps}):
        if step == 10:
            report("gate")
            hear()
        handles = []
        for i, w in enumerate(weights):
            gradient = w * np.float32(0.1 * (bpsx.rank() + 1)) + np.float32(step)
            handles.append(bpsx.push_pull_async(gradient, name=f"w{{i}}", average=False))
        for w, handle in zip(weights, handles):
            w -= np.float32(0.01) * bpsx.synchronize(handle)
    report(hashlib.sha256(b"".join(w.tobytes() for w in weights)).hexdigest())
    bpsx.shutdown()
"""


def summed(server: Process) -> int:
    """Bytes of the results of a server that has ended, over its lanes."""
    lanes = re.findall(r"lane \d+: rounds \d+, bytes (\d+)", server.text())
    assert lanes, server.text()
    return sum(map(int, lanes))


def joined(job: Job, count: int = 1) -> None:
    """Wait until ``count`` terms that give keys to new servers are over."""
    job.scheduler.wait_for_line("bytes of the job's tensors", count=count)


def gated(steps: int, transport: str, servers: int, workers: int = 2, **env: str) -> Job:
    """A training whose workers wait before step 10; see :func:`pass_gate`."""
    own = {"BPSX_FIXED_ORDER": "1", "BPSX_ELASTIC": "servers", "BYTEPS_LOG_LEVEL": "info"}
    source = _GATED.format(sizes=SIZES, steps=steps)
    env = {**TRANSPORTS[transport], **CUT, **own, **env}
    return Job(source, workers=workers, servers=servers, env=env)


def await_gate(job: Job) -> None:
    for worker in job.workers:
        worker.wait_for_line("gate")


def pass_gate(job: Job) -> None:
    for worker in job.workers:
        worker.say("go")


@pytest.mark.parametrize("transport", ["zmq", "tcp", "shm"])
def test_a_third_server_gets_a_third_of_the_bytes(transport):
    """It joins after 10 of 40 steps, so it sums 30 thirds, and the others 10 halves more."""
    with gated(40, transport, servers=2, BYTEPS_PARTITION_BYTES="32768") as job:
        await_gate(job)
        job.start_server(2)
        joined(job)
        pass_gate(job)
        assert_went_well(job, 40)
        for server in job.servers:
            assert server.wait() == 0, server.text()
        first, second, third = [summed(server) for server in job.servers]
    step = (first + second + third) / 40
    assert abs(third / step - 10) < 1, (first, second, third, step)
    assert abs(first / step - 15) < 1 and abs(second / step - 15) < 1, (first, second, third, step)


@pytest.mark.parametrize("transport", ["zmq", "tcp", "shm"])
def test_two_servers_that_join_at_once_get_a_quarter_each(transport):
    """Keys move once or twice, as the second may come when they already move to the first."""
    with gated(40, transport, servers=2, workers=3, BYTEPS_PARTITION_BYTES="32768") as job:
        await_gate(job)
        job.start_server(2)
        job.start_server(3)
        job.scheduler.wait_for_line("has joined: all workers", count=2)
        joined(job)
        pass_gate(job)
        assert_went_well(job, 40)
        assert all(server.wait() == 0 for server in job.servers)
        parts = [summed(server) for server in job.servers]
    step = sum(parts) / 40
    assert all(abs(part / step - 12.5) < 2 for part in parts[:2]), (parts, step)
    assert all(abs(part / step - 7.5) < 2 for part in parts[2:]), (parts, step)


@pytest.mark.parametrize("transport", ["zmq", "tcp", "shm"])
@pytest.mark.parametrize("workers", [2, 3])
def test_keys_move_again_and_again(tmp_path, transport, workers):
    """Servers join, and the oldest leave or die, while workers push."""
    steps, gates = 120, Gates(tmp_path)
    gates.close(*range(15, 80, 20))
    with training(steps, transport, workers, servers=2, **gates.env) as job:
        for turn in range(4):
            for worker in job.workers:
                worker.wait_for_line(str(20 * turn))
            job.start_server(turn + 2)
            joined(job, turn + 1)
            if turn % 2:
                kill(job, turn)
            else:
                job.servers[turn].signal(signal.SIGTERM)
            gates.open(20 * turn + 15)
        assert_went_well(job, steps)


@pytest.mark.parametrize(
    ("transport", "compressor"),
    [("zmq", "onebit"), ("tcp", "topk"), ("shm", "dithering"), ("tcp", "powersgd")],
)
def test_compressed_keys_move(tmp_path, transport, compressor):
    """With residuals of workers and servers, momentum and counters."""
    gates, steps = Gates(tmp_path), (STEPS // 4, STEPS // 2 + 1)
    gates.close(*(step + 2 for step in steps))
    env = {**environment(compressor, transport), **gates.env}
    with Job(COMPRESSED, workers=2, servers=3, env=env) as job:
        for turn, step in enumerate(steps):
            job.workers[0].wait_for_line(str(step))
            job.start_server(turn + 3)
            joined(job, turn + 1)
            gates.open(step + 2)
        trained = Trained(job)
    assert trained.hashes == undisturbed_compressed(compressor, 2)


#: What happens while keys move -> servers that are killed or asked to leave, and number of terms.
#: Servers 0 and 1 yield keys, server 2 gets them.
DURING: dict[str, tuple[list[int], int, int]] = {
    "nothing": ([], signal.SIGKILL, 1),
    "an old one dies": ([0], signal.SIGKILL, 2),
    "the new one dies": ([2], signal.SIGKILL, 2),
    "both die": ([1, 2], signal.SIGKILL, 3),
    "the old ones die": ([0, 1], signal.SIGKILL, 3),
    "an old one leaves": ([0], signal.SIGTERM, 2),
    "the new one leaves": ([2], signal.SIGTERM, 2),
}
#: Each operation with several transports and deaths.
SOME = [
    (transport, operation, during)
    for i, operation in enumerate(OPERATIONS)
    for j, during in enumerate(DURING)
    if (transport := list(TRANSPORTS)[(i + j) % len(TRANSPORTS)])
]


def begin_to_move(job: Struck) -> None:
    """Begin the operation, and start a server to which keys then move."""
    job.begin()
    job.start_server(2)
    for worker in job.workers:
        worker.wait_for_line("term 1: keys of the others move to server 2")


@pytest.mark.parametrize(("transport", "operation", "during"), SOME)
def test_keys_move_in_the_middle_of_an_operation(transport, operation, during):
    """The old servers are stopped, so that the operation is under way, and keys wait to move."""
    struck, number, terms = DURING[during]
    with Struck(operation, transport) as job:
        begin_to_move(job)
        for i in struck:
            job.servers[i].signal(number)
            if number == signal.SIGKILL:
                job.servers[i].wait()
        if during == "the new one leaves":  # the old one is stopped, and cannot ask yet
            job.scheduler.wait_for_line("leaves the job")
        job.resume()
        job.end_well(*(job.servers[i] for i in struck), terms=terms)


@pytest.mark.parametrize("during", ["nothing", "an old one dies", "the new one dies"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("operation", ["many", "join"])
def test_keys_move_in_other_jobs(kind, operation, during):
    """Several processes a machine, urgent messages first, several lanes, fixed order."""
    struck, number, terms = DURING[during]
    with Struck(operation, "tcp", **KINDS[kind]) as job:
        begin_to_move(job)
        for i in struck:
            job.servers[i].signal(number)
            job.servers[i].wait()
        job.resume()
        job.end_well(*(job.servers[i] for i in struck), terms=terms)


@pytest.mark.parametrize(
    ("transport", "compressor"), [("tcp", "onebit"), ("shm", "topk"), ("zmq", "randomk")]
)
def test_compressed_keys_move_while_servers_die(tmp_path, transport, compressor):
    """First the server that yields keys dies, then the one that gets them."""
    gates, steps = Gates(tmp_path), (STEPS // 4, STEPS // 2 + 1)
    gates.close(*(step + 2 for step in steps))
    env = {**environment(compressor, transport), **gates.env}
    with Job(COMPRESSED, workers=2, servers=3, env=env) as job:
        for turn, (step, victim) in enumerate(zip(steps, (0, 4))):
            job.workers[0].wait_for_line(str(step))
            job.start_server(turn + 3)
            job.scheduler.wait_for_line("keys of the others move to server", count=turn + 1)
            job.servers[victim].signal(signal.SIGKILL)
            job.servers[victim].wait()
            gates.open(step + 2)
        trained = Trained(job)
    assert "term 4" in trained.scheduler
    assert trained.hashes == undisturbed_compressed(compressor, 2)


@pytest.mark.parametrize(
    ("transport", "operation"), [("zmq", "large"), ("tcp", "many"), ("shm", "join")]
)
def test_the_scheduler_dies_while_keys_move(transport, operation):
    """Another one learns of the rules: it places new tensors, and moves keys of a lost server."""
    with Struck(operation, transport) as job:
        job.begin()
        job.start_server(2)
        for worker in job.workers:
            worker.wait_for_line("term 1: keys of the others move to server 2")
        job.scheduler.signal(signal.SIGKILL)
        job.scheduler.wait()
        job.resume()
        if operation != "join":  # which needs a scheduler
            job.await_line("ended")
        job.start_scheduler(int(job.port))
        for worker in job.workers:
            worker.wait_for_line("is back, after")
        job.await_line("ended")
        kill(job, 0)
        # Term 2, or 3 if the other scheduler has found the bytes uneven and moved keys again.
        job.await_line("the job goes on with term")
        job.go_on()
        for process in (*job.workers, *job.servers[1:], job.scheduler):
            assert process.wait() == 0, job.everything()
        for worker in job.workers:
            assert worker.reports()[-1] == [], job.everything()


def test_balance_may_be_switched_off():
    with gated(20, "tcp", servers=2, BPSX_ELASTIC_BALANCE="0") as job:
        await_gate(job)
        job.start_server(2)
        job.scheduler.wait_for_line("has joined: all workers")
        pass_gate(job)
        assert_went_well(job, 20)
        assert job.servers[2].wait() == 0 and summed(job.servers[2]) == 0
        assert "term 1" not in job.scheduler.text()
