"""Jobs whose machines have several processes that sum among themselves, and that lose some: a
machine leaves as a whole, and others join.
"""

from __future__ import annotations

import random
import signal

import pytest

from cluster.test_worker_deaths import Shrinking
from cluster.test_worker_joins import Growing
from support.jobs import TRANSPORTS, Job

EACH = 2  # processes of a machine


def machine(number: int) -> list[int]:
    return list(range(number * EACH, (number + 1) * EACH))


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
    with GrowingMachines(2, steps=1_500, servers=1, env={"BYTEPS_LOG_LEVEL": "INFO"}) as job:
        job.lose(0, 10)
        first = job.join(0)
        job.workers[first].wait_for_line("waits for worker 1 on the same machine")
        second = job.join(1)
        for worker in (first, second):
            job.workers[worker].wait_for_line('["step"')
        job.end_well(0, 1)


def test_a_process_that_dies_while_its_machine_joins_leaves_the_others_alone():
    with GrowingMachines(3, steps=600, servers=2) as job:
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
    with GrowingMachines(2, steps=300, servers=2, env=env) as job:
        job.workers[0].wait_for_line('["step", 10')
        new = job.join_machine(2)
        for worker in new:
            job.workers[worker].wait_for_line('["step"')
        job.end_well()
