"""Workers that are struck together with other processes, or at a delicate moment.

The servers are stopped meanwhile, so a step is under way for certain. All sums are compared with
float64.
"""

from __future__ import annotations

import signal
from typing import Any

import pytest
from network import NetJob, Network, needed

from cluster.test_worker_deaths import SHRINK, Shrinking
from support.jobs import TRANSPORTS, Gates, Job, Process


def strike(*processes: Process) -> None:
    """Kill processes at once."""
    for process in processes:
        process.signal(signal.SIGKILL)


class Stuck(Shrinking):
    """A job of three workers that does not go on from :meth:`stop` on."""

    def __init__(self, servers: int, env: dict[str, str], **more: Any) -> None:
        super().__init__(
            3, steps=8, sizes=[3, 2_000, 30_000, 300_000], servers=servers, env=env, **more
        )

    def stop(self) -> None:
        """Stop the servers in the middle of a step."""
        self.await_step(0, 3)
        for server in self.servers:
            server.signal(signal.SIGSTOP)

    def resume(self, *servers: Process) -> None:
        """Let these servers go on, or all."""
        for server in servers or self.servers:
            server.signal(signal.SIGCONT)

    def await_term(self, term: int, *workers: int) -> None:
        """Wait until these workers have heard of ``term``."""
        for of in workers:
            self.workers[of].wait_for_line(f"goes on with term {term}")


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_worker_dies_while_keys_move_from_a_dead_server(transport):
    """Server 2, which gets some of the keys, has not read any message of the first term."""
    with Stuck(3, TRANSPORTS[transport]) as job:
        job.stop()
        strike(job.servers[0])
        job.resume(job.servers[1])
        job.await_term(1, 0, 1, 2)
        strike(job.workers[2])
        job.await_term(2, 0, 1)
        job.resume()
        job.end_well(2)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_server_dies_while_keys_are_taken_over_without_a_worker(transport):
    with Stuck(3, TRANSPORTS[transport]) as job:
        job.stop()
        strike(job.workers[1])
        job.resume(job.servers[0])
        job.await_term(1, 0, 2)
        strike(job.servers[2])
        job.await_term(2, 0, 2)
        job.resume()
        job.end_well(1)


@pytest.mark.parametrize("transport", ["zmq", "tcp"])
def test_a_worker_and_the_scheduler_are_killed_at_once(transport):
    """The next scheduler goes on without the worker, as its connections to servers have ended."""
    env = {**TRANSPORTS[transport], "BPSX_GATHER_GRACE": "1"}
    with Stuck(2, env) as job:
        job.stop()
        strike(job.scheduler, job.workers[2])
        job.scheduler.wait()
        job.resume()
        job.start_scheduler(int(job.port))
        job.end_well(2)


class CutJob(Stuck, NetJob):
    """Such a job whose processes have a network of their own."""


@needed
@pytest.mark.parametrize("transport", ["zmq", "tcp"])
def test_a_worker_whose_links_are_cut_is_lost(transport, tmp_path):
    """After its return, before the others end, it hears that it is not awaited any more."""
    gates = Gates(tmp_path)
    gates.close(6)
    quick = {"PS_HEARTBEAT_INTERVAL": "0.3", "PS_HEARTBEAT_TIMEOUT": "1"}
    env = {**TRANSPORTS[transport], **quick}
    names = ["scheduler", "server 0", "server 1", "worker 0", "worker 1", "worker 2"]
    more = {"worker_env": {0: gates.env}}
    with Network(names) as network, CutJob(2, env, network=network, **more) as job:
        job.stop()
        network.cut("worker 2")
        job.resume()
        job.scheduler.wait_for_line("workers go on without worker 2")
        network.mend("worker 2")
        assert job.workers[2].wait() == 1
        gates.open(6)
        told = f"worker 2 ({network.address['worker 2']}, pid {job.workers[2].popen.pid}) is gone"
        assert (
            f"PeerLostError: this worker is not awaited any more: {told}" in job.workers[2].text()
        )
        job.end_well(2)


#: The workers push names that no worker has pushed before. Worker 2 pushes some of them, and dies.
NEW_NAMES = """
    import bpsx, zlib, numpy as np

    SIZES = [1 + i * i * i % 5_000 for i in range(40)]
    bpsx.init()
    number = bpsx.rank()

    def share(of, round_, i):
        return np.random.default_rng([of, round_, i]).standard_normal(SIZES[i], np.float32)

    def begin(round_, some):
        return [
            bpsx.push_pull_async(share(number, round_, i), name=f"new{i}", average=False)
            for i in range(some)
        ]

    def counted(round_, i, got):
        # The workers whose exact sum this is.
        for ranks in ([0, 1, 2], [0, 1]):
            exact = np.sum([share(of, round_, i) for of in ranks], axis=0, dtype=np.float64)
            if np.allclose(got, exact, rtol=1e-5, atol=1e-5):
                return ranks

    bpsx.push_pull(np.zeros(1), name="first")
    report("ready")
    hear()
    handles = begin(0, SOME if number == 2 else len(SIZES))
    report("begun")
    if number == 2:
        hear()
    results = [bpsx.synchronize(handle) for handle in handles]
    report([[counted(0, i, got), zlib.crc32(got.tobytes())] for i, got in enumerate(results)])
    bpsx.barrier()
    results = [bpsx.synchronize(handle) for handle in begin(1, len(SIZES))]
    report([counted(1, i, got) for i, got in enumerate(results)])
    report([bpsx.rank(), bpsx.size()])
    bpsx.shutdown()
"""


def new_names(transport: str, some: int, **more: Any) -> Job:
    env = {**TRANSPORTS[transport], **SHRINK, "BPSX_FIXED_ORDER": "1"}
    return Job(NEW_NAMES.replace("SOME", str(some)), workers=3, servers=2, env=env, **more)


@pytest.mark.parametrize("some", [0, 25, 40])
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_worker_dies_while_new_names_are_declared(transport, some):
    """The scheduler is stopped, and hears of the names and of the death at once."""
    with new_names(transport, some) as job:
        for worker in job.workers:
            worker.wait_for_line("ready")
        job.scheduler.signal(signal.SIGSTOP)
        for worker in job.workers:
            worker.say("go")
            worker.wait_for_line("begun")
        strike(job.workers[2])
        job.workers[2].wait()
        job.scheduler.signal(signal.SIGCONT)
        text = "\n".join(p.text() for p in job.processes)
        reports = []
        for rank, worker in enumerate(job.workers[:2]):
            assert worker.wait() == 0, text
            *_, first, second, place = worker.reports()
            assert place == [rank, 2]
            assert second == [[0, 1]] * 40, second
            reports.append(first)
        assert job.scheduler.wait() == 0, job.scheduler.text()
        assert reports[0] == reports[1]
        with_all = [i for i, (ranks, _) in enumerate(reports[0]) if ranks == [0, 1, 2]]
        assert all(i < some for i in with_all), with_all
        assert all(ranks for ranks, _ in reports[0]), reports[0]
