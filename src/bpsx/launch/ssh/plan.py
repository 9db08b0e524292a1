"""The plan of a job over ssh: the ssh command and the variables of each process.

ssh runs with the user's own setup: keys, agent, ``~/.ssh/config``, and its usual host key checks.
It never prompts.
"""

from __future__ import annotations

import os
import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from bpsx.config import child_environment, own_store
from bpsx.errors import ConfigError
from bpsx.launch.backend import Plan
from bpsx.launch.spawn import job_variables, unbuffered, verify
from bpsx.launch.ssh.client import SshProcess, new_marker, request
from bpsx.launch.ssh.hostfile import Host, Hosts, bare
from bpsx.launch.torch_variables import any_port, store_variables
from bpsx.system.address import is_loopback
from bpsx.system.role_process import MODULES

#: Variables that are handed on: bpsx's, and those that make the same program compute the same on
#: another host.
_HANDED_ON = re.compile(
    r"(DMLC|BYTEPS|BPSX|PS|NCCL)_"
    r"|(OMP_NUM_THREADS|KMP_AFFINITY|NVIDIA_VISIBLE_DEVICES|LD_LIBRARY_PATH"
    r"|PYTHON(PATH|UNBUFFERED))$"
)
#: Variables of these that apply to one process or machine only.
_NOT_HANDED_ON = (
    "DMLC_ROLE",
    "DMLC_WORKER_ID",
    "DMLC_NODE_HOST",
    "BYTEPS_LOCAL_RANK",
    "BPSX_PORT_FILE",
    "BPSX_STATE_FD",
)
_CONNECT_SECONDS = 10


@dataclass(frozen=True)
class Remote(Plan):
    """A job over ssh.

    ``address``: the scheduler's address for the other hosts, if it is not the host's name.
    """

    hosts: Hosts
    address: str = ""
    ssh: str = "ssh"
    ssh_port: int = 0
    username: str = ""
    interface: str = ""
    python: str = sys.executable
    directory: str = field(default_factory=os.getcwd)
    given: Mapping[str, str] = field(default_factory=dict)
    store_port: int = field(default_factory=any_port)

    telling: ClassVar[float] = 1.0

    @property
    def needed(self) -> Sequence[str]:
        """See :class:`~bpsx.launch.backend.Plan`."""
        return shlex.split(self.ssh) or [""]

    def check(self) -> None:
        """See :class:`~bpsx.launch.backend.Plan`."""
        for role in ("scheduler", "server", "worker"):
            environment = self.environment(role, 0, self.port)
            verify(
                {**environment, "BYTEPS_LOCAL_SIZE": environment.get("BYTEPS_LOCAL_SIZE") or "1"}
            )
        hosts = {self.hosts.scheduler, *self.hosts.servers, *self.hosts.workers}
        if is_loopback(self._address) and not all(is_loopback(bare(host)) for host in hosts):
            far = next(host for host in hosts if not is_loopback(bare(host)))
            raise ConfigError(
                f"the scheduler's address is {self._address}, which {far.name} ({far.line}) cannot"
                " reach; name another with --scheduler-ip"
            )

    @property
    def _address(self) -> str:
        return self.address or bare(self.hosts.scheduler)

    def environment(self, role: str, index: int, port: int) -> dict[str, str]:
        """The variables that the ``index``-th process of ``role`` gets besides its host's."""
        kept = {
            k: v
            for k, v in child_environment().items()
            if _HANDED_ON.match(k) and k not in _NOT_HANDED_ON
        }
        address = self._address, port
        workers, servers = len(self.hosts.workers), len(self.hosts.servers)
        changes = job_variables(role, index, address, workers, servers, self.secret)
        if role == "worker":
            if self.hosts.slots:
                changes["BYTEPS_LOCAL_SIZE"] = str(self.hosts.slots)
            kept |= self._store()
        if self.interface:
            changes["DMLC_INTERFACE"] = self.interface
        return {**kept, **unbuffered(), **self.patience, **self.given, **changes}

    def _store(self) -> dict[str, str]:
        """The variables of PyTorch's store.

        It is on the first worker's host if the others can reach that by its name.
        """
        first = self.hosts.workers[0]
        address = self._address if first == self.hosts.scheduler else bare(first)
        reached = not is_loopback(address) or all(
            is_loopback(bare(host)) for host in self.hosts.workers
        )
        found = store_variables((address, self.store_port) if reached else None)
        users = {
            k: v for k, v in child_environment().items() if k in ("MASTER_ADDR", "MASTER_PORT")
        }
        return (
            {**users, **found}
            if "MASTER_ADDR" in found or not own_store(child_environment())
            else {}
        )

    def scheduler(self) -> SshProcess:
        """See :class:`~bpsx.launch.backend.Plan`."""
        return self._process("scheduler", "scheduler", 0, self.hosts.scheduler, self.port)

    def others(self, port: int) -> list[SshProcess]:
        """See :class:`~bpsx.launch.backend.Plan`."""
        return [
            self._process(f"{role} {i} {host.name}", role, i, host, port)
            for role, hosts in (("server", self.hosts.servers), ("worker", self.hosts.workers))
            for i, host in enumerate(hosts)
        ]

    def _process(self, name: str, role: str, index: int, host: Host, port: int) -> SshProcess:
        environment = self.environment(role, index, port)
        command = [
            self.python,
            "-P",
            "-m",
            "bpsx.launch",
            *(() if role in MODULES else ("--grace", str(self.grace), "--", *self.command)),
        ]
        marker = new_marker()
        # Workers find the interpreter of this environment, as after its activation.
        path = os.path.dirname(self.python) if role == "worker" else ""
        what = request(
            marker,
            command=command,
            path=path,
            environment=environment,
            directory=self.directory if role == "worker" else "",
            find_port=role == "scheduler" and not port,
            tells=role == "scheduler",
            hears=role == "worker",
            kill_after=self.kill_after,
        )
        return SshProcess(
            name,
            role,
            tuple(self._ssh(host, environment)),
            child_environment(),
            request=what,
            host=host.name,
            marker=marker,
            machine=index if role == "worker" else -1,
        )

    def _ssh(self, host: Host, environment: Mapping[str, str]) -> list[str]:
        """Return the ssh command.

        ssh uses the first value of an option, so the user's own options win.
        """
        words = [
            *self.needed,
            "-T",
            "-o",
            "BatchMode=yes",
            "-o",
            f"ConnectTimeout={_CONNECT_SECONDS}",
            "-o",
            "ServerAliveInterval=5",
            "-o",
            "ServerAliveCountMax=3",
        ]
        if port := host.port or self.ssh_port:
            words += ["-p", str(port)]
        if self.username and "@" not in host.name:
            words += ["-l", self.username]
        # Needed to find bpsx before the request is read.
        path = (
            ["env", f"PYTHONPATH={environment['PYTHONPATH']}"]
            if environment.get("PYTHONPATH")
            else []
        )
        return [
            *words,
            "--",
            host.name,
            shlex.join([*path, self.python, "-P", "-m", "bpsx.launch.ssh.agent"]),
        ]
