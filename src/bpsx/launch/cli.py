"""The options and the help text of ``bpsx-run``."""

from __future__ import annotations

import argparse
import difflib
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

from bpsx.launch.arguments import seconds, whole
from bpsx.launch.backend_table import BACKENDS

_USAGE = """\
%(prog)s COMMAND...
       %(prog)s --local [--workers N] [--servers M] [--processes K] [--port P]
              [--grace S] [--max-restarts R] COMMAND...
       %(prog)s --hostfile FILE [--scheduler-ip A] [--env K=V]... [ssh options] COMMAND...
       %(prog)s doctor [--json] | top [--help] | trace [--help] | advise [--help]"""
_DESCRIPTION = """\
Start one machine's part of a job. With --local, start a whole job on this machine. With --hostfile,
start a job on several machines over ssh.

Without --local and --hostfile, DMLC_ROLE says what to start. A scheduler or server runs until the
workers are done, and ignores COMMAND. A worker runs COMMAND once, or once per GPU. Each role needs
DMLC_PS_ROOT_URI, DMLC_PS_ROOT_PORT, DMLC_NUM_WORKER and DMLC_NUM_SERVER. Workers also need
DMLC_WORKER_ID."""
_EPILOG = """\
COMMAND starts at the first word that is not an option, or after --. No shell interprets it.

Subcommands: top shows a running job, trace records a timeline of it, doctor checks this machine and
tries a push_pull, advise predicts the step time of each way of sending gradients. To run a COMMAND
of such a name, write it after --.

Several processes on a worker machine: bpsx-run starts one per entry of NVIDIA_VISIBLE_DEVICES (all:
one per GPU), else BYTEPS_LOCAL_SIZE. Each gets BYTEPS_LOCAL_RANK and BYTEPS_LOCAL_SIZE. If
BYTEPS_LOCAL_RANK is set, bpsx-run starts only that process. The processes sum in shared memory, and
one of them talks to the servers. A job on one machine needs neither servers nor a scheduler that
you start, unless BYTEPS_FORCE_DISTRIBUTED=1.

Workers also get PyTorch's RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR and
MASTER_PORT (docs/train/pytorch.md).

Cores: bpsx-run binds each of several processes of a worker machine to cores of its own, inside one
NUMA node if they fit. --local binds nothing.
    BYTEPS_NUMA_ON=0                  bind nothing
    BYTEPS_NUMA_DEFAULT_QUOTA=N       physical cores per process (default: cores / processes); the
                                      largest local rank, the root, gets the rest
    BYTEPS_CPU_BLACKLIST=0,8-11       use none of these CPUs
    BYTEPS_VISIBLE_CPU_CORES=0-3:4-7  use exactly these CPUs; a colon separates local ranks

Debugger: with BYTEPS_ENABLE_GDB=1, workers and servers run under gdb. After a crash, gdb prints the
backtraces of all threads.

Output: if there are several processes, each line begins with the name of its process, and the
processes read no input. They get PYTHONUNBUFFERED=1 unless it is set, because Python would hold
back its lines. With --local, OMP_NUM_THREADS is each worker's share of the cores unless it is set.

Signals: workers get Ctrl-C, SIGTERM, SIGHUP, SIGUSR1 and SIGUSR2. After SIGTERM they have
BPSX_TERM_GRACE seconds. Servers and scheduler end after the workers. A second Ctrl-C kills all.

Hostfile: one line per host, host[:port] and what the host runs: scheduler, server, server=N, worker
or slots=N (N worker processes). A line without a role is a worker. If no line names a server, each
worker host also runs a server. The scheduler runs on the host that says so, else at --scheduler-ip,
else on the first server's host. "#" begins a comment.
    node0  scheduler server
    node1  worker slots=4
    node2  worker slots=4
ssh checks host keys and never prompts. bpsx-run passes on the variables DMLC_* BYTEPS_* BPSX_* PS_*
NCCL_*, OMP_NUM_THREADS, KMP_AFFINITY, NVIDIA_VISIBLE_DEVICES, LD_LIBRARY_PATH, PYTHONPATH and
PYTHONUNBUFFERED, and those of --env. When bpsx-run ends, even by SIGKILL, the processes on all
hosts end, too.

Secret: --local and --hostfile make one for the job (BPSX_SECRET) unless BPSX_SECRET or
BPSX_SECRET_FILE is set.

Exit status:
    the command's  the largest one of several processes that ended by themselves
                   (servers and schedulers that the job has survived do not count)
    1              these ended with 0, but bpsx-run had to end others
    2              an option or variable is wrong
    126, 127       the command cannot be run
    128 + n        signal n ended the process, or told bpsx-run to stop and not all processes ended
    255            ssh cannot reach a host, or lost it
    doctor: 0 if it found no problem, else 1

All variables: docs/reference/options.md; more on this page: docs/run/launching.md."""


