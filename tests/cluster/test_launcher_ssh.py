"""bpsx-run --hostfile: jobs over real ssh to a private sshd on loopback."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from launching import (
    FOR_EVER,
    PY,
    TELL,
    Launcher,
    finish,
    launching,
    python,
    role_pids,
    wait_for,
    words,
)
from sshd import Sshd, sshd, start

SUM = (
    "import sys, numpy, bpsx; bpsx.init(); a = numpy.full(3000, bpsx.rank() + 1,"
    " 'float32');print(bpsx.rank(), bpsx.size(), bpsx.push_pull(a, name='a', average=False)[-1]);"
    " bpsx.shutdown()"
)
INIT = "import bpsx, os, signal, sys; bpsx.init()\n"


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Sshd]:
    with sshd(tmp_path) as made:
        yield made


@pytest.fixture
def launcher(tmp_path: Path, server: Sshd) -> Iterator[Launcher]:  # ends before the sshd does
    with launching(tmp_path) as made:
        yield made


def test_a_whole_job(launcher: Launcher, server: Sshd) -> None:
    job = start(
        launcher, server, "HOST scheduler server   # both\nHOST\nHOST worker\n", PY, "-c", SUM
    )
    assert finish(job) == (0, [f"[worker {i} 127.0.0.1] {i} 2 3.0" for i in (0, 1)], [])


def test_hosts_by_role_and_a_given_port(launcher: Launcher, server: Sshd, tmp_path: Path) -> None:
    for name in ("workers", "servers"):
        (tmp_path / name).write_text(f"127.0.0.1:{server.port}\n")
    show = SUM.replace("print(", "import os; print(os.environ['DMLC_PS_ROOT_URI'], ")
    job = launcher.start(
        words(
            "-WH",
            str(tmp_path / "workers"),
            "-SH",
            str(tmp_path / "servers"),
            "--scheduler-ip",
            "127.0.0.1",
            "--ssh-port",
            str(server.port),
            "--ssh",
            server.ssh,
            "--env",
            launcher.mark,
            PY,
            "-c",
            show,
        )
    )
    assert finish(job) == (0, ["[worker 0 127.0.0.1] 127.0.0.1 0 1 1.0"], [])


def test_variables_are_handed_on_and_the_secret_on_no_command_line(
    launcher: Launcher, server: Sshd
) -> None:
    look = (
        INIT
        + """
from pathlib import Path

