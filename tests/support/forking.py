"""Processes as forks of one that has imported what they need: 4 s of a core for TensorFlow, 3.5 for
PyTorch, 2 for MXNet, 1.1 for Numba, 0.25 for NumPy and ZeroMQ, for hundreds.

As a script it is that process, the nursery: ``forking.py SOCKET_FD PACKAGE...``. It has one thread,
and gives each of its children the input, output and environment that were asked for. What comes
out is a process of its own in all that a test can see, except that its parent is the nursery, that
all have its seed for hashes, and that at their end Python does not take the packages apart, nor
anything of a server or scheduler. Only :func:`nursery_for` and :class:`Fork` are for tests.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import faulthandler
import gc
import importlib
import io
import itertools
import json
import os
import re
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any, NamedTuple, NoReturn

#: Variables that are looked at while Python or TensorFlow starts: there is a nursery for each value
#: that these have.
_PATHS = ("LD_LIBRARY_PATH", "PYTHONPATH")
_TENSORFLOWS = ("TF_CPP_MIN_LOG_LEVEL", "CUDA_VISIBLE_DEVICES")
#: ... or while packages are imported: of the others a nursery has the tests' values.
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
    "TF_",
    "XLA_",
    "KERAS_",
    "MXNET_",
)
#: What a worker that names a framework is forked from. PyTorch imports the last of its packages,
#: which is half of it, with the first optimizer. To import bpsx.tensorflow starts threads. A test's
#: file that runs as a worker imports pytest.
_FRAMEWORKS = {
    "torch": ("numba", "torch", "torch._dynamo", "bpsx.torch", "pytest"),
    "tensorflow": ("tensorflow", "numba", "bpsx.api.verbs", "bpsx.plugin.adapter", "pytest"),
    "mxnet": ("bpsx.mxnet", "numba", "pytest"),
}
#: What each role imports when it starts: nearly half of a short process.
_FOR_ALL = (
    "zmq.utils.monitor",
    "encodings.idna",
    "numpy.random",
    "runpy",
    *(f"bpsx.transports.{name}.endpoint" for name in ("shm", "tcp", "zeromq")),
)
#: What is forked for NumPy's workers and the scheduler; and for who sums, with all kernels loaded.
_PLAIN = ("bpsx.api.verbs", "bpsx.scheduler.__main__")
_SUMS = (*_PLAIN, "numba", "bpsx.server.__main__")
#: Modules that run without a test's script: such a process has nothing of the test's to take apart.
_WITHOUT_SCRIPT = ("bpsx.scheduler", "bpsx.server")
#: Modules that Python itself uses until it has ended.
_PYTHONS_OWN = ("__main__", "builtins", "sys")
#: The seed for hashes of each first worker: it differs from the others in the order of sets, as all
#: do in life.
_FIRST = {"PYTHONHASHSEED": "1"}
_NAMED = re.compile(r"(?m)^\s*(?:import|from)\b.*?\b(torch|tensorflow|keras|mxnet)(?:_job)?\b")
#: How the source of a worker reads that compresses.
_COMPRESSES = re.compile("compression=|declare.*compress")
_ROOM, _ROOT = 1 << 20, Path(__file__).parents[2]
_SECONDS = 150.0 * float(os.environ.get("BPSX_TEST_PATIENCE", "1"))


def _early(environment: dict[str, str]) -> dict[str, str]:
    return {
        name: value
        for name, value in environment.items()
        if name.startswith(_EARLY) and name not in (*_PATHS, *_TENSORFLOWS)
    }


def _chosen(names: tuple[str, ...], environment: dict[str, str]) -> dict[str, str]:
    return {name: environment[name] for name in names if name in environment}


def _quiet() -> dict[str, str]:
    """Return the nurseries' environment variables, without paths."""
    return {
        **{
            name: value
            for name, value in os.environ.items()
            if name not in (*_PATHS, *_TENSORFLOWS)
        },
        "OMP_NUM_THREADS": "1",
    }


class Kind(NamedTuple):
    """What a nursery has imported besides NumPy and ZeroMQ, and the variables that only it has."""

    packages: tuple[str, ...]
    variables: frozenset[tuple[str, str]]


class Task(NamedTuple):
    """A command without the prefixes that a fork does itself: ``env`` and ``ip netns exec``."""

    command: list[str]
    environment: dict[str, str]
    namespace: str = ""


