"""Servers that are struck in the middle of an operation: the others take over, and all sums are
right.
"""

from __future__ import annotations

import itertools
import signal
from typing import Any

import pytest
from deaths import OPERATIONS, QUICK, Striking, Struck, source
from network import NetJob, Network, needed

from support.jobs import TRANSPORTS, Job

#: Pairs of a transport and an operation: each operation once, each transport several times.
SOME = list(zip(itertools.cycle(TRANSPORTS), OPERATIONS))
#: Jobs that differ from the plain ones with two workers.
KINDS: dict[str, dict[str, Any]] = {
    "processes": {"workers": 4, "processes": 2, "env": {"BPSX_LOCAL_REDUCE": "1"}},
    "scheduled": {"env": {"BYTEPS_SERVER_ENABLE_SCHEDULE": "1"}},
    "lanes": {"env": {"BYTEPS_SERVER_ENGINE_THREAD": "3"}},
    "fixed order": {
        "workers": 3,
        "env": {"BPSX_FIXED_ORDER": "1", "BYTEPS_SCHEDULING_CREDIT": "1"},
    },
}


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_killed_server_is_replaced(transport, operation):
    with Struck(operation, transport) as job:
        job.begin()
        job.servers[0].signal(signal.SIGKILL)
        job.resume()
        job.end_well(job.servers[0])


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("kind", KINDS)
def test_a_killed_server_is_replaced_in_other_jobs(kind, operation):
    with Struck(operation, "tcp", **KINDS[kind]) as job:
        job.begin(1)
        job.servers[0].signal(signal.SIGKILL)
        job.end_well(job.servers[0])


def test_the_only_worker_of_a_job_goes_on():
    """Only it keeps results, and nobody else can be late."""
    with Struck("many", "zmq", workers=1, env={"BYTEPS_FORCE_DISTRIBUTED": "1"}) as job:
        job.begin()
        job.servers[1].signal(signal.SIGKILL)
        job.resume()
        job.end_well(job.servers[1])


@pytest.mark.parametrize(("transport", "operation"), SOME)
def test_a_server_that_gets_sigterm_is_replaced(transport, operation):
    """It ends with status 1, as it leaves the job before the workers do."""
    with Struck(operation, transport, env={"BPSX_TERM_GRACE": "0"}) as job:
        job.begin()
        job.servers[0].signal(signal.SIGTERM)
        job.resume()
        assert job.servers[0].wait() == 1
        job.end_well(job.servers[0])
        assert "ended by SIGTERM" in job.scheduler.text()


@pytest.mark.parametrize(("transport", "operation"), SOME)
def test_a_server_that_was_silent_learns_that_it_has_been_replaced(transport, operation):
    with Struck(operation, transport, env=QUICK) as job:
        job.begin(1)
        job.replace_silent()


@needed
@pytest.mark.parametrize(("transport", "operation"), [("zmq", "large"), ("tcp", "many")])
def test_a_server_whose_links_are_cut_is_replaced(transport, operation):
    class CutJob(Striking, NetJob):
        pass

    names = ["scheduler", "server 0", "server 1", "worker 0", "worker 1"]
    env = {**TRANSPORTS[transport], **QUICK, "BPSX_ELASTIC": "servers"}
    with Network(names) as network, CutJob(source(operation), network, env=env, servers=2) as job:
        job.begin()
        network.cut("server 0")
        job.resume()
        job.await_line("goes on with term 1")
        job.await_line("ended")
        network.mend("server 0")
        # It may have noticed the silence of the scheduler before.
        assert job.servers[0].wait() == 1, job.servers[0].text()
        job.end_well(job.servers[0])


@pytest.mark.parametrize(("transport", "operation"), SOME)
def test_two_servers_that_are_killed_at_once_are_replaced(transport, operation):
    with Struck(operation, transport, servers=3) as job:
        job.begin()
        for server in job.servers[:2]:
            server.signal(signal.SIGKILL)
        job.resume()
        job.end_well(*job.servers[:2])


@pytest.mark.parametrize(("transport", "operation"), SOME)
def test_a_server_that_dies_while_it_takes_keys_over_is_replaced(transport, operation):
    """It has not read any message of the first term."""
    with Struck(operation, transport, servers=3) as job:
        job.begin()
        job.servers[0].signal(signal.SIGKILL)
        job.servers[2].signal(signal.SIGCONT)
        job.await_line("goes on with term 1")
        job.servers[1].signal(signal.SIGKILL)
        job.end_well(*job.servers[:2])


@pytest.mark.parametrize(("transport", "operation"), SOME)
def test_a_second_death_during_a_takeover_is_survived(transport, operation):
    """Server 1 learns of both terms at once, the others of one after the other."""
    env = {"BPSX_FIXED_ORDER": "1"}
    with Struck(operation, transport, servers=4, workers=3, env=env) as job:
        job.begin()
        job.servers[0].signal(signal.SIGKILL)
        for server in job.servers[2:]:
            server.signal(signal.SIGCONT)
        job.await_line("goes on with term 1")
        job.servers[2].signal(signal.SIGKILL)
        job.await_line("goes on with term 2")
        job.resume()
        job.end_well(job.servers[0], job.servers[2])


#: Worker 0 leaves before a server dies.
_LEAVING = """
    import bpsx, numpy as np
    bpsx.init()
    bpsx.push_pull(np.ones(300_000, np.float32), name="x")
    if bpsx.rank():
        report("ready")
        hear()
        try:
            {last}
        except bpsx.BpsxError as e:
            report(f"{{type(e).__name__}}: {{e}}")
            sys.exit(7)
    bpsx.shutdown()
    report("left")
"""


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_worker_can_leave_after_others_have_left_and_a_server_has_died(transport):
    env = {**TRANSPORTS[transport], "BPSX_ELASTIC": "servers"}
    with Job(_LEAVING.format(last="pass"), servers=2, env=env) as job:
        job.workers[0].wait_for_line("left")
        job.workers[1].wait_for_line("ready")
        job.servers[0].signal(signal.SIGKILL)
        job.workers[1].wait_for_line("none of them can be summed any more, as worker 0")
        job.workers[1].say("go")
        assert [p.wait() for p in job.workers] == [0, 0], job.workers[1].text()
        assert job.scheduler.wait() == 0


def test_a_worker_that_needs_what_is_lost_with_the_server_ends_the_job():
    last = 'bpsx.push_pull(np.ones(300_000, np.float32), name="x")'
    with Job(_LEAVING.format(last=last), servers=2, env={"BPSX_ELASTIC": "servers"}) as job:
        job.workers[0].wait_for_line("left")
        job.workers[1].wait_for_line("ready")
        job.servers[0].signal(signal.SIGKILL)
        job.workers[1].wait_for_line("none of them can be summed any more, as worker 0")
        job.workers[1].say("go")
        assert job.workers[1].wait() == 7, job.workers[1].text()
        text = job.workers[1].reports()[-1]
        assert text.startswith("Peer") and "worker 0" in text, text