lines = [p.read_bytes() for p in Path("/proc").glob("[0-9]*/cmdline") if p.exists()]
e = os.environ
print(len(e["BPSX_SECRET"]) >= 40, any(e["BPSX_SECRET"].encode() in line for line in lines))
print(
    e["ONE"],
    e["TWO"],
    e["NCCL_DEBUG"],
    e["OMP_NUM_THREADS"],
    e.get("PRIVATE"),
    e["BPSX_STALL_WARN_SECONDS"],
    os.getcwd(),
)
bpsx.shutdown()
"""
    )
    job = start(
        launcher,
        server,
        "HOST server worker",
        "--env",
        "ONE:a b",
        "--env",
        "TWO='$HOME",
        PY,
        "-c",
        look,
        environment={
            "NCCL_DEBUG": "INFO",
            "OMP_NUM_THREADS": "3",
            "PRIVATE": "x",
            "BPSX_STALL_WARN_SECONDS": "7",
        },
    )
    status, out, err = finish(job)
    assert (status, err) == (0, [])
    assert out == sorted(
        [
            "[worker 0 127.0.0.1] True False",
            f"[worker 0 127.0.0.1] a b '$HOME INFO 3 None 7 {os.getcwd()}",
        ]
    )


def test_a_secret_of_the_users_is_kept(launcher: Launcher, server: Sshd) -> None:
    job = start(
        launcher,
        server,
        "HOST server worker",
        PY,
        "-c",
        INIT + "print(os.environ['BPSX_SECRET']); bpsx.shutdown()",
        environment={"BPSX_SECRET": "chosen-by-the-user-and-long-enough"},
    )
    assert finish(job) == (0, ["[worker 0 127.0.0.1] chosen-by-the-user-and-long-enough"], [])


def test_the_far_exit_status_is_kept(launcher: Launcher, server: Sshd) -> None:
    job = start(
        launcher,
        server,
        "HOST server\nHOST\nHOST",
        PY,
        "-c",
        INIT + "os._exit(9 if bpsx.rank() else 0)",
    )
    status, _, err = finish(job)
    assert status == 9
    assert "worker 1 127.0.0.1 exited with status 9" in err[-1] or any(
        "worker 1 127.0.0.1 exited with status 9" in line for line in err
    )


def test_a_far_command_that_is_not_there(launcher: Launcher, server: Sshd) -> None:
    job = start(
        launcher, server, "HOST server worker", "--grace", "0.5", "no-such-command-of-anybody"
    )
    status, _, err = finish(job)
    assert status == 127
    assert any("cannot run 'no-such-command-of-anybody'" in line for line in err)


def test_a_far_folder_that_is_not_there(launcher: Launcher, server: Sshd) -> None:
    job = start(
        launcher,
        server,
        "HOST server worker",
        "--grace",
        "0.5",
        "--directory",
        "/no/such/folder",
        PY,
        "-c",
        SUM,
    )
    status, _, err = finish(job)
    assert status == 2
    assert any(
        "has no folder /no/such/folder; name another with --directory" in line for line in err
    )


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_reaches_the_remote_processes(
    launcher: Launcher, server: Sshd, number: signal.Signals
) -> None:
    # A second warning would appear, too.
    once = (
        TELL.replace("os._exit(5)", "end()")
        + "def end(): import time; time.sleep(0.3); os._exit(5)\n"
    )
    job = start(
        launcher,
        server,
        "HOST server\nHOST\nHOST",
        "--grace",
        "80",
        PY,
        "-c",
        INIT + once + FOR_EVER,
    )
    wait_for(job, "[worker 0 127.0.0.1] ready", "[worker 1 127.0.0.1] ready")
    job.send_signal(number)
    status, out, err = finish(job)
    assert status == 5, err
    assert out == [f"[worker {i} 127.0.0.1] got {number}" for i in (0, 1)]
    assert any(f"received {number.name}; " in line for line in err)


def test_a_killed_launcher_takes_the_far_processes_along(
    launcher: Launcher, server: Sshd, tmp_path: Path
) -> None:
    fifo = tmp_path / "alive"
    os.mkfifo(fifo)
    worker = (
        INIT
        + f"held = os.open({str(fifo)!r}, os.O_WRONLY)\nsignal.signal(15, signal.SIG_IGN)\n"
        + FOR_EVER
    )
    job = start(launcher, server, "HOST server\nHOST\nHOST", PY, "-c", worker)
    with open(fifo, "rb") as alive:  # ends when the last writer is dead
        wait_for(job, "[worker 0 127.0.0.1] ready", "[worker 1 127.0.0.1] ready")
        job.kill()
        assert alive.read() == b""
    # The folder of the scheduler's port is removed by the scheduler's runner, the last to exit.
    for _ in range(600):
        if not launcher.left() and not list(launcher.folder.iterdir()):
            break
        signal.sigtimedwait([], 0.05)


def test_a_host_that_does_not_answer_ends_the_job(launcher: Launcher, server: Sshd) -> None:
    import socket

    with socket.create_server(("127.0.0.1", 0)) as closed:
        nobody = closed.getsockname()[1]
    job = start(
        launcher, server, f"HOST scheduler server worker\n127.0.0.1:{nobody} worker", PY, "-c", SUM
    )
    status, _, err = finish(job)
    assert status == 255
    assert any(
        line.startswith(
            "bpsx-run: worker 1 127.0.0.1 could not be started on 127.0.0.1: ssh exited with"
            " status 255"
        )
        for line in err
    )


def test_an_unknown_host_key_is_refused(launcher: Launcher, server: Sshd) -> None:
    server.known.write_text("")
    status, _, err = finish(start(launcher, server, "HOST server worker", PY, "-c", SUM))
    assert status == 255
    assert any("Host key verification failed" in line for line in err)
    assert any(
        "could not be started on 127.0.0.1" in line
        and "connect once by hand (ssh 127.0.0.1)" in line
        for line in err
    )


def test_the_interpreters_folder_comes_first_on_the_far_path(
    launcher: Launcher, server: Sshd
) -> None:
    show = INIT + "print(sys.executable, os.environ['PATH'].split(os.pathsep)[0]); bpsx.shutdown()"
    show += "; assert os.environ['BPSX_STATE_FD'] == '-1'  # bpsx-run's"
    job = start(launcher, server, "HOST server worker", "python", "-c", show)
    assert finish(job) == (0, [f"[worker 0 127.0.0.1] {PY} {os.path.dirname(PY)}"], [])


def test_hosts_without_a_server_have_one_beside_each_worker(
    launcher: Launcher, server: Sshd
) -> None:
    show = INIT + "print(os.environ['DMLC_NUM_SERVER'], bpsx.size()); bpsx.shutdown()"
    job = start(
        launcher,
        server,
        "HOST\nHOST\n",
        "--scheduler-ip",
        "127.0.0.1",
        "--ssh-port",
        str(server.port),
        PY,
        "-c",
        show,
    )
    assert finish(job) == (0, [f"[worker {i} 127.0.0.1] 2 2" for i in (0, 1)], [])


def test_a_connection_that_breaks(launcher: Launcher, server: Sshd) -> None:
    # The worker kills the sshd that serves it: the ancestor whose parent is the listening sshd.
    cut = (
        INIT
        + """
