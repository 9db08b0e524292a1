"""The processes of each role: command, environment, CPUs, setup; and the plan of ``--local``."""

from __future__ import annotations

import ctypes
import errno
import os
import shutil
import signal
import sys
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

from bpsx.config import Config, child_environment, is_set
from bpsx.errors import ConfigError
from bpsx.launch.torch_variables import free_port, torch_variables
from bpsx.secret import make
from bpsx.system.host import SCRIPT_SIGNALS
from bpsx.system.role_process import module_command

#: Signals that tell a job to end. Workers get them; scheduler and servers end when no worker needs
#: them any more.
ENDING = (signal.SIGTERM, signal.SIGINT)

LOOPBACK = "127.0.0.1"
#: Seconds that the others have to end by themselves once one has failed, then seconds from SIGTERM
#: to SIGKILL: five in all.
GRACE, KILL_AFTER = 3.0, 2.0
_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True)
class Process:
    """A process to start.

    ``cpus``: CPUs that it may run on; empty for the same as bpsx-run. With ``request``, the process
    is an ssh; its remote end, :mod:`bpsx.launch.ssh.agent`, gets the request as its first line of
    input. ``host``: name of that end. ``marker``: prefix of the messages from it.
    """

    name: str
    role: str
    command: tuple[str, ...]
    environment: dict[str, str] = field(repr=False)
    cpus: frozenset[int] = frozenset()
    request: bytes = field(default=b"", repr=False)
    host: str = ""
    marker: bytes = b""


class Processes(Protocol):
    """Interface of the plans that :class:`~bpsx.launch.local.Job` runs. Times in seconds."""

    @property
    def command(self) -> Sequence[str]:
        """The command that must exist before any process is started."""

    @property
    def port(self) -> int:
        """The scheduler's port; 0 if the scheduler takes a free one."""

    @property
    def grace(self) -> float:
        """Seconds that the others have to end by themselves."""

    @property
    def kill_after(self) -> float:
        """Seconds from SIGTERM to SIGKILL."""

    @property
    def forgiving(self) -> bool:
        """Whether workers may end with status 0 without having joined a job."""

    def check(self) -> None:
        """Raise ConfigError for an invalid plan, before any process is started."""

    def environment(self, role: str, index: int, port: int, /) -> dict[str, str]:
        """The environment of the ``index``-th process of ``role``; ``port``: the scheduler's."""

    def scheduler(self) -> Process | None:
        """The scheduler, or None."""

    def others(self, port: int) -> list[Process]:
        """All other processes, workers last, with the scheduler at ``port``."""


