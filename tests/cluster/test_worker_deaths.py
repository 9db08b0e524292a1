"""Jobs that lose workers: the others go on, all with the same sums, in which the lost worker counts
or does not.
"""

from __future__ import annotations

import random
import signal

import pytest

from support.jobs import TRANSPORTS, Job

#: Bytes of the tensors' elements: sent in batches without and with acknowledgement, whole, and cut.
SIZES = [3, 2_000, 30_000, 1_500_000]
#: A worker that checks each result against float64, and says which workers it sums. It makes some
#: steps, and goes on until the test has struck all that it will: then all end in the same step. Two
#: steps more cannot end before the losses are known.
TRAINING = """
    import bpsx, zlib, numpy as np

    SIZES, STEPS, WORKERS = {sizes}, {steps}, {workers}
    bpsx.init()
    number = bpsx.rank()

    some = [slice(None, None, 1 + n // 5_000) for n in SIZES]
    base = [np.arange(n, dtype=np.float32) % 7 for n in SIZES]

    def share(of, step, i, part=slice(None)):
        return base[i][part] + np.float32(7 ** of * (step + i + 1))

    def counted(got, step, i, average):
        # The sets of workers whose exact sum or average this is: with all, or without some.
        found = []
        parts = [share(of, step, i, some[i]) for of in range(WORKERS)]
        first, starts = float(got[0]), [float(part[0]) for part in parts]
        for mask in range(1, 2**WORKERS):
            ranks = [of for of in range(WORKERS) if mask >> of & 1]
            start = sum(starts[of] for of in ranks) / (len(ranks) if average else 1)
            if abs(first - start) > 1e-4 * start:  # most sets; NumPy takes longer to find out
                continue
            exact = np.sum([parts[of] for of in ranks], axis=0, dtype=np.float64)
            if np.allclose(got[some[i]], exact / (len(ranks) if average else 1), rtol=1e-5):
                found.append(ranks)
        return found

    step, last = 0, 0
    while not last or step < last:
        pass_gate(step)
        inputs = [share(number, step, i) for i in range(len(SIZES))]
        handles = [
            bpsx.push_pull_async(a, name=f"w{{i}}", average=i % 2 == 1, output=a)
            for i, a in enumerate(inputs)
        ]
        told = np.full(1, told_to_end(), np.float32)
        handles.append(bpsx.push_pull_async(told, name="told", average=False))
        *results, told = [bpsx.synchronize(handle) for handle in handles]
        report(["step", step])
        report([
            [counted(got, step, i, i % 2 == 1), zlib.crc32(got.tobytes())]
            for i, got in enumerate(results)
        ])
        step += 1
        last = last or (max(STEPS, step + 2) if told[0] else 0)
    bpsx.barrier()
    report([bpsx.rank(), bpsx.size()])
    bpsx.shutdown()
"""
SHRINK = {"BPSX_ELASTIC": "shrink"}


class Shrinking(Job):
    """A job that runs :data:`TRAINING`."""

    def __init__(
        self,
        workers: int,
        steps: int = 12,
        env: dict[str, str] | None = None,
        sizes: list[int] = SIZES,
        **more,
    ):
        self.sizes = sizes
        source = TRAINING.format(sizes=sizes, steps=steps, workers=workers)
        super().__init__(source, workers=workers, env={**SHRINK, **(env or {})}, **more)

    def await_step(self, worker: int, step: int) -> None:
        self.workers[worker].wait_for_line(f'["step", {step}]')

    def everything(self) -> str:
        return "\n".join(p.text() for p in self.processes)

    def end_well(self, *lost: int) -> None:
        """End the training. All survivors have the same results, of an allowed set of workers."""
        self.end_without(*([of] for of in lost))

    def end_without(self, *losses: list[int]) -> None:
        """The same. ``losses``: workers that are lost together."""
        assert self.scheduler is not None
        self.tell_to_end()
        numbers = range(len(self.workers))
        lost = [of for loss in losses for of in loss]
        living = [of for of in numbers if of not in lost]
        reports = {}
        for of in living:
            assert self.workers[of].wait() == 0, self.everything()
            *steps, place = self.workers[of].reports()
            assert place == [living.index(of), len(living)], self.everything()
            reports[of] = [one for one in steps if one[0] != "step"]
        assert self.scheduler.wait() == 0, self.everything()
        first = reports[living[0]]
        assert all(report == first for report in reports.values()), self.everything()
        # In the order of deaths: with all, without the first, and so on; never back again.
        gone = [sum(losses[:n], []) for n in range(len(losses) + 1)]
        allowed = [[of for of in numbers if of not in some] for some in gone]
        for i in range(len(self.sizes)):
            counted = [[one for one in step[i][0] if one in allowed] for step in first]
            assert all(counted), counted
            ages = [allowed.index(one[0]) for one in counted]
            assert ages == sorted(ages) and ages[-1] == len(losses), ages
        log = self.scheduler.text()
        assert log.count("workers go on without") == len(losses), log


