"""The back end ``--local``: a whole job on this machine."""

from __future__ import annotations

import os
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Container
from dataclasses import dataclass, field

from bpsx.config import Config, child_environment, is_set
from bpsx.errors import ConfigError
from bpsx.launch.arguments import given, whole
from bpsx.launch.backend import Backend, Plan, Process
from bpsx.launch.spawn import LOOPBACK, debugged, job_variables, unbuffered, verify
from bpsx.launch.torch_variables import free_port, torch_variables
from bpsx.system.role_process import module_command


class Local(Backend):
    """The back end ``--local``. See :class:`~bpsx.launch.backend.Backend`."""

    label = "--local"
    chosen_by = ("local",)
    own = ("workers", "servers", "processes", "port", "max_restarts")

    def add_options(self, parser: ArgumentParser) -> None:
        """See :class:`~bpsx.launch.backend.Backend`."""
        parser.add_argument(
            "--local",
            action="store_true",
            default=None,
            help="run a scheduler, servers and workers on this machine",
        )
        parser.add_argument(
            "--workers",
            type=whole(1, 65535),
            metavar="N",
            help="number of worker machines to imitate (default: 2)",
        )
        parser.add_argument(
            "--servers",
            type=whole(0, 65535),
            metavar="M",
            help="number of servers (default: 1); 0 with a single worker",
        )
        parser.add_argument(
            "--processes",
            type=whole(1, 65535),
            metavar="K",
            help="worker processes per imitated machine (default: 1)",
        )

    def plan(self, options: Namespace, command: tuple[str, ...]) -> Plan:
        """See :class:`~bpsx.launch.backend.Backend`."""
        plan = LocalPlan(command, **given(options, (*self.own, "grace")))
        for line in overlooked(plan, given(options, self.own)):
            print(f"bpsx-run: warning: {line}", file=sys.stderr)
        return plan


@dataclass(frozen=True)
class LocalPlan(Plan):
    """A whole job on this machine: ``workers`` imitated machines with ``processes`` workers each.

    Raises ConfigError if workers lack a server.
    """

    workers: int = 2
    servers: int = 1
    processes: int = 1
    store_port: int = field(default_factory=free_port)

    def __post_init__(self) -> None:
        if self.servers < 1 < self.workers:
            raise ConfigError(
                f"--servers 0: {self.workers} workers need at least one server; 0 is allowed with"
                " --workers 1"
            )

    def environment(self, role: str, index: int, port: int, local_rank: int = 0) -> dict[str, str]:
        """See :class:`~bpsx.launch.backend.Plan`."""
        changes = {
            **job_variables(role, index, (LOOPBACK, port), self.workers, self.servers, self.secret),
            **self.patience,
            "DMLC_NODE_HOST": LOOPBACK,
            "BYTEPS_LOCAL_RANK": str(local_rank),
            "BYTEPS_LOCAL_SIZE": str(self.processes),
        }
        if role == "worker":
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
        """See :class:`~bpsx.launch.backend.Plan`.

        Several processes need a scheduler to find each other, even without servers.
        """
        return super().scheduler() if self.servers or self.processes > 1 else None

    def others(self, port: int) -> list[Process]:
        """See :class:`~bpsx.launch.backend.Plan`."""
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
                f"{env} has no effect with --local: use --{option} N (now {getattr(plan, option)})"
            )
    return found