@dataclass(frozen=True)
class LocalPlan:
    """A whole job on this machine: ``workers`` imitated machines with ``processes`` workers each.

    Times are in seconds. ``port`` 0 lets the scheduler take a free port.

    Raises ConfigError if workers lack a server.
    """

    command: tuple[str, ...]
    workers: int = 2
    servers: int = 1
    port: int = 0
    grace: float = GRACE
    kill_after: float = KILL_AFTER
    processes: int = 1
    forgiving: bool = False
    secret: str = field(default_factory=make, repr=False)
    store_port: int = field(default_factory=free_port)

    def __post_init__(self) -> None:
        if self.servers < 1 < self.workers:
            raise ConfigError(
                f"--servers 0: {self.workers} workers need at least one server; allowed with"
                " --workers 1"
            )

    def environment(self, role: str, index: int, port: int, local_rank: int = 0) -> dict[str, str]:
        """The environment of the ``index``-th process of ``role``; ``port``: the scheduler's."""
        changes = {
            "DMLC_ROLE": role,
            "DMLC_PS_ROOT_URI": LOOPBACK,
            "DMLC_PS_ROOT_PORT": str(port),
            "DMLC_NODE_HOST": LOOPBACK,
            "DMLC_NUM_WORKER": str(self.workers),
            "DMLC_NUM_SERVER": str(self.servers),
            "BYTEPS_LOCAL_RANK": str(local_rank),
            "BYTEPS_LOCAL_SIZE": str(self.processes),
            # A user who asks for one worker and a server means to use the server.
            "BYTEPS_FORCE_DISTRIBUTED": "1" if self.servers else "0",
            "BPSX_ANNOUNCE": "0",
            **secret_unless_given(self.secret),
        }
        if role == "worker":
            changes["DMLC_WORKER_ID"] = str(index)
            changes |= torch_variables(
                index * self.processes + local_rank,
                self.workers * self.processes,
                local_rank,
                self.processes,
                (LOOPBACK, self.store_port),
            )
            # The imitated machines share a file system, and on each local ranks begin at 0.
            changes["BYTEPS_TRACE_DIR"] = os.path.join(
                Config().trace_dir or "traces", f"worker-{index}"
            )
            # Otherwise each worker would start a thread for every core and slow down the others.
            if not is_set("OMP_NUM_THREADS"):
                changes["OMP_NUM_THREADS"] = str(
                    max(1, len(os.sched_getaffinity(0)) // (self.workers * self.processes))
                )
        return child_environment(**changes, **unbuffered())

    def check(self) -> None:
        """Raise ConfigError for a malformed variable now and once, instead of in each child."""
        for role in ("scheduler", "server", "worker") if self.servers else ("worker",):
            verify(self.environment(role, 0, self.port))
        debugged(self.command, Config())

    def scheduler(self) -> Process | None:
        """See :class:`Processes`.

        Several processes need a scheduler to find each other, even without servers.
        """
        if not self.servers and self.processes == 1:
            return None
        return Process(
            "scheduler",
            "scheduler",
            tuple(module_command("scheduler")),
            self.environment("scheduler", 0, self.port),
        )

    def others(self, port: int) -> list[Process]:
        """See :class:`Processes`."""
        config = Config()
        server, worker = debugged(module_command("server"), config), debugged(self.command, config)
        return [
            Process(f"server {i}", "server", server, self.environment("server", i, port))
            for i in range(self.servers)
        ] + [
            Process(
                f"worker {i}.{k}" if self.processes > 1 else f"worker {i}",
                "worker",
                worker,
                self.environment("worker", i, port, k),
            )
            for i in range(self.workers)
            for k in range(self.processes)
        ]


#: Variables of a real job's machine -> the options of ``--local`` that replace them.
_OVERLOOKED = {
    "DMLC_NUM_WORKER": "workers",
    "DMLC_NUM_SERVER": "servers",
    "BYTEPS_LOCAL_SIZE": "processes",
    "NVIDIA_VISIBLE_DEVICES": "processes",
}


def overlooked(plan: LocalPlan, chosen: Container[str]) -> list[str]:
    """Warnings about variables that have no effect with ``--local``.

    ``chosen``: options given on the command line, which need no warning.
    """
    config, found = Config(), []
    wanted = {
        "DMLC_NUM_WORKER": config.num_worker,
        "DMLC_NUM_SERVER": config.num_server,
        "BYTEPS_LOCAL_SIZE": config.local_size,
        "NVIDIA_VISIBLE_DEVICES": len(config.visible_devices.split(",")),
    }
    devices = config.visible_devices.lower()
    for env, option in _OVERLOOKED.items():
        same = wanted[env] == getattr(plan, option) and not (
            env == "NVIDIA_VISIBLE_DEVICES" and devices == "all"
        )
        idle = env == "NVIDIA_VISIBLE_DEVICES" and devices in ("none", "void")
        if is_set(env) and option not in chosen and not same and not idle:
            found.append(
                f"{env} has no effect with --local: --{option} N does that ({getattr(plan, option)}"
                " now)"
            )
    return found


def secret_unless_given(secret: str) -> dict[str, str]:
    """The job secret's variable for a job that bpsx-run starts, unless the user has set one."""
    return {} if is_set("BPSX_SECRET") or is_set("BPSX_SECRET_FILE") else {"BPSX_SECRET": secret}


def unbuffered() -> dict[str, str]:
    """The variable that stops Python from buffering its output into a pipe until it ends."""
    return {} if is_set("PYTHONUNBUFFERED") else {"PYTHONUNBUFFERED": "1"}


def verify(environment: dict[str, str]) -> None:
    """Raise ConfigError for malformed or missing variables in a process's environment."""
    Config(environment).check()


def debugged(command: Sequence[str], config: Config) -> tuple[str, ...]:
    """Return ``command``, run under gdb if BYTEPS_ENABLE_GDB is set.

    Raises ConfigError if there is no gdb.
    """
    if not config.enable_gdb:
        return tuple(command)
    if shutil.which("gdb") is None:
        raise ConfigError(
            "BYTEPS_ENABLE_GDB=1: gdb is not on the PATH; install it, or unset the variable"
        )
    return (sys.executable, "-P", "-m", "bpsx.launch.gdb", *command)


def heeded() -> tuple[signal.Signals, ...]:
    """The signals that bpsx-run passes on.

    These are all but those that its caller ignores, as ``nohup`` does.
    """
    return tuple(s for s in ENDING + SCRIPT_SIGNALS if signal.getsignal(s) is not signal.SIG_IGN)


def child_setup(
    mask: Iterable[int], cpus: Iterable[int] = (), ignored: Iterable[int] = ()
) -> Callable[[], None]:
    """Return a function for a child to run between fork and exec.

    The child dies when this process dies, gets default signal handlers with ``mask`` blocked, is
    bound to ``cpus``, and ignores the signals in ``ignored``.

    Only for a process with a single thread, where running Python after a fork is safe. "Parent" in
    PR_SET_PDEATHSIG means the *thread* that forks. Grandchildren do not inherit the setting.
    """
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    return partial(
        _set_up_child,
        prctl,
        os.getpid(),
        heeded(),
        frozenset(mask),
        frozenset(cpus),
        tuple(ignored),
    )


def _set_up_child(
    prctl: Callable[..., int],
    parent: int,
    signals: Sequence[int],
    mask: Iterable[int],
    cpus: frozenset[int],
    ignored: Sequence[int],
) -> None:
    prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    if os.getppid() != parent:  # it died before prctl
        os.kill(os.getpid(), signal.SIGKILL)
    for number in signals:
        # Otherwise a Ctrl-C at this moment would run the launcher's handler in the child.
        signal.signal(number, signal.SIG_DFL)
    for number in ignored:
        signal.signal(number, signal.SIG_IGN)
    if cpus:
        os.sched_setaffinity(0, cpus)
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def runnable(command: Sequence[str]) -> tuple[str, ...]:
    """Return ``command``, its first word made a path if it is a program of the current folder only.

    A program on the PATH wins.
    """
    name = command[0]
    here = os.path.join(os.curdir, name)
    if (
        "/" in name
        or shutil.which(name) is not None
        or not os.path.isfile(here)
        or not os.access(here, os.X_OK)
    ):
        return tuple(command)
    return (here, *command[1:])


def _advice(name: str) -> str:
    """Advice for ``name``, if it is a file that the shell would not run either."""
    if not os.path.isfile(name) or os.access(name, os.X_OK):
        return ""
    run = f"python {name}" if name.endswith(".py") else f"an interpreter and {name}"
    return (
        f"; it is a file in {os.path.dirname(os.path.abspath(name))} that is not executable: name"
        f" what runs it, as in bpsx-run … {run}"
    )


def cannot_run(
    command: Sequence[str], error: OSError, environment: Mapping[str, str] | None = None
) -> tuple[str, int]:
    """Return a message and the exit status that shells use for ``error``.

    ``environment``: the command's, if it is not this process's.
    """
    name = command[0]
    if advice := _advice(name):
        return f"cannot run {name!r}: Permission denied{advice}", 126
    if isinstance(error, PermissionError) and "/" not in name:
        # exec reports a PATH folder that it may not search in the same way; a shell then says "not
        # found".
        folders = os.get_exec_path(environment)
        if not any(os.path.exists(os.path.join(folder, name)) for folder in folders):
            error = FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))
    return f"cannot run {command[0]!r}: {error.strerror or error}", (
        127 if isinstance(error, FileNotFoundError) else 126
    )
