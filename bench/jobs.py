"""Start measuring processes and send them commands: single ones, or a whole bpsx job on this
machine.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.network import Links
from bench.report import BenchError
from bpsx.config import child_environment

ROOT = Path(__file__).resolve().parent.parent
_START_SECONDS = 120.0
_END_SECONDS = 15.0


def progress(text: str) -> None:
    """Print a progress line to standard error; standard output is kept for the result."""
    print(f"bench: {text}", file=sys.stderr, flush=True)


def start(
    module: str,
    environment: Mapping[str, str],
    *,
    pipes: bool = False,
    prefix: Sequence[str] = (),
    log: Path | None = None,
) -> subprocess.Popen[bytes]:
    """Start ``python -m module`` in the repository's root, behind the words of ``prefix``.

    Without ``pipes`` its output goes to standard error. Standard error goes to the file ``log`` if
    there is one.
    """
    pipe = subprocess.PIPE if pipes else None
    with open(log, "ab") if log else contextlib.nullcontext(2) as errors:
        return subprocess.Popen(
            [*prefix, sys.executable, "-m", module],
            stdin=pipe or subprocess.DEVNULL,
            stdout=pipe or errors,
            stderr=errors,
            cwd=ROOT,
            env=child_environment(**environment),
        )


def stop(process: subprocess.Popen[bytes], seconds: float = _END_SECONDS) -> int:
    """Wait ``seconds`` for the process to end, then kill it. Returns its exit status."""
    try:
        return process.wait(seconds)
    except subprocess.TimeoutExpired:
        progress(f"process {process.pid} ({process.args!r}) did not end; killing it")
        process.kill()
        return process.wait()


class Child:
    """A process running :func:`bench.child.serve`. Not thread-safe."""

    def __init__(
        self,
        module: str,
        name: str,
        prefix: Sequence[str] = (),
        log: Path | None = None,
        **environment: str,
    ) -> None:
        self.name = name
        self.process = start(module, environment, pipes=True, prefix=prefix, log=log)
        self._buffer = b""

    @property
    def pid(self) -> int:
        return self.process.pid

    def tell(self, op: str, **arguments: Any) -> None:
        """Send a command without waiting for its reply.

        Raises :class:`BenchError` if the process is gone.
        """
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(json.dumps({"op": op, **arguments}).encode() + b"\n")
            self.process.stdin.flush()
        except OSError:
            raise BenchError(f"{self.name} has died (exit status {self.process.poll()})") from None

    def answer(self, timeout: float = 120.0) -> Any:
        """Return the result of the oldest command that has no reply yet.

        Raises :class:`BenchError` after ``timeout`` seconds, if the command failed, or if the
        process died.
        """
        assert self.process.stdout is not None
        deadline = time.monotonic() + timeout
        waiting = select.poll()  # select() fails if more than FD_SETSIZE files are open
        waiting.register(self.process.stdout, select.POLLIN)
        while b"\n" not in self._buffer:
            ready = waiting.poll(1000 * max(0.0, deadline - time.monotonic()))
            if not ready:
                raise BenchError(f"{self.name} did not reply within {timeout:.0f} s")
            data = os.read(self.process.stdout.fileno(), 1 << 16)
            if not data:
                raise BenchError(f"{self.name} has died (exit status {stop(self.process)})")
            self._buffer += data
        line, _, self._buffer = self._buffer.partition(b"\n")
        answer = json.loads(line)
        if "error" in answer:
            raise BenchError(f"{self.name}: {answer['error']}")
        return answer["result"]

    def ask(self, op: str, *, timeout: float = 120.0, **arguments: Any) -> Any:
        """Send a command and return its result: :meth:`tell` and :meth:`answer`."""
        self.tell(op, **arguments)
        return self.answer(timeout)

    def close(self) -> int:
        """Let the process quit, and wait for it. Returns its exit status. May be called twice."""
        with contextlib.suppress(BenchError, ValueError):
            self.tell("quit")
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()
        return stop(self.process)


def ask_all(
    children: Iterable[Child], op: str, *, timeout: float = 120.0, **arguments: Any
) -> list[Any]:
    """Send one command to all children at once, and return their results in order."""
    group = list(children)
    for child in group:
        child.tell(op, **arguments)
    return [child.answer(timeout) for child in group]


@contextlib.contextmanager
def closing_all(children: Iterable[Child]) -> Iterator[list[Child]]:
    """Context manager of children that closes them at its end.

    It sends "quit" to all before it waits for any, since peers may only be able to leave together.
    """
    group: list[Child] = []
    try:
        for child in children:
            group.append(child)
        yield group
    except KeyboardInterrupt:
        for child in group:
            child.process.kill()  # the command in progress may take minutes
        raise
    finally:
        for child in group:
            with contextlib.suppress(BenchError, ValueError):
                child.tell("quit")
        for child in group:
            status = child.close()
            if status:
                progress(f"{child.name} ended with status {status}")


#: The round that ``bench.worker`` calls "rate": number of tensors, bytes of each; bytes of all.
RATE = (32, 4_096_000)
RATE_BYTES = RATE[0] * RATE[1]
#: Environment variables that select each transport.
TRANSPORTS = {
    "zmq": {"DMLC_ENABLE_RDMA": "zmq", "BYTEPS_ENABLE_IPC": "0"},
    "tcp": {"DMLC_ENABLE_RDMA": "tcp", "BYTEPS_ENABLE_IPC": "0"},
    "rdma": {"DMLC_ENABLE_RDMA": "1", "BYTEPS_ENABLE_IPC": "0"},
    "shm": {"DMLC_ENABLE_RDMA": "tcp", "BYTEPS_ENABLE_IPC": "1"},
}


class Job:
    """A bpsx job on this machine: a scheduler, servers, and workers that run :mod:`bench.worker`.

    A context manager. Without servers the workers are the local processes of one machine.
    """

    def __init__(
        self,
        workers: int = 2,
        servers: int = 1,
        transport: str = "zmq",
        environment: Mapping[str, str] | None = None,
        modules: Mapping[int, str] | None = None,
        links: Links | None = None,
        own: Mapping[int, Mapping[str, str]] | None = None,
        processes: int | None = None,
        logs: Path | None = None,
    ) -> None:
        """``transport`` is a key of :data:`TRANSPORTS`.

        Except with "shm", the job's processes communicate as on different machines. ``modules``:
        modules that single workers run instead, by index. ``links``: the network in which the
        processes run, with places named "scheduler", "server 0" and so on. ``own``: variables of
        single workers, by index. ``processes``: workers of one machine; by default one with
        servers, and all without. ``logs``: a folder for what each process writes to standard error.
        """
        processes = processes or (1 if servers else workers)
        self._stack = contextlib.ExitStack()
        self._roles = contextlib.ExitStack()  # the scheduler and servers of the present job
        self._common = {
            "DMLC_PS_ROOT_URI": "127.0.0.1",
            "DMLC_NODE_HOST": "127.0.0.1",
            "DMLC_NUM_WORKER": str(workers // processes),
            "BYTEPS_LOCAL_SIZE": str(processes),
            "DMLC_NUM_SERVER": str(servers),
            "BYTEPS_FORCE_DISTRIBUTED": str(int(servers > 0)),
            **TRANSPORTS[transport],
            **(environment or {}),
        }
        self._links = links
        if links is not None:  # a job that leaves loopback needs a secret
            self._common |= {
                "DMLC_PS_ROOT_URI": links.address["scheduler"],
                "BPSX_SECRET": os.urandom(16).hex(),
            }
        self._counts = workers, servers
        self._processes = processes
        self._modules, self._own = modules or {}, own or {}
        self._logs = logs
        #: Files with what the processes have written to standard error, by process id.
        self.logs: dict[int, Path] = {}
        self.workers: list[Child] = []
        self.servers: list[subprocess.Popen[bytes]] = []
        self.scheduler: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Job:
        try:
            self._start()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        with self._roles:  # the workers first, as the others serve them
            self._stack.close()

    @property
    def environment(self) -> dict[str, str]:
        """Environment variables that all processes of the job share."""
        return dict(self._common)

    @property
    def pids(self) -> dict[str, int]:
        """Process ids by role and index."""
        assert self.scheduler is not None
        named = {
            "scheduler": self.scheduler.pid,
            **{f"server {i}": p.pid for i, p in enumerate(self.servers)},
        }
        return {**named, **{w.name: w.pid for w in self.workers}}

    def ask(self, op: str, **arguments: Any) -> list[Any]:
        """Send a command to every worker and return their results."""
        return ask_all(self.workers, op, **arguments)

    def check_rate(self) -> None:
        """Run a round of "rate". Raises :class:`BenchError` if its sums are wrong."""
        self.ask("many", kind="rate", rounds=1)
        if not all(self.ask("check", kind="rate")):
            raise BenchError("the sums of push_pull are wrong")

    def _start(self) -> None:
        self._start_roles()
        made = (self._worker(i) for i in range(self._counts[0]))
        self.workers = self._stack.enter_context(closing_all(made))
        self.ask("init", timeout=_START_SECONDS)

    def _worker(self, index: int) -> Child:
        name = f"worker {index}"
        log = self._log(name)
        child = Child(
            self._modules.get(index, "bench.worker"),
            name,
            prefix=self._prefix(name),
            log=log,
            **{**self._of_worker(index), **self._place(name)},
        )
        self._note(child.process, log)
        return child

    def replace_worker(self, index: int) -> Child:
        """Kill a worker and start another in its place, which has not joined the job yet."""
        old = self.workers[index]
        old.process.kill()
        old.close()
        return self.start_worker_again(index)

    def start_worker_again(self, index: int) -> Child:
        """Start another worker in the place of one that has ended, or does not answer.

        The caller closes the earlier one.
        """
        self.workers[index] = self._worker(index)
        return self.workers[index]

    def _start_roles(self) -> None:
        """Start a scheduler and the servers."""
        folder = self._roles.enter_context(tempfile.TemporaryDirectory(prefix="bpsx-bench-"))
        port_file = Path(folder) / "port"
        self.scheduler = self._role(
            "bpsx.scheduler", "scheduler", 0, DMLC_PS_ROOT_PORT="0", BPSX_PORT_FILE=str(port_file)
        )
        self._common["DMLC_PS_ROOT_PORT"] = str(port_in(port_file, self.scheduler))
        self.servers = [self._role("bpsx.server", "server", i) for i in range(self._counts[1])]

    def start_scheduler_again(self) -> None:
        """Start another scheduler at the address of one that has ended."""
        self.scheduler = self._role("bpsx.scheduler", "scheduler", 0)

    def add_server(self, place: int | None = None) -> None:
        """Start one more server, which joins the running job.

        ``place``: the server in whose place of the network it runs; by default one of its own.
        """
        index = len(self.servers) if place is None else place
        self.servers.append(self._role("bpsx.server", "server", index))

    def _of_worker(self, index: int) -> dict[str, str]:
        """Return the variables of the worker ``index``."""
        machine, local_rank = divmod(index, self._processes)
        return {
            **self._common,
            "DMLC_ROLE": "worker",
            "DMLC_WORKER_ID": str(machine),
            "BYTEPS_LOCAL_RANK": str(local_rank),
            **self._own.get(index, {}),
        }

    def again(self, changes: Mapping[str, str | None]) -> None:
        """End the job, and start another with the same worker processes.

        ``changes``: variables of the new job; None removes one. The workers' module needs the
        commands "leave" and "enter".
        """
        self.ask("leave", timeout=_START_SECONDS)
        self._roles.close()
        for name, value in changes.items():
            self._common.pop(name, None)
            if value is not None:
                self._common[name] = value
        self._start_roles()
        port = self._common["DMLC_PS_ROOT_PORT"]
        self.ask("enter", timeout=_START_SECONDS, changes={**changes, "DMLC_PS_ROOT_PORT": port})

    def _prefix(self, name: str) -> list[str]:
        return [] if self._links is None else self._links.prefix(name)

    def _place(self, name: str) -> dict[str, str]:
        return {} if self._links is None else {"DMLC_NODE_HOST": self._links.address[name]}

    def _role(
        self, module: str, role: str, index: int, **environment: str
    ) -> subprocess.Popen[bytes]:
        name = role if role == "scheduler" else f"{role} {index}"
        log = self._log(name)
        process = start(
            module,
            {"DMLC_ROLE": role, **self._common, **self._place(name), **environment},
            prefix=self._prefix(name),
            log=log,
        )
        self._note(process, log)
        self._roles.callback(end_role, role, process, quiet=self._logs is not None)
        return process

    def _log(self, name: str) -> Path | None:
        """Return a new file for what a process writes to standard error; None: there is none."""
        if self._logs is None:
            return None
        return self._logs / f"{len(self.logs):03d} {name}.log"

    def _note(self, process: subprocess.Popen[bytes], log: Path | None) -> None:
        if log is not None:
            self.logs[process.pid] = log


def end_role(role: str, process: subprocess.Popen[bytes], *, quiet: bool = False) -> int:
    """Wait for a role's process to end by itself, or kill it. Returns its exit status.

    A status other than 0 is printed, unless ``quiet``.
    """
    status = stop(process)
    if status and not quiet:
        progress(f"{role} ended with status {status}")
    return status


def port_in(file: Path, scheduler: subprocess.Popen[bytes]) -> int:
    """Wait until the scheduler has written its port to ``file``, and return the port.

    Raises :class:`BenchError` if the scheduler ends or does not listen in time.
    """
    deadline = time.monotonic() + _START_SECONDS
    while time.monotonic() < deadline:
        if file.exists():
            return int(file.read_text())
        if scheduler.poll() is not None:
            raise BenchError(
                f"the scheduler ended with status {scheduler.returncode} instead of listening"
            )
        time.sleep(0.02)
    raise BenchError(f"the scheduler did not listen within {_START_SECONDS:.0f} s")