def _task_of(command: list[str], environment: dict[str, str]) -> Task:
    if command[:3] == ["ip", "netns", "exec"]:
        return _task_of(command[4:], environment)._replace(namespace=command[3])
    if command[0] == "env" and "=" in command[1]:
        name, _, value = command[1].partition("=")
        return _task_of(["env", *command[2:]], {**environment, name: value})
    return Task(command[1:] if command[0] == "env" else command, environment)


def nursery_for(command: list[str], environment: dict[str, str]) -> Kind | None:
    """What the process that this command is better forked from has; None: it is better started."""
    command, environment, _ = _task_of(command, environment)
    packages = _packages_for(command, environment)
    if packages is None or _early(environment) != _early(_quiet()):
        return None
    variables = _chosen(_PATHS, environment)
    if "tensorflow" in packages:
        variables |= _chosen(_TENSORFLOWS, environment)
    alone = environment.get("BYTEPS_LOCAL_SIZE", "1") == "1"
    first = alone and environment.get("DMLC_WORKER_ID") == "0"
    if packages in (_PLAIN, _SUMS) and command[1] == "-c" and first:
        variables |= _FIRST
    return Kind(packages, frozenset(variables.items()))


def _packages_for(command: list[str], environment: dict[str, str]) -> tuple[str, ...] | None:
    if command[0] != sys.executable or not (command[1] in ("-c", "-m") or command[1][-3:] == ".py"):
        return None
    if command[1] == "-c" and len(command) > 3:  # a fork has no arguments of its own
        return None
    # a test that has a folder of its own for kernels
    own_kernels = environment.get("BPSX_CACHE_DIR") != os.environ.get("BPSX_CACHE_DIR")
    sums = ("numba",) if own_kernels else _SUMS
    if command[1] == "-m":
        if not command[2].startswith("bench."):
            return {"bpsx.scheduler": _PLAIN, "bpsx.server": sums}.get(command[2])
        text = _ROOT.joinpath(*command[2].split(".")).with_suffix(".py").read_text()
    else:
        text = command[2] if command[1] == "-c" else Path(command[1]).read_text()
    frameworks = {"tensorflow" if n == "keras" else n for n in _NAMED.findall(text)}
    if frameworks:
        return _FRAMEWORKS[frameworks.pop()] if len(frameworks) == 1 else None
    # a machine's processes sum, as servers do; compressors are compiled by the same packages
    plain = environment.get("BYTEPS_LOCAL_SIZE", "1") == "1" and not _COMPRESSES.search(text)
    return _PLAIN if plain else sums


