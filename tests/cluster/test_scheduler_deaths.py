"""Jobs whose scheduler dies: steps go on, and another one at its address takes the job over."""

from __future__ import annotations

import signal
import time
from typing import Any

import pytest

from bpsx.config import Config
from bpsx.scheduler.waiting import patience
from cluster.test_server_deaths_compressed import _TRAINING as _COMPRESSED
from cluster.test_server_deaths_compressed import Trained, environment, undisturbed
from cluster.test_server_joins import assert_went_well, training
from support import jobs
from support.jobs import TRANSPORTS, Gates


class Job(jobs.Job):
    """A job that outlives its scheduler."""

    def __init__(self, *given: Any, env: dict[str, str] | None = None, **named: Any) -> None:
        super().__init__(*given, env={"BPSX_ELASTIC": "servers", **(env or {})}, **named)


_NUMPY = """
    import bpsx, numpy as np

    bpsx.init()
    x = np.zeros(50_000, np.float32)

    def step(name="x"):
        global x
        mine = np.full(50_000, bpsx.rank() + 1, np.float32)
        x = x + bpsx.push_pull(mine, name=name, average=False)

    for i in range(5):
        step()
    report("before")
    hear()
    for i in range(5):
        step()
    report("without")
    hear()
    step("new")
    report("declared")
    hear()
    for i in range(5):
        step()
        step("new")
    report(float(x.sum()))
    bpsx.shutdown()
"""


def kill(process) -> None:
    process.signal(signal.SIGKILL)
    process.wait()


def everywhere(job: Job, text: str) -> None:
    for worker in job.workers:
        worker.wait_for_line(text)


def tell(job: Job) -> None:
    for worker in job.workers:
        worker.say("go")


def test_steps_go_on_and_another_scheduler_takes_over():
    """No step is lost, new names can be declared, and terms go on after a server's death."""
    with Job(_NUMPY, workers=2, servers=2) as job:
        everywhere(job, "before")
        kill(job.scheduler)
        tell(job)
        everywhere(job, "without")
        job.start_scheduler(int(job.port))
        tell(job)
        everywhere(job, "declared")
        job.servers[0].signal(signal.SIGKILL)
        tell(job)
        for worker in job.workers:
            assert worker.wait() == 0, worker.text() + job.scheduler.text()
            assert worker.reports()[-1] == 3 * 50_000 * 21
        assert job.scheduler.wait() == 0, job.scheduler.text()
        assert "term 1" in job.scheduler.text()
        assert job.servers[1].wait() == 0


_STEPPING = """
    import bpsx, time, numpy as np

    bpsx.init()
    one, steps, sums = np.ones(30_000, np.float32), 0, 0.0

    def until(word):
        # The workers agree by a sum on when to go on; `hear` would block a step.
        import select
        global steps, sums
        while True:
            told = bool(select.select([0], [], [], 0)[0])
            asked = bpsx.push_pull(np.array([told], np.float32), name="told", average=False)
            sums += float(bpsx.push_pull(one, name="x", average=False)[0])
            steps += 1
            # A pause for each of the many steps. The others wait, so a death still meets a step.
            time.sleep(0.005 * (bpsx.rank() == 0))
            if asked[0] == bpsx.size():
                os.read(0, 3)
                report([word, steps, sums])
                return

    for name in ("told", "x"):
        bpsx.push_pull(np.zeros(1 if name == "told" else 30_000, np.float32), name=name)
    report("running")
    until("first")
    until("second")
    bpsx.shutdown()
    report("left")
"""


def counts(job: Job, word: str) -> list[int]:
    """The number of steps that the workers have made until ``word``."""
    found = []
    for worker in job.workers:
        worker.wait_for_line(f'["{word}"')
        (said,) = [r for r in worker.reports() if isinstance(r, list) and r[0] == word]
        assert said[2] == len(job.workers) * said[1], "a step's sum is wrong"
        found.append(said[1])
    assert len(set(found)) == 1
    return found


def finished(job: Job, *, servers: list[int] | None = None) -> None:
    for worker in job.workers:
        assert worker.wait() == 0, "\n".join(p.text() for p in job.processes)
    assert job.scheduler.wait() == 0, job.scheduler.text()
    for i in range(len(job.servers)) if servers is None else servers:
        assert job.servers[i].wait() == 0, job.servers[i].text()