def parent(pid): return int(open(f"/proc/{pid}/stat").read().rpartition(")")[2].split()[1])
pid = os.getpid()
while open(f"/proc/{pid}/comm").read() != "sshd\\n": pid = parent(pid)
os.kill(pid, 9)
signal.pause()
"""
    )
    job = start(launcher, server, "HOST server\nHOST", "--grace", "1", PY, "-c", cut)
    status, _, err = finish(job)
    assert status == 255
    assert any(
        "worker 0 127.0.0.1 was lost: the connection to 127.0.0.1 ended (ssh: status 255)" in line
        for line in err
    )


_TRAINING = """
import os, numpy, bpsx
bpsx.init()
x = numpy.zeros(70_000, "float32")
def step():
    global x
    x += bpsx.push_pull(x / 8 + bpsx.rank(), name="x", average=False)
for _ in range(10): step()
print("running", flush=True)
gate = os.environ["GATE"]
while not bpsx.push_pull(numpy.array([os.path.exists(gate)], float), name="told")[0]: step()
print("ends", x[0] == x[-1], flush=True)
bpsx.shutdown()
"""


def test_a_far_server_that_dies_is_started_again(
    launcher: Launcher, server: Sshd, tmp_path: Path
) -> None:
    """The job's only one. It is a process of another host, which bpsx-run knows as an ssh."""
    gate = tmp_path / "gate"
    job = start(
        launcher,
        server,
        "HOST server\nHOST\nHOST",
        *("--max-restarts", "3", "--env", f"GATE:{gate}", PY, "-c", _TRAINING),
        environment={"BYTEPS_LOG_LEVEL": "info"},
    )
    wait_for(job, "[worker 0 127.0.0.1] running", "[worker 1 127.0.0.1] running")
    pid = role_pids(launcher)["server"]
    os.kill(pid, signal.SIGKILL)
    gate.touch()  # no step ends without a server
    status, out, err = finish(job)
    assert status == 0, err
    assert sorted(out) == [f"[worker {i} 127.0.0.1] ends True" for i in (0, 1)]
    assert any("SIGKILL; started again in 0.5 s (1 of 3)" in line for line in err), err
    assert any("has joined: all workers have connected to it" in line for line in err), err
    died = f"bpsx-run: server 0 127.0.0.1 (pid {pid}) was killed by SIGKILL"
    assert f"{died}, and the job went on without it" in err


_ELASTIC = """
import os, signal, numpy, bpsx
bpsx.init()
old = not os.path.exists(os.environ["FLAG"])  # it has not joined late
@bpsx.elastic.run
def train(state):
    while state.step < 40:
        while state.step == 30 and old and sizes[-1:] != [3]: state.check_host_updates()
        state.x = state.x + bpsx.push_pull(numpy.ones(1000), name="x", average=False)
        state.step += 1
        if state.step == 10 and bpsx.rank() == 1 and not os.path.exists(os.environ["FLAG"]):
            open(os.environ["FLAG"], "w").close()
            os.kill(os.getpid(), signal.SIGKILL)
        state.commit()
state, sizes = bpsx.State(step=0, x=numpy.zeros(1000)), []
state.register_reset_callbacks([lambda: sizes.append(bpsx.size())])
train(state)
print("ends", bpsx.size(), state.x[0], flush=True)
bpsx.shutdown()
"""


def start_three(
    launcher: Launcher, server: Sshd, tmp_path: Path, source: str, *options: str
) -> subprocess.Popen[str]:
    """Start a job of a server and three far workers, one of which ends and is started again."""
    return start(
        launcher,
        server,
        "HOST server\nHOST\nHOST\nHOST",
        *("--max-restarts", "3", *options, "--env", f"FLAG:{tmp_path / 'flag'}"),
        *("--env", "BPSX_ELASTIC:shrink", PY, "-c", source),
    )


