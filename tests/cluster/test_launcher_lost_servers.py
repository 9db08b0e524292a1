"""bpsx-run --local when a server dies: the scheduler, a stand-in, says whether the job goes on."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from launching import FOR_EVER, JOIN, TELL, Launcher, finish, launching, wait_for

#: Stand-in for a scheduler that orders its servers to die, one after the other, with ``lose``.
HUB = """
import os, signal, socket, sys
e = os.environ
def tell(line): os.write(int(e["BPSX_STATE_FD"]), line.encode() + b"\\n")
tell("waiting")
listener = socket.create_server(("127.0.0.1", 0))
with open(e["BPSX_PORT_FILE"] + "~", "w") as f: f.write(str(listener.getsockname()[1]))
os.rename(e["BPSX_PORT_FILE"] + "~", e["BPSX_PORT_FILE"])
count = int(e["DMLC_NUM_WORKER"]) + int(e["DMLC_NUM_SERVER"])
links = [listener.accept()[0] for _ in range(count)]
said = [(link, link.recv(1)) for link in links]
workers = [link for link, what in said if what == b"w"]
servers = [link for link, what in said if what == b"s"]
pids = [int(link.recv(20)) for link in servers]
def lose(i):
    servers[i].send(b"d")
    servers[i].recv(1)  # it closes its files; it has died a little later
    stat = f"/proc/{pids[i]}/stat"  # until bpsx-run reaps it, at the job's end
    while open(stat).read().rsplit(")", 1)[1].split()[0] != "Z": os.sched_yield()
def survive(i):
    lose(i)
    tell(f"lost server {i} {pids[i]}")
def serve():
    for link in workers: link.send(b"g")
    for link in workers: link.recv(1)
