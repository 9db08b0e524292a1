"""``bpsx-run`` on one machine of a job: runs the role that the environment names.

For a worker, it runs all processes of the machine. A worker's command is a child, not an ``exec``
in place of bpsx-run. So signals, exit status and binding are the same for one process and for
several.
"""

from __future__ import annotations

import importlib
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import ClassVar

from bpsx.config import Config, child_environment, is_set
from bpsx.errors import ConfigError
from bpsx.launch import numa
from bpsx.launch.backend import Plan, Process
from bpsx.launch.spawn import LOOPBACK, debugged, run_alone, secret_unless_given, unbuffered, verify
from bpsx.launch.torch_variables import free_port, torch_variables
from bpsx.system.role_process import MODULES, module_command

_SI_KERNEL = 0x80  # si_code of the terminal's Ctrl-C, as opposed to kill()
_GPUS = Path("/proc/driver/nvidia/gpus")


@dataclass(frozen=True)
class SingleRole(Plan):
    """The worker processes of this machine.

    A single-machine job without servers has no scheduler elsewhere, so ``alone`` adds one on
    loopback.
    """

    size: int
    cpus: tuple[frozenset[int], ...]
    alone: bool = False
    store_port: int = field(default_factory=free_port)

    # bpsx-run adds the scheduler itself, and the command need not use it.
    forgiving: ClassVar[bool] = True

    def environment(self, role: str, local_rank: int, port: int) -> dict[str, str]:
        """See :class:`~bpsx.launch.backend.Plan`."""
        changes = {
            **_nothing_heard(),
            "DMLC_ROLE": role,
            "BYTEPS_LOCAL_RANK": str(local_rank),
            "BYTEPS_LOCAL_SIZE": str(self.size),
        }
        if role == "scheduler":
            changes["BPSX_ANNOUNCE"] = "0"  # bpsx-run itself says what the job waits for
        if self.alone:
            changes |= {
                "DMLC_PS_ROOT_URI": LOOPBACK,
                "DMLC_PS_ROOT_PORT": str(port),
                "DMLC_NODE_HOST": LOOPBACK,
                "DMLC_NUM_SERVER": "0",
                **secret_unless_given(self.secret),
            }
        if role == "worker":
            changes |= _torch_variables(
                Config(role=role, local_rank=local_rank, local_size=self.size), self.store_port
            )
        return child_environment(**changes, **unbuffered())

    def check(self) -> None:
        """See :class:`~bpsx.launch.backend.Plan`."""
        verify(self.environment("worker", 0, self.port))

    def scheduler(self) -> Process | None:
        """See :class:`~bpsx.launch.backend.Plan`."""
        return super().scheduler() if self.alone else None

    def others(self, port: int) -> list[Process]:
        """See :class:`~bpsx.launch.backend.Plan`."""
        command, machine = debugged(self.command, Config()), Config().worker_id or 0
        return [
            Process(
                f"worker {machine}.{i}",
                "worker",
                command,
                self.environment("worker", i, port),
                self.cpus[i],
            )
            for i in range(self.size)
        ]


def run_role(command: Sequence[str], grace: float | None) -> int:
    """Run the role that the environment names, until it ends.

    Returns its exit status. Raises ConfigError.
    """
    config = Config()
    if config.role is None:
        raise ConfigError(
            "DMLC_ROLE is not set; it names this machine's part in a job (worker, server or"
            " scheduler). For a whole job on this machine: bpsx-run --local COMMAND. For help:"
            " bpsx-run --help"
        )
    if config.role != "worker":
        config.check()
        return _run_own(config)
    if not command:
        raise ConfigError("DMLC_ROLE=worker needs a COMMAND, as in bpsx-run python train.py")
    # If the local rank is set, another launcher starts the other processes.
    size = config.local_size if is_set("BYTEPS_LOCAL_RANK") else local_size(config)
    if size == 1 or is_set("BYTEPS_LOCAL_RANK"):
        return _run_single(command, config)
    from bpsx.launch.job import Job  # imported late: a server or a single worker does not need it

    # As with BytePS, a single machine has no servers, whatever DMLC_NUM_SERVER says. So there is no
    # scheduler either.
    alone = (
        config.machines == 1
        and config.local_reduce
        and not (config.force_distributed or config.asynchronous)
    )
    cpus = numa.plan(config, size, numa.topology(os.sched_getaffinity(0)))
    _tell(config, dict(enumerate(cpus)))
    machine = SingleRole(tuple(command), size, tuple(cpus), alone)
    return Job(machine if grace is None else replace(machine, grace=grace)).run()


