"""Real jobs for tests: a scheduler, servers and workers as processes on loopback, owned by the test
that starts them.

A worker is Python source. The values that it passes to ``report(value)`` travel back as JSON. The
system chooses the ports, so any number of jobs may run side by side. Leaving the ``with`` block
ends all remaining processes.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import textwrap
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from support.forking import Fork, nursery_for

#: Seconds that a job may take, and in which all processes are promised to hear of a death. Tests on
#: an emulated processor set a multiple.
DEADLINE, PROMISED, _GATHERING = (
    s * float(os.environ.get("BPSX_TEST_PATIENCE", "1")) for s in (90.0, 5.0, 150.0)
)

#: Transport -> its environment variables.
TRANSPORTS = {
    "zmq": {"DMLC_ENABLE_RDMA": "zmq"},
    "tcp": {"DMLC_ENABLE_RDMA": "tcp"},
    "shm": {"BYTEPS_ENABLE_IPC": "1"},
}
_PRELUDE = """
import faulthandler, json, os, sys

faulthandler.enable()


def report(value):
    # Not through sys.stdout, which a handler of a signal may have interrupted.
    line = (json.dumps(value) + "\\n").encode()
    while line:
        line = line[os.write(1, line):]


def pass_gate(step):
    # One process waits here if the test has made a gate, until the test opens it.
    gate = os.path.join(os.environ.get("GATES", ""), f"gate {step}")
    if os.path.exists(gate):
        open(gate).read()


def told_to_end():
    # Whether the test has called Job.tell_to_end(). Workers hear of it in different steps, so each
    # pushes what it has heard, and all end by the sum.
    return os.path.exists(os.environ["END_FILE"])


def hear():
    # A line, whatever it says, for a process that is struck meanwhile: Python does not look at a
    # signal that came just before a read blocks.
    import select, signal

    news, told = os.pipe()
    os.set_blocking(told, False)
    before = signal.set_wakeup_fd(told)
    try:
        while 0 not in select.select([0, news], [], [])[0]:
            os.read(news, 4096)
        while os.read(0, 1) not in (b"\\n", b""):
            pass
    finally:
        signal.set_wakeup_fd(before)
        os.close(news)
        os.close(told)
"""


class Gates:
    """Steps at which a worker of a job waits that calls ``pass_gate(step)``, for the test.

    ``env``: variables for the worker.
    """

    def __init__(self, folder: Path) -> None:
        self._folder, self.env = folder, {"GATES": str(folder)}

    def close(self, *steps: int) -> None:
        """Let the worker wait at these steps."""
        for step in steps:
            os.mkfifo(self._folder / f"gate {step}")

    def open(self, step: int) -> None:
        """Let the worker go on; waits until it has come."""
        (self._folder / f"gate {step}").write_text("")


def native_stacks(pid: int) -> list[str]:
    """The stacks of a process's threads in C, line by line; none without gdb."""
    if shutil.which("gdb") is None:
        return []
    command = ["gdb", "-p", str(pid), "-batch", "-ex", "thread apply all backtrace 20"]
    try:
        found = subprocess.run(
            command, capture_output=True, text=True, errors="replace", timeout=60
        ).stdout
    except subprocess.TimeoutExpired:
        return ["gdb took more than 60 s"]
    return [line[:200] for line in found.splitlines() if line.startswith(("#", "Thread"))]


