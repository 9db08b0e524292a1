"""Workers that join a running job: they get the model from the others, and all go on alike."""

from __future__ import annotations

import random
import signal
import time

import pytest

from support.jobs import TRANSPORTS, Job

#: A worker that adds what all push to its weights. All end in the same step, 20 steps after the
#: test has told them to. Each step takes a moment, so that a test that waits for a newcomer does
#: not cost many of them.
TRAINING = """
    import bpsx, time, zlib, numpy as np
    from bpsx.api.lifecycle import session

    NEWCOMER = {newcomer}
    bpsx.init()
    number = session().number
    step, last = 0, 0  # last: not known if 0
    weights = [np.zeros(n, np.float32) for n in (3, 2_000, 300_000)]
    gradients = [(1 + number) * (np.arange(w.size, dtype=np.float32) % 11) for w in weights]

    def get_model():
        global step, last, weights
        step, last = map(int, bpsx.broadcast(np.array([step, last]), 0, name="step"))
        weights = [bpsx.broadcast(w, 0, name=f"w{{i}}") for i, w in enumerate(weights)]

    if NEWCOMER:
        get_model()
    while not last or step < last:
        told = np.full(1, told_to_end(), np.float32)
        begun = [
            bpsx.push_pull_async(g, name=f"g{{i}}", average=False)
            for i, g in enumerate([*gradients, told])
        ]
        *added, told = [bpsx.synchronize(handle) for handle in begun]
        for w, a in zip(weights, added):
            w += a
        step += 1
        last = last or (step + 20 if told[0] else 0)
        report(["step", step, float(weights[0][1])])
        if session().pass_boundary().entered:
            report(["entered", bpsx.rank(), bpsx.size()])
            get_model()
        time.sleep(0.01)
    bpsx.barrier()
    report([bpsx.rank(), bpsx.size(), [zlib.crc32(w.tobytes()) for w in weights]])
    bpsx.shutdown()
"""
SHRINK = {"BPSX_ELASTIC": "shrink"}


class Growing(Job):
    """A job that runs :data:`TRAINING`, and workers that join it."""

    def __init__(self, workers: int, env: dict[str, str] | None = None, **more):
        source = TRAINING.format(newcomer=False)
        super().__init__(source, workers=workers, env={**SHRINK, **(env or {})}, **more)

    def lose(self, worker: int, steps: int = 1) -> None:
        """Kill a worker that has made some steps; return when the others go on."""
        self.workers[worker].wait_for_line('["step"', count=steps)
        count = self.scheduler.text().count("workers go on without")
        self.workers[worker].signal(signal.SIGKILL)
        self.scheduler.wait_for_line("workers go on without", count=count + 1)

    def join(self, number: int) -> int:
        """Start a worker in the place of a lost one; returns its index in ``workers``."""
        self.start_worker(number, TRAINING.format(newcomer=True))
        return len(self.workers) - 1

    def end_well(self, *lost: int) -> None:
        """End the training: all that live have the same weights, of a sum that counts each step."""
        self.tell_to_end()
        living = [w for i, w in enumerate(self.workers) if i not in lost]
        assert [w.wait() for w in living] == [0] * len(living), self.everything()
        reports = [w.reports()[-1] for w in living]
        assert sorted(r[0] for r in reports) == list(range(len(living)))
        assert {r[1] for r in reports} == {len(living)}
        assert len({str(r[2]) for r in reports}) == 1, reports
        assert self.scheduler.wait() == 0, self.everything()
        assert [s.wait() for s in self.servers] == [0] * len(self.servers)

    def everything(self) -> str:
        return "\n".join(p.text()[-3000:] for p in self.processes)

    def added(self, worker: int) -> list[float]:
        """What each step has added to the second weight of the first tensor."""
        weights = [r[2] for r in self.workers[worker].reports() if r[0] == "step"]
        return [b - a for a, b in zip(weights, weights[1:], strict=False)]