def _run_own(config: Config) -> int:
    """Run the scheduler or the server in this process, or the server as a child under gdb."""
    if config.role == "server" and config.enable_gdb:
        return run_command(debugged(module_command("server"), config), child_environment())
    return int(importlib.import_module(f"{MODULES[config.role]}.__main__").main())


def _run_single(command: Sequence[str], config: Config) -> int:
    environment = child_environment(
        BYTEPS_LOCAL_RANK=str(config.local_rank),
        BYTEPS_LOCAL_SIZE=str(config.local_size),
        **_nothing_heard(),
        **_torch_variables(config, free_port() if config.size == 1 else 0),
    )
    verify(environment)
    cpus: frozenset[int] = frozenset()
    # Of several processes that another launcher starts, each plans for all and takes its own part.
    if numa.wanted(config, 1):
        cpus = numa.plan(config, config.local_size, numa.topology(os.sched_getaffinity(0)))[
            config.local_rank
        ]
    _tell(config, {config.local_rank: cpus})
    return run_command(debugged(command, config), environment, cpus)


def _nothing_heard() -> dict[str, str]:
    """The variable that keeps a worker from using the descriptor which bpsx-run reads."""
    return {"BPSX_STATE_FD": "-1"} if is_set("BPSX_STATE_FD") else {}


def _torch_variables(config: Config, port: int) -> dict[str, str]:
    """PyTorch's variables for the worker of ``config``.

    With several machines, or if another launcher starts the other processes, no process knows the
    host of worker 0 and its free ports (``port`` 0). The user must then set these variables if
    PyTorch is to rendezvous without bpsx. None is known of a worker whose number the scheduler
    chooses.
    """
    if config.asks_for_number:
        return {}
    store = (LOOPBACK, port) if port and config.num_worker == 1 else None
    return torch_variables(config.rank, config.size, config.local_rank, config.local_size, store)


def _tell(config: Config, cpus: Mapping[int, frozenset[int]]) -> None:
    """Print each local rank's CPUs at log level info and below."""
    if config.log_level in ("trace", "debug", "info"):
        for rank, bound in ((r, c) for r, c in cpus.items() if c):
            print(f"bpsx-run: local rank {rank} runs on CPUs {numa.text(bound)}", file=sys.stderr)


def local_size(config: Config) -> int:
    """The number of worker processes for this machine.

    Raises ConfigError if two variables disagree.
    """
    text = config.visible_devices.strip()
    size = int(config.local_size)
    if text.lower() in ("", "none", "void"):
        return size
    if text.lower() == "all":
        return size if is_set("BYTEPS_LOCAL_SIZE") else _gpus()
    entries = [entry.strip() for entry in text.split(",")]
    if not all(entries):
        raise ConfigError(
            f"NVIDIA_VISIBLE_DEVICES={text!r}: an entry is empty; expected all, none, void or"
            " names separated by commas"
        )
    if is_set("BYTEPS_LOCAL_SIZE") and size != len(entries):
        raise ConfigError(
            f"NVIDIA_VISIBLE_DEVICES={text!r} has {len(entries)} entries but"
            f" BYTEPS_LOCAL_SIZE={size}; unset one of them or make them agree"
        )
    return len(entries)


def _gpus() -> int:
    """The number of GPUs on this machine; 1 with a warning if none is found."""
    try:
        found = len(list(_GPUS.iterdir()))
    except OSError:
        found = 0
    if not found:
        try:
            listed = subprocess.run(
                ["nvidia-smi", "-L"],
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=30,
                check=False,
            )
            found = (
                sum(line.startswith("GPU ") for line in listed.stdout.splitlines())
                if listed.returncode == 0
                else 0
            )
        except (OSError, subprocess.TimeoutExpired):
            found = 0
    if not found:
        print(
            "bpsx-run: warning: NVIDIA_VISIBLE_DEVICES=all, but neither /proc/driver/nvidia nor"
            " nvidia-smi shows a GPU: bpsx-run starts one process; set BYTEPS_LOCAL_SIZE for more",
            file=sys.stderr,
        )
    return found or 1


def run_command(
    command: Sequence[str], environment: dict[str, str], cpus: frozenset[int] = frozenset()
) -> int:
    """Run ``command`` with the same input, output and terminal; see :func:`run_alone`."""

    def pass_on(child: subprocess.Popen[bytes], received: signal.struct_siginfo) -> None:
        if not _has_it_already(child.pid, received):
            child.send_signal(received.si_signo)

    return run_alone(command, pass_on, cpus, env=environment)


def _has_it_already(pid: int, received: signal.struct_siginfo) -> bool:
    """Whether the signal came from the terminal, which sends it to the whole process group.

    A second one would abort the child's cleanup.
    """
    try:
        return received.si_code == _SI_KERNEL and os.getpgid(pid) == os.getpgrp()
    except ProcessLookupError:
        return True
