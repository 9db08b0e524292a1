"""Forks test processes from a process that has imported their packages.

This saves processor time in each of hundreds of processes: 3.5 s for PyTorch, 1.1 s for Numba, 0.25
s for NumPy and ZeroMQ.

Run as a script, this module is that process, the nursery: ``forking.py SOCKET_FD PACKAGE...``. It
has one thread, imports nothing of bpsx, and gives each child the requested input, output and
environment. For a test, a child differs from a started process in two ways: its parent is the
nursery, and all children have the same hash seed. Tests use only :func:`packages_for` and
:class:`Fork`.
"""

from __future__ import annotations

import atexit
import contextlib
import io
import itertools
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
from typing import IO, Any

#: Variables that Python reads at its start: each set of their values has its own nursery.
_PATHS = ("LD_LIBRARY_PATH", "PYTHONPATH")
#: Variables that packages read when they are imported, likewise. A nursery has the tests' values of
#: all others.
_EARLY = (
    "LD_",
    "PYTHON",
    "OMP_",
    "MKL_",
    "OPENBLAS_",
    "KMP_",
    "GOMP_",
    "TORCH_",
    "MALLOC_",
    "GLIBC_",
    "NUMBA_",
)
_ROOM = 1 << 20
_SECONDS = 60.0


def _early(environment: dict[str, str]) -> dict[str, str]:
    return {
        name: value
        for name, value in environment.items()
        if name.startswith(_EARLY) and name not in _PATHS
    }


def _paths(environment: dict[str, str]) -> dict[str, str]:
    return {name: environment[name] for name in _PATHS if name in environment}


def _quiet() -> dict[str, str]:
    """Return the nurseries' environment variables, without paths."""
    return {
        **{name: value for name, value in os.environ.items() if name not in _PATHS},
        "OMP_NUM_THREADS": "1",
    }


def packages_for(command: list[str], environment: dict[str, str]) -> tuple[str, ...] | None:
    """Return the packages, besides NumPy and ZeroMQ, of the nursery to fork this command from.

    None: start the command as a new process instead. The first worker is started, unless it needs
    PyTorch or Numba, so that its sets have another order than those of the other workers, as in a
    real job.
    """
    if len(command) < 3 or command[0] != sys.executable or _early(environment) != _early(_quiet()):
        return None
    if command[1] == "-m":  # the scheduler needs no Numba, but also starts faster as a fork
        return ("numba",) if command[2] in ("bpsx.server", "bpsx.scheduler") else None
    if "import torch" in command[2] or "bpsx.torch" in command[2]:
        # PyTorch imports the last one, half of the total, with the first optimizer
        return "numba", "torch", "torch._dynamo"
    if environment.get("BYTEPS_LOCAL_SIZE", "1") != "1":
        return ("numba",)  # a machine's processes sum, like servers
    return () if environment.get("DMLC_WORKER_ID", "0") != "0" else None


class _Nursery:
    """The process that forks, and a thread that receives from it the children that ended."""

    def __init__(self, packages: tuple[str, ...], paths: dict[str, str]) -> None:
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        for end in (self._socket, theirs):
            end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _ROOM)
        self._process = subprocess.Popen(
            [sys.executable, __file__, str(theirs.fileno()), *packages],
            pass_fds=[theirs.fileno()],
            env={**_quiet(), **paths},
            stdin=subprocess.DEVNULL,
        )
        theirs.close()
        self._changed, self._one_by_one = threading.Condition(), threading.Lock()
        # by the request's number
        self._born: dict[int, tuple[int, int]] = {}
        self._numbers = itertools.count()
        self._ended: dict[int, int] = {}
        self._gone = False
        threading.Thread(target=self._listen, daemon=True).start()
        atexit.register(self._end)

    @property
    def pid(self) -> int:
        return self._process.pid

    def _listen(self) -> None:
        while True:
            try:
                message, fds, _, _ = socket.recv_fds(self._socket, 4096, 1)
            except OSError:
                message, fds = b"", []
            with self._changed:
                if not message:
                    self._gone = True
                else:
                    said = json.loads(message)
                    if fds:
                        # an earlier process with the same pid
                        self._ended.pop(said["pid"], None)
                        self._born[said["task"]] = said["pid"], fds[0]
                    else:
                        self._ended[said["pid"]] = said["status"]
                self._changed.notify_all()
                if self._gone:
                    return

    def fork(self, source: str, environment: dict[str, str], fds: list[int]) -> tuple[int, int]:
        """Fork a process; return its process id and a descriptor that refers to it."""
        number = next(self._numbers)
        task = {
            "number": number,
            "source": source,
            "environment": environment,
            "folder": os.getcwd(),
        }
        with self._one_by_one, self._changed:
            socket.send_fds(self._socket, [json.dumps(task).encode()], fds)
            if (
                not self._changed.wait_for(lambda: number in self._born or self._gone, _SECONDS)
                or number not in self._born
            ):
                raise AssertionError("the process that has imported the packages does not answer")
            return self._born.pop(number)

    def status(self, pid: int, timeout: float | None) -> int | None:
        """Return the exit status as :class:`subprocess.Popen` does; None if the process has not
        ended within ``timeout`` seconds.
        """
        with self._changed:
            if not self._changed.wait_for(lambda: pid in self._ended or self._gone, timeout):
                return None
            return self._ended.get(pid, -signal.SIGKILL)

    def _end(self) -> None:
        self._socket.shutdown(socket.SHUT_RDWR)
        self._process.wait()


