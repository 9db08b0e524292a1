"""Data paths that die silently while everything else works: the control link, other ports, the
other direction, small packets.
"""

from __future__ import annotations

import time

import pytest
from network import STEPPING, needed, net_job

from support.jobs import TRANSPORTS, Job

#: Packets to drop on the server's side, given its lane's port.
_CUTS = {
    "to the lane": ("input", "tcp dport {}"),
    "from the lane": ("output", "tcp sport {}"),
    "large packets": ("input", "tcp dport {} meta length > 700"),
}


@needed
@pytest.mark.parametrize(
    ("cut", "transport"), [*((cut, "zmq") for cut in _CUTS), ("large packets", "tcp")]
)
def test_a_dead_data_path_ends_the_job_and_is_named(cut, transport):
    env = {
        "PS_HEARTBEAT_INTERVAL": "0.5",
        "PS_HEARTBEAT_TIMEOUT": "2",
        "BYTEPS_LOG_LEVEL": "info",
        **TRANSPORTS[transport],
    }
    with net_job(STEPPING, env) as (network, job):
        port = job.servers[0].wait_for_line("server 0: ").rpartition(":")[2]
        for worker in job.workers:
            worker.wait_for_line("running")
        hook, packets = _CUTS[cut]
        began = time.time()
        network.filter("server 0", hook, packets.format(port) + " drop")
        statuses = [p.wait(40) for p in job.processes]
        assert all(statuses), "\n".join(p.text() for p in job.processes)
        for worker in job.workers:
            kind, text, when = worker.reports()[-1]
            assert kind == "PeerLostError"
            assert "server 0" in text and network.address["server 0"] in text, text
            assert (
                when - began < 2.5 + 5 + 10
            )  # silence, the promised time, and a margin for a busy machine


@pytest.mark.parametrize("transport", ["zmq", "tcp"])
def test_a_lane_reports_a_lost_worker_that_the_scheduler_does_not_report(transport):
    with Job(
        """
        import bpsx, numpy as np, os, socket
        from bpsx.api.verbs import session
        bpsx.init()
        bpsx.push_pull(np.ones(4, np.float32), name="x")
        if bpsx.rank() == 1:
            session()._lanes.broken._patience = 1e9  # as if this worker did not notice it
            lane = int(session()._lanes.addresses[0].rpartition(":")[2])
            for fd in map(int, os.listdir("/proc/self/fd")):
                try:
                    with socket.socket(fileno=os.dup(fd)) as s:
                        if s.family == socket.AF_INET and s.getpeername()[1] == lane:
                            s.shutdown(socket.SHUT_RDWR)
                except OSError:
                    pass
        report("cut")
        try:
            while True:
                bpsx.push_pull(np.ones(4, np.float32), name="x")
        except bpsx.BpsxError as e:
            report(str(e))
            sys.exit(7)
    """,
        env={"PS_HEARTBEAT_TIMEOUT": "2", **TRANSPORTS[transport]},
    ) as job:
        assert [w.wait() for w in job.workers] == [7, 7]
        assert job.servers[0].wait() == 1
        said = job.servers[0].text()
        assert (
            "worker 1 (127.0.0.1" in said
            and "broke, and the scheduler has not reported it for 2 s" in said
        ), said
        assert "server 0" in job.workers[0].reports()[-1]