def start_again(job: Job) -> None:
    """Start another scheduler, and wait until the job has it."""
    before = [sum("is back, after" in line for line in w.errors) for w in job.workers]
    job.start_scheduler(int(job.port))
    for worker, count in zip(job.workers, before):
        worker.wait_for_line("is back, after", count=count + 1)


@pytest.mark.parametrize("transport", sorted(TRANSPORTS))
def test_steps_go_on_for_as_long_as_the_scheduler_is_away(transport):
    """Ten seconds, with heartbeats that would have ended the job long before."""
    env = {**TRANSPORTS[transport], "PS_HEARTBEAT_TIMEOUT": "2", "PS_HEARTBEAT_INTERVAL": "0.5"}
    seconds = 10 if transport == "zmq" else 3
    with Job(_STEPPING, workers=2, servers=2, env=env) as job:
        everywhere(job, "running")
        time.sleep(1)
        tell(job)
        (first, _) = counts(job, "first")
        kill(job.scheduler)
        time.sleep(seconds)
        tell(job)
        (second, _) = counts(job, "second")
        print(f"{first} steps before, {second - first} in {seconds} s without a scheduler")
        assert second - first >= 10 * seconds
        start_again(job)
        finished(job)


@pytest.mark.parametrize("processes", [1, 2])
def test_schedulers_may_die_again_and_again(processes):
    """Also where the processes of a machine sum among themselves."""
    with Job(_STEPPING, workers=2 * processes, servers=2, processes=processes) as job:
        everywhere(job, "running")
        for _ in range(3):
            kill(job.scheduler)
            start_again(job)
        tell(job)
        counts(job, "first")
        tell(job)
        finished(job)


def test_a_scheduler_that_gets_sigterm_leaves_the_job_to_another_one():
    with Job(_STEPPING, workers=2, servers=2, env={"BPSX_TERM_GRACE": "0.2"}) as job:
        everywhere(job, "running")
        for _ in range(2):
            job.scheduler.signal(signal.SIGTERM)
            assert job.scheduler.wait() == 1
            assert (
                "was ended by SIGTERM; if it lives, it goes on with another scheduler at this"
                in job.scheduler.text()
            )
            start_again(job)
        tell(job)
        counts(job, "first")
        tell(job)
        finished(job)


@pytest.mark.parametrize("order", ["scheduler first", "server first"])
def test_scheduler_and_server_fall_silent_together(order):
    """A worker must not blame the server before it can tell that the scheduler is silent, too."""
    # A node that was refused by the silent scheduler asks the next one up to 2 s after its start.
    env = {"PS_HEARTBEAT_TIMEOUT": "2", "PS_HEARTBEAT_INTERVAL": "0.5", "BPSX_GATHER_GRACE": "5"}
    env |= TRANSPORTS["zmq"]  # a stopped process's connections over plain sockets do not break
    with Job(_STEPPING, workers=2, servers=3, env=env) as job:
        everywhere(job, "running")
        victims = [job.scheduler, job.servers[1]]
        for victim in victims if order == "scheduler first" else victims[::-1]:
            victim.signal(signal.SIGSTOP)
            time.sleep(1.8)
        everywhere(job, "steps go on without it")
        time.sleep(2.5)
        for victim in victims:
            victim.signal(signal.SIGCONT)
        assert job.scheduler.wait() == 1, job.scheduler.text()
        start_again(job)
        assert job.servers[1].wait() == 1, job.servers[1].text()
        tell(job)
        counts(job, "first")
        tell(job)
        finished(job, servers=[0, 2])


