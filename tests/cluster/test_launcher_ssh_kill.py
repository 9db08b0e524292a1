"""bpsx-run --hostfile kills processes on other hosts, and ends when they have."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from launching import DEAF, FOR_EVER, PY, Launcher, finish, launching, python, wait_for
from sshd import Sshd, sshd, start

#: ``leave_a_child`` makes a process that has left the worker's session, and whose parent ends.
INIT = f"""
import bpsx, os, signal, subprocess, sys, time
{DEAF}
bpsx.init()
launcher = os.getppid()
agent = int(open(f"/proc/{{launcher}}/stat").read().rpartition(")")[2].split()[1])
def leave_a_child():
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0: time.sleep(1000)
        os._exit(0)
"""
HOSTS = "HOST server\nHOST\nHOST"
#: Seconds for which bpsx-run waits for an agent, and with which a test tells the two cases apart.
ANSWER = 5.0


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Sshd]:
    with sshd(tmp_path) as made:
        yield made


@pytest.fixture
def launcher(tmp_path: Path, server: Sshd) -> Iterator[Launcher]:  # ends before the sshd does
    with launching(tmp_path) as made:
        yield made


def failing(
    launcher: Launcher, server: Sshd, what: str, hosts: str = HOSTS
) -> subprocess.Popen[bytes]:
    """Start a job whose worker 0 does ``what`` before the last worker fails."""
    source = INIT + (
        "if bpsx.rank() == bpsx.size() - 1:\n"
        '    bpsx.push_pull(__import__("numpy").ones(1), name="x")\n'
        "    time.sleep(0.3)\n"
        "    os._exit(9)\n"
        f"if bpsx.rank() == 0:\n    {what}\n"
        'bpsx.push_pull(__import__("numpy").ones(1), name="x")\n' + FOR_EVER
    )
    # A far bpsx-run that takes longer than that to tell a status on busy cores is ended, too.
    return start(launcher, server, hosts, "--grace", "2", PY, "-c", source)


def waited(line: str) -> bool:
    """Whether ``line`` says that bpsx-run has not heard of the end of far processes."""
    return f"no word from 127.0.0.1 for {ANSWER:g} s after SIGKILL" in line


@pytest.mark.parametrize(
    "what",
    [
        "leave_a_child()",
        "bpsx.push_pull(np.ones(1), name='x'); os.kill(os.getpid(), signal.SIGSTOP)",
        "bpsx.push_pull(np.ones(1), name='x'); os.kill(launcher, signal.SIGSTOP)",
    ],
    ids=["a child that has left", "a stopped worker", "a stopped bpsx-run"],
)
def test_far_processes_have_ended_when_bpsx_run_ends(
    launcher: Launcher, server: Sshd, what: str
) -> None:
    job = failing(launcher, server, what.replace("np.", '__import__("numpy").'))
    status, _, err = finish(job)
    assert launcher.left() == []
    assert status == 9, err
    assert not any(waited(line) for line in err), err
    assert any("got SIGTERM and was killed by SIGKILL" in line for line in err), err


def test_so_have_those_of_several_workers_of_a_host(launcher: Launcher, server: Sshd) -> None:
    """They lead sessions of their own."""
    what = 'bpsx.push_pull(__import__("numpy").ones(1), name="x"); leave_a_child();'
    what += " os.kill(launcher, signal.SIGSTOP); os.kill(os.getpid(), signal.SIGSTOP)"
    status, _, err = finish(
        failing(launcher, server, what, "HOST server\nHOST slots=2\nHOST slots=2")
    )
    assert launcher.left() == []
    assert status == 9, err
    assert not any(waited(line) for line in err), err


def test_a_second_interrupt_kills_them(launcher: Launcher, server: Sshd) -> None:
    source = INIT + "leave_a_child()\n" + FOR_EVER
    job = start(launcher, server, HOSTS, "--grace", "80", PY, "-c", source)
    wait_for(job, "[worker 0 127.0.0.1] ready", "[worker 1 127.0.0.1] ready")
    began = time.monotonic()
    for _ in range(2):
        job.send_signal(signal.SIGINT)
        time.sleep(0.2)
    status, _, err = finish(job)
    assert launcher.left() == []
    assert status == 128 + signal.SIGKILL, err
    assert time.monotonic() - began < ANSWER
    assert not any(waited(line) for line in err), err


def test_an_agent_that_hangs_is_named_and_cleans_up_once_it_can(
    launcher: Launcher, server: Sshd, tmp_path: Path
) -> None:
    pid = tmp_path / "agent"
    what = f'open({str(pid)!r}, "w").write(str(agent)); leave_a_child();'
    job = failing(launcher, server, what + " os.kill(agent, signal.SIGSTOP)")
    status, _, err = finish(job)
    assert status == 9, err
    (line,) = (line for line in err if waited(line))
    assert line.startswith("bpsx-run: worker 0 127.0.0.1: "), line
    assert "processes of the job may still run there" in line
    assert launcher.left()  # so they do
    os.kill(int(pid.read_text()), signal.SIGCONT)
    launcher.await_end()
    assert launcher.left() == []


def test_an_agent_that_is_killed_takes_the_worker_along(launcher: Launcher, server: Sshd) -> None:
    status, _, err = finish(failing(launcher, server, "os.kill(agent, signal.SIGKILL)"))
    launcher.await_end()
    assert launcher.left() == []
    assert status == 255, err
    assert any("the connection to 127.0.0.1 ended" in line for line in err), err
    assert not any(waited(line) for line in err), err


@pytest.mark.parametrize("then", ["signal.pause()", "time.sleep(0.5); os._exit(0)"])
def test_a_connection_that_breaks_takes_all_along(
    launcher: Launcher, server: Sshd, then: str
) -> None:
    """Also what has left the worker's session. The worker kills the sshd that serves it."""
    cut = """
def parent(pid): return int(open(f"/proc/{pid}/stat").read().rpartition(")")[2].split()[1])
leave_a_child()
pid = os.getpid()
while open(f"/proc/{pid}/comm").read() != "sshd\\n": pid = parent(pid)
os.kill(pid, 9)
"""
    source = f"{INIT}{cut}while True: {then}\n"
    job = start(launcher, server, "HOST server\nHOST", "--grace", "1", PY, "-c", source)
    status, _, err = finish(job)
    assert status == 255, err
    launcher.await_end()
    assert launcher.left() == []


def test_kill_all_finds_orphans_and_reap_orphans_forgets_them(launcher: Launcher) -> None:
    source = """
import os, subprocess, sys, time
from bpsx.launch.ssh.descendants import adopt_orphans, kill_all, reap_orphans, running
adopt_orphans()
loop = "import os, time\\nif os.fork(): os._exit(0)\\nos.setsid()\\n"
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"])
subprocess.run([sys.executable, "-c", loop + "time.sleep(1000)"], check=True)
subprocess.run([sys.executable, "-c", loop], check=True)
ended = lambda: [e for e in os.listdir("/proc") if e.isdigit() and zombie(e)]
def zombie(pid):
    try: state, parent = open(f"/proc/{pid}/stat").read().rpartition(")")[2].split()[:2]
    except OSError: return False
    return state == "Z" and int(parent) == os.getpid()
while not ended(): time.sleep(0.01)
reap_orphans(child.pid)
print(len(ended()), len(running()), child.pid in running())
kill_all()
print(len(running()), child.wait())
"""
    assert finish(launcher.start(python(source))) == (0, ["0 -9", "0 2 True"], [])
