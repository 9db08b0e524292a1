"""Jobs that get more workers than they have begun with."""

from __future__ import annotations

import random
import signal

import pytest

from cluster.test_worker_joins import COMPRESSED, SHRINK, TRAINING, Growing
from support.jobs import TRANSPORTS, Job

MOST = 4


def changes(added: list[float]) -> list[float]:
    """Leave out the steps that have added the same as the step before."""
    return [a for a, b in zip(added, [0.0, *added], strict=False) if a != b]


def grown(workers: int = 2, **more) -> Growing:
    env = {"BPSX_MAX_WORKERS": str(MOST), **more.pop("env", {})}
    return Growing(workers, env=env, **more)


@pytest.mark.parametrize("fixed", ["0", "1"])
@pytest.mark.parametrize("transport", ["zmq", "tcp", "shm"])
def test_two_workers_become_four(transport, fixed):
    env = {**TRANSPORTS[transport], "BPSX_FIXED_ORDER": fixed}
    with grown(env=env, servers=2) as job:
        job.workers[0].wait_for_line('["step", 10')
        for number in random.sample([2, 3], 2):
            job.workers[job.join(number)].wait_for_line('["step"')
        job.end_well()
        found = changes(job.added(0))
        assert found in ([3.0, 6.0, 10.0], [3.0, 7.0, 10.0]), found


def test_one_worker_becomes_three():
    with grown(1) as job:
        job.workers[0].wait_for_line('["step", 10')
        for number in (1, 2):
            job.workers[job.join(number)].wait_for_line('["step"')
        job.end_well()
        assert changes(job.added(0)) == [1.0, 3.0, 6.0]


def test_a_worker_that_comes_before_the_job_begins_joins_it():
    job = grown()
    try:
        job.start_scheduler()
        early = job.workers[job.join(3)]
        job.scheduler.wait_for_line("wants to join")
        job.start_server(0)
        for number in (0, 1):
            job.start_worker(number)
        early.wait_for_line('["step"')
        job.end_well()
    finally:
        job.__exit__()


@pytest.mark.parametrize("transport", ["zmq", "shm"])
def test_all_places_are_left_and_taken_again(transport):
    with grown(env=TRANSPORTS[transport], servers=2) as job:
        job.workers[0].wait_for_line('["step", 10')
        third = job.join(2)
        job.workers[third].wait_for_line('["step"')
        job.lose(third)
        again, fourth = job.join(2), job.join(3)
        for new in (again, fourth):
            job.workers[new].wait_for_line('["step"')
        job.lose(1, 20)
        job.workers[job.join(1)].wait_for_line('["step"')
        job.end_well(third, 1)


def test_a_server_joins_a_grown_job_and_takes_keys_over():
    with grown(servers=2) as job:
        job.workers[0].wait_for_line('["step", 10')
        job.workers[job.join(3)].wait_for_line('["step"')
        job.start_server(2)
        job.scheduler.wait_for_line("all workers have connected to it")
        job.servers[0].signal(signal.SIGKILL)
        job.scheduler.wait_for_line("its keys go to")
        job.workers[job.join(2)].wait_for_line('["step"')
        job.tell_to_end()
        living = job.workers
        assert [w.wait() for w in living] == [0] * 4, job.everything()
        assert len({str(w.reports()[-1][2]) for w in living}) == 1


def test_the_scheduler_dies_after_the_job_has_grown():
    with grown(servers=2) as job:
        job.workers[0].wait_for_line('["step", 10')
        third = job.join(2)
        job.workers[third].wait_for_line('["step"')
        job.scheduler.signal(signal.SIGKILL)
        job.workers[third].wait_for_line("steps go on without it")
        job.start_scheduler(int(job.port))
        job.workers[third].wait_for_line("is back")
        job.lose(0, 20)
        job.workers[job.join(3)].wait_for_line('["step"')
        job.end_well(0)
        assert "3 of 3 workers" not in job.scheduler.text()
        assert "2 of 3 workers" in job.scheduler.text()


