"""Hostfiles: the hosts of a job and their roles."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from bpsx.errors import ConfigError

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
            f"{line}: {word!r} is not a host; expected [user@]host[:port], with an IPv6 address"
            " in brackets"
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
        raise ConfigError(f"{line}: {word!r}: expected {name}=1..65535")
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
                    f"{line}: {roles[0]!r}: every host of this file is a {role}; expected"
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
                    raise ConfigError(f"{line}: {word!r} is unknown; expected {_LINE}")
            slots.update({_number(word, line): line for word in words if word.startswith("slots=")})
    if len(named) > 1:
        raise ConfigError(f"{named[1].line}: a second scheduler; the first is in {named[0].line}")
    if len(slots) > 1:
        raise ConfigError(
            f"{' and '.join(slots.values())}: different slots ({' and '.join(map(str, slots))}); "
            "all worker hosts need the same number of processes"
        )
    if not workers:
        raise ConfigError(f"{', '.join(file for file, _ in files)}: no worker; expected {_LINE}")
    # Servers run beside the workers: together their links carry as much as those of separate
    # machines.
    servers = servers or workers
    return Hosts((named or schedulers or servers)[0], tuple(servers), tuple(workers), *slots)


def bare(host: Host) -> str:
    """The host's name without a user."""
    return host.name.rpartition("@")[2]
