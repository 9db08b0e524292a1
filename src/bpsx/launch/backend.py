"""The protocol of launcher back ends: an option that chooses one, a plan, the plan's processes.

A back end never waits for processes itself. :class:`~bpsx.launch.job.Job` starts the processes of
any plan as children of bpsx-run, passes signals to them and ends them. A process on another host is
a child, too: the command that reaches that host, such as ssh.
"""

from __future__ import annotations

import subprocess
from abc import ABC, abstractmethod
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import ClassVar

from bpsx.config import is_set
from bpsx.launch.child import Child
from bpsx.launch.spawn import GRACE, KILL_AFTER, verify
from bpsx.secret import make
from bpsx.system.host import SCRIPT_SIGNALS
from bpsx.system.role_process import module_command


@dataclass(frozen=True)
class Process:
    """A process to start as a child of bpsx-run.

    ``name``: the prefix of its output. ``cpus``: CPUs that it may run on; empty for the same as
    bpsx-run.
    """

    name: str
    role: str
    command: tuple[str, ...]
    environment: dict[str, str] = field(repr=False)
    cpus: frozenset[int] = frozenset()

    #: Whether the process itself, not only the command that reaches it, runs on this machine. A
    #: scheduler on this machine reports its port and its state through files of bpsx-run.
    here: ClassVar[bool] = True
    #: Standard input, as for :class:`subprocess.Popen`.
    stdin: ClassVar[int] = subprocess.DEVNULL

    @property
    def number(self) -> int:
        """The number under which the scheduler knows a worker; -1: it is none, or has no number."""
        of = self.environment
        machine = of.get("DMLC_WORKER_ID", "")
        if self.role != "worker" or not machine:
            return -1
        size, rank = of.get("BYTEPS_LOCAL_SIZE", "1"), of.get("BYTEPS_LOCAL_RANK", "0")
        return int(machine) * int(size) + int(rank)

    @property
    def place(self) -> str:
        """A worker's place in the job as the scheduler calls it; "" if it is unknown."""
        return f"worker {self.number}" if self.number >= 0 else ""

    @property
    def dies_with(self) -> str:
        """The same text on all processes that the job loses together: see docs/run/launching.md."""
        of = self.environment
        alone = self.number < 0 or of.get("BPSX_LOCAL_REDUCE") == "0"
        return self.name if alone else f"worker machine {of['DMLC_WORKER_ID']}"

    @property
    def ignored(self) -> Sequence[int]:
        """Signals that it ignores from its first instruction on.

        A batch system may send such signals to every process of a job.
        """
        return () if self.role == "worker" else SCRIPT_SIGNALS

    def child(self, started: subprocess.Popen[bytes]) -> Child:
        """Return the object that watches and signals the process once it has been started."""
        return Child(self.name, self.role, started)


@dataclass(frozen=True)
class Plan(ABC):
    """The processes of a job. Times in seconds.

    ``command``: the workers' command. ``port``: the scheduler's; 0 if it takes a free one.
    ``grace``: how long the others may take to end once one has failed. ``kill_after``: from SIGTERM
    to SIGKILL. ``max_restarts``: see :class:`~bpsx.launch.restarts.Restarts`.
    """

    command: tuple[str, ...]
    _: KW_ONLY
    port: int = 0
    grace: float = GRACE
    kill_after: float = KILL_AFTER
    secret: str = field(default_factory=make, repr=False)
    max_restarts: int | None = None

    #: Seconds more than ``grace`` that other hosts' bpsx-run have to tell how processes ended:
    #: they give these the same time.
    telling: ClassVar[float] = 0.0
    #: Whether workers may end with status 0 without having joined a job.
    forgiving: ClassVar[bool] = False

    @property
    def needed(self) -> Sequence[str]:
        """The command whose program must exist before any process is started."""
        return self.command

    @property
    def patience(self) -> dict[str, str]:
        """Variables that let the job wait for restarted servers, unless the user has set them.

        It has to survive the death of a server, also on one machine, and to wait for the next one.
        """
        wanted = {"BPSX_ELASTIC": "servers", "BPSX_ELASTIC_WAIT": "60"} if self.max_restarts else {}
        return {name: value for name, value in wanted.items() if not is_set(name)}

    def check(self) -> None:
        """Raise ConfigError for an invalid plan, before any process is started."""
        for role in ("scheduler", "server", "worker"):
            verify(self.environment(role, 0, self.port))

    @abstractmethod
    def environment(self, role: str, index: int, port: int, /) -> dict[str, str]:
        """The variables of the ``index``-th process of ``role``; ``port``: the scheduler's."""

    def scheduler(self) -> Process | None:
        """The scheduler, or None. By default, one on this machine."""
        command = tuple(module_command("scheduler"))
        environment = self.environment("scheduler", 0, self.port)
        return Process("scheduler", "scheduler", command, environment)

    @abstractmethod
    def others(self, port: int) -> Sequence[Process]:
        """All other processes, workers last, with the scheduler at ``port``."""


class Backend(ABC):
    """A way to start a job, chosen by an option of bpsx-run."""

    #: The choice in messages, such as "--local".
    label: str
    #: Options, as attributes of the parsed arguments. Any of ``chosen_by`` chooses this back end;
    #: ``own`` need it, or another back end that names them, too.
    chosen_by: Sequence[str]
    own: Sequence[str]

    @abstractmethod
    def add_options(self, parser: ArgumentParser) -> None:
        """Add the options that no other back end adds. Their default is None."""

    @abstractmethod
    def plan(self, options: Namespace, command: tuple[str, ...]) -> Plan:
        """The plan of a job. Raises ConfigError for options that do not fit."""