def test_with_replace_the_job_waits_for_as_many_workers_as_it_had():
    env = {"BPSX_ELASTIC": "replace", "BPSX_ELASTIC_WAIT": "60"}
    with grown(env=env) as job:
        job.workers[0].wait_for_line('["step", 10')
        third = job.join(2)
        job.workers[third].wait_for_line('["step"')
        job.lose(third)
        job.scheduler.wait_for_line("all workers have stopped, and wait for another")
        job.workers[job.join(3)].wait_for_line('["step"')  # another place will do
        job.end_well(third)


@pytest.mark.parametrize("codec", ["onebit", "randomk"])
def test_compression_goes_on_with_more_workers(codec):
    source = COMPRESSED.format(newcomer=False, codec=codec)
    env = {**SHRINK, "BYTEPS_MIN_COMPRESS_BYTES": "0", "BYTEPS_PARTITION_BYTES": "65536"}
    env["BPSX_MAX_WORKERS"] = "4"
    with Job(source, workers=2, servers=2, env=env) as job:
        job.workers[1].wait_for_line('["step", 30')
        for number in (2, 3):
            job.start_worker(number, COMPRESSED.format(newcomer=True, codec=codec))
            job.workers[number].wait_for_line('["step"')
        job.servers[0].signal(signal.SIGKILL)
        job.tell_to_end()
        everything = "\n".join(p.text()[-1500:] for p in job.processes)
        assert [w.wait() for w in job.workers] == [0] * 4, everything
        assert len({str(w.reports()[-1]) for w in job.workers}) == 1
        log = "\n".join(s.text() for s in job.servers)
        assert "starts from zero" not in log, log


@pytest.mark.parametrize(
    ("env", "text"),
    [
        ({"BPSX_MAX_WORKERS": "2"}, "DMLC_NUM_WORKER=3; expected at least as many"),
        ({"BPSX_MAX_WORKERS": "4"}, "it needs BPSX_ELASTIC=shrink or replace, which is auto"),
        (
            {"BPSX_MAX_WORKERS": "4", "BPSX_ELASTIC": "shrink", "DMLC_WORKER_ID": "4"},
            "DMLC_WORKER_ID=4: expected 0..3 (BPSX_MAX_WORKERS=4)",
        ),
        (
            {"BPSX_MAX_WORKERS": "4", "BPSX_ELASTIC": "shrink", "BYTEPS_ENABLE_ASYNC": "1"},
            "training is asynchronous",
        ),
    ],
)
def test_sizes_that_cannot_be_are_refused(env, text):
    from bpsx.config import Config
    from bpsx.errors import ConfigError

    given = {"DMLC_ROLE": "worker", "DMLC_NUM_WORKER": "3", "DMLC_NUM_SERVER": "1"}
    given |= {"DMLC_WORKER_ID": "1", "DMLC_PS_ROOT_URI": "127.0.0.1", "DMLC_PS_ROOT_PORT": "9"}
    with pytest.raises(ConfigError) as e:
        Config({**given, **env}).check()
    assert text in str(e.value)


def unnumbered(job: Growing, newcomer: bool = True) -> int:
    """Start a worker without DMLC_WORKER_ID; returns its index in ``workers``."""
    index = len(job.workers)
    job._worker_env[index] = {"DMLC_WORKER_ID": ""}
    job.start_worker(index, TRAINING.format(newcomer=newcomer))
    return index


@pytest.mark.parametrize("transport", ["zmq", "shm"])
def test_the_scheduler_numbers_workers_that_have_no_number(transport):
    own = dict.fromkeys(range(2), {"DMLC_WORKER_ID": ""})
    with grown(2, env=TRANSPORTS[transport], worker_env=own) as job:
        job.workers[0].wait_for_line('["step", 10')
        third, fourth = unnumbered(job), unnumbered(job)
        for new in (third, fourth):
            job.workers[new].wait_for_line('["step"')
        waits = unnumbered(job)
        job.scheduler.wait_for_line("wants to join", count=3)
        job.lose(third)
        job.workers[waits].wait_for_line('["step"')
        job.end_well(third)
        assert changes(job.added(0))[-1] == 10.0, "not all numbers are taken"
