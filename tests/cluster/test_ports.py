"""Ports: every process names a blocked port within seconds, BPSX_PORTS selects ports, and top and
doctor test them.
"""

from __future__ import annotations

import json
import os
import random
import re
import socket
import subprocess
import sys
import time

import pytest
from network import needed, net_job

from bpsx.launch import checks
from bpsx.transports.reach import unreachable
from support.jobs import TRANSPORTS, Job

_SUM = """
    import bpsx, numpy as np
    try:
        bpsx.init()
    except bpsx.RendezvousError as e:
        report(str(e))
        sys.exit(7)
    report(bpsx.push_pull(np.ones(3, np.float32), "x", average=False).tolist())
"""
_SECRET = "a secret for the ports' tests"


@needed
@pytest.mark.parametrize(
    ("transport", "how", "why"),
    [
        ("zmq", "drop", "no reply; a firewall may drop the connection"),
        ("tcp", "drop", "no reply; a firewall may drop the connection"),
        ("zmq", "reject with tcp reset", "refused"),
    ],
)
def test_all_processes_name_a_blocked_lane(transport, how, why):
    def block(network):
        network.filter(
            "worker 0",
            "output",
            f"ip daddr {network.address['server 0']} tcp dport 31000-31063 {how}",
        )

    env = {
        "BPSX_PORTS": "31000-31063",
        "BYTEPS_SERVER_ENGINE_THREAD": "2",
        "BPSX_SECRET": _SECRET,
        **TRANSPORTS[transport],
    }
    with net_job(_SUM, env, before=block) as (network, job):
        began, scheduler = time.monotonic(), f"{network.address['scheduler']}:{job.port}"
        view = None
        if (transport, how) == ("zmq", "drop"):
            job.scheduler.wait_for_line("the job is complete")
            words = [
                sys.executable,
                "-m",
                "bpsx.launch",
                "top",
                "--once",
                "--json",
                "--scheduler",
                scheduler,
            ]
            looked = subprocess.run(
                network.prefix("worker 0") + words,
                env={**os.environ, "BPSX_SECRET": _SECRET},
                capture_output=True,
                text=True,
                timeout=60,
                check=True,
            )
            view = json.loads(looked.stdout)
        assert all(w.wait(40) for w in job.workers), "\n".join(p.text() for p in job.processes)
        assert time.monotonic() - began < 40  # not BPSX_RENDEZVOUS_TIMEOUT, 150 s here
        assert job.servers[0].wait(20) and job.scheduler.wait(20)
        for said in (p.text() for p in job.processes):
            assert (
                f"worker 0 cannot reach server 0 ({network.address['server 0']}, pid" in said
                and why in said
            ), said
        if view is not None:
            assert len(view["unreachable"]) == 2 and all(
                "no reply; a firewall may drop the connection" in u for u in view["unreachable"]
            ), view


@pytest.mark.parametrize("transport", ["zmq", "tcp"])
def test_ports_are_those_allowed(transport):
    low = random.randrange(20000, 30000)
    allowed = range(low, low + 200)
    env = {
        "BPSX_PORTS": f"{low}-{low + 199}",
        "BYTEPS_SERVER_ENGINE_THREAD": "2",
        "BPSX_METRICS_PORT": "0",
        "BYTEPS_LOG_LEVEL": "info",
    }
    with Job(_SUM, servers=2, env={**env, **TRANSPORTS[transport]}) as job:
        assert job.results() == [[[2, 2, 2]]] * 2
        at = [
            re.search(r"INFO: server \d: (127.*)", server.text())[1].split(", ")
            for server in job.servers
        ]
        metrics = (
            job.scheduler.wait_for_line("metrics at").rpartition("/metrics")[0].rpartition(":")[2]
        )
        ports = [
            int(job.port),
            int(metrics),
            *(int(a.rpartition(":")[2]) for lanes in at for a in lanes),
        ]
        assert len(set(ports)) == 6 and all(p in allowed for p in ports), ports


@pytest.mark.parametrize(
    ("role", "transport"), [("server", "zmq"), ("server", "tcp"), ("scheduler", "zmq")]
)
def test_no_free_port_is_an_error(role, transport):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        environment = {
            **os.environ,
            "DMLC_ROLE": role,
            "DMLC_PS_ROOT_URI": "127.0.0.1",
            "DMLC_NUM_WORKER": "2",
            "DMLC_NUM_SERVER": "1",
            "DMLC_PS_ROOT_PORT": "0" if role == "scheduler" else str(port),
            "BPSX_PORTS": str(port),
            **TRANSPORTS[transport],
        }
        module = {"server": "bpsx.server", "scheduler": "bpsx.scheduler"}[role]
        done = subprocess.run(
            [sys.executable, "-m", module],
            env=environment,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert (
            done.returncode in (1, 2)
            and f"BPSX_PORTS={port}: it is taken on this machine" in done.stderr
        ), done.stderr


def test_doctor_names_lanes_that_cannot_be_reached():
    with socket.create_server(("127.0.0.1", 0)) as open_, socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        good, bad = (f"127.0.0.1:{s.getsockname()[1]}" for s in (open_, closed))
        report = checks.CheckReport()
        checks.lanes(
            report,
            [
                {"role": "server", "rank": 3, "state": "running", "lanes": [good, bad]},
                {"role": "worker", "lanes": []},
            ],
        )
        assert report.found["network"]["lanes of servers"] == "1 of 2 can be reached"
        assert (
            len(report.problems) == 1
            and f"cannot reach server 3 at {bad} (refused" in report.problems[0]
        )
        assert unreachable([good]) == {}