class _Version(argparse.Action):
    def __call__(self, *_: Any, **__: Any) -> NoReturn:
        from bpsx import __version__

        print(f"bpsx {__version__}")
        sys.exit(0)


#: Options of other launchers -> bpsx-run's own, for error messages.
_ELSEWHERE = {
    "-n": "--workers",
    "-np": "--workers",
    "--np": "--workers",
    "--num-proc": "--workers",
    "--nproc": "--workers",
    "--nproc-per-node": "--processes",
    "--nproc_per_node": "--processes",
    "--num-workers": "--workers",
    "--num-servers": "--servers",
    "--hosts": "--hostfile",
    "--master-port": "--port",
    "--master_port": "--port",
}


class _Parser(argparse.ArgumentParser):
    """An argument parser whose errors suggest the option that was probably meant."""

    def error(self, message: str) -> NoReturn:
        prefix = "unrecognized arguments: "
        if message.startswith(prefix):
            word = message.removeprefix(prefix).split()[0].split("=")[0]
            known = [
                option
                for action in self._actions
                for option in action.option_strings
                if option.startswith("--")
            ]
            near = (
                [_ELSEWHERE[word]]
                if word in _ELSEWHERE
                else difflib.get_close_matches(word, known, n=1)
            )
            message = f"unknown option {word}" + (f"; did you mean {near[0]}?" if near else "")
        super().error(message)


def parser() -> argparse.ArgumentParser:
    """Return the parser of the options before COMMAND."""
    made = _Parser(
        "bpsx-run",
        usage=_USAGE,
        description=_DESCRIPTION,
        epilog=_EPILOG,
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    for backend in BACKENDS:
        backend.add_options(made)
    made.add_argument(
        "--port",
        "--scheduler-port",
        type=whole(1, 65535),
        metavar="P",
        help="the scheduler's port (default: a free one)",
    )
    made.add_argument(
        "--grace",
        type=seconds,
        metavar="S",
        help=(
            "seconds in which processes may end by themselves (default: 3) after one has failed,"
            " the workers are done, or bpsx-run got a signal; then SIGTERM, 2 s later SIGKILL"
        ),
    )
    made.add_argument(
        "--max-restarts",
        type=whole(0, 1_000_000),
        metavar="R",
        help=(
            "maximum restarts of dead servers, and separately of workers (BPSX_ELASTIC=shrink) and"
            " of the scheduler (if it runs on this machine); the job goes on meanwhile (default: 0,"
            " and 3 for the scheduler of an elastic job)"
        ),
    )
    made.add_argument("--version", action=_Version, nargs=0, help="print the version")
    return made


def split(
    arguments: Sequence[str], more: argparse.ArgumentParser | None = None
) -> tuple[list[str], list[str]]:
    """Split ``arguments`` into bpsx-run's options, and those of ``more``, and the command.

    argparse would take a ``--`` that belongs to the command as its own.
    """
    valued = {
        word
        for action in [*parser()._actions, *(more._actions if more is not None else ())]
        if action.nargs is None
        for word in action.option_strings
    }
    at = 0
    while at < len(arguments):
        word = arguments[at]
        if word == "--":
            return list(arguments[:at]), list(arguments[at + 1 :])
        if not word.startswith("-") or word == "-":
            break
        at += 2 if word in valued else 1
    return list(arguments[:at]), list(arguments[at:])