class _Nursery:
    """The process that forks, and a thread that receives from it the children that ended."""

    def __init__(self, kind: Kind) -> None:
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        for end in (self._socket, theirs):
            end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _ROOM)
        self._process = subprocess.Popen(
            [sys.executable, __file__, str(theirs.fileno()), *kind.packages],
            pass_fds=[theirs.fileno()],
            env={**_quiet(), **dict(kind.variables)},
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

    def fork(self, wanted: Task, fds: list[int]) -> tuple[int, int]:
        """Fork a process; return its process id and a descriptor that refers to it."""
        number = next(self._numbers)
        task = {
            "number": number,
            "source": _source(wanted.command),
            "has_script": wanted.command[1] != "-m" or wanted.command[2] not in _WITHOUT_SCRIPT,
            "environment": wanted.environment,
            "namespace": wanted.namespace,
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
        self._socket.close()


_lock = threading.Lock()
_all: dict[Kind, _Nursery] = {}


def _nursery(kind: Kind) -> _Nursery:
    with _lock:
        if kind not in _all:
            _all[kind] = _Nursery(kind)
        return _all[kind]


def nurseries() -> set[int]:
    """The processes that stay for the tests to come."""
    return {nursery.pid for nursery in list(_all.values())}


def kinds() -> dict[int, str]:
    """What is forked from each of them."""
    return {nursery.pid: " ".join(kind.packages) for kind, nursery in list(_all.items())}


def _source(command: list[str]) -> str:
    """What ``python -c`` would have to run in place of ``command``."""
    if command[1] == "-c":
        return command[2]
    if command[1] == "-m":
        run = f"runpy.run_module({command[2]!r}, run_name='__main__', alter_sys=True)"
        return f"import runpy; {run}"
    place = f"sys.argv, sys.path[0] = {command[1:]!r}, {str(Path(command[1]).parent)!r}"
    return f"import runpy, sys; {place}; runpy.run_path({command[1]!r}, run_name='__main__')"


class Fork:
    """The part of :class:`subprocess.Popen`'s interface that tests need, for a forked process.

    ``command``: ``python -c SOURCE``, ``python -m MODULE`` or ``python SCRIPT ARGUMENT...``; before
    it ``env NAME=VALUE...`` or ``ip netns exec NAME``. ``log``: a file that the process writes its
    errors to; ``stderr`` is empty then.
    """

    def __init__(
        self, command: list[str], environment: dict[str, str], kind: Kind, log: Path | None = None
    ) -> None:
        inward, outward = os.pipe(), os.pipe()
        errors = (
            (os.open(os.devnull, os.O_RDONLY), os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND))
            if log
            else os.pipe()
        )
        self._of = _nursery(kind)
        self.args = command
        self.returncode: int | None = None
        try:
            self.pid, self._descriptor = self._of.fork(
                _task_of(command, environment), [inward[0], outward[1], errors[1]]
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
    if task["namespace"]:
        _enter(task["namespace"])
    sys.argv, sys.path[0] = ["-c"], ""
    numpy.random.seed()
    return task


def _enter(namespace: str) -> None:
    """Do what ``ip netns exec`` does: enter the network, and mount its devices at /sys."""
    new_network, new_mounts, recursive_slave, detach = 0x40000000, 0x20000, 0x84000, 2
    libc = ctypes.CDLL(None, use_errno=True)
    with open(f"/run/netns/{namespace}") as file:
        results = [
            libc.setns(file.fileno(), new_network),
            libc.unshare(new_mounts),
            libc.mount(b"", b"/", b"none", recursive_slave, None),
            libc.umount2(b"/sys", detach),
            libc.mount(namespace.encode(), b"/sys", b"sysfs", 0, None),
        ]
    assert not any(results), (namespace, results, os.strerror(ctypes.get_errno()))


def _be(task: dict[str, Any]) -> None:
    """Run the source as ``python -c`` would: this module becomes ``__main__`` of the source."""
    faulthandler.enable()
    ending = _ending()
    own = sys.modules["__main__"].__dict__
    for name in [n for n in own if n not in ("__name__", "__builtins__")]:
        del own[name]
    try:
        exec(compile(task["source"], "<string>", "exec"), own)
    except SystemExit as e:
        if not task["has_script"] and isinstance(e.code, int):
            ending(e.code)
        raise


def _ending() -> Callable[[int], NoReturn]:
    """Return a function that ends a process without a script, with a given status.

    It awaits threads, runs exit functions and writes output, as Python does. Then Python would take
    its modules apart, which took half of a server's processor time.
    """
    threads_end = threading._shutdown  # type: ignore[attr-defined]
    run_exit_functions, end = atexit._run_exitfuncs, os._exit
    output, errors = sys.stdout, sys.stderr

    def ending(status: int) -> NoReturn:
        threads_end()
        run_exit_functions()
        output.flush()
        errors.flush()
        end(status)

    return ending


def _sparing() -> Callable[[], None]:
    """What a child does last before Python takes its modules apart, and their objects one by one:
    the nursery's are left out, a tenth of a second or more. What the child has imported is not.
    """
    modules = sys.modules
    keep, held = ctypes.pythonapi.Py_IncRef, ctypes.py_object
    spared: dict[str, Any] = {}

    def last() -> None:
        if not spared:  # in the nursery: these are its modules
            spared.update({n: m for n, m in modules.items() if n not in _PYTHONS_OWN})
            return
        for name, module in spared.items():
            if modules.get(name) is module:
                keep(held(module))
                del modules[name]

    return last


def _prepare(packages: list[str]) -> None:
    """Import the packages, and whatever makes the first use of them slow."""
    last = _sparing()
    atexit.register(last)  # before any package's, so it runs after them
    for name in (*_FOR_ALL, *packages):
        importlib.import_module(name)
        if name.endswith("__main__"):
            del sys.modules[name]  # which will run once more, as a script
    if "numba" in packages:
        # it imports as much again for the first function that it compiles or loads
        sys.modules["numba"].cfunc("void()")(lambda: None)
    if "bpsx.server.__main__" in packages:
        for code in sys.modules["bpsx.dtypes"].BY_CODE:
            sys.modules["bpsx.kernels"].load(code)
        sys.modules["bpsx.kernels.codecs"].import_all()
    last()


if __name__ == "__main__":
    import numpy

    _prepare(sys.argv[2:])
    assert len(os.listdir("/proc/self/task")) == 1, "what forks has to have one thread"
    gc.collect()
    # Otherwise each child would traverse all imported objects in its garbage collections and again
    # at its end: 0.3 s.
    gc.freeze()
    _task = _serve(socket.socket(fileno=int(sys.argv[1])))
    if _task is not None:
        _be(_task)
