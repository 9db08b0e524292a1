"""Part of the failure matrix through ``bpsx-run --local``: its exit status is the worst one, and
nothing remains of the job.
"""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest
from launching import PY, Launcher, finish, launching, local_words, role_pids, wait_for

_SCRIPT = """
import os, sys, time
import numpy as np
import bpsx
me, stage = int(os.environ["DMLC_WORKER_ID"]), sys.argv[1]
if stage == "init" and me == 2:
    print("behind", flush=True)
    time.sleep(600)
if stage == "init":
    print("joining", flush=True)
try:
    bpsx.init()
    bpsx.push_pull(np.ones(1), name="first")
    bpsx.barrier()
    print("running", flush=True)
    if stage == "idle" or me == 2:
        time.sleep(600)
    bpsx.push_pull(np.ones(1000), name="x")
except bpsx.BpsxError as e:
    print("told:", e, flush=True)
    sys.exit(7)
"""
_FAST = {
    "PS_HEARTBEAT_INTERVAL": "0.3",
    "PS_HEARTBEAT_TIMEOUT": "2",
    "BPSX_GATHER_GRACE": "1",
    "BPSX_TERM_GRACE": "0.5",
}


def begin(launcher: Launcher, folder: Path, stage: str, *words: str):
    script = folder / "script.py"
    script.write_text(_SCRIPT)
    process = launcher.start(
        local_words("--workers", "3", "--servers", "1", *words, PY, str(script), stage), _FAST
    )
    ready = {"init": ["[worker 0] joining", "[worker 1] joining", "[worker 2] behind"]}
    wait_for(process, *ready.get(stage, [f"[worker {i}] running" for i in range(3)]))
    return process


@pytest.mark.parametrize(
    ("stage", "role", "way", "status"),
    [
        ("init", "worker 1", signal.SIGKILL, 137),
        ("init", "server", signal.SIGKILL, 137),
        ("init", "scheduler", signal.SIGKILL, 137),
        ("pull", "worker 1", signal.SIGKILL, 137),
        ("pull", "server", signal.SIGTERM, 7),
        ("pull", "scheduler", signal.SIGKILL, 137),
        ("idle", "worker 1", signal.SIGTERM, 143),
        ("idle", "server", signal.SIGKILL, 137),
        ("idle", "scheduler", signal.SIGINT, 1),
    ],
)
def test_the_worst_status_is_reported_and_nothing_is_left(tmp_path, stage, role, way, status):
    with launching(tmp_path) as launcher:
        process = begin(launcher, tmp_path, stage, "--grace", "2", "--max-restarts", "0")
        os.kill(role_pids(launcher)[role], way)
        found, _, errors = finish(process)
        assert found == status, errors
        (last,) = (line for line in errors if line.startswith("bpsx-run: "))
        assert last.startswith(f"bpsx-run: {role}"), errors


@pytest.mark.parametrize("role", ["worker 1", "server", "scheduler"])
def test_a_process_stopped_for_good_is_killed_too(tmp_path, role):
    with launching(tmp_path) as launcher:
        process = begin(launcher, tmp_path, "pull", "--grace", "2")
        os.kill(role_pids(launcher)[role], signal.SIGSTOP)
        found, out, errors = finish(process)
        assert found == 7, errors
        assert any("[worker 0] told:" in line and role in line for line in out), out


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("stage", ["init", "pull", "idle"])
def test_a_stopped_launcher_leaves_nothing(tmp_path, stage, number):
    with launching(tmp_path) as launcher:
        process = begin(launcher, tmp_path, stage, "--grace", "2")
        process.send_signal(number)
        began = time.monotonic()
        assert finish(process)[0] >= 128
        assert time.monotonic() - began < 30


def test_a_launcher_that_is_killed_leaves_no_process(tmp_path):
    with launching(tmp_path) as launcher:
        process = begin(launcher, tmp_path, "pull")
        process.kill()
        process.communicate()
        launcher.await_end()


_NAMES = """
import os, time
from pathlib import Path
import numpy as np
import bpsx
bpsx.init()
bpsx.push_pull(np.zeros(1), name="old")
print("running", flush=True)
for n in (1, 2):
    told = Path(os.environ["FOLDER"], str(n))
    while not bpsx.push_pull(np.array([told.exists()], float), name="old")[0]:
        time.sleep(0.01)
    found = bpsx.push_pull(np.ones(10), name=f"new {n}", average=False)
    print("declared", n, found.sum(), flush=True)
bpsx.shutdown()
"""


def test_a_killed_scheduler_is_started_again(tmp_path):
    """Twice: the job ends as if nothing had happened, and bpsx-run says what has."""
    script = tmp_path / "script.py"
    script.write_text(_NAMES)
    with launching(tmp_path) as launcher:
        words = local_words("--workers", "2", "--servers", "2", PY, str(script))
        env = {"FOLDER": str(tmp_path), "BPSX_ELASTIC": "servers"}
        process = launcher.start(words, _FAST | env)
        wait_for(process, "[worker 0] running", "[worker 1] running")
        for n in (1, 2):
            os.kill(role_pids(launcher)["scheduler"], signal.SIGKILL)
            (tmp_path / str(n)).touch()  # both workers declare a new name
            wait_for(process, *(f"[worker {i}] declared {n} 20.0" for i in (0, 1)))
        found, _, errors = finish(process)
        assert found == 0, errors
        said = {line for line in errors if line.startswith("bpsx-run: ")}
        died = "scheduler was killed by SIGKILL"
        assert f"bpsx-run: {died}; started again in 1 s (2 of 3)" in said
        assert f"bpsx-run: {died} (2 times), and was started again" in said


def test_a_scheduler_that_was_silent_is_started_again(tmp_path):
    """It ends by itself when it runs again, and finds that the nodes have left it."""
    script = tmp_path / "script.py"
    script.write_text(_NAMES)
    with launching(tmp_path) as launcher:
        words = local_words("--workers", "2", "--servers", "2", PY, str(script))
        quick = {"PS_HEARTBEAT_TIMEOUT": "2", "PS_HEARTBEAT_INTERVAL": "0.5"}
        env = {"FOLDER": str(tmp_path), "BPSX_ELASTIC": "servers", **quick}
        process = launcher.start(words, _FAST | env)
        wait_for(process, "[worker 0] running", "[worker 1] running")
        scheduler = role_pids(launcher)["scheduler"]
        os.kill(scheduler, signal.SIGSTOP)
        time.sleep(4)  # longer than the nodes' patience
        os.kill(scheduler, signal.SIGCONT)
        for n in (1, 2):
            (tmp_path / str(n)).touch()
            wait_for(process, *(f"[worker {i}] declared {n} 20.0" for i in (0, 1)))
        found, _, errors = finish(process)
        assert found == 0, errors
        told = "\n".join(errors)
        assert "this scheduler was silent for" in told and "started again in 0.5 s (1 of 3)" in told


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_scheduler_that_may_not_be_started_again_ends_the_job(tmp_path, number):
    """SIGTERM asks it to end the job; --max-restarts forbids more."""
    with launching(tmp_path) as launcher:
        words = ["--max-restarts", "0"] if number == signal.SIGKILL else []
        process = begin(launcher, tmp_path, "pull", "--grace", "2", *words)
        os.kill(role_pids(launcher)["scheduler"], number)
        found, _, errors = finish(process)
        assert found == (137 if number == signal.SIGKILL else 7), errors
        assert not any("started again in" in line for line in errors)