class Process:
    """One role's process; collects its output as it arrives."""

    def __init__(self, name: str, command: list[str], env: dict[str, str]) -> None:
        self.name = name
        self.lines: list[str] = []
        self.errors: list[str] = []
        self._changed = threading.Condition()
        kind = nursery_for(command, env)
        self.popen: subprocess.Popen[str] | Fork = (
            Fork(command, env, kind)
            if kind is not None
            else subprocess.Popen(
                command,
                env=env,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                errors="replace",
            )
        )
        self._readers = [
            threading.Thread(target=self._read, args=(stream, lines), daemon=True)
            for stream, lines in ((self.popen.stdout, self.lines), (self.popen.stderr, self.errors))
        ]
        for reader in self._readers:
            reader.start()

    def _read(self, stream: Any, lines: list[str]) -> None:
        for line in stream:
            with self._changed:
                lines.append(line.rstrip("\n"))
                self._changed.notify_all()
        with self._changed:
            self._changed.notify_all()

    def wait_for_line(self, text: str, timeout: float = DEADLINE, count: int = 1) -> str:
        """Wait until ``count`` lines on stdout or stderr contain ``text``; return the first one.

        Fails if the process ends earlier.
        """

        def found() -> list[str]:
            return [line for line in self.lines + self.errors if text in line]

        with self._changed:
            self._changed.wait_for(
                lambda: len(found()) >= count or not any(r.is_alive() for r in self._readers),
                timeout,
            )
        if len(found()) < count:
            raise AssertionError(
                f"{self.name} never said {text!r}; status {self.popen.poll()}:\n{self.text()}"
            )
        return found()[0]

    def wait(self, timeout: float = DEADLINE) -> int:
        """Wait for the end; return the exit status."""
        try:
            self.popen.wait(timeout)
        except subprocess.TimeoutExpired:
            self.print_stacks()
            raise AssertionError(
                f"{self.name} has not ended after {timeout} s:\n{self.text()}"
            ) from None
        for reader in self._readers:
            reader.join(timeout)
        return self.popen.returncode

    def print_stacks(self) -> None:
        """End the process, if it still runs; :meth:`text` then has the stacks of its threads.

        With gdb, which shows threads that Python does not know or has forgotten, these too.
        """
        if self.popen.poll() is not None:
            return
        self.signal(signal.SIGCONT)
        native = native_stacks(self.popen.pid)
        self.signal(signal.SIGABRT)  # Python prints them, as `faulthandler` is on
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.popen.wait(5)
            for reader in self._readers:
                reader.join(5)
        self.errors += native

    @property
    def silent(self) -> bool:
        """Whether no process can write to its output any more: it and its forks have ended."""
        return not any(reader.is_alive() for reader in self._readers)

    def reports(self) -> list[Any]:
        """Return the values that the process passed to ``report``."""
        return [json.loads(line) for line in self.lines if line[:1] in '[{"0123456789tfn-']

    def text(self) -> str:
        """Return all output, for the message of a failed test."""
        return "\n".join(
            [f"--- {self.name} stdout", *self.lines, f"--- {self.name} stderr", *self.errors]
        )

    def say(self, line: str) -> None:
        """Write a line to the process's standard input."""
        assert self.popen.stdin is not None
        try:
            self.popen.stdin.write(line + "\n")
            self.popen.stdin.flush()
        except BrokenPipeError:
            raise BrokenPipeError(f"{self.name} has ended before:\n{self.text()}") from None

    def signal(self, number: int) -> None:
        self.popen.send_signal(number)

    def end(self) -> None:
        """Kill the process if it still runs, and close its pipes."""
        if self.popen.poll() is None:
            self.popen.send_signal(signal.SIGCONT)
            self.popen.kill()
            self.popen.wait()
        for reader in self._readers:
            reader.join(10)
        for stream in (self.popen.stdin, self.popen.stdout, self.popen.stderr):
            if stream is not None:
                with contextlib.suppress(BrokenPipeError):  # input that it never read
                    stream.close()


