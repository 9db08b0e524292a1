"""Servers of asynchronous jobs that end: the others continue with the values, and each push counts
once.
"""

from __future__ import annotations

import itertools
import signal
from collections.abc import Sequence
from typing import Any

import pytest
from deaths import QUICK
from network import NetJob, Network, needed

from support.jobs import TRANSPORTS, Job, Process

#: A worker adds 1 to each element whose number is its rank modulo 8, until it reads a line. So each
#: value tells how many pushes of whom it has. Worker 2 leaves after some pushes, if told to.
SOURCE = """
    import threading
    import bpsx, numpy as np

    bpsx.init()
    rank, leaves = bpsx.rank(), {leaves} and bpsx.rank() == 2
    sizes = {{"tiny": 8, "small": 1001, "large": 70_000, "cut": 300_000}}
    ones = {{n: (np.arange(size) % 8 == rank).astype(float) for n, size in sizes.items()}}
    over = threading.Event()

    def listen():
        while os.read(0, 1) != b"\\n":
            pass
        over.set()

    def push(name, data):
        return bpsx.push_pull_async(data, name, average=False)

    for name, size in sizes.items():
        assert (bpsx.seed(np.full(size, 0.0 if rank == 0 else 9.0), name) == 0).all()
    if not leaves:
        threading.Thread(target=listen, daemon=True).start()
    steps, wrong = 0, []
    while steps < 40 if leaves else not over.is_set():
        steps += 1
        handles = {{n: push(n, ones[n]) for n in np.random.permutation(list(sizes)).tolist()}}
        for name, handle in handles.items():
            got = bpsx.synchronize(handle)[rank::8]
            if not (got == steps).all():
                wrong.append([name, steps, got.min(), got.max()])
        if steps == 10:
            report("ready")
    report({{"steps": steps, "wrong": wrong[:5]}})
    if not leaves:
        hear()
        for name, size in sizes.items():
            value = bpsx.synchronize(push(name, np.zeros(size)))
            each = [np.unique(value[of::8]).tolist() for of in range(bpsx.size())]
            report({{"name": name, "pushes": each}})
        hear()
    bpsx.shutdown()
"""
ASYNC = {"BYTEPS_ENABLE_ASYNC": "1", "BPSX_ELASTIC": "servers", "BYTEPS_PARTITION_BYTES": "500000"}


class AsyncJob(Job):
    """A job that pushes without end."""

    def __init__(
        self,
        transport: str,
        *given: Any,
        leaves: bool = False,
        env: dict[str, str] | None = None,
        **more: Any,
    ) -> None:
        env = {**ASYNC, **TRANSPORTS[transport], **(env or {})}
        super().__init__(SOURCE.format(leaves=leaves), *given, env=env, **{"servers": 2, **more})

    def await_line(self, text: str) -> None:
        """Wait until all workers have said ``text``."""
        for worker in self.workers:
            worker.wait_for_line(text)

    def lose_scheduler(self) -> None:
        """Kill the scheduler; return when all workers go on without it."""
        assert self.scheduler is not None
        self.scheduler.signal(signal.SIGKILL)
        self.scheduler.wait()
        self.await_line("steps go on without it")

    def await_terms(self, terms: int) -> None:
        """Wait until all workers have moved their keys in so many terms."""
        assert self.scheduler is not None
        self.scheduler.wait_for_line("workers have moved", count=terms)

    def end_well(
        self, *, dead: Sequence[Process] = (), left: Sequence[Process] = (), status: int = 0
    ) -> None:
        """End the workers; each value must have each of their pushes once.

        ``status``: that of the scheduler.
        """
        assert self.scheduler is not None
        stay = [worker for worker in self.workers if worker not in (*dead, *left)]
        for worker in stay:
            worker.say("")
        for worker in stay:
            worker.wait_for_line('"steps"')
        for worker in stay:
            worker.say("")
        for worker in stay:
            worker.wait_for_line('"cut", "pushes"')
        for worker in stay:
            worker.say("")
        assert [worker.wait() for worker in (*stay, *left)] == [0] * len((*stay, *left))
        assert self.scheduler.wait() == status
        said = {w: [r for r in w.reports() if isinstance(r, dict)] for w in self.workers}
        ended = {w: r for w in (*stay, *left) for r in said[w] if "steps" in r}
        assert all(r["wrong"] == [] for r in ended.values()), ended
        for worker in stay:
            for value in said[worker]:
                for other, pushes in zip(self.workers, value.get("pushes", []), strict=False):
                    # How many of a dead worker's count is open.
                    assert other in dead or pushes == [ended[other]["steps"]], (value, ended)
        for process in self.processes:
            if process not in dead:
                assert "malformed 0" in process.text() or "malformed" not in process.text()


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_servers_that_are_killed_are_replaced_one_after_the_other(transport):
    with AsyncJob(transport, workers=3, servers=3) as job:
        job.await_line("ready")
        for term, server in enumerate(job.servers[:2], 1):
            server.signal(signal.SIGKILL)
            job.await_terms(term)
        job.end_well()


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_two_servers_are_killed_at_once(transport):
    """So that one dies while it takes keys of the other over."""
    with AsyncJob(transport, servers=3) as job:
        job.await_line("ready")
        for server in job.servers[:2]:
            server.signal(signal.SIGKILL)
        job.await_terms(2)
        job.end_well()


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_the_last_server_is_replaced_by_a_new_one(transport):
    """Then only workers have the values. The new server gets all of them."""
    with AsyncJob(transport, servers=1, env={"BPSX_ELASTIC_WAIT": "60"}) as job:
        job.await_line("ready")
        job.servers[0].signal(signal.SIGKILL)
        assert job.scheduler is not None
        job.scheduler.wait_for_line("the job waits 60 s for another")
        job.start_server(1)
        job.await_terms(1)
        job.end_well()


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_values_move_to_a_server_that_joins_and_back(transport):
    with AsyncJob(transport) as job:
        job.await_line("ready")
        job.start_server(2)
        job.await_terms(1)
        job.servers[2].signal(signal.SIGTERM)
        assert job.servers[2].wait() == 0
        job.end_well()