def assert_started_again(err: list[str], status: int) -> None:
    """Worker 1 has ended with ``status``, was started again, and the job went on without it."""
    died = f"bpsx-run: worker 1 127.0.0.1 exited with status {status}"
    assert f"{died}; started again in 0.5 s (1 of 3)" in err
    assert f"{died}, and the job went on without it" in err


def test_a_far_worker_that_dies_is_started_again_and_joins(
    launcher: Launcher, server: Sshd, tmp_path: Path
) -> None:
    job = start_three(launcher, server, tmp_path, _ELASTIC)
    status, out, err = finish(job)
    assert status == 0, err
    assert len(out) == 3 and len({line.split("] ")[1] for line in out}) == 1, out
    assert "ends 3 " in out[0]
    assert_started_again(err, 137)  # as a shell says of SIGKILL


_LATE = """
import os, signal, time, numpy, bpsx
flag, over = os.environ["FLAG"], os.environ["FLAG"] + ".over"
if os.path.exists(flag):
    open(flag + ".again", "w").close()
    while not os.path.exists(over): time.sleep(0.01)
bpsx.init()
@bpsx.elastic.run
def train(state):
    while state.step < 20:
        bpsx.push_pull(numpy.ones(1000), name="x")
        state.step += 1
        if state.step == 10 and bpsx.rank() == 1 and not os.path.exists(flag):
            open(flag, "w").close()
            os._exit(3)
        while state.step == 20 and not os.path.exists(flag + ".again"): time.sleep(0.01)
train(bpsx.State(step=0))
bpsx.shutdown()
print("ends", flush=True)
open(over, "w").close()
time.sleep(4)  # it still saves something
print("saved", flush=True)
"""


def test_a_far_worker_that_comes_when_the_job_is_over_is_ended(
    launcher: Launcher, server: Sshd, tmp_path: Path
) -> None:
    """It would wait for a scheduler. The others may take their time."""
    job = start_three(launcher, server, tmp_path, _LATE, "--grace", "1")
    began = time.monotonic()
    status, out, err = finish(job)
    assert status == 0, err
    assert [line.split("] ")[1] for line in out] == ["ends", "saved"] * 2
    assert time.monotonic() - began < 60
    assert_started_again(err, 3)


#: Process 0 of the second machine ends, or hangs; process 1 hangs when it gets PeerLostError.
_HUNG = """
import os, signal, time, numpy, bpsx
signal.signal(signal.SIGTERM, signal.SIG_IGN)
bpsx.init()
old, me = not os.path.exists(os.environ["FLAG"]), bpsx.rank()
@bpsx.elastic.run
def train(state):
    while state.step < 40:
        while state.step == 30 and waits(): state.check_host_updates()
        bpsx.push_pull(numpy.ones(1000), name="x")
        state.step += 1
        if state.step == 10 and me == 2 and old:
            open(os.environ["FLAG"], "w").close()
            os.kill(os.getpid(), getattr(signal, os.environ["NUMBER"]))
        state.commit()
def waits(): return sizes[-1:] != [4] if old else bpsx.size() < 4  # they may join one by one
state, sizes = bpsx.State(step=0), []
state.register_reset_callbacks([lambda: sizes.append(bpsx.size())])
try: train(state)
except bpsx.PeerLostError: time.sleep(1000)
print("ends", bpsx.size(), flush=True)
bpsx.shutdown()
"""


