"""The command line ``bpsx-run``."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Sequence

from bpsx.errors import BpsxError, ConfigError
from bpsx.launch.backend_table import choose
from bpsx.launch.cli import parser, split
from bpsx.launch.single_role import run_role
from bpsx.launch.spawn import runnable

#: First words that are subcommands, not a user's command: the module's ``main(arguments) ->
#: status`` takes over.
SUBCOMMANDS = {
    "advise": "bpsx.launch.advise",
    "doctor": "bpsx.launch.doctor",
    "top": "bpsx.launch.top",
    "trace": "bpsx.launch.job_view",
}


def _run(arguments: Sequence[str]) -> int:
    if arguments and arguments[0] in SUBCOMMANDS:
        return int(importlib.import_module(SUBCOMMANDS[arguments[0]]).main(list(arguments[1:])))
    words, command = split(arguments)
    command = list(runnable(command)) if command else command
    parse = parser()
    options = parse.parse_args(words)
    backend = choose(options, parse.error)
    if backend is None:
        return run_role(command, options.grace)
    if not command:
        parse.error(f"{backend.label} needs the workers' COMMAND")
    from bpsx.launch.job import Job  # imported late: a server or a single worker does not need it

    return Job(backend.plan(options, tuple(command))).run()


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