@pytest.mark.parametrize("servers", [1, 2])
@pytest.mark.parametrize("transport", ["zmq", "tcp", "shm"])
def test_survivors_go_on_when_a_worker_is_killed(transport, servers):
    lost, rng = random.randrange(3), random.Random()
    env = {**TRANSPORTS[transport], "BPSX_FIXED_ORDER": rng.choice("01")}
    with Shrinking(3, env=env, servers=servers) as job:
        job.await_step(rng.randrange(3), 4)
        job.workers[lost].signal(signal.SIGKILL)
        job.end_well(lost)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_two_workers_are_killed_at_once(transport):
    with Shrinking(4, servers=2, env=TRANSPORTS[transport]) as job:
        job.await_step(0, 3)
        for lost in (1, 3):
            job.workers[lost].signal(signal.SIGKILL)
        job.end_well(*_order(job, 1, 3))


def _order(job: Job, *lost: int) -> list[int]:
    """The order in which the scheduler has noticed the deaths of workers."""
    assert job.scheduler is not None
    for of in lost:
        job.scheduler.wait_for_line(f"workers go on without worker {of}")
    log = job.scheduler.text()
    return sorted(lost, key=lambda of: log.index(f"workers go on without worker {of}"))


def test_one_worker_is_left_in_the_end():
    with Shrinking(3, servers=1) as job:
        for step, lost in ((3, 0), (6, 2)):
            job.await_step(1, step)
            job.workers[lost].signal(signal.SIGKILL)
        job.end_well(0, 2)


def test_a_worker_that_was_only_silent_ends_with_an_error():
    quick = {"PS_HEARTBEAT_INTERVAL": "0.5", "PS_HEARTBEAT_TIMEOUT": "2"}
    with Shrinking(3, servers=2, env=quick) as job:
        job.await_step(0, 3)
        job.workers[2].signal(signal.SIGSTOP)
        assert job.scheduler is not None
        job.scheduler.wait_for_line("workers go on without worker 2")
        job.workers[2].signal(signal.SIGCONT)
        assert job.workers[2].wait() == 1
        silent = f"worker 2 (127.0.0.1, pid {job.workers[2].popen.pid}) is gone: "
        error = f"PeerLostError: this worker is not awaited any more: {silent}"
        assert error in job.workers[2].text(), job.workers[2].text()
        job.end_well(2)


def test_a_worker_and_a_server_are_killed_at_once():
    for _ in range(3):
        with Shrinking(3, servers=2, env={"BPSX_FIXED_ORDER": "1"}) as job:
            job.await_step(0, 3)
            both = [job.workers[1], job.servers[random.randrange(2)]]
            random.shuffle(both)
            for process in both:
                process.signal(signal.SIGKILL)
            job.end_well(1)


def test_a_job_that_does_not_shrink_ends_when_a_worker_dies():
    with Shrinking(2, servers=2, env={"BPSX_ELASTIC": "servers"}) as job:
        job.await_step(0, 3)
        job.workers[1].signal(signal.SIGKILL)
        assert job.workers[0].wait() != 0
        assert "PeerLostError" in job.workers[0].text()


OTHERS = """
    import bpsx, time, numpy as np
    from bpsx.errors import BpsxError, ConfigError, PeerLostError

    bpsx.init()
    number = bpsx.rank()
    bpsx.push_pull(np.ones(4), name="begin")
    report("ready")
    if number == 0:
        {dead}
    {others}
    while bpsx.size() == 3:  # an operation may end a moment before this process hears of the loss
        time.sleep(0.001)
    report([bpsx.rank(), bpsx.size()])
    report(float(bpsx.push_pull(np.full(3, float(number)), name="end")[0]))
    bpsx.shutdown()
"""
#: What worker 0 does before it dies, and what the others do -> what they report of it.
SCENES = {
    "barrier": ("hear()", "bpsx.barrier()", []),
    "broadcast from a survivor": (
        "hear()",
        """report(float(bpsx.broadcast(np.full(3, float(number)), root_rank=2, name="b")[0]))""",
        [2.0],
    ),
    "broadcast from the dead": (
        "hear()",
        """
    try:
        bpsx.broadcast(np.full(9, float(number)), root_rank=0, name="b")
    except PeerLostError as e:
        report("worker 0" in str(e))
    """,
        [True],
    ),
    "join": (
        "hear()",
        """
    last = bpsx.join()
    place = np.full(3, float(bpsx.rank()))
    report(float(bpsx.broadcast(place, root_rank=last, name="b")[0]) == last)
    """,
        [True],
    ),
    "dies in join": ("bpsx.join()", "hear(); report(bpsx.join() in (0, 1))", [True]),
    "fails": ("raise ValueError('enough')", "bpsx.barrier()", []),
}


@pytest.mark.parametrize("scene", SCENES)
def test_other_operations_go_on_without_a_worker(scene):
    dead, others, wanted = SCENES[scene]
    with Job(OTHERS.format(dead=dead, others=others), workers=3, servers=1, env=SHRINK) as job:
        for worker in job.workers:
            worker.wait_for_line("ready")
        if scene != "fails":
            job.workers[0].signal(signal.SIGKILL)
        assert job.workers[0].wait() != 0
        if scene == "dies in join":
            job.scheduler.wait_for_line("workers go on without worker 0")
            for worker in job.workers[1:]:
                worker.say("go")
        for rank, worker in enumerate(job.workers[1:]):
            assert worker.wait() == 0, worker.text() + job.scheduler.text()
            _, *reports, place, mean = worker.reports()
            assert place == [rank, 2] and mean == 1.5
            assert reports == wanted, reports
        assert job.scheduler.wait() == 0
