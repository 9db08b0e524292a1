"""What a process of each role needs: command, environment, care. And running the one role that the environment names.

A worker's command is a child, not an ``exec`` in our place: the launcher of a machine with several workers needs the same.
"""

from __future__ import annotations

import ctypes
import importlib
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial

from bpsx.config import Config, child_environment
from bpsx.errors import ConfigError

#: Roles that are modules of ours: each has a ``__main__`` with ``main() -> int``.
MODULES = {"scheduler": "bpsx.rendezvous", "server": "bpsx.server"}
#: Signals that end a job and are passed on.
ENDING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)

_HOST = "127.0.0.1"
_PR_SET_PDEATHSIG = 1
_SI_KERNEL = 0x80  # how the terminal's Ctrl-C says that it is not kill()


@dataclass(frozen=True)
class Plan:
    """What to run. Times in seconds. ``port`` 0: the scheduler takes a free one. Raises ConfigError if it cannot be a job."""

    command: tuple[str, ...]
    workers: int = 2
    servers: int = 1
    port: int = 0
    grace: float = 10.0
    kill_after: float = 5.0

    def __post_init__(self) -> None:
        if self.servers < 1 < self.workers:
            raise ConfigError(f"--servers 0: {self.workers} workers need at least one server; allowed with --workers 1")

    def environment(self, role: str, index: int, port: int) -> dict[str, str]:
        """The environment of the ``index``-th process of ``role``, with the scheduler at ``port``."""
        changes = {
            "DMLC_ROLE": role, "DMLC_PS_ROOT_URI": _HOST, "DMLC_PS_ROOT_PORT": str(port), "DMLC_NODE_HOST": _HOST,
            "DMLC_NUM_WORKER": str(self.workers), "DMLC_NUM_SERVER": str(self.servers),
            "BYTEPS_LOCAL_RANK": "0", "BYTEPS_LOCAL_SIZE": "1",
            # Who asks for one worker and a server means to use it.
            "BYTEPS_FORCE_DISTRIBUTED": "1" if self.servers else "0",
        }
        if role == "worker":
            changes["DMLC_WORKER_ID"] = str(index)
        environment = child_environment(**changes)
        if role == "worker":    # they share a file system and all have the local rank 0
            environment["BYTEPS_TRACE_DIR"] = os.path.join(environment.get("BYTEPS_TRACE_DIR") or "traces", f"worker-{index}")
        environment.setdefault("PYTHONUNBUFFERED", "1")  # into a pipe, Python would print when it is done
        return environment

    def check(self) -> None:
        """Raise ConfigError for a malformed variable now, and once, instead of in each child."""
        for role in ("scheduler", "server", "worker") if self.servers else ("worker",):
            Config(self.environment(role, 0, self.port)).check()


def module_command(role: str) -> list[str]:
    """The command that runs ``role``. ``-P``: the folder we happen to be in may hold a ``queue.py``."""
    return [sys.executable, "-P", "-m", MODULES[role]]


def heeded() -> tuple[signal.Signals, ...]:
    """The signals of :data:`ENDING` that our caller did not tell us to ignore, as ``nohup`` does."""
    return tuple(s for s in ENDING if signal.getsignal(s) is not signal.SIG_IGN)


def child_setup(mask: Iterable[int]) -> Callable[[], None]:
    """What a child does between fork and exec: die when this process dies, and have ordinary signals with ``mask`` blocked.

    For a process with one thread, in which running Python after a fork is safe. The kernel means the *thread* that forks when it says
    parent. Grandchildren do not inherit the wish.
    """
    return partial(_set_up_child, ctypes.CDLL(None, use_errno=True).prctl, os.getpid(), heeded(), frozenset(mask))


def _set_up_child(prctl: Callable[..., int], parent: int, signals: Sequence[int], mask: Iterable[int]) -> None:
    prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    if os.getppid() != parent:  # it died before the wish was heard
        os.kill(os.getpid(), signal.SIGKILL)
    for number in signals:
        signal.signal(number, signal.SIG_DFL)  # or a Ctrl-C of this very moment would run the launcher's handler in the child
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def cannot_run(command: Sequence[str], error: OSError) -> tuple[str, int]:
    """A message and the exit status that shells use for it."""
    return f"cannot run {command[0]!r}: {error.strerror or error}", 127 if isinstance(error, FileNotFoundError) else 126


def run_role(command: Sequence[str]) -> int:
    """Run the role that the environment names, until it ends. Returns its exit status; raises ConfigError."""
    config = Config()
    config.check()
    if config.role in MODULES:
        return int(importlib.import_module(f"{MODULES[config.role]}.__main__").main())
    if not command:
        raise ConfigError("no COMMAND: DMLC_ROLE=worker runs one, as in bpsx-run python train.py")
    return run_command(command, child_environment(
        BYTEPS_LOCAL_RANK=str(config.local_rank), BYTEPS_LOCAL_SIZE=str(config.local_size)))


def run_command(command: Sequence[str], environment: dict[str, str]) -> int:
    """Run ``command`` as a child in our place: same input, output and terminal, signals passed on. Returns its exit status.

    For the main thread of a process that does nothing else: leaves the signals blocked.
    """
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # if inherited as ignored, the kernel throws exit statuses away
    signals = heeded()
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, (*signals, signal.SIGCHLD))
    try:
        child = subprocess.Popen(command, env=environment, preexec_fn=child_setup(mask))
    except OSError as error:
        text, status = cannot_run(command, error)
        print(f"bpsx-run: error: {text}", file=sys.stderr)
        return status
    while child.poll() is None:
        received = signal.sigwaitinfo((*signals, signal.SIGCHLD))
        if received.si_signo != signal.SIGCHLD and not _has_it_already(child.pid, received):
            child.send_signal(received.si_signo)
    return child.returncode if child.returncode >= 0 else 128 - child.returncode


def _has_it_already(pid: int, received: signal.struct_siginfo) -> bool:
    """Whether the signal is the terminal's, which sends it to the whole process group. Twice would abort the child's cleaning up."""
    try:
        return received.si_code == _SI_KERNEL and os.getpgid(pid) == os.getpgrp()
    except ProcessLookupError:
        return True
