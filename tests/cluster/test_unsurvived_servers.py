"""Deaths of servers without which a job cannot go on: it ends, soon, and names the server."""

from __future__ import annotations

import re
import signal
import time

import pytest

from support.jobs import PROMISED, Job

_STEPPING = """
    import bpsx, numpy as np
    bpsx.init()
    {before}
    bpsx.push_pull(np.ones(50_000, np.float32), name="x")
    report("ready")
    try:
        while True:
            bpsx.push_pull(np.ones(50_000, np.float32), name="x")
    except bpsx.BpsxError as e:
        report([type(e).__name__, str(e)])
        sys.exit(7)
"""
#: Why the job cannot go on -> number of servers, variables, what the workers do first.
_CASES: dict[str, tuple[int, dict[str, str], str]] = {
    "it was the last server": (1, {"BPSX_ELASTIC_WAIT": "0"}, ""),
    "BPSX_ELASTIC=off": (2, {"BPSX_ELASTIC": "off"}, ""),
}


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
@pytest.mark.parametrize("why", _CASES)
def test_the_job_ends_and_names_the_server_and_the_obstacle(why, number):
    servers, env, before = _CASES[why]
    source = _STEPPING.format(before=before)
    with Job(
        source, servers=servers, env={"BPSX_TERM_GRACE": "0", "BPSX_ELASTIC": "servers", **env}
    ) as job:
        assert job.scheduler is not None
        for worker in job.workers:
            worker.wait_for_line("ready")
        struck = time.monotonic()
        job.servers[0].signal(number)
        # All of them end, each with an error.
        statuses = [p.wait() for p in job.processes]
        assert time.monotonic() - struck < PROMISED
        assert all(statuses), "\n".join(p.text() for p in job.processes)
        name = rf"server \d \(127\.0\.0\.1, pid {job.servers[0].popen.pid}\) "
        for worker in job.workers:
            kind, text = worker.reports()[-1]
            assert kind == "PeerLostError" and re.match(name, text), text
            assert f"the job cannot go on without it: {why}" in text, text