def test_a_scheduler_that_was_silent_loses_no_worker():
    """A worker that was silent, too, would confirm that the others are lost, which live."""
    # A node that was refused by the silent scheduler asks the next one up to 2 s after its start.
    env = {"PS_HEARTBEAT_TIMEOUT": "2", "PS_HEARTBEAT_INTERVAL": "0.5", "BPSX_GATHER_GRACE": "5"}
    env |= TRANSPORTS["zmq"]  # a stopped process's connections over plain sockets do not break
    with Job(_STEPPING, workers=3, servers=1, env={**env, "BPSX_ELASTIC": "shrink"}) as job:
        everywhere(job, "running")
        living, silent = job.workers[:2], job.workers[2]
        for process in (job.scheduler, silent):
            process.signal(signal.SIGSTOP)
        for worker in living:
            worker.wait_for_line("steps go on without it")
        time.sleep(3)
        for process in (silent, job.scheduler):
            process.signal(signal.SIGCONT)
        assert job.scheduler.wait() == 1
        assert "this scheduler was silent for" in job.scheduler.text()
        job.start_scheduler(int(job.port))
        assert silent.wait() == 1, "its connections to the servers have broken"
        for word in ("first", "second"):
            for worker in living:
                worker.say("go")
            for worker in living:
                worker.wait_for_line(f'["{word}"')
        for worker in living:
            assert worker.wait() == 0, "\n".join(p.text() for p in job.processes)
        assert job.scheduler.wait() == 0, job.scheduler.text()


def test_a_worker_that_was_silent_does_not_blame_the_server():
    """While it was stopped it could not hear that the scheduler was silent, too."""
    env = {"PS_HEARTBEAT_INTERVAL": "0", "BPSX_GATHER_GRACE": "2", "BYTEPS_LOG_LEVEL": "info"}
    # The others must not take the workers for dead.
    own = {i: {"PS_HEARTBEAT_INTERVAL": "0.5", "PS_HEARTBEAT_TIMEOUT": "2"} for i in range(2)}
    with Job(_STEPPING, workers=2, servers=2, env=env, worker_env=own) as job:
        everywhere(job, "running")
        job.scheduler.signal(signal.SIGSTOP)
        kill(job.servers[1])
        everywhere(job, "is gone")
        for worker in job.workers:
            worker.signal(signal.SIGSTOP)
        time.sleep(patience(Config(own[0]), True) + 0.5)
        for worker in job.workers:
            worker.signal(signal.SIGCONT)
        everywhere(job, "steps go on without it")
        kill(job.scheduler)
        start_again(job)
        for word in ("first", "second"):
            tell(job)
            counts(job, word)
        finished(job, servers=[0])


@pytest.mark.parametrize("order", ["scheduler first", "server first"])
def test_scheduler_and_server_die_together(order):
    """Steps stall until another scheduler has found out that the server is gone."""
    env = {"BPSX_GATHER_GRACE": "1.5"}
    with Job(_STEPPING, workers=2, servers=3, env=env) as job:
        everywhere(job, "running")
        victims = [job.scheduler, job.servers[1]]
        for victim in victims if order == "scheduler first" else victims[::-1]:
            victim.signal(signal.SIGKILL)
        for victim in victims:
            victim.wait()
        start_again(job)
        tell(job)
        counts(job, "first")
        # The terms go on from there.
        kill(job.servers[0])
        tell(job)
        counts(job, "second")
        finished(job, servers=[2])
        assert "term 2" in job.scheduler.text() or order == "server first"


def test_a_server_dies_while_the_scheduler_is_away():
    with Job(_STEPPING, workers=3, servers=2) as job:
        everywhere(job, "running")
        kill(job.scheduler)
        kill(job.servers[0])
        tell(job)
        start_again(job)
        counts(job, "first")
        assert "term 1" in job.scheduler.wait_for_line("term 1")
        tell(job)
        finished(job, servers=[1])


_JOINING = """
    import bpsx, numpy as np

    bpsx.init()
    bpsx.push_pull(np.ones(10), name="x")
    report("running")
    if bpsx.rank() == 0:
        hear()
    report(["joining", bpsx.rank()])
    last = bpsx.join()
    report(["joined", last])
    report(float(bpsx.push_pull(np.ones(10), name="x", average=False)[0]))
    hear()
    bpsx.join()
    report(float(bpsx.push_pull(np.ones(10), name="y", average=False)[0]))
    bpsx.shutdown()
"""