_lock = threading.Lock()
# nurseries by packages and paths
_all: dict[tuple[tuple[str, ...], frozenset[tuple[str, str]]], _Nursery] = {}


def _nursery(packages: tuple[str, ...], paths: dict[str, str]) -> _Nursery:
    key = packages, frozenset(paths.items())
    with _lock:
        if key not in _all:
            _all[key] = _Nursery(packages, paths)
        return _all[key]


def nurseries() -> set[int]:
    """Return the pids of the nurseries, which stay for later tests."""
    return {nursery.pid for nursery in _all.values()}


class Fork:
    """The part of :class:`subprocess.Popen`'s interface that tests need, for a forked process.

    ``command``: ``python -c SOURCE`` or ``python -m MODULE``.
    """

    def __init__(
        self, command: list[str], environment: dict[str, str], packages: tuple[str, ...]
    ) -> None:
        inward, outward, errors = os.pipe(), os.pipe(), os.pipe()
        source = (
            command[2]
            if command[1] == "-c"
            else (
                f"import runpy; runpy.run_module({command[2]!r}, run_name='__main__',"
                " alter_sys=True)"
            )
        )
        self._of = _nursery(packages, _paths(environment))
        self.args = command
        self.returncode: int | None = None
        try:
            self.pid, self._descriptor = self._of.fork(
                source, environment, [inward[0], outward[1], errors[1]]
            )
        finally:
            for fd in (inward[0], outward[1], errors[1]):
                os.close(fd)
        self.stdin: IO[str] = os.fdopen(inward[1], "w")
        self.stdout: IO[str] = os.fdopen(outward[0], errors="replace")
        self.stderr: IO[str] = os.fdopen(errors[0], errors="replace")

    def poll(self) -> int | None:
        return self._look(0)

    def wait(self, timeout: float | None = None) -> int:
        status = self._look(timeout)
        if status is None:
            raise subprocess.TimeoutExpired(self.args, timeout or 0)
        return status

    def _look(self, timeout: float | None) -> int | None:
        if self.returncode is None:
            self.returncode = self._of.status(self.pid, timeout)
            if self.returncode is not None:
                os.close(self._descriptor)
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            # it has ended, but the report has not arrived yet
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._descriptor, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def _serve(ours: socket.socket) -> dict[str, Any] | None:
    """Fork processes on request, and report the children that ended.

    Returns the task in a child, and None in the nursery at the end.
    """
    news, told = os.pipe()
    for fd in (news, told):
        os.set_blocking(fd, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(told)
    # a long run of tests may have more descriptors than select() can handle
    waiting = select.poll()
    for fd in (ours.fileno(), news):
        waiting.register(fd, select.POLLIN)
    while True:
        ready = [fd for fd, _ in waiting.poll()]
        if news in ready:
            with contextlib.suppress(BlockingIOError):
                os.read(news, 4096)
            _bury(ours)
        if ours.fileno() not in ready:
            continue
        message, fds, _, _ = socket.recv_fds(ours, _ROOM, 3)
        if not message:
            return None
        task = json.loads(message)
        pid = os.fork()
        if pid == 0:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            ours.close()
            os.close(news)
            os.close(told)
            return _settle(task, fds)
        for fd in fds:
            os.close(fd)
        descriptor = os.pidfd_open(pid)
        socket.send_fds(
            ours, [json.dumps({"pid": pid, "task": task["number"]}).encode()], [descriptor]
        )
        os.close(descriptor)


def _bury(ours: socket.socket) -> None:
    with contextlib.suppress(ChildProcessError):
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            ours.send(
                json.dumps(
                    {"pid": ended[0], "status": os.waitstatus_to_exitcode(ended[1])}
                ).encode()
            )


def _settle(task: dict[str, Any], fds: list[int]) -> dict[str, Any]:
    """Give this child the input, output and environment of its task."""
    for i, fd in enumerate(fds):
        os.dup2(fd, i)
        os.close(fd)
    sys.stdin = os.fdopen(0, closefd=False)
    sys.stdout = os.fdopen(1, "w", closefd=False)
    sys.stderr = io.TextIOWrapper(
        os.fdopen(2, "wb", 0, closefd=False), errors="backslashreplace", write_through=True
    )
    sys.__stdin__, sys.__stdout__, sys.__stderr__ = sys.stdin, sys.stdout, sys.stderr
    os.environ.clear()
    os.environ.update(task["environment"])
    os.chdir(task["folder"])
    sys.argv, sys.path[0] = ["-c"], ""
    numpy.random.seed()
    return task


def _be(task: dict[str, Any]) -> None:
    """Run the source as ``python -c`` would: this module becomes ``__main__`` of the source."""
    own = sys.modules["__main__"].__dict__
    for name in [n for n in own if n not in ("__name__", "__builtins__")]:
        del own[name]
    exec(compile(task["source"], "<string>", "exec"), own)


if __name__ == "__main__":
    import gc
    import importlib

    import numpy
    import zmq.utils.monitor  # noqa: F401

    for _name in sys.argv[2:]:
        importlib.import_module(_name)
    if "numba" in sys.modules:
        # Numba imports as much again for the first function that it compiles or loads
        sys.modules["numba"].cfunc("void()")(lambda: None)
    assert len(os.listdir("/proc/self/task")) == 1, "what forks has to have one thread"
    gc.collect()
    # Otherwise each child would traverse all imported objects in its garbage collections and again
    # at its end: 0.3 s.
    gc.freeze()
    _task = _serve(socket.socket(fileno=int(sys.argv[1])))
    if _task is not None:
        _be(_task)
