"""Runs bpsx-run in processes, with small stand-ins for scheduler and server that fail on request,
and checks that nothing is left.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

PY = sys.executable
#: Restores the default signal handling, which the caller of pytest may have changed (background
#: jobs ignore SIGINT), then calls exec.
ORDINARY = (
    "import os, signal, sys; [signal.signal(s, signal.SIG_DFL) for s in (1, 2, 10, 12, 15, 17)];"
    "signal.pthread_sigmask(signal.SIG_SETMASK, []); os.execv(sys.argv[1], sys.argv[1:])"
)
RUN_JOB = """
import json, sys
from bpsx.launch.job import Job
from bpsx.launch.local import LocalPlan
plan, commands = json.loads(sys.argv[1])
sys.exit(Job(LocalPlan(**{**plan, "command": tuple(plan["command"])}), commands).run())
"""
#: Stand-in for a scheduler: ends when all workers have gone, and closes the servers' connections.
HUB = """
import os, socket
e = os.environ
listener = socket.create_server(("127.0.0.1", int(e["DMLC_PS_ROOT_PORT"])))
port = listener.getsockname()[1]
if "BPSX_PORT_FILE" in e:
    with open(e["BPSX_PORT_FILE"] + "~", "w") as f: f.write(str(port))
    os.rename(e["BPSX_PORT_FILE"] + "~", e["BPSX_PORT_FILE"])
links = [listener.accept()[0] for _ in range(int(e["DMLC_NUM_WORKER"]) + int(e["DMLC_NUM_SERVER"]))]
workers = [link for link in links if link.recv(1) == b"w"]
for link in workers: link.recv(1)
"""
JOIN = """
import os, signal, socket, sys, threading
e = os.environ
link = socket.create_connection((e["DMLC_PS_ROOT_URI"], int(e["DMLC_PS_ROOT_PORT"])))
link.send(e["DMLC_ROLE"][0].encode())
me = int(e.get("DMLC_WORKER_ID", -1))
"""
SERVER = JOIN + "link.recv(1)\n"
#: Prepended to RUN_JOB. Once the launcher has seen a child's exit, and before it reads outputs,
#: this lets the workers pass the FIFO GATE and waits until all children have ended.
ALL_END_BEFORE_THE_READ = """
import os
from bpsx.launch.child import Child
from bpsx.launch.output_mux import Pump
gate, children, step, begin = os.environ["GATE"], [], Pump.step, Child.begin
def started(self):
    children.append(self.process.pid)
    begin(self)
def late(self, timeout):
    if timeout == 0 and children:
        with open(gate, "w"):
            while children: os.waitid(os.P_PID, children.pop(), os.WEXITED | os.WNOWAIT)
    step(self, timeout)
Child.begin, Pump.step = started, late
"""
#: Prepended to RUN_JOB. Once all workers have ended, scheduler and servers end after the launcher
#: has looked for ended children, and before it signals those that are overdue.
HELPERS_END_BEFORE_THE_SIGNAL = """
import os
from bpsx.launch.job import Job
escalate = Job._escalate
def late(self, now):
    workers = self._status.workers
    if workers and all(worker.status is not None for worker in workers):
        for helper in self._status.helpers:
            os.waitid(os.P_PID, helper.process.pid, os.WEXITED | os.WNOWAIT)
    escalate(self, now)
