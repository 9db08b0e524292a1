"""The command line ``bpsx-run``."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Sequence
from typing import Any

from bpsx.errors import BpsxError, ConfigError
from bpsx.launch.cli import LOCAL, REMOTE, SHARED, SSH, parser, split
from bpsx.launch.roles import LocalPlan, overlooked, runnable
from bpsx.launch.single_role import run_role

#: First words that are subcommands, not a user's command: the module's ``main(arguments) ->
#: status`` takes over.
SUBCOMMANDS = {
    "doctor": "bpsx.launch.doctor",
    "top": "bpsx.launch.top",
    "trace": "bpsx.launch.job_view",
}


def _given(options: Any, names: Sequence[str]) -> dict[str, Any]:
    return {name: value for name in names if (value := getattr(options, name)) is not None}


def _run(arguments: Sequence[str]) -> int:
    if arguments and arguments[0] in SUBCOMMANDS:
        return int(importlib.import_module(SUBCOMMANDS[arguments[0]]).main(list(arguments[1:])))
    words, command = split(arguments)
    command = list(runnable(command)) if command else command
    parse = parser()
    options = parse.parse_args(words)
    remote = bool(_given(options, REMOTE))
    if options.local and remote:
        parse.error("--local and a hostfile exclude each other")
    for names, there, needed in (
        (LOCAL, options.local, "--local"),
        (SSH, remote, "a hostfile"),
        (("port",), options.local or remote, "--local"),
    ):
        for name in _given(options, names):
            if not there:
                parse.error(f"--{name.replace('_', '-')} needs {needed}")
    if not (options.local or remote):
        return run_role(command, options.grace)
    if not command:
        parse.error(f"{'--local' if options.local else 'a hostfile'} needs the workers' COMMAND")
    from bpsx.launch.local import Job  # imported late: a server or a single worker does not need it

    if options.local:
        plan = LocalPlan(tuple(command), **_given(options, (*LOCAL, *SHARED)))
        for line in overlooked(plan, _given(options, LOCAL)):
            print(f"bpsx-run: warning: {line}", file=sys.stderr)
        return Job(plan).run()
    return Job(_remote(options, tuple(command), parse.error)).run()


def _remote(options: Any, command: tuple[str, ...], refuse: Any) -> Any:
    from bpsx.launch.ssh import hostfile as hosts

    files = [
        (file, role)
        for name, role in zip(REMOTE, ("", "worker", "server"))
        if (file := getattr(options, name)) is not None
    ]
    try:
        given = dict(hosts.assignment(text) for text in options.env or ())
    except ValueError as error:
        refuse(f"argument --env: {error}")
    more = _given(
        options, ("ssh", "ssh_port", "username", "interface", "python", "directory", *SHARED)
    )
    address = options.scheduler_ip or ""
    return hosts.Remote(
        hosts.read(files, address), command, address.strip("[]"), given=given, **more
    )


def _open_standard_streams() -> None:
    """Open 0, 1 and 2 where the caller closed them.

    Otherwise, one of the launcher's pipes could get such a number and be taken for the output.
    """
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(descriptor, True)
    os.close(descriptor)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line ``arguments``, without the program's name; by default, this process's.

    Returns the exit status.
    """
    _open_standard_streams()
    try:
        return _run(sys.argv[1:] if arguments is None else arguments)
    except ConfigError as error:
        print(f"bpsx-run: error: {error}", file=sys.stderr)
        return 2
    except (BpsxError, OSError) as error:
        print(f"bpsx-run: error: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