class Job:
    """A job of processes.

    ``source``: Python source that each worker runs (dedented), or ``script``: a file and its
    arguments. ``env``: environment variables of all processes; ``worker_env[i]``: of worker i.

    ``workers``: number of worker processes; ``processes`` of them form one machine. ``alone``: one
    worker without scheduler and servers.
    """

    def __init__(
        self,
        source: str,
        workers: int = 2,
        servers: int = 1,
        *,
        env: dict[str, str] | None = None,
        worker_env: dict[int, dict[str, str]] | None = None,
        host: str = "127.0.0.1",
        processes: int = 1,
        alone: bool = False,
        script: Sequence[str] = (),
    ) -> None:
        self.processes_each, self._needs_scheduler = processes, not alone
        self._run = list(script) or ["-c", _PRELUDE + textwrap.dedent(source)]
        self.n_workers, self.n_servers = workers, servers
        self._folder = tempfile.TemporaryDirectory(prefix="bpsx-test-")
        clean = {
            k: v
            for k, v in os.environ.items()
            if not k.startswith(("DMLC_", "BYTEPS_", "BPSX_", "PS_"))
        }
        self._env = {
            **clean,
            "DMLC_PS_ROOT_URI": host,
            "DMLC_PS_ROOT_PORT": "0",
            "DMLC_NUM_WORKER": str(workers // processes),
            "DMLC_NUM_SERVER": str(servers),
            # The first worker of a kind waits until what it is forked from has imported all.
            "BPSX_RENDEZVOUS_TIMEOUT": f"{_GATHERING:g}",
            "BYTEPS_SOCKET_PATH": self._folder.name,
            # Most tests are about the network; tests of shared memory set this themselves.
            "OMP_NUM_THREADS": "1",
            "BYTEPS_ENABLE_IPC": "0",
            "BPSX_ANNOUNCE": "0",
            **(env or {}),
        }
        self._env["END_FILE"] = str(Path(self._folder.name) / "end")
        if "BPSX_CACHE_DIR" in os.environ:
            self._env.setdefault("BPSX_CACHE_DIR", os.environ["BPSX_CACHE_DIR"])
        self._worker_env = worker_env or {}
        self.scheduler: Process | None = None
        self.servers: list[Process] = []
        self.workers: list[Process] = []

    def __enter__(self) -> Job:
        try:
            if self._needs_scheduler:
                self.start_scheduler()
            for i in range(self.n_servers):
                self.start_server(i)
            for i in range(self.n_workers):
                self.start_worker(i)
        except BaseException:
            self.__exit__()
            raise
        return self

    def command(self, name: str, words: list[str]) -> list[str]:
        """Return the command that starts process ``name``; subclasses may run it elsewhere."""
        return words

    def start_scheduler(self, port: int = 0) -> None:
        """Start the scheduler and wait until it listens."""
        fifo = Path(self._folder.name) / f"port-{port}"
        env = {
            **self._env,
            "DMLC_ROLE": "scheduler",
            "DMLC_PS_ROOT_PORT": str(port),
            "BPSX_PORT_FILE": str(fifo),
            "BYTEPS_LOG_LEVEL": "info",
        }
        self.scheduler = Process(
            "scheduler", self.command("scheduler", [sys.executable, "-m", "bpsx.scheduler"]), env
        )
        self.scheduler.wait_for_line("listening on")
        self._env["DMLC_PS_ROOT_PORT"] = str(port or int(fifo.read_text()))

    @property
    def port(self) -> str:
        """Port of the scheduler."""
        return self._env["DMLC_PS_ROOT_PORT"]

    def start_server(self, i: int) -> None:
        command = self.command(f"server {i}", [sys.executable, "-m", "bpsx.server"])
        self.servers.append(Process(f"server {i}", command, {**self._env, "DMLC_ROLE": "server"}))

    def start_worker(self, i: int, source: str | None = None) -> None:
        env = {
            **self._env,
            "DMLC_ROLE": "worker",
            "DMLC_WORKER_ID": str(i // self.processes_each),
            "BYTEPS_LOCAL_RANK": str(i % self.processes_each),
            "BYTEPS_LOCAL_SIZE": str(self.processes_each),
            **self._worker_env.get(i, {}),
        }
        run = self._run if source is None else ["-c", _PRELUDE + textwrap.dedent(source)]
        command = self.command(f"worker {i}", [sys.executable, *run])
        self.workers.append(Process(f"worker {i}", command, env))

    def tell_to_end(self) -> None:
        """Let ``told_to_end()`` be true in the workers: the test has seen what it waited for."""
        Path(self._env["END_FILE"]).touch()

    @property
    def processes(self) -> list[Process]:
        return [*self.workers, *self.servers, *([self.scheduler] if self.scheduler else [])]

    def servers_anew(self, workers: int, left: bool = True) -> None:
        """After suspend(): wait until scheduler and servers have ended, and start them again, for a
        job of ``workers`` machines if that is more than one.

        ``left``: they end by themselves, because a process has contacted them.
        """
        for p in (*self.servers, self.scheduler):
            if p is not None:
                assert not left or p.wait() == 0, p.text()
                p.end()
        self.servers = []
        self._env["DMLC_NUM_WORKER"] = str(workers)
        if workers > 1:
            self.start_scheduler(int(self.port))
            for i in range(int(self._env["DMLC_NUM_SERVER"])):
                self.start_server(i)

    def results(self, timeout: float = DEADLINE) -> list[list[Any]]:
        """Wait until all processes have ended well; return the values that each worker reported."""
        for p in self.processes:
            status = p.wait(timeout)
            assert status == 0, f"{p.name} ended with status {status}\n" + "\n".join(
                q.text() for q in self.processes
            )
        return [w.reports() for w in self.workers]

    def __exit__(self, kind: type[BaseException] | None = None, *_: object) -> None:
        if kind is not None and issubclass(kind, AssertionError):
            for p in self.processes:
                p.print_stacks()
                print(p.text())
        for p in self.processes:
            p.end()
        self._folder.cleanup()


def run(source: str, workers: int = 2, servers: int = 1, **more: Any) -> list[list[Any]]:
    """Run a job until it has ended well; return the values that each worker reported."""
    with Job(source, workers, servers, **more) as job:
        return job.results()
