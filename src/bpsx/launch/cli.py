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
              [--grace S] COMMAND...
       %(prog)s --hostfile FILE [--scheduler-ip A] [--env K=V]... [ssh options] COMMAND...
       %(prog)s doctor [--json] | top [--help] | trace [--help]"""
_DESCRIPTION = """\
Start one machine's part of a job; or with --local a whole job on this machine; or with --hostfile
a job on several, over ssh.
"doctor" reports what was found here and tries a push_pull.

Without --local and --hostfile, DMLC_ROLE says what to start: scheduler and server run until the
workers are done (COMMAND is ignored); worker runs COMMAND, once or once per GPU. Needed besides:
DMLC_PS_ROOT_URI, DMLC_PS_ROOT_PORT, DMLC_NUM_WORKER, DMLC_NUM_SERVER, and on workers
DMLC_WORKER_ID."""
_EPILOG = """\
COMMAND starts at the first word that is no option, or after --. No shell interprets it.

Several processes on a worker machine: one per entry of NVIDIA_VISIBLE_DEVICES (all: one per GPU),
else BYTEPS_LOCAL_SIZE. Each gets BYTEPS_LOCAL_RANK and BYTEPS_LOCAL_SIZE; with BYTEPS_LOCAL_RANK
set only that one is started. They sum in shared memory, and one of them speaks to the servers. A
job of one machine needs neither servers nor a scheduler of yours, unless
BYTEPS_FORCE_DISTRIBUTED=1.

Workers also get PyTorch's RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR and
MASTER_PORT (docs/train/pytorch.md).

bpsx-run top shows a running job, bpsx-run trace records a timeline of it, bpsx-run doctor looks
at this machine; a COMMAND of such a name goes after --.

Cores: several processes of a worker machine are bound to cores of their own, inside one NUMA node
where they fit. BYTEPS_NUMA_ON=0: not. BYTEPS_NUMA_DEFAULT_QUOTA: physical cores each (cores /
processes); BYTEPS_NUMA_ROOT_QUOTA: of the root, the largest local rank (what is left);
BYTEPS_CPU_BLACKLIST=0,8-11: leave these out; BYTEPS_MULTITHREADED_CPU=0: one hardware thread per
core; BYTEPS_VISIBLE_CPU_CORES=0-3:4-7: exactly these, with a colon between local ranks. --local
binds nothing.

BYTEPS_ENABLE_GDB=1: workers and servers run under gdb; after a crash it prints the backtraces of
all threads.

Output: where there are several processes each line carries its process's name, and they read no
input. They get PYTHONUNBUFFERED=1, unless it is set, or Python would keep its lines to itself for
long. Workers get Ctrl-C, SIGTERM (they have BPSX_TERM_GRACE seconds then), SIGHUP, SIGUSR1 and
SIGUSR2; servers and scheduler outlive them. A second Ctrl-C kills. With --local all compute on
the same cores, so OMP_NUM_THREADS is each one's share of them unless it is set.

Hostfile: a line per host: host[:port] and what it runs: scheduler, server, server=N, worker,
slots=N (N worker processes). Without a role: worker. Without any server each worker host runs one
beside its worker. The scheduler is on the host that says so, else at --scheduler-ip, else on the
first server's host. "#" begins a comment.
    node0  scheduler server
    node1  worker slots=4
    node2  worker slots=4
ssh checks host keys and asks nothing. Variables DMLC_* BYTEPS_* BPSX_* PS_* NCCL_*,
OMP_NUM_THREADS, KMP_AFFINITY, NVIDIA_VISIBLE_DEVICES, LD_LIBRARY_PATH, PYTHONPATH and
PYTHONUNBUFFERED are handed on, and what --env names. If bpsx-run ends, for whatever reason, so do
the processes on all hosts.

Secret: --local and --hostfile make one for the job (BPSX_SECRET) unless BPSX_SECRET or
BPSX_SECRET_FILE is set.

Exit status: the command's; with several processes the largest of who ended by itself, or 1 if
that is 0 and others had to be ended; 128+n for a process that signal n ended, and for bpsx-run,
told to stop by signal n, if not all heeded it; 2 for a wrong option or variable; 126 or 127 if
the command cannot be run; 255 if ssh cannot reach a host.
doctor: 0 all well, 1 not.

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
        help="the scheduler's port (a free one)",
    )
    made.add_argument(
        "--grace",
        type=seconds,
        metavar="S",
        help=(
            "seconds to end in (3) once one has failed, the workers are done or bpsx-run is told to"
            " stop; then SIGTERM, 2 s later SIGKILL"
        ),
    )
    made.add_argument("--version", action=_Version, nargs=0, help="print the version")
    return made


def split(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Split ``arguments`` into bpsx-run's options and the command.

    argparse would take a ``--`` that belongs to the command as its own.
    """
    valued = {
        word
        for action in parser()._actions
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
