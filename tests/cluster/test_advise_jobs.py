"""``bpsx-run advise`` with real jobs: a command, hosts over ssh, and a job that runs."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from launching import PY, Launcher, launching, words
from network import NetJob, Network, needed
from sshd import sshd

from bpsx.launch.advise_methods import METHODS, PLAIN
from support.jobs import DEADLINE

#: Two gradients a step, of 4 MB together, until the script is ended.
STEPS = """
import bpsx, numpy as np, sys, time
bpsx.init()
a, b = np.ones((500, 1000), np.float32), np.ones(500_000, np.float32)
while True:
    time.sleep(0.02)
    handles = [bpsx.push_pull_async(a, name="a"), bpsx.push_pull_async(b, name="b")]
    for handle in handles: bpsx.synchronize(handle)
"""


@pytest.fixture
def launcher(tmp_path: Path) -> Iterator[Launcher]:
    with launching(tmp_path) as made:
        yield made


def advise(launcher: Launcher, *more: str) -> tuple[int, str, str]:
    process = launcher.start(words("advise", *more))
    out, err = process.communicate(timeout=DEADLINE)
    return process.returncode, out.decode(), err.decode()


def test_a_command_is_run_alone_and_its_steps_are_predicted(launcher: Launcher) -> None:
    status, out, err = advise(
        launcher,
        "--json",
        "--workers",
        "4",
        "--link",
        "0.1",
        "--spare",
        "0,4",
        "--",
        PY,
        "-c",
        STEPS,
    )
    assert status == 0, err
    found = json.loads(out)
    assert (found["step"]["gradients"], found["step"]["bytes"]) == (2, 4_000_000)
    assert 0.02 <= found["step"]["ready_seconds"] < 1
    seconds = {name: found["methods"][name]["seconds"] for name in METHODS}
    # The link alone takes 0.33 s for each 4 MB; without spare machines a card carries 1.5 of them.
    assert 0.9 < seconds[PLAIN]["0"] / (1.5 * 0.334 + found["step"]["ready_seconds"]) < 1.1
    assert seconds[PLAIN]["4"] < seconds[PLAIN]["0"]
    assert seconds["bfloat16"]["0"] - found["step"]["ready_seconds"] < 0.6 * 0.6 - 0.02
    assert found["pick"] != PLAIN and found["seconds_now"] is None


@pytest.mark.parametrize(
    ("script", "says"),
    [
        ("raise SystemExit(3)", "ended with status 3, after fewer than 5 steps"),
        ("import bpsx; bpsx.init(); bpsx.shutdown()", "fewer than 2 whole steps were recorded"),
    ],
)
def test_a_command_without_steps_is_an_error(launcher: Launcher, script: str, says: str) -> None:
    status, out, err = advise(launcher, "--workers", "2", "--link", "1", PY, "-c", script)
    assert (status, out) == (2, "") and says in err


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_command_too(launcher: Launcher, number: signal.Signals) -> None:
    waits = "import signal; print('begun', flush=True); signal.pause()"
    process = launcher.start(words("advise", "--workers", "2", "--link", "1", PY, "-c", waits))
    assert process.stderr is not None
    while b"begun" not in process.stderr.readline():
        pass
    process.send_signal(number)
    assert process.wait(DEADLINE) == 130
    assert b"Traceback" not in process.stderr.read()


def test_hosts_that_are_one_machine_have_no_links(launcher: Launcher, tmp_path: Path) -> None:
    with sshd(tmp_path) as server:
        hosts = tmp_path / "hosts"
        hosts.write_text(f"127.0.0.1:{server.port}\n" * 2)
        given = ("--hostfile", str(hosts), "--ssh", server.ssh, "--env", launcher.mark)
        status, out, err = advise(launcher, *given, PY, "-c", STEPS)
    assert (status, out) == (2, "")
    assert "all hosts of the hostfile are one machine: it has no links to measure" in err


@needed
def test_a_running_job_shows_its_links_by_its_steps(tmp_path: Path) -> None:
    places = [f"worker {i}" for i in range(2)]
    beside = {f"server {i}": name for i, name in enumerate(places)}
    with Network(["scheduler", *places], "100mbit", both=True, beside=beside) as network:
        env = {"BYTEPS_TRACE_DIR": str(tmp_path), "BPSX_SECRET": "7a" * 32}
        with NetJob(STEPS, network, env=env, servers=2) as job:
            where = f"{network.address['scheduler']}:{job.port}"
            more = ["--json", "--scheduler", where, "--seconds", "8", "--cores", "1"]
            done = subprocess.run(
                [*network.prefix("worker 0"), *words("advise", *more)],
                env={**os.environ, **env},
                stdout=subprocess.PIPE,
                text=True,
                timeout=DEADLINE,
                check=True,
            )
    found: dict[str, Any] = json.loads(done.stdout)
    cluster = found["cluster"]
    assert (cluster["workers"], cluster["spare"], cluster["together"]) == (2, 0, True)
    # 100 Mbit/s are 12.5 MB/s with all headers.
    assert 9e6 < cluster["link"] < 14e6
    now = found["methods"][PLAIN]["seconds"]["0"]
    assert now == pytest.approx(found["seconds_now"], rel=0.02)
    assert found["methods"]["bfloat16"]["seconds"]["0"] < 0.7 * now