def test_a_server_that_was_silent_is_replaced():
    with AsyncJob("tcp", env=QUICK) as job:
        job.await_line("ready")
        job.servers[0].signal(signal.SIGSTOP)
        job.await_terms(1)
        job.servers[0].signal(signal.SIGCONT)
        assert job.servers[0].wait() == 1
        job.end_well()


class CutJob(AsyncJob, NetJob):
    """Each process has a link of its own."""


@needed
def test_a_server_whose_link_is_cut_is_replaced():
    names = ["scheduler", "server 0", "server 1", "worker 0", "worker 1"]
    with Network(names) as network, CutJob("zmq", network, env=QUICK) as job:
        job.await_line("ready")
        network.cut("server 0")
        job.await_terms(1)
        network.mend("server 0")
        assert job.servers[0].wait() == 1
        job.end_well()


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("order", list(itertools.permutations(["worker", "server"])))
def test_a_worker_and_a_server_are_killed_at_once(transport, order):
    """The other workers continue, and all of their pushes count."""
    with AsyncJob(transport, workers=3, env={"BPSX_SCHEDULER_WAIT": "60"}) as job:
        job.await_line("ready")
        victims = {"worker": job.workers[1], "server": job.servers[1]}
        for role in order:
            victims[role].signal(signal.SIGKILL)
        job.await_terms(1)
        job.end_well(dead=[job.workers[1]], status=1)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_pushes_of_a_worker_that_has_left_survive_their_server(transport):
    with AsyncJob(transport, workers=3, leaves=True) as job:
        job.await_line("ready")
        assert job.workers[2].wait() == 0
        job.servers[0].signal(signal.SIGKILL)
        job.await_terms(1)
        job.end_well(left=[job.workers[2]])


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_server_is_killed_while_the_scheduler_is_away(transport):
    with AsyncJob(transport) as job:
        job.await_line("ready")
        job.lose_scheduler()
        job.servers[0].signal(signal.SIGKILL)
        job.servers[0].wait()
        job.start_scheduler(int(job.port))
        job.await_terms(1)
        job.end_well()


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("also", ["", "server"])
def test_a_worker_is_killed_while_the_scheduler_is_away(transport, also):
    """The next scheduler goes on without it, and tells the servers."""
    with AsyncJob(transport, workers=3) as job:
        job.await_line("ready")
        job.lose_scheduler()
        struck = [job.workers[1], *([job.servers[1]] if also else [])]
        for process in struck:
            process.signal(signal.SIGKILL)
            process.wait()
        job.start_scheduler(int(job.port))
        assert job.scheduler is not None
        job.scheduler.wait_for_line("the other workers continue without it")
        if also:
            job.await_terms(1)
        job.end_well(dead=struck, status=1)


def test_a_broadcast_under_the_name_of_a_value_leaves_it_as_it_is():
    source = """
        import bpsx, numpy as np
        bpsx.init()
        bpsx.seed(np.full(9, 1.0), "w")
        bpsx.push_pull(np.full(9, 2.0), "w", average=False)
        bpsx.barrier()
        got = bpsx.broadcast(np.full(9, 50.0 + bpsx.rank()), root_rank=1, name="w")
        report("ready")
        hear()
        value = bpsx.push_pull(np.zeros(9), "w", average=False)
        report([set(got.tolist()) == {51.0}, set(value.tolist()) == {5.0}])
        bpsx.shutdown()
    """
    env = {"BPSX_ELASTIC_WAIT": "60", **ASYNC}
    with Job(source, servers=1, env=env) as job:
        for worker in job.workers:
            worker.wait_for_line("ready")
        job.servers[0].signal(signal.SIGKILL)
        job.start_server(1)
        for worker in job.workers:
            worker.say("")
        for worker in job.workers:
            assert worker.wait() == 0, worker.text()
            assert worker.reports()[-1] == [True, True]


def test_the_job_ends_with_a_server_if_it_is_not_elastic():
    with AsyncJob("zmq", env={"BPSX_ELASTIC": "off"}) as job:
        job.await_line("ready")
        job.servers[0].signal(signal.SIGKILL)
        assert all(worker.wait() != 0 for worker in job.workers)
        assert job.scheduler is not None
        assert "the job cannot go on without it: BPSX_ELASTIC=off" in job.scheduler.text()
