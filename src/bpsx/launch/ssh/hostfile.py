"""A job on several hosts over ssh: the hosts, their roles, and the variables of each process.

ssh runs with the user's own setup: keys, agent, ``~/.ssh/config``, and its usual host key checks.
It never prompts.
"""

from __future__ import annotations

import os
import re
import shlex
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from bpsx.config import child_environment, own_store
from bpsx.errors import ConfigError
from bpsx.launch.roles import GRACE, KILL_AFTER, Process, secret_unless_given, unbuffered, verify
from bpsx.launch.ssh.client import new_marker, request
from bpsx.launch.torch_variables import any_port, store_variables
from bpsx.secret import make
from bpsx.system.address import is_loopback
from bpsx.system.role_process import MODULES

#: Variables that are handed on: bpsx's, and those that make the same program compute the same on
#: another host.
_HANDED_ON = re.compile(
    r"(DMLC|BYTEPS|BPSX|PS|NCCL)_|(OMP_NUM_THREADS|KMP_AFFINITY|NVIDIA_VISIBLE_DEVICES|LD_LIBRARY_PATH|PYTHON(PATH|UNBUFFERED))$"
)
#: Variables of these that apply to one process or machine only.
_NOT_HANDED_ON = (
    "DMLC_ROLE",
    "DMLC_WORKER_ID",
    "DMLC_NODE_HOST",
    "BYTEPS_LOCAL_RANK",
    "BPSX_PORT_FILE",
)
_CONNECT_SECONDS = 10
_LINE = "host[:port] followed by any of: scheduler, server, server=N, worker, slots=N"


@dataclass(frozen=True)
class Host:
    """A host as ssh knows it.

    ``port``: 0 for ssh's default. ``line``: position in the hostfile, for messages.
    """

    name: str
    port: int
    line: str


@dataclass(frozen=True)
class Hosts:
    """The hosts of each role.

    ``slots``: worker processes per host; 0 lets each host decide.
    """

    scheduler: Host
    servers: tuple[Host, ...]
    workers: tuple[Host, ...]
    slots: int = 0


def _host(word: str, line: str) -> Host:
    match = re.fullmatch(
        r"((?:[^\s@\[\]:]+@)?)(?:\[([0-9a-fA-F:.%\w]+)\]|([^\s@\[\]:]+))(?::(\d+))?", word
    )
    port = int(match[4] or 0) if match else -1
    # A leading "-" would be an option to ssh.
    if (
        not match
        or word.startswith("-")
        or (match[2] or match[3]).startswith("-")
        or not (match[4] is None or 1 <= port <= 65535)
    ):
        raise ConfigError(
            f"{line}: {word!r} is no host; allowed is [user@]host[:port], an IPv6 address in"
            " brackets"
        )
    return Host(match[1] + (match[2] or match[3]), port, line)


def _lines(file: str) -> Iterable[tuple[str, list[str]]]:
    """Position and words of each hostfile line that is not empty."""
    try:
        text = Path(file).read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"hostfile {file}: {getattr(error, 'strerror', None) or error}") from None
    for number, line in enumerate(text.splitlines(), 1):
        if words := line.split("#")[0].split():
            yield f"{file} line {number}", words


def _number(word: str, line: str) -> int:
    name, _, text = word.partition("=")
    if not (text.isascii() and text.isdigit() and 1 <= int(text) <= 65535):
        raise ConfigError(f"{line}: {word!r}: allowed is {name}=1..65535")
    return int(text)


def read(files: Sequence[tuple[str, str]], scheduler: str = "") -> Hosts:
    """Read the hosts in ``files``, pairs of a file and the role of all its hosts.

    Role "" means that the file's lines name roles. ``scheduler``: its host, if no file names one.
    """
    schedulers = (
        [
            _host(
                (
                    f"[{scheduler}]"
                    if scheduler.count(":") > 1 and "[" not in scheduler
                    else scheduler
                ),
                "--scheduler-ip",
            )
        ]
        if scheduler
        else []
    )
    named: list[Host] = []
    servers: list[Host] = []
    workers: list[Host] = []
    slots: dict[int, str] = {}
    for file, role in files:
        for line, (first, *words) in _lines(file):
            host = _host(first, line)
            roles = [w for w in words if not w.startswith("slots=")]
            if role and roles:
                raise ConfigError(
                    f"{line}: {roles[0]!r}: every host of this file is a {role}; allowed is"
                    " host[:port] slots=N"
                )
            for word in [role] if role else roles or ["worker"]:
                if word == "scheduler":
                    named.append(host)
                elif word == "worker":
                    workers.append(host)
                elif word == "server" or word.startswith("server="):
                    servers += [host] * (1 if word == "server" else _number(word, line))
                else:
                    raise ConfigError(f"{line}: {word!r} is not known; allowed is {_LINE}")
            slots.update({_number(word, line): line for word in words if word.startswith("slots=")})
    if len(named) > 1:
        raise ConfigError(f"{named[1].line}: a second scheduler; the first is in {named[0].line}")
    if len(slots) > 1:
        raise ConfigError(
            f"{' and '.join(slots.values())}: different slots ({' and '.join(map(str, slots))}); "
            "every worker host has to have as many processes as the others"
        )
    if not workers:
        raise ConfigError(f"{', '.join(file for file, _ in files)}: no worker; allowed is {_LINE}")
    # Servers run beside the workers: together their links carry as much as those of separate
    # machines.
    servers = servers or workers
    return Hosts((named or schedulers or servers)[0], tuple(servers), tuple(workers), *slots)