@pytest.mark.parametrize("servers", [1, 2])
@pytest.mark.parametrize("transport", ["zmq", "tcp", "shm"])
def test_a_lost_worker_is_replaced(transport, servers):
    lost = random.randrange(3)
    env = {**TRANSPORTS[transport], "BPSX_FIXED_ORDER": random.choice("01")}
    with Growing(3, env=env, servers=servers) as job:
        job.lose(lost, 10)
        new = job.join(lost)
        job.workers[new].wait_for_line('["step"')
        job.end_well(lost)
        whole, without = 6.0, 6.0 - (1 + lost)
        added = job.added((lost + 1) % 3)
        # Each step counts the workers that were there; before the loss, during it, and after.
        changes = [a for a, b in zip(added, [0.0, *added], strict=False) if a != b]
        assert changes == [whole, without, whole]


@pytest.mark.parametrize("transport", ["zmq", "shm"])
def test_one_of_several_processes_of_a_machine_is_replaced(transport):
    """Each speaks for itself. Those of a machine that sum among themselves cannot lose one."""
    env = {**TRANSPORTS[transport], "BPSX_LOCAL_REDUCE": "0"}
    with Growing(4, env=env, servers=2, processes=2) as job:
        job.lose(2, 10)
        new = job.join(2)
        job.workers[new].wait_for_line('["step"')
        job.end_well(2)


@pytest.mark.parametrize("transport", ["zmq", "tcp", "shm"])
def test_one_place_is_taken_again_and_again(transport):
    with Growing(2, env=TRANSPORTS[transport], servers=2) as job:
        lost = 1
        for _ in range(4):
            job.lose(lost)
            lost = job.join(1)
            job.workers[lost].wait_for_line('["step"')
        job.end_well(*range(1, lost))


def test_all_workers_are_replaced_one_by_one():
    with Growing(2, servers=2) as job:
        job.lose(0, 10)
        first = job.join(0)
        job.workers[first].wait_for_line('["step"')
        job.lose(1, 20)
        second = job.join(1)
        job.workers[second].wait_for_line('["step"')
        job.end_well(0, 1)


def test_a_silent_worker_is_replaced_and_goes_on_too_late():
    env = {"PS_HEARTBEAT_INTERVAL": "0.5", "PS_HEARTBEAT_TIMEOUT": "1"}
    with Growing(3, env=env, servers=2) as job:
        job.workers[1].wait_for_line('["step", 10')
        job.workers[1].signal(signal.SIGSTOP)
        job.scheduler.wait_for_line("workers go on without")
        new = job.join(1)
        job.workers[new].wait_for_line('["step"')
        job.workers[1].signal(signal.SIGCONT)
        assert job.workers[1].wait() != 0
        job.end_well(1)


def test_servers_and_workers_are_lost_and_a_worker_joins():
    with Growing(3, servers=3) as job:
        job.lose(2, 10)
        job.servers[0].signal(signal.SIGKILL)
        new = job.join(2)
        job.workers[new].wait_for_line('["step"')
        job.servers[1].signal(signal.SIGKILL)
        job.scheduler.wait_for_line("partitions", count=2)
        job.tell_to_end()
        living = [w for i, w in enumerate(job.workers) if i != 2]
        assert [w.wait() for w in living] == [0] * 3, job.everything()
        assert len({str(w.reports()[-1][2]) for w in living}) == 1


def test_a_worker_that_dies_while_it_joins_leaves_the_others_alone():
    with Growing(3, servers=2) as job:
        job.lose(1, 10)
        for _ in range(5):
            new = job.join(1)
            job.scheduler.wait_for_line("wants to join", count=new - 2)
            job.workers[new].signal(signal.SIGKILL)
            job.workers[new].wait()
        last = job.join(1)
        job.workers[last].wait_for_line('["step"')
        job.end_well(1, *range(3, last))