"""
RUNNING = HUB + "tell('running')\n"
SERVER = JOIN + (
    "link.send(b'%d' % os.getpid())\nif link.recv(1) == b'd': os.kill(os.getpid(), 9)\n"
)
#: Waits until the servers that are to die have died.
GO = "link.recv(1)\n"
SERVER_DIED = r"server [01] \(pid \d+\) was killed by SIGKILL"
DIED = "bpsx-run: " + SERVER_DIED
WENT_ON = DIED + ", and the job went on without it"


@pytest.fixture
def launcher(tmp_path: Path) -> Iterator[Launcher]:
    with launching(tmp_path) as made:
        yield made


def start(launcher: Launcher, hub: str, worker: str, **more: Any) -> subprocess.Popen[bytes]:
    given = {"servers": 2, "server": SERVER, "grace": 0.2, **more}
    return launcher.job(worker, scheduler=hub, **given)


def assert_ended_as_failed(job: subprocess.Popen[bytes]) -> None:
    """The launcher ended workers that would run for ever, because of a killed server."""
    status, _, err = finish(job)
    assert status == 128 + signal.SIGKILL
    (line,) = (line for line in err if line.startswith("bpsx-run: "))
    assert re.match(DIED + "; ", line), err
    assert "worker 0 was still running after the grace time (0.2 s), got SIGTERM and" in line
    assert "went on without it" not in line


@pytest.mark.parametrize("told", [True, False])
def test_a_job_that_goes_on_without_a_server_ends_well(launcher: Launcher, told: bool) -> None:
    """A scheduler that says nothing of the loss, as on another host, says it with its status."""
    hub = RUNNING + ("survive(0)\n" if told else "lose(0)\n") + "serve()"
    status, out, err = finish(start(launcher, hub, GO + "print('done')", grace=60))
    assert (status, out) == (0, ["[worker 0] done", "[worker 1] done"]), err
    (line,) = err
    assert re.fullmatch(WENT_ON, line), err


def test_the_workers_of_a_job_that_goes_on_get_no_signal(launcher: Launcher) -> None:
    """They end only after the launcher has handled the death, without any grace time.

    Without it, the launcher may also have to end the other server.
    """
    gate = launcher.gate()
    worker = GO + "print('ready', flush=True); open(e['GATE']).read(); print('done')"
    hub = RUNNING + "survive(0)\nserve()"
    environment = {"GATE": str(gate)}
    job = start(launcher, hub, worker, workers=1, grace=0, environment=environment)
    # The launcher forwards this line after it was told of the server's end.
    wait_for(job, "[worker 0] ready")
    gate.write_text("")
    _, out, (line,) = finish(job)
    assert out == ["[worker 0] done"]
    assert re.search(DIED[len("bpsx-run: ") :] + ", and the job went on without it$", line), line
    assert "worker" not in line.replace("all workers had exited with status 0", "")


def test_each_lost_server_is_named(launcher: Launcher) -> None:
    hub = RUNNING + "survive(1)\nsurvive(0)\nserve()"
    status, _, err = finish(start(launcher, hub, GO, servers=3, grace=60))
    assert status == 0
    (line,) = err
    died = r"server [012] \(pid \d+\) was killed by SIGKILL, and the job went on without it"
    assert re.fullmatch(f"bpsx-run: {died}; {died}", line), err


@pytest.mark.parametrize(
    "end",
    [
        pytest.param("tell(f'blame server 0 {pids[0]}')\nsignal.pause()", id="blame"),
        pytest.param("sys.exit(1)", id="exit"),
    ],
)
def test_a_scheduler_that_ends_the_job_is_followed(launcher: Launcher, end: str) -> None:
    assert_ended_as_failed(start(launcher, RUNNING + "lose(0)\n" + end, FOR_EVER))


def test_a_second_loss_may_end_the_job(launcher: Launcher) -> None:
    hub = RUNNING + "survive(0)\nlose(1)\ntell(f'blame server 1 {pids[1]}')\nsignal.pause()"
    status, _, err = finish(start(launcher, hub, FOR_EVER))
    assert status == 128 + signal.SIGKILL
    (line,) = (line for line in err if line.startswith("bpsx-run: "))
    assert re.match(f"{DIED}; .*; {SERVER_DIED}, and the job went on", line)


def test_a_loss_that_ends_the_job_later_is_its_cause(launcher: Launcher) -> None:
    """The scheduler may find later that a worker needs what only the lost server had."""
    hub = RUNNING + "survive(0)\ntell(f'blame server 0 {pids[0]}')\nsignal.pause()"
    assert_ended_as_failed(start(launcher, hub, FOR_EVER))


def test_a_job_that_cannot_lose_servers_is_ended_at_once(launcher: Launcher) -> None:
    """Without a word of the scheduler."""
    off = {"BPSX_ELASTIC": "off"}
    hub = RUNNING + "lose(0)\nsignal.pause()"
    assert_ended_as_failed(start(launcher, hub, FOR_EVER, environment=off))


def test_a_job_that_has_not_formed_is_ended_at_once(launcher: Launcher) -> None:
    status, _, err = finish(start(launcher, HUB + "lose(0)\nsignal.pause()", FOR_EVER, grace=3600))
    assert status == 128 + signal.SIGKILL
    assert any("was still waiting for the job to form, got SIGTERM and" in line for line in err)


def test_a_later_failure_is_the_cause_and_its_status_counts(launcher: Launcher) -> None:
    hub = RUNNING + "survive(0)\nserve()\ntell('blame worker 1 1')\nsys.exit(1)"
    status, _, err = finish(start(launcher, hub, GO + "if me: sys.exit(3)"))
    assert status == 3
    (line,) = (line for line in err if line.startswith("bpsx-run: "))
    assert re.match("bpsx-run: worker 1 exited with status 3; ", line), err
    assert re.search(f"; {SERVER_DIED}, and the job went on without it$", line)


def test_a_lost_server_that_hangs_is_no_failure(launcher: Launcher) -> None:
    hub = RUNNING + "servers[0].send(b'h')\ntell(f'lost server 0 {pids[0]}')\nserve()"
    server = JOIN + (
        "link.send(b'%d' % os.getpid())\n"
        "if link.recv(1) == b'h': os.kill(os.getpid(), signal.SIGSTOP)\n"
    )
    status, _, err = finish(start(launcher, hub, GO, server=server, grace=2))
    assert status == 0
    (line,) = err
    assert re.fullmatch(
        r"bpsx-run: server [01] \(pid \d+\) was still running after the grace time \(2 s\), got"
        " SIGTERM and was killed by SIGKILL, and the job went on without it",
        line,
    ), err


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signals_work_after_a_loss(launcher: Launcher, number: signal.Signals) -> None:
    """The workers' status counts, not that of the lost server."""
    hub = RUNNING + "survive(0)\nserve()"
    job = start(launcher, hub, TELL + GO + FOR_EVER, grace=60)
    wait_for(job, "[worker 0] ready", "[worker 1] ready")
    job.send_signal(number)
    status, out, err = finish(job)
    assert status == 5, err
    assert out == [f"[worker {i}] got {int(number)}" for i in (0, 1)]
    (line,) = err
    assert line.startswith(f"bpsx-run: received {number.name}; worker "), err
    assert re.search(f"; {SERVER_DIED}, and the job went on without it$", line)