Job._escalate = late
"""
#: Does not use print(), because a signal handler that runs inside print() could not print.
FOR_EVER = "__import__('os').write(1, b'ready\\n')\nwhile True: signal.pause()\n"
DEAF = "for s in (signal.SIGTERM, signal.SIGINT): signal.signal(s, signal.SIG_IGN)\n"
TELL = (
    "def tell(n, _): print('got', n, flush=True); os._exit(5)\nfor s in (1, 2, 10, 12, 15):"
    " signal.signal(s, tell)\n"
)
#: For two processes with the same FIFO as GATE: each waits for the other one.
MEETS, IS_MET = "open(e['GATE']).close()\n", "open(e['GATE'], 'w').close()\n"


def python(text: str) -> list[str]:
    return [PY, "-c", text]


class Launcher:
    """Starts launchers, and checks at the end that no process or file of theirs is left."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.mark = f"LAUNCHER_TEST={uuid.uuid4()}"
        self.started: list[subprocess.Popen[bytes]] = []
        unwanted = ("DMLC_", "BYTEPS_", "BPSX_", "NO_COLOR", "NVIDIA_VISIBLE_DEVICES")
        self.environment = {k: v for k, v in os.environ.items() if not k.startswith(unwanted)}
        key, value = self.mark.split("=")
        # The runtime folder itself may stay; its contents must be gone.
        self.runtime = folder.with_name("runtime")
        self.runtime.mkdir()
        self.environment |= {
            key: value,
            # Far processes have an empty home: each server would compile its kernels there.
            "BPSX_CACHE_DIR": os.environ["BPSX_CACHE_DIR"],
            "TMPDIR": str(folder),
            "TERM": "xterm",
            "XDG_RUNTIME_DIR": str(self.runtime),
        }

    def start(
        self, command: Sequence[str], environment: dict[str, str] | None = None, **options: Any
    ) -> subprocess.Popen[bytes]:
        options = {
            "stdin": subprocess.DEVNULL,
            "stdout": subprocess.PIPE,
            "stderr": subprocess.PIPE,
            **options,
        }
        process = subprocess.Popen(
            [PY, "-c", ORDINARY, *command], env=self.environment | (environment or {}), **options
        )
        self.started.append(process)
        return process

    def job(
        self,
        worker: str | list[str],
        scheduler: str = HUB,
        server: str = SERVER,
        environment: dict[str, str] | None = None,
        options: dict[str, Any] | None = None,
        prelude: str = "",
        **plan: Any,
    ) -> subprocess.Popen[bytes]:
        """Start a complete job of stand-ins. ``prelude``: Python that the launcher runs first."""
        plan = {
            "command": python(JOIN + worker) if isinstance(worker, str) else worker,
            "kill_after": 0.2,
            **plan,
        }
        commands = {"scheduler": python(scheduler), "server": python(server)}
        return self.start(
            [PY, "-c", prelude + RUN_JOB, json.dumps([plan, commands])],
            environment,
            **(options or {}),
        )

    def gate(self) -> Path:
        """Make a FIFO; opening it for reading blocks until it has a writer."""
        fifo = self.folder.with_name("gate")
        os.mkfifo(fifo)
        return fifo

    def left(self) -> list[str]:
        """Return the command lines of running processes that these launchers started, directly or
        not.
        """
        found = []
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                with contextlib.suppress(OSError):
                    if self.mark.encode() in (entry / "environ").read_bytes():
                        found.append((entry / "cmdline").read_text(errors="replace"))
        return found

    def await_end(self) -> None:
        """Wait until no process is left, for at most a minute."""
        end = time.monotonic() + 60
        while self.left() and time.monotonic() < end:
            time.sleep(0.05)

    def close(self) -> None:
        for process in self.started:
            process.kill()
            for stream in (process.stdin, process.stdout, process.stderr):
                if stream:
                    stream.close()
            process.wait()


@contextlib.contextmanager
def launching(tmp_path: Path) -> Iterator[Launcher]:
    """Yield a :class:`Launcher` whose temporary files go into a separate folder."""
    folder = tmp_path / "tmp"
    folder.mkdir()
    made = Launcher(folder)
    try:
        yield made
        assert [process.pid for process in made.started if process.poll() is None] == []
        assert made.left() == []
        # A process at the other end of an ssh has only a runtime folder in here.
        assert [p for p in folder.rglob("*") if p != folder / f"bpsx-{os.getuid()}"] == []
        assert [p for p in made.runtime.rglob("*") if p.is_file()] == []
    finally:
        made.close()


def finish(process: subprocess.Popen[bytes]) -> tuple[int, list[str], list[str]]:
    """Wait for the end; return the exit status and the sorted lines of both outputs."""
    out, err = process.communicate()
    return process.returncode, sorted(out.decode().splitlines()), sorted(err.decode().splitlines())


def wait_for(process: subprocess.Popen[bytes], *lines: str) -> None:
    """Read standard output until all ``lines`` have arrived."""
    assert process.stdout
    missing = set(lines)
    while missing:
        line = process.stdout.readline()
        assert line, f"ended without {sorted(missing)}"
        missing.discard(line.decode().rstrip("\n"))


def role_pids(launcher: Launcher) -> dict[str, int]:
    """Return the job's processes by role and worker id, as their environments say."""
    found = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                pairs = dict(
                    p.partition(b"=")[::2] for p in (entry / "environ").read_bytes().split(b"\0")
                )
                if (
                    launcher.mark.split("=")[1].encode() == pairs.get(b"LAUNCHER_TEST")
                    and b"DMLC_ROLE" in pairs
                ):
                    found[
                        (pairs[b"DMLC_ROLE"] + b" " + pairs.get(b"DMLC_WORKER_ID", b""))
                        .decode()
                        .strip()
                    ] = int(entry.name)
    return found


def words(*rest: str) -> list[str]:
    return [PY, "-m", "bpsx.launch", *rest]


def local_words(*rest: str) -> list[str]:
    return words("--local", *rest)


def read_terminal(descriptor: int, until: Callable[[bytes], bool] = lambda _: False) -> bytes:
    """Return the output of a pseudo terminal until it closes or ``until`` holds."""
    text = b""
    with contextlib.suppress(OSError):  # EIO means that no process has the terminal open any more
        while not until(text) and (data := os.read(descriptor, 4096)):
            text += data
    return text