#: The same with one compressed tensor.
COMPRESSED = """
    import bpsx, time, zlib, numpy as np
    from bpsx.api.lifecycle import session
    from bpsx.compression.spec import compression

    NEWCOMER, SHAPE = {newcomer}, (200, 300)
    bpsx.init()
    number = session().number
    spec = {{"compressor": {codec!r}, "k": 600, "ef": "vanilla", "seed": 3}}
    if {codec!r} == "onebit":
        spec = {{"compressor": "onebit", "scaling": True, "ef": "vanilla"}}
    if {codec!r} == "powersgd":
        spec = {{"compressor": "powersgd", "rank": 2, "ef": "vanilla"}}
    session().declare("g", compression(spec))
    step, last, weights = 0, 0, np.zeros(SHAPE, np.float32)  # last: not known if 0

    def get_model():
        global step, last, weights
        step, last = map(int, bpsx.broadcast(np.array([step, last]), 0, name="step"))
        weights = bpsx.broadcast(weights, 0, name="weights")

    if NEWCOMER:
        get_model()
    draw = np.random.default_rng(number)
    while not last or step < last:
        gradient = draw.standard_normal(SHAPE).astype(np.float32)
        weights += bpsx.push_pull(gradient, name="g", average=True)
        told = bpsx.push_pull(np.full(1, told_to_end(), np.float32), name="told", average=False)
        step += 1
        last = last or (step + 20 if told[0] else 0)
        report(["step", step, zlib.crc32(weights.tobytes())])
        if session().pass_boundary().entered:
            report(["entered"])
            get_model()
        time.sleep(0.002)
    bpsx.barrier()
    report(["end", zlib.crc32(weights.tobytes())])
    bpsx.shutdown()
"""


def test_a_newcomer_may_die_while_a_scheduler_takes_the_job_over():
    """That scheduler has its HELLO, and still waits for a worker of the job."""
    with Growing(3, servers=2, env={"BPSX_GATHER_GRACE": "0.5"}) as job:
        job.lose(2, 10)
        job.workers[1].signal(signal.SIGSTOP)
        job.scheduler.signal(signal.SIGKILL)
        job.scheduler.wait()
        job.start_scheduler(int(job.port))
        new = job.join(2)
        job.scheduler.wait_for_line("arrived: worker 2")
        job.workers[new].signal(signal.SIGKILL)
        time.sleep(1.5)  # longer than BPSX_GATHER_GRACE
        job.workers[1].signal(signal.SIGCONT)
        job.end_well(2, new)


@pytest.mark.parametrize("codec", ["onebit", "topk", "randomk", "powersgd"])
def test_a_worker_joins_and_a_server_dies_with_compression(codec):
    """The new server rebuilds its residual also from sums that the newcomer has no part in."""
    source = COMPRESSED.format(newcomer=False, codec=codec)
    env = {**SHRINK, "BYTEPS_MIN_COMPRESS_BYTES": "0", "BYTEPS_PARTITION_BYTES": "65536"}
    with Job(source, workers=3, servers=2, env=env) as job:
        job.workers[1].wait_for_line('["step", 30')
        job.workers[1].signal(signal.SIGKILL)
        job.scheduler.wait_for_line("workers go on without")
        job.start_worker(1, COMPRESSED.format(newcomer=True, codec=codec))
        job.workers[3].wait_for_line('["step"')
        job.servers[0].signal(signal.SIGKILL)
        job.tell_to_end()
        living = [job.workers[i] for i in (0, 2, 3)]
        everything = "\n".join(p.text()[-1500:] for p in job.processes)
        assert [w.wait() for w in living] == [0, 0, 0], everything
        assert len({str(w.reports()[-1]) for w in living}) == 1
        of = [[r for r in w.reports() if r[0] == "step"] for w in living]
        assert of[0] == of[1] and of[2] == of[0][-len(of[2]) :], "weights differ in some step"
        log = "\n".join(s.text() for s in job.servers)
        assert "starts from zero" not in log, log
