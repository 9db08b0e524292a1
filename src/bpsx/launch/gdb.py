"""``python -m bpsx.launch.gdb COMMAND``: run a command under gdb, for BYTEPS_ENABLE_GDB=1.

After a crash, gdb prints the backtraces of all threads to standard error and ends the command. The
exit status is the command's, or 128 + n for signal n. Signals go to the command, not to gdb, which
would handle them as its own.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from bpsx.launch.spawn import run_alone

#: Signals that cause a backtrace. All others are passed to the command.
_CRASHES = "SIGSEGV SIGBUS SIGILL SIGFPE SIGABRT SIGSYS"
# An old gdb that does not know one of these settings continues. Address randomization stays
# enabled, as some containers do not allow gdb to disable it.
_BEFORE = (
    "set debuginfod enabled off",
    "set confirm off",
    "set pagination off",
    "set startup-with-shell off",
    "set disable-randomization off",
    "set print thread-events off",
    "set print inferior-events off",
)
_SCRIPT = f"""\
handle all nostop noprint pass
handle SIGINT nostop noprint pass
handle {_CRASHES} stop print pass
run
if $_isvoid($_exitcode)
  if $_isvoid($_exitsignal)
    set $bpsx_status = 128 + $_siginfo.si_signo
    thread apply all backtrace
    kill
    quit $bpsx_status
  end
  quit 128 + $_exitsignal
end
quit $_exitcode
"""


def _children(pid: int) -> Iterator[int]:
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            if int(stat.read_text().rpartition(")")[2].split()[1]) == pid:
                yield int(stat.parent.name)


def _file(name: str, text: str) -> int:
    descriptor = os.memfd_create(name)
    os.write(descriptor, text.encode(errors="surrogateescape"))
    os.lseek(descriptor, 0, os.SEEK_SET)
    return descriptor


def run(command: Sequence[str]) -> int:
    """Run ``command`` under gdb; see :func:`run_alone`."""
    output = os.dup(1)
    # gdb splits arguments at blanks, and a shell between would interpret more. So a script holds
    # the arguments. The script also separates the command's output from gdb's.
    program = _file("command", f"exec {shlex.join(command)} >&{output} {output}>&-\n")
    script = _file("gdb", _SCRIPT)
    gdb = [
        "gdb",
        "-q",
        "-nx",
        "-batch",
        *(word for line in _BEFORE for word in ("-iex", line)),
        "-x",
        f"/proc/self/fd/{script}",
        "--args",
        "/bin/sh",
        f"/proc/self/fd/{program}",
    ]
    # gdb gets its own session, or the terminal's Ctrl-C would go to gdb. In that session it cannot
    # read from the terminal.
    return run_alone(
        gdb,
        _signal_children,
        stdin=subprocess.DEVNULL if os.isatty(0) else None,
        stdout=2,
        start_new_session=True,
        pass_fds=(output, program, script),
    )


def _signal_children(gdb: subprocess.Popen[bytes], received: signal.struct_siginfo) -> None:
    for pid in _children(gdb.pid):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, received.si_signo)


if __name__ == "__main__":
    sys.exit(run(sys.argv[1:]))
