"""bpsx-run --local when a worker of a job with BPSX_ELASTIC=shrink dies."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap

import pytest

WORKER = """
    import os, signal, sys
    import bpsx, numpy as np

    bpsx.init()
    number = bpsx.rank()
    for step in range(6):
        if number == 1 and step == 3:
            {end}
        got = bpsx.push_pull(np.full(50_000, 10.0**number), name="x", average=False)
        assert len(set(got)) == 1 and got[0] in (111.0, 101.0), got
    print("done", bpsx.rank(), bpsx.size(), flush=True)
    bpsx.shutdown()
"""


def run(end: str, restarts: str = "0", **more: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "bpsx", "--local", "--workers", "3", "--servers", "1"]
    command += ["--max-restarts", restarts]
    script = [sys.executable, "-c", textwrap.dedent(WORKER.format(end=end))]
    env = {**os.environ, "BPSX_ELASTIC": "shrink", **more}
    return subprocess.run(
        [*command, *script], env=env, capture_output=True, text=True, timeout=90, check=False
    )


@pytest.mark.parametrize("restarts", ["0", "2"])
@pytest.mark.parametrize(
    ("end", "story"),
    [
        ("os.kill(os.getpid(), 9)", "worker 1 was killed by SIGKILL"),
        ("raise ValueError('no more')", "worker 1 exited with status 1"),
    ],
)
def test_the_others_go_on(end: str, story: str, restarts: str) -> None:
    job = run(end, restarts)
    assert job.returncode == 0, job.stderr
    assert sorted(line.split("] ")[1] for line in job.stdout.splitlines()) == [
        "done 0 2",
        "done 1 2",
    ]
    assert f"{story}, and the job went on without it" in job.stderr


def test_without_the_option_the_job_ends() -> None:
    job = run("os.kill(os.getpid(), 9)", BPSX_ELASTIC="servers")
    assert job.returncode == 128 + signal.SIGKILL, job.stderr
    assert "done" not in job.stdout
