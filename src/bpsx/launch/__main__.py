"""The command line ``bpsx-run``."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

from bpsx.errors import BpsxError, ConfigError
from bpsx.launch.roles import Plan, run_role

_USAGE = "%(prog)s COMMAND...\n       %(prog)s --local [--workers N] [--servers M] [--port P] [--grace S] COMMAND..." \
    "\n       %(prog)s top [--help]\n       %(prog)s trace [--help]"
_DESCRIPTION = """\
Start one process of a job, or with --local a whole job on this machine.

Without --local, DMLC_ROLE says what to start: scheduler and server run until the workers are done (COMMAND is ignored);
worker runs COMMAND. Needed besides: DMLC_PS_ROOT_URI, DMLC_PS_ROOT_PORT, DMLC_NUM_WORKER, DMLC_NUM_SERVER, and on
workers DMLC_WORKER_ID."""
_EPILOG = """\
COMMAND starts at the first word that is no option, or after --. No shell interprets it.
bpsx-run top shows a running job, bpsx-run trace records a timeline of it; a COMMAND of such a name goes after --.

With --local each line of output carries its process's name, the processes read no input, and Ctrl-C reaches all of them
(a second one kills). All of them compute on the same cores: set OMP_NUM_THREADS if they get in each other's way.

Exit status: the command's; with --local the largest of who ended by itself; 128+n for a process that signal n ended; 2 for a wrong
option or variable; 126 or 127 if the command cannot be run."""
_LOCAL_ONLY = ("workers", "servers", "port", "grace")


class _Version(argparse.Action):
    def __call__(self, *_: Any, **__: Any) -> NoReturn:
        from bpsx import __version__

        print(f"bpsx {__version__}")
        sys.exit(0)


def _whole(low: int, high: int) -> Any:
    def parse(text: str) -> int:
        value = int(text) if text.isascii() and text.isdigit() else -1
        if not low <= value <= high:
            raise argparse.ArgumentTypeError(f"{text!r}: allowed is {low}..{high}")
        return value

    return parse


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r}: allowed are seconds, 0 or more")
    return value


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("bpsx-run", usage=_USAGE, description=_DESCRIPTION, epilog=_EPILOG, allow_abbrev=False,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--local", action="store_true", help="run a scheduler, servers and workers on this machine")
    parser.add_argument("--workers", type=_whole(1, 65535), metavar="N", help="number of workers (2)")
    parser.add_argument("--servers", type=_whole(0, 65535), metavar="M", help="number of servers (1); 0 with a single worker")
    parser.add_argument("--port", type=_whole(1, 65535), metavar="P", help="the scheduler's port (a free one)")
    parser.add_argument("--grace", type=_seconds, metavar="S",
                        help="seconds to end in (10) once one has failed, the workers are done or bpsx-run is told to stop; "
                        "then SIGTERM, 5 s later SIGKILL")
    parser.add_argument("--version", action=_Version, nargs=0, help="print the version")
    return parser


def split(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Our options and the command. argparse would take a ``--`` that belongs to the command for its own."""
    valued = {f"--{name}" for name in _LOCAL_ONLY}
    at = 0
    while at < len(arguments):
        word = arguments[at]
        if word == "--":
            return list(arguments[:at]), list(arguments[at + 1:])
        if not word.startswith("-") or word == "-":
            break
        at += 2 if word in valued else 1
    return list(arguments[:at]), list(arguments[at:])


def _run(arguments: Sequence[str]) -> int:
    if arguments[:1] == ["top"]:
        from bpsx.launch.top import main as top

        return top(arguments[1:])
    if arguments[:1] == ["trace"]:
        from bpsx.launch.observe import trace_main

        return trace_main(arguments[1:])
    words, command = split(arguments)
    parser = _parser()
    options = parser.parse_args(words)
    if not options.local:
        for name in _LOCAL_ONLY:
            if getattr(options, name) is not None:
                parser.error(f"--{name} needs --local")
        return run_role(command)
    if not command:
        parser.error("--local needs the workers' COMMAND")
    from bpsx.launch.local import Job  # a server or a single worker has no use for it

    given = {name: getattr(options, name) for name in _LOCAL_ONLY if getattr(options, name) is not None}
    return Job(Plan(tuple(command), **given)).run()


def _open_standard_streams() -> None:
    """Occupy 0, 1 and 2 where the caller closed them, or a pipe of ours would get such a number and be taken for the output."""
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(descriptor, True)
    os.close(descriptor)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line (without the program's name; default: this process's). Returns the exit status."""
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