@pytest.mark.parametrize(
    ("number", "reduce"), [("SIGKILL", "1"), ("SIGSTOP", "1"), ("SIGSTOP", "0")]
)
def test_a_far_machine_whose_processes_hang_is_ended_and_started_again(
    launcher: Launcher, server: Sshd, tmp_path: Path, number: str, reduce: str
) -> None:
    """The bpsx-run there ends the neighbours of a process that has died. If none has died, it hears
    from the launcher which ones the job has lost: all, or one that speaks to the servers itself.
    """
    job = start(
        launcher,
        server,
        "HOST server\nHOST slots=2\nHOST",
        *("--max-restarts", "1", "--grace", "1", "--env", f"FLAG:{tmp_path / 'flag'}"),
        *("--env", "BPSX_ELASTIC:shrink", "--env", f"NUMBER:{number}", PY, "-c", _HUNG),
        environment={
            "PS_HEARTBEAT_INTERVAL": "1",
            "PS_HEARTBEAT_TIMEOUT": "5",
            "BPSX_LOCAL_REDUCE": reduce,
        },
    )
    status, out, err = finish(job)
    assert status == 0, err
    assert [line.split("] ")[-1] for line in out] == ["ends 4"] * 4, err
    if number == "SIGKILL":
        (far,) = (line for line in err if "] bpsx-run: worker 1.0 was killed by SIGKILL" in line)
        # The bpsx-run there sees the death and hears of the loss at the same time: in either order.
        causes = "after the grace time (1 s)", "1 s after the job had lost it"
        texts = [f"; worker 1.1 was still running {cause}, got SIGTERM and" for cause in causes]
        assert any(text in far for text in texts), far
        text = "worker 1 127.0.0.1 exited with status 137"
    else:
        (far,) = (line for line in err if "] bpsx-run: worker 1." in line)
        hung = (
            "was still running 1 s after the job had lost it, got SIGTERM and was killed by SIGKILL"
        )
        assert far.count(hung) == (2 if reduce == "1" else 1), far
        text = "worker 1 127.0.0.1 exited with status 1;"
    assert any(text in line and "started again in 0.5 s (1 of 1)" in line for line in err), err


#: Process 0 of the second machine ends. When both are started again, process 1 comes too late.
_ONE_LATE = """
import os, time, numpy, bpsx
flag, over, me = os.environ["FLAG"], os.environ["FLAG"] + ".over", os.environ["BYTEPS_LOCAL_RANK"]
again = os.path.exists(flag) and os.environ["DMLC_WORKER_ID"] == "1"
if again and me == "1":
    while not os.path.exists(over): time.sleep(0.01)
    print("late", flush=True)
bpsx.init()
@bpsx.elastic.run
def train(state):
    if again: open(flag + ".again", "w").close()
    while state.step < 20:
        while state.step == 15 and not os.path.exists(flag + ".again"): state.check_host_updates()
        bpsx.push_pull(numpy.ones(1000), name="x")
        state.step += 1
        if state.step == 10 and bpsx.rank() == 2 and not again:
            open(flag, "w").close()
            os._exit(3)
        state.commit()
train(bpsx.State(step=0))
bpsx.shutdown()
print("ends", flush=True)
open(over, "w").close()
time.sleep(5)  # it still saves something
print("saved", flush=True)
"""


def test_one_of_a_far_machines_workers_that_comes_when_the_job_is_over_is_ended(
    launcher: Launcher, server: Sshd, tmp_path: Path
) -> None:
    """It would wait for a scheduler. Its neighbour, which has joined in time, may take its time."""
    job = start(
        launcher,
        server,
        "HOST server\nHOST slots=2\nHOST slots=2\nHOST slots=2",
        *("--max-restarts", "3", "--grace", "1", "--env", f"FLAG:{tmp_path / 'flag'}"),
        *("--env", "BPSX_ELASTIC:shrink", "--env", "BPSX_LOCAL_REDUCE:0", PY, "-c", _ONE_LATE),
        environment={"BPSX_RENDEZVOUS_TIMEOUT": "90"},
    )
    began = time.monotonic()
    status, out, err = finish(job)
    assert status == 0, err
    said = sorted(line.split("] ")[-1] for line in out)
    assert said == ["ends"] * 5 + ["late"] + ["saved"] * 5, (out, err)
    assert time.monotonic() - began < 60
    assert_started_again(err, 3)


def test_several_processes_on_a_far_host(launcher: Launcher, server: Sshd) -> None:
    show = (
        INIT + "print(bpsx.rank(), bpsx.local_rank(), bpsx.size(), bpsx.local_size(),"
        " os.environ['BPSX_STATE_FD']); bpsx.shutdown()"
    )
    job = start(
        launcher,
        server,
        "HOST server\nHOST slots=2",
        PY,
        "-c",
        show,
        environment={"BYTEPS_NUMA_ON": "0"},
    )
    status, out, err = finish(job)
    assert (status, err) == (0, [])
    assert out == [f"[worker 0 127.0.0.1] [worker 0.{i}] {i} {i} 2 2 -1" for i in (0, 1)]


def test_the_far_end_starts_with_one_thread(launcher: Launcher) -> None:
    look = (
        "import bpsx.launch.ssh.agent, bpsx.launch.ssh.plan, os, sys;print(*{'numpy', 'zmq',"
        " 'torch', 'numba', 'asyncio'} & set(sys.modules), len(os.listdir('/proc/self/task')))"
    )
    assert finish(launcher.start(python(look))) == (0, ["1"], [])
