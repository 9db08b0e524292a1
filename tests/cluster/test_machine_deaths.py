"""Jobs whose machines have several processes that sum among themselves, and that lose some: a
machine leaves as a whole, and others join.
"""

from __future__ import annotations

import random
import signal
import textwrap

import pytest

from cluster.test_worker_deaths import SHRINK, Shrinking
from cluster.test_worker_deaths_compressed import CASES
from cluster.test_worker_departures import Departing
from cluster.test_worker_joins import Growing
from support.jobs import TRANSPORTS, Job

EACH = 2  # processes of a machine


def machine(number: int) -> list[int]:
    return list(range(number * EACH, (number + 1) * EACH))


def everything(job: Job) -> str:
    return "\n".join(process.text()[-3000:] for process in job.processes)


def end_neighbours(job: Job, killed: int) -> None:
    """The other processes of the machine end, and say why."""
    for other in machine(killed // EACH):
        if other != killed:
            assert job.workers[other].wait() != 0
            text = job.workers[other].text()
            assert f"worker {killed} (" in text and "PeerLostError" in text, text
            assert f"its machine leaves the job with it: worker {other} (" in text


@pytest.mark.parametrize("of", ["root", "other"])
@pytest.mark.parametrize("transport", ["zmq", "tcp", "shm"])
def test_others_go_on_when_a_process_is_killed(transport, of):
    number, rng = random.randrange(3), random.Random()
    killed = machine(number)[-1 if of == "root" else 0]
    env = {**TRANSPORTS[transport], "BPSX_FIXED_ORDER": rng.choice("01")}
    with Shrinking(3 * EACH, env=env, servers=2, processes=EACH) as job:
        job.await_step(rng.randrange(3 * EACH), 4)
        job.workers[killed].signal(signal.SIGKILL)
        end_neighbours(job, killed)
        job.end_without(machine(number))


def test_all_processes_of_a_machine_are_killed_at_once():
    with Shrinking(3 * EACH, servers=2, processes=EACH) as job:
        job.await_step(0, 3)
        for worker in machine(1):
            job.workers[worker].signal(signal.SIGKILL)
        job.end_without(machine(1))


def test_one_machine_is_left_in_the_end():
    with Shrinking(3 * EACH, servers=1, processes=EACH) as job:
        for step, killed in ((3, 0), (6, 5)):
            job.await_step(2, step)
            job.workers[killed].signal(signal.SIGKILL)
            end_neighbours(job, killed)
        job.end_without(machine(0), machine(2))


def test_a_process_and_a_server_are_killed_at_once():
    with Shrinking(3 * EACH, servers=2, processes=EACH, env={"BPSX_FIXED_ORDER": "1"}) as job:
        job.await_step(0, 3)
        both = [job.workers[3], job.servers[random.randrange(2)]]
        random.shuffle(both)
        for process in both:
            process.signal(signal.SIGKILL)
        job.end_without(machine(1))


def test_the_last_machine_ends_the_job():
    with Shrinking(2 * EACH, servers=1, processes=EACH) as job:
        job.await_step(0, 3)
        job.workers[0].signal(signal.SIGKILL)
        end_neighbours(job, 0)
        job.scheduler.wait_for_line("workers go on without")
        job.workers[3].signal(signal.SIGKILL)
        assert job.workers[2].wait() != 0
        assert "it was the last machine" in job.workers[2].text()


class GrowingMachines(Growing):
    """A job of machines that are lost and replaced."""

    def __init__(self, machines: int, **more):
        super().__init__(machines * EACH, processes=EACH, **more)

    def join_machine(self, number: int) -> list[int]:
        """Start the processes of a machine; returns their indices in ``workers``."""
        return [self.join(worker) for worker in machine(number)]


@pytest.mark.parametrize("transport", ["zmq", "tcp", "shm"])
def test_a_lost_machine_is_replaced(transport):
    with GrowingMachines(2, env=TRANSPORTS[transport], servers=2) as job:
        killed = random.randrange(2 * EACH)
        number = killed // EACH
        job.lose(killed, 10)
        end_neighbours(job, killed)
        new = job.join_machine(number)
        for worker in new:
            job.workers[worker].wait_for_line('["step"')
        job.end_well(*machine(number))
        whole = float(sum(1 + of for of in range(2 * EACH)))
        without = whole - sum(1 + of for of in machine(number))
        added = job.added(machine(1 - number)[0])
        changes = [a for a, b in zip(added, [0.0, *added], strict=False) if a != b]
        assert changes == [whole, without, whole]


def test_a_machine_enters_once_all_of_its_processes_have_come():
    with GrowingMachines(2, servers=1, env={"BYTEPS_LOG_LEVEL": "INFO"}) as job:
        job.lose(0, 10)
        first = job.join(0)
        job.workers[first].wait_for_line("waits for worker 1 on the same machine")
        second = job.join(1)
        for worker in (first, second):
            job.workers[worker].wait_for_line('["step"')
        job.end_well(0, 1)


def test_a_process_that_dies_while_its_machine_joins_leaves_the_others_alone():
    with GrowingMachines(3, servers=2) as job:
        job.lose(2, 10)
        for of in (0, 1):
            new = job.join_machine(1)
            job.scheduler.wait_for_line("wants to join", count=len(job.workers) - 3 * EACH)
            for worker in (new[of], new[1 - of]):
                job.workers[worker].signal(signal.SIGKILL)
                job.workers[worker].wait()
        last = job.join_machine(1)
        for worker in last:
            job.workers[worker].wait_for_line('["step"')
        job.end_well(*machine(1), *range(3 * EACH, last[0]))


def test_a_job_grows_beyond_its_machines():
    env = {"BPSX_MAX_WORKERS": "3"}
    with GrowingMachines(2, servers=2, env=env) as job:
        job.workers[0].wait_for_line('["step", 10')
        new = job.join_machine(2)
        for worker in new:
            job.workers[worker].wait_for_line('["step"')
        job.end_well()


# ---- machines that leave


@pytest.mark.parametrize("asks", [0, 1])
@pytest.mark.parametrize("transport", ["zmq", "tcp", "shm"])
def test_a_machine_leaves_when_one_of_its_processes_gets_sigterm(transport, asks):
    with Departing(3 * EACH, env=TRANSPORTS[transport], servers=2, processes=EACH) as job:
        job.ask(2 + asks)
        for of in machine(1):
            assert job.left(of)[:3] == ["left", of, 3 * EACH]
        job.end_well(*machine(1))
        other = job.workers[3 - asks].text()
        assert f"worker {2 + asks} (" in other and "on the same machine leaves it" in other


def test_all_machines_leave_at_once():
    with Departing(2 * EACH, servers=2, processes=EACH) as job:
        for worker in job.workers:
            worker.wait_for_line('["step", 10,')
        for worker in job.workers:
            worker.signal(signal.SIGTERM)
        assert {job.left(of)[0] for of in range(2 * EACH)} == {"left"}
        assert job.scheduler.wait() == 0, job.everything()


# ---- what is under way


@pytest.mark.parametrize("transport", ["zmq", "shm"])
def test_compressed_sums_are_the_same_on_all_that_are_left(transport):
    names = ["onebit vanilla", "topk corrected", "randomk sparse", "dithering vanilla"]
    killed = random.randrange(2 * EACH)
    source = MACHINES_COMPRESSED.format(cases={name: CASES[name] for name in names}, steps=30)
    env = {**SHRINK, **TRANSPORTS[transport], "BYTEPS_MIN_COMPRESS_BYTES": "0"}
    with Job(source, workers=3 * EACH, servers=2, processes=EACH, env=env) as job:
        job.workers[0].wait_for_line('["step", 10')
        job.workers[killed].signal(signal.SIGKILL)
        job.scheduler.wait_for_line("workers go on without")
        job.servers[0].signal(signal.SIGKILL)
        living = [of for of in range(3 * EACH) if of not in machine(killed // EACH)]
        assert [job.workers[of].wait() for of in living] == [0] * len(living), everything(job)
        reports = [job.workers[of].reports() for of in living]
        assert all(report == reports[0] for report in reports) and len(reports[0]) == 31


#: Gradients that are the same in each step, so that error feedback shows if it is lost.
MACHINES_COMPRESSED = """
    import bpsx, zlib, numpy as np

    bpsx.init()
    cases = {cases}
    for name, params in cases.items():
        bpsx.declare(name, compression=params)
    number = bpsx.rank()
    for step in range({steps}):
        rng = np.random.default_rng([step, number])
        inputs = {{name: rng.standard_normal(40_001, np.float32) for name in cases}}
        handles = [
            bpsx.push_pull_async(a, name=name, learning_rate=1 / (step + 1))
            for name, a in inputs.items()
        ]
        report(["step", step, [zlib.crc32(bpsx.synchronize(h).tobytes()) for h in handles]])
    bpsx.barrier()
    report(bpsx.size())
    bpsx.shutdown()
"""


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64", "int32"])
def test_averages_divide_by_the_workers_that_are_left(dtype):
    """Half types are divided on the machine first."""
    source = """
        import bpsx, numpy as np

        bpsx.init()
        number, size = bpsx.rank(), bpsx.size()
        for step in range(60):
            if step == 30 and number == 2:
                report("dying")
                hear()
            a = np.full(5_000, 8 * (number + 1), "{dtype}")
            got = bpsx.push_pull(a, name="a", average=True)
            assert len(np.unique(got)) == 1
            report(float(got[0]))
        bpsx.shutdown()
    """
    with Job(source.format(dtype=dtype), workers=3 * EACH, processes=EACH, env=SHRINK) as job:
        job.workers[2].wait_for_line("dying")
        job.workers[2].signal(signal.SIGKILL)
        living = [0, 1, 4, 5]
        assert [job.workers[of].wait() for of in living] == [0] * 4, everything(job)
        reports = [job.workers[of].reports() for of in living]
        # 8 times the mean of 1 to 6, and of 1, 2, 5 and 6: both 28.
        assert all(report == [28.0] * 60 for report in reports), reports


SCENES = {
    "broadcast from the dead": """
        try:
            bpsx.broadcast(np.full(9, float(number)), root_rank=2, name="b")
        except PeerLostError as e:
            report("worker 2" in str(e))
    """,
    "barrier": "bpsx.barrier(); report(True)",
    "join": "report(bpsx.join() in range(4))",
    "root in join": """
        if number % 2 == 0:  # the root works for its machine, though it has joined
            sums = [bpsx.push_pull(np.ones(9), name=f"j{i}", average=False)[0] for i in range(3)]
            assert sums == [2.0] * 3, sums
        report(bpsx.join() in range(4))
    """,
}


OTHERS = """
import bpsx, numpy as np, time
from bpsx.errors import PeerLostError

bpsx.init()
number = bpsx.rank()
bpsx.push_pull(np.ones(4), name="begin")
report("ready")
if number in (2, 3):
    hear()
{others}
while bpsx.size() == 6:  # a process may have a sum a moment before it hears of the loss
    time.sleep(0.001)
report([bpsx.rank(), bpsx.size()])
report(float(bpsx.push_pull(np.full(3, float(number)), name="end")[0]))
bpsx.shutdown()
"""


@pytest.mark.parametrize("scene", SCENES)
def test_other_operations_go_on_without_a_machine(scene):
    source = OTHERS.format(others=textwrap.dedent(SCENES[scene]))
    with Job(source, workers=6, processes=2, env=SHRINK) as job:
        for worker in job.workers:
            worker.wait_for_line("ready")
        job.workers[2].signal(signal.SIGKILL)
        for place, of in enumerate((0, 1, 4, 5)):
            assert job.workers[of].wait() == 0, everything(job)
            assert job.workers[of].reports()[1:] == [True, [place, 4], 2.5], everything(job)


@pytest.mark.parametrize("killed", ["root", "other"])
def test_a_process_dies_while_there_is_no_scheduler(killed):
    """The next one goes on without its machine, after BPSX_SCHEDULER_WAIT at the latest."""
    env = {"BPSX_SCHEDULER_WAIT": "6"}
    with Shrinking(3 * EACH, env=env, servers=2, processes=EACH) as job:
        job.await_step(0, 3)
        job.scheduler.signal(signal.SIGKILL)
        job.scheduler.wait()
        job.workers[3 if killed == "root" else 2].signal(signal.SIGKILL)
        job.start_scheduler(int(job.port))
        job.tell_to_end()
        assert job.workers[2 if killed == "root" else 3].wait() != 0
        living = [0, 1, 4, 5]
        assert [job.workers[of].wait() for of in living] == [0] * 4, everything(job)
        assert [job.workers[of].reports()[-1] for of in living] == [[i, 4] for i in range(4)]
