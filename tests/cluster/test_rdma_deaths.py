"""Jobs over RDMA that lose servers and workers, and get others: no sum is lost, and all are right.

tests/machine has an emulated machine with an adapter.
"""

from __future__ import annotations

import signal

import pytest

from cluster.deaths import Striking, source
from cluster.test_async_servers import AsyncJob
from cluster.test_rdma import RDMA, with_rdma
from cluster.test_server_deaths import _TRAINING, undisturbed
from cluster.test_worker_deaths import Shrinking
from cluster.test_worker_deaths_compressed import CASES, Compressed
from cluster.test_worker_departures import Departing
from cluster.test_worker_joins import Growing
from support.jobs import Job

#: Elements: sent in batches without and with acknowledgement, whole, and cut.
SIZES = [3, 2_000, 30_000, 300_000]
#: The largest is cut into three.
CUT = {**RDMA, "BYTEPS_PARTITION_BYTES": "500000"}
#: The tests look on, so that they can act between two steps.
SLOWLY = _TRAINING.replace("report(step)", "report(step); time.sleep(0.05)").replace(
    "import bpsx,", "import time, bpsx,"
)


def kill(job: Job, server: int) -> None:
    job.servers[server].signal(signal.SIGKILL)
    job.servers[server].wait()


@with_rdma
@pytest.mark.parametrize("processes", [1, 2])
def test_servers_die_one_after_the_other_and_a_new_one_joins(processes: int) -> None:
    """The second is the last: the job waits. Two processes sum in the memory they push from."""
    steps, workers = 40, 2
    env = {
        **CUT,
        "BPSX_FIXED_ORDER": "1",
        "BPSX_ELASTIC": "servers",
        "BPSX_ELASTIC_WAIT": "600",
        "BYTEPS_FORCE_DISTRIBUTED": "1",
    }
    source = SLOWLY.format(sizes=SIZES, steps=steps)
    with Job(source, workers=workers, servers=2, processes=processes, env=env) as job:
        assert job.scheduler is not None
        job.workers[0].wait_for_line("3")
        kill(job, 0)
        job.scheduler.wait_for_line("workers have moved")
        job.workers[1].wait_for_line("8")
        kill(job, 1)
        job.scheduler.wait_for_line("the last server, and the job waits")
        job.start_server(2)
        for worker in job.workers:
            assert worker.wait() == 0, worker.text() + job.scheduler.text()
            assert worker.reports()[-1] == undisturbed(workers, steps, SIZES)
        assert job.scheduler.wait() == 0, job.scheduler.text()


@with_rdma
def test_a_server_that_is_stopped_is_replaced() -> None:
    env = {
        **RDMA,
        "BPSX_ELASTIC": "servers",
        "PS_HEARTBEAT_INTERVAL": "2",
        "PS_HEARTBEAT_TIMEOUT": "12",
    }
    with Striking(source("many"), servers=2, env=env) as job:
        job.begin(1)
        job.replace_silent()


@with_rdma
def test_two_servers_die_at_once() -> None:
    """One of them while it takes keys of the other over."""
    env = {**CUT, "BPSX_ELASTIC": "servers"}
    with Striking(source("large"), servers=3, env=env) as job:
        job.begin()
        for server in (0, 1):
            kill(job, server)
        job.resume(*job.servers[:2])
        job.end_well(*job.servers[:2])


@with_rdma
def test_the_scheduler_and_a_server_die() -> None:
    env = {**RDMA, "BPSX_ELASTIC": "servers", "BPSX_SCHEDULER_WAIT": "600"}
    with Striking(source("small"), servers=2, env=env) as job:
        assert job.scheduler is not None
        job.begin()
        job.scheduler.signal(signal.SIGKILL)
        job.scheduler.wait()
        job.await_line("steps go on without it")
        kill(job, 0)
        job.start_scheduler(int(job.port))
        job.resume(job.servers[0])
        job.end_well(job.servers[0])


@with_rdma
def test_servers_of_an_asynchronous_job_die() -> None:
    with AsyncJob("zmq", env=RDMA, servers=3) as job:
        job.await_line("ready")
        for term, server in enumerate(job.servers[:2], 1):
            server.signal(signal.SIGKILL)
            job.await_terms(term)
        job.end_well()


@with_rdma
def test_a_server_leaves_in_good_order() -> None:
    """It yields its keys between two steps."""
    steps = 30
    env = {**CUT, "BPSX_FIXED_ORDER": "1", "BPSX_ELASTIC": "servers"}
    with Job(SLOWLY.format(sizes=SIZES, steps=steps), workers=2, servers=2, env=env) as job:
        job.workers[0].wait_for_line("3")
        job.servers[1].signal(signal.SIGTERM)
        assert job.servers[1].wait() == 0, job.servers[1].text()
        assert "other servers take the keys over" in job.servers[1].text()
        for worker in job.workers:
            assert worker.wait() == 0, worker.text()
            assert worker.reports()[-1] == undisturbed(2, steps, SIZES)