@pytest.mark.parametrize("processes", [1, 2])
@pytest.mark.parametrize("join", ["before", "meanwhile", "after"])
def test_a_join_goes_on(join, processes):
    """Worker 0 joins last: before another scheduler is there, or after that."""
    with Job(_JOINING, workers=2 * processes, servers=2, processes=processes) as job:
        everywhere(job, "running")
        job.workers[1].wait_for_line('["joining", 1]')
        if join == "before":
            job.workers[0].say("go")
            everywhere(job, '["joined"')
        kill(job.scheduler)
        if join == "meanwhile":
            job.workers[0].say("go")
            job.workers[0].wait_for_line('["joining", 0]')
        start_again(job)
        if join == "after":
            job.workers[0].say("go")
        everywhere(job, f"{2.0 * processes}")
        assert len({w.wait_for_line('["joined"') for w in job.workers}) == 1
        tell(job)
        finished(job)
        assert [w.reports()[-2:] for w in job.workers] == [[2.0 * processes] * 2] * 2 * processes


# ---- jobs that end


def lost(job: Job, *texts: str) -> None:
    for worker in job.workers:
        assert worker.wait() != 0
        assert all(text in worker.text() for text in ("PeerLostError", *texts)), worker.text()


FOR_EVER = _STEPPING.replace('until("first")', "while True: until('never')")


def test_a_job_without_a_scheduler_ends_when_the_wait_is_over():
    env = {"BPSX_SCHEDULER_WAIT": "1"}
    with Job(FOR_EVER, workers=2, servers=2, env=env) as job:
        everywhere(job, "running")
        kill(job.scheduler)
        lost(job, "no other one came within 1 s (BPSX_SCHEDULER_WAIT)")
        for server in job.servers:
            assert server.wait() == 1


@pytest.mark.parametrize("env", [{"BPSX_SCHEDULER_WAIT": "0"}, {"BPSX_ELASTIC": "off"}])
def test_a_job_that_must_not_wait_ends_at_once(env):
    with Job(FOR_EVER, workers=2, servers=1, env=env) as job:
        everywhere(job, "running")
        kill(job.scheduler)
        lost(job, "is gone: its connection broke")


def test_a_scheduler_with_another_secret_does_not_get_the_job():
    """The nodes say why they wait on; the right one gets the job afterwards."""
    env = {"BPSX_SECRET": "a" * 40, "BPSX_SCHEDULER_WAIT": "60"}
    with Job(_STEPPING, workers=2, servers=2, env=env) as job:
        everywhere(job, "running")
        kill(job.scheduler)
        job._env["BPSX_SECRET"] = "b" * 40
        job.start_scheduler(int(job.port))
        for process in [*job.workers, *job.servers]:
            process.wait_for_line("does not share our job secret")
        kill(job.scheduler)
        job._env["BPSX_SECRET"] = "a" * 40
        start_again(job)
        tell(job)
        counts(job, "first")
        tell(job)
        finished(job)


def test_a_scheduler_of_another_size_does_not_get_the_job():
    with Job(_STEPPING, workers=2, servers=2) as job:
        everywhere(job, "running")
        kill(job.scheduler)
        job._env["DMLC_NUM_WORKER"] = "3"
        job.start_scheduler(int(job.port))
        for process in [*job.workers, *job.servers]:
            process.wait_for_line("does not fit: DMLC_NUM_WORKER is 2 in the job")
        kill(job.scheduler)
        job._env["DMLC_NUM_WORKER"] = "2"
        start_again(job)
        tell(job)
        tell(job)
        finished(job)


def test_another_job_at_the_same_address_ends_the_orphans():
    with Job(FOR_EVER, workers=2, servers=1) as old:
        everywhere(old, "running")
        old.workers[1].signal(signal.SIGSTOP)  # so that the old job is not complete
        kill(old.scheduler)
        source = "import bpsx; bpsx.init(); hear(); bpsx.shutdown()"
        new = Job(source, workers=2, servers=1)
        try:
            new.start_scheduler(int(old.port))
            new.start_server(0)
            for i in range(2):
                new.start_worker(i)
            assert old.workers[0].wait() != 0
            assert "another job has begun" in old.workers[0].text()
            tell(new)
            assert [p.wait() for p in new.processes] == [0] * 4
        finally:
            new.__exit__()


def test_a_worker_that_dies_meanwhile_ends_the_job():
    env = {"BPSX_SCHEDULER_WAIT": "10"}
    with Job(FOR_EVER, workers=2, servers=2, env=env) as job:
        everywhere(job, "running")
        kill(job.scheduler)
        kill(job.workers[1])
        job.start_scheduler(int(job.port))
        assert job.workers[0].wait() != 0
        assert "worker 1 did not come back" in job.workers[0].text()
        assert job.scheduler.wait() == 1