#: Worker 0 kills a server of its launcher in the middle of its steps.
_KILLING = """
import os, signal
import bpsx, numpy as np
bpsx.init()
for step in range(20):
    handle = bpsx.push_pull_async(
        np.full(300_000, step + bpsx.rank(), np.float32), name="x", average=False
    )
    if step == 5 and bpsx.rank() == 0:
        launcher = os.getppid()
        for child in open(f"/proc/{launcher}/task/{launcher}/children").read().split():
            if "bpsx.server" in open(f"/proc/{child}/cmdline").read():
                os.kill(int(child), signal.SIGKILL)
                break
    assert (bpsx.synchronize(handle) == 2 * step + 1).all()
print("right", flush=True)
"""


def train_locally(source: str, env: Mapping[str, str], *options: str) -> str:
    """Run ``source`` on two workers that end well and print "right"; returns standard error."""
    words = [sys.executable, "-m", "bpsx.launch", "--local", "--workers", "2", *options]
    done = subprocess.run(
        [*words, sys.executable, "-c", source],
        env={**os.environ, **env},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == ["[worker 0] right", "[worker 1] right"]
    return done.stderr


@pytest.mark.parametrize("transport", ["zmq", "shm"])
def test_a_real_job_goes_on_without_a_killed_server(transport: str) -> None:
    env = {"BPSX_ELASTIC": "servers", "BYTEPS_ENABLE_IPC": str(int(transport == "shm"))}
    errors = train_locally(_KILLING, env, "--servers", "2")
    last = errors.splitlines()[-1]
    assert re.fullmatch(WENT_ON, last), errors
    # The scheduler's number may differ.
    (pid,) = re.findall(r"pid (\d+)", last)
    assert re.search(rf"server [01] \(127.0.0.1, pid {pid}\) is gone", errors), errors
    assert "workers have moved" in errors, errors


#: Worker 0 stops a server, and trains until the launcher has started another one.
_STOPPING = """
import os, signal
import bpsx, numpy as np
bpsx.init()
def servers():
    launcher = os.getppid()
    children = open(f"/proc/{launcher}/task/{launcher}/children").read().split()
    ours = lambda pid: open(f"/proc/{pid}/cmdline").read().endswith("bpsx.server\\0")
    return {int(pid) for pid in children if ours(pid)}
first = servers()
for step in range(5): bpsx.push_pull(np.ones(300_000), name="x")
if bpsx.rank() == 0: os.kill(max(first), signal.SIGSTOP)
while not bpsx.push_pull(np.ones(1) * bool(bpsx.rank() == 0 and servers() - first), name="end")[0]:
    assert (bpsx.push_pull(np.ones(300_000), name="x", average=False) == 2).all()
print("right", flush=True)
"""


@pytest.mark.parametrize("servers", ["2", "1"])
def test_a_stopped_server_is_ended_and_started_again(servers: str) -> None:
    """The job has gone on without it, or waits for another one."""
    env = {"PS_HEARTBEAT_INTERVAL": "1", "PS_HEARTBEAT_TIMEOUT": "2"}
    options = ("--servers", servers, "--max-restarts", "1", "--grace", "0.5")
    errors = train_locally(_STOPPING, env, *options)
    hung = r"server [01] \(pid \d+\) was still running 0.5 s after the job had lost it"
    ended = f"bpsx-run: {hung}, got SIGTERM and was killed by SIGKILL"
    assert re.search(ended + r"; started again in 0.5 s \(1 of 1\)\n", errors), errors
    assert re.search(ended + ", and the job went on without it", errors), errors


def test_a_server_that_leaves_is_not_ended(launcher: Launcher) -> None:
    """The scheduler reports no "gone", as it has asked to leave, however long its end takes."""
    hub = RUNNING + "tell(f'lost server 0 {pids[0]}')\nserve()"
    server = JOIN + "link.send(b'%d' % os.getpid())\nlink.recv(1)\n"
    worker = "import time; time.sleep(3)\n" + GO
    status, _, err = finish(start(launcher, hub, worker, server=server, grace=2))
    assert (status, err) == (0, [])