@with_rdma
def test_a_worker_and_a_server_leave_at_once() -> None:
    with Departing(env=RDMA, servers=2) as job:
        job.workers[1].wait_for_line('["step", 10,')
        job.servers[0].signal(signal.SIGTERM)
        job.workers[1].signal(signal.SIGTERM)
        assert job.servers[0].wait() == 0
        job.end_well(1)


@with_rdma
def test_survivors_go_on_when_a_worker_is_killed_and_then_a_server() -> None:
    with Shrinking(3, steps=18, env=CUT, sizes=SIZES, servers=2) as job:
        assert job.scheduler is not None
        job.await_step(0, 4)
        job.workers[1].signal(signal.SIGKILL)
        job.scheduler.wait_for_line("workers go on without worker 1")
        job.await_step(0, 10)
        kill(job, 1)
        job.end_well(1)


@with_rdma
def test_a_lost_worker_is_replaced() -> None:
    env = {**CUT, "BPSX_ELASTIC": "replace", "BPSX_ELASTIC_WAIT": "600"}
    with Growing(2, env=env, servers=1) as job:
        assert job.scheduler is not None
        job.lose(1, 10)
        job.scheduler.wait_for_line("all workers have stopped, and wait for another")
        job.workers[job.join(1)].wait_for_line('["step"')
        job.end_well(1)
        added = job.added(0)
        assert set(added) <= {1.0, 3.0} and added[-1] == 3.0, added


@with_rdma
def test_the_successor_of_a_lost_worker_dies_too() -> None:
    env = {**CUT, "BPSX_ELASTIC": "replace", "BPSX_ELASTIC_WAIT": "600"}
    with Growing(2, env=env, servers=1) as job:
        assert job.scheduler is not None
        job.lose(1, 10)
        successor = job.join(1)
        job.lose(successor)
        job.workers[job.join(1)].wait_for_line('["step"')
        job.end_well(1, successor)


@with_rdma
def test_compressed_gradients_survive_a_server_and_a_worker(monkeypatch) -> None:
    """Those of a compressor are too large for a batch, so they are sent from where they are."""
    monkeypatch.setitem(CASES, "large", {"compressor": "topk", "k": 0.9, "ef": "vanilla"})
    with Compressed(["large"], 3, servers=2, env=RDMA) as job:
        job.await_step(0, 3)
        job.strike_server(0)
        job.await_step(2, 8)
        job.strike(1)
        job.end_well(1)


@with_rdma
def test_a_job_on_one_machine_copies_no_more_than_it_has_to() -> None:
    """Answers that are kept stay where they have arrived."""
    source = """
        import bpsx, numpy as np
        from bpsx.api.verbs import session
        bpsx.init()
        x = np.ones(320_000, np.float32)
        for step in range(6):
            before = session()._endpoint.copied
            bpsx.push_pull(x, "g", average=False)
            report(session()._endpoint.copied - before)
        bpsx.shutdown()
    """
    env = {**RDMA, "BPSX_ELASTIC": "servers"}
    with Job(source, workers=2, servers=2, env=env) as job:
        for copied in job.results():
            assert copied == [320_000 * 4] * 6  # pushes only, into the outbox


#: Two push_pulls that count as a whole; worker 2 takes part in the first only. All elements are
#: kept by the compressor, so sums are exact.
_HALF_A_STEP = """
    import bpsx, numpy as np, time
    from bpsx.api.verbs import session

    bpsx.init()
    n, number = 20_000, bpsx.rank()
    for name in "ab":
        bpsx.declare(name, compression={"compressor": "topk", "k": n})
    group = session().group_of("ab")
    x = np.arange(n, dtype=np.float32) % 13 + 1
    handles = [bpsx.push_pull_async(x * 10**number, "a", average=False)]
    if number == 2:
        time.sleep(10_000)
    handles.append(bpsx.push_pull_async(x * 10**number, "b", average=False))
    session().seal(group)
    while session()._core.counters()["bytes_received"] < 8 * n:
        time.sleep(0.01)
    report(any(bpsx.poll(handle) for handle in handles))
    report([float((bpsx.synchronize(handle) / x).mean()) for handle in handles])
    bpsx.shutdown()
"""


@with_rdma
def test_a_push_is_intact_until_its_group_has_been_committed() -> None:
    """It has been answered, and is pushed again as a worker of the group dies."""
    env = {**RDMA, "BPSX_ELASTIC": "shrink", "BYTEPS_MIN_COMPRESS_BYTES": "0"}
    with Job(_HALF_A_STEP, workers=3, servers=1, env=env) as job:
        for worker in job.workers[:2]:
            worker.wait_for_line("false")
        job.workers[2].signal(signal.SIGKILL)
        for worker in job.workers[:2]:
            assert worker.wait() == 0, worker.text()
            assert worker.reports() == [False, [11.0, 11.0]]