def assignment(text: str) -> tuple[str, str]:
    """Split an ``--env`` argument into name and value.

    Raises :class:`ValueError`, also for the job secret.
    """
    match = re.fullmatch(r"([A-Za-z_]\w*)[=:](.*)", text, re.DOTALL | re.ASCII)
    if not match:
        raise ValueError(f"{text!r}: allowed is NAME=VALUE or NAME:VALUE")
    if match[1] == "BPSX_SECRET":
        raise ValueError(
            "BPSX_SECRET on a command line can be read by every user of this machine: export it"
            " before bpsx-run, or name a file with BPSX_SECRET_FILE; without either bpsx-run makes"
            " a secret"
        )
    return match[1], match[2]


@dataclass(frozen=True)
class Remote:
    """A job over ssh, for :class:`~bpsx.launch.local.Job`.

    ``address``: the scheduler's address for the other hosts, if it is not the host's name.
    """

    hosts: Hosts
    worker_command: tuple[str, ...]
    address: str = ""
    port: int = 0
    grace: float = GRACE
    kill_after: float = KILL_AFTER
    forgiving: bool = False
    ssh: str = "ssh"
    ssh_port: int = 0
    username: str = ""
    interface: str = ""
    python: str = sys.executable
    directory: str = field(default_factory=os.getcwd)
    given: Mapping[str, str] = field(default_factory=dict)
    secret: str = field(default_factory=make, repr=False)
    store_port: int = field(default_factory=any_port)

    @property
    def command(self) -> Sequence[str]:
        """See :class:`~bpsx.launch.roles.Processes`."""
        return shlex.split(self.ssh) or [""]

    def check(self) -> None:
        """See :class:`~bpsx.launch.roles.Processes`."""
        for role in ("scheduler", "server", "worker"):
            environment = self.environment(role, 0, self.port)
            verify(
                {**environment, "BYTEPS_LOCAL_SIZE": environment.get("BYTEPS_LOCAL_SIZE") or "1"}
            )
        everybody = {self.hosts.scheduler, *self.hosts.servers, *self.hosts.workers}
        if is_loopback(self._address) and not all(is_loopback(_bare(host)) for host in everybody):
            far = next(host for host in everybody if not is_loopback(_bare(host)))
            raise ConfigError(
                f"the scheduler's address is {self._address}, which {far.name} ({far.line}) cannot"
                " reach; name another with --scheduler-ip"
            )

    @property
    def _address(self) -> str:
        return self.address or _bare(self.hosts.scheduler)

    def environment(self, role: str, index: int, port: int) -> dict[str, str]:
        """The variables that the ``index``-th process of ``role`` gets besides its host's."""
        kept = {
            k: v
            for k, v in child_environment().items()
            if _HANDED_ON.match(k) and k not in _NOT_HANDED_ON
        }
        changes = {
            "DMLC_ROLE": role,
            "DMLC_PS_ROOT_URI": self._address,
            "DMLC_PS_ROOT_PORT": str(port),
            "DMLC_NUM_WORKER": str(len(self.hosts.workers)),
            "DMLC_NUM_SERVER": str(len(self.hosts.servers)),
            "BYTEPS_FORCE_DISTRIBUTED": "1",
            "BPSX_ANNOUNCE": "0",
            **secret_unless_given(self.secret),
        }
        if role == "worker":
            changes["DMLC_WORKER_ID"] = str(index)
            if self.hosts.slots:
                changes["BYTEPS_LOCAL_SIZE"] = str(self.hosts.slots)
            kept |= self._store()
        if self.interface:
            changes["DMLC_INTERFACE"] = self.interface
        return {**kept, **unbuffered(), **self.given, **changes}

    def _store(self) -> dict[str, str]:
        """The variables of PyTorch's store.

        It is on the first worker's host if the others can reach that by its name.
        """
        first = self.hosts.workers[0]
        address = self._address if first == self.hosts.scheduler else _bare(first)
        reached = not is_loopback(address) or all(
            is_loopback(_bare(host)) for host in self.hosts.workers
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

    def scheduler(self) -> Process:
        """See :class:`~bpsx.launch.roles.Processes`."""
        return self._process("scheduler", "scheduler", 0, self.hosts.scheduler, self.port)

    def others(self, port: int) -> list[Process]:
        """See :class:`~bpsx.launch.roles.Processes`."""
        return [
            self._process(f"{role} {i} {host.name}", role, i, host, port)
            for role, hosts in (("server", self.hosts.servers), ("worker", self.hosts.workers))
            for i, host in enumerate(hosts)
        ]

    def _process(self, name: str, role: str, index: int, host: Host, port: int) -> Process:
        environment = self.environment(role, index, port)
        command = [
            self.python,
            "-P",
            "-m",
            "bpsx.launch",
            *(() if role in MODULES else ("--grace", str(self.grace), "--", *self.worker_command)),
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
            kill_after=self.kill_after,
        )
        return Process(
            name,
            role,
            tuple(self._ssh(host, environment)),
            child_environment(),
            request=what,
            host=host.name,
            marker=marker,
        )

    def _ssh(self, host: Host, environment: Mapping[str, str]) -> list[str]:
        """Return the ssh command.

        ssh uses the first value of an option, so the user's own options win.
        """
        words = [
            *self.command,
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


def _bare(host: Host) -> str:
    return host.name.rpartition("@")[2]
