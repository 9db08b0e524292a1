"""Start of a job's processes: variables, set-up after the fork, error messages."""

from __future__ import annotations

import ctypes
import errno
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

from bpsx.config import Config, is_set
from bpsx.errors import ConfigError
from bpsx.system.host import SCRIPT_SIGNALS

#: Signals that tell a job to end. Workers get them; scheduler and servers end when no worker needs
#: them any more.
ENDING = (signal.SIGTERM, signal.SIGINT)

LOOPBACK = "127.0.0.1"
#: Seconds that the others have to end by themselves once one has failed, then seconds from SIGTERM
#: to SIGKILL: five in all.
GRACE, KILL_AFTER = 3.0, 2.0
_PR_SET_PDEATHSIG = 1


def job_variables(
    role: str, index: int, address: tuple[str, int], workers: int, servers: int, secret: str
) -> dict[str, str]:
    """The variables that make a process the ``index``-th of ``role`` in a job.

    ``address``: the scheduler's address and port. ``workers``, ``servers``: numbers of worker
    machines and of servers. ``secret``: the job's, unless the user has set one.
    """
    changes = {
        "DMLC_ROLE": role,
        "DMLC_PS_ROOT_URI": address[0],
        "DMLC_PS_ROOT_PORT": str(address[1]),
        "DMLC_NUM_WORKER": str(workers),
        "DMLC_NUM_SERVER": str(servers),
        # A user who asks for one worker and a server means to use the server.
        "BYTEPS_FORCE_DISTRIBUTED": "1" if servers else "0",
        "BPSX_ANNOUNCE": "0",  # bpsx-run itself says what the job waits for
        **secret_unless_given(secret),
    }
    return {**changes, "DMLC_WORKER_ID": str(index)} if role == "worker" else changes


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


def passed_on() -> tuple[signal.Signals, ...]:
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
        passed_on(),
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


def run_alone(
    command: Sequence[str],
    pass_on: Callable[[subprocess.Popen[bytes], signal.struct_siginfo], None],
    cpus: Iterable[int] = (),
    **options: Any,
) -> int:
    """Run ``command`` as the only child; returns its exit status.

    ``pass_on``: called with the child for each signal to pass on. ``options``: for ``Popen``.

    Only for the main thread of a process that does nothing else, as it leaves the signals blocked.
    """
    # If SIGCHLD is inherited as ignored, the kernel drops exit statuses.
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signals = (*passed_on(), signal.SIGCHLD)
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    try:
        child = subprocess.Popen(command, preexec_fn=child_setup(mask, cpus), **options)
    except OSError as error:
        text, status = cannot_run(command, error, options.get("env"))
        print(f"bpsx-run: error: {text}", file=sys.stderr)
        return status
    while child.poll() is None:
        received = signal.sigwaitinfo(signals)
        if received.si_signo != signal.SIGCHLD:
            pass_on(child, received)
    return child.returncode if child.returncode >= 0 else 128 - child.returncode


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
        f"; this file in {os.path.dirname(os.path.abspath(name))} is not executable: write the"
        f" program that runs it, as in bpsx-run … {run}"
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