def test_workers_that_end_meanwhile_do_so_well():
    """They wait for a goodbye for a while; another scheduler later says it, or nobody does."""
    env = {"BPSX_SHUTDOWN_TIMEOUT": "1", "BPSX_SCHEDULER_WAIT": "60"}
    with Job(_STEPPING, workers=2, servers=1, env=env) as job:
        everywhere(job, "running")
        kill(job.scheduler)
        tell(job)
        counts(job, "first")
        tell(job)
        for worker in job.workers:
            assert worker.wait() == 0 and worker.reports()[-1] == "left"


def test_a_goodbye_waits_for_another_scheduler():
    env = {"BPSX_SHUTDOWN_TIMEOUT": "60"}
    with Job(_STEPPING, workers=2, servers=2, env=env) as job:
        everywhere(job, "running")
        kill(job.scheduler)
        tell(job)
        counts(job, "first")
        tell(job)
        counts(job, "second")
        job.start_scheduler(int(job.port))
        finished(job)


# ---- servers that come late


@pytest.mark.parametrize("transport", ["zmq", "tcp", "shm"])
@pytest.mark.parametrize("balance", [0, 1])
def test_a_server_that_came_late_outlives_the_scheduler(tmp_path, transport, balance):
    """It has got keys before, or none. Another one says HELLO while no scheduler is there."""
    gates = Gates(tmp_path)
    gates.close(20, 59)
    env = {"BPSX_ELASTIC_BALANCE": str(balance), **gates.env}
    with training(60, transport, servers=2, **env) as job:
        job.workers[0].wait_for_line("2")
        job.start_server(2)
        job.scheduler.wait_for_line("moved" if balance else "has joined")
        kill(job.scheduler)
        job.start_server(3)
        start_again(job)
        job.scheduler.wait_for_line("has joined", count=2 - balance)
        gates.open(20)
        for server in job.servers[:3]:
            kill(server)
        gates.open(59)
        assert_went_well(job, 60)
        assert job.servers[3].wait() == 0, job.servers[3].text()


@pytest.mark.parametrize("processes", [1, 2])
def test_a_job_that_waits_for_a_server_outlives_the_scheduler(processes):
    env = {"BPSX_ELASTIC_WAIT": "60", "BPSX_GATHER_GRACE": "1.5"}
    more = {"workers": 2 * processes, "servers": 1, "processes": processes}
    with Job(_STEPPING, env=env, **more) as job:
        everywhere(job, "running")
        kill(job.servers[0])
        job.scheduler.wait_for_line("the last server, and the job waits")
        kill(job.scheduler)
        start_again(job)
        job.scheduler.wait_for_line("the last server, and the job waits")
        job.start_server(1)
        job.scheduler.wait_for_line("has joined")
        tell(job)
        counts(job, "first")
        tell(job)
        counts(job, "second")
        finished(job, servers=[1])


def test_a_server_that_has_to_end_waits_for_a_scheduler_to_let_it_go():
    with Job(_STEPPING, workers=2, servers=3) as job:
        everywhere(job, "running")
        kill(job.scheduler)
        job.servers[0].signal(signal.SIGTERM)
        job.servers[0].wait_for_line("got SIGTERM")
        start_again(job)
        assert job.servers[0].wait() == 0, job.servers[0].text()
        tell(job)
        counts(job, "first")
        tell(job)
        counts(job, "second")
        finished(job)


@pytest.mark.parametrize("compressor", ["onebit", "randomk", "powersgd"])
def test_compressed_keys_outlive_the_scheduler(compressor):
    """Residuals and counters are found again by the servers that take the keys over afterwards."""
    env = environment(compressor, "tcp")
    with Job(_COMPRESSED, workers=2, servers=3, env=env) as job:
        for death in range(2):
            for worker in job.workers:
                worker.wait_for_line(str(6 * death + 2))
            kill(job.scheduler)
            kill(job.servers[death])
            start_again(job)
            if not death:  # at the second one, the steps may be over
                job.scheduler.wait_for_line("goes on with term 1")
        assert Trained(job).hashes == undisturbed(compressor, 2)
