"""The launcher's end of the protocol with :mod:`bpsx.launch.ssh.agent`.

The protocol uses the input and output of an ssh. The launcher sends one line of JSON that says what
to run, then a line with a number for each signal to pass on; the end of input ends the process. The
agent replies on standard output, mixed with the process's own output: ``up``, ``port N``, ``ended
STATUS KILLED``, behind a marker that is unique to each process. Secrets travel in the request,
never on a command line.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import secrets
import signal
import subprocess
from typing import Any

from bpsx.launch.roles import Process

#: Pipe size in bytes. Requests hold environments; a pipe that takes a whole one needs no second
#: thread.
_PIPE = 1 << 20
_COMPLAINTS = 4096  # bytes of ssh's standard error that are kept to explain a failure


def new_marker() -> bytes:
    """Make a marker that the process's own output does not contain by chance."""
    return b"\x1e" + secrets.token_hex(8).encode() + b" "


def request(marker: bytes, **what: Any) -> bytes:
    """Encode the first line of input.

    ``what``: ``command``, ``environment``, ``directory`` ("" for any), ``path`` (a folder put first
    on the PATH, "" for none), ``find_port``, ``kill_after``.
    """
    return json.dumps({"marker": marker.decode(), **what}).encode() + b"\n"


class Far:
    """State of the remote end of ``process``; ``started`` is its ssh."""

    def __init__(self, process: Process, started: subprocess.Popen[bytes]) -> None:
        assert started.stdin
        self.host = process.host
        self.up = False
        self.port = 0
        self.told = False
        self.killed = False
        self._process = process
        self._control = started.stdin
        self._complaints = b""

    def begin(self) -> None:
        """Send the request. Raises OSError if it is too large."""
        with contextlib.suppress(OSError):
            fcntl.fcntl(self._control, fcntl.F_SETPIPE_SZ, _PIPE)
        os.set_blocking(self._control.fileno(), False)
        with contextlib.suppress(BrokenPipeError):  # ssh has ended already; its status explains it
            if os.write(self._control.fileno(), self._process.request) != len(
                self._process.request
            ):
                raise OSError(
                    f"the environment for {self._process.name} has more than {_PIPE} bytes"
                )

    def heard(self, message: bytes) -> None:
        """Handle a message from the agent."""
        match message.decode(errors="replace").split():
            case ["up"]:
                self.up = True
            case ["port", port] if port.isdigit():
                self.port = int(port)
            case ["ended", _, killed]:
                self.told = True
                self.killed = killed == "1"

    def overheard(self, data: bytes) -> None:
        """Handle standard error of ssh, or of the process once it is up."""
        if not self.up:
            self._complaints = (self._complaints + data)[-_COMPLAINTS:]

    def _remedy(self) -> str:
        """Advice for ssh's error message, or ""."""
        if b"Host key verification failed" in self._complaints:
            return (
                f". ssh does not know the key of {self.host}: connect once by hand (ssh"
                f" {self.host}) and compare its fingerprint, or add the key to ~/.ssh/known_hosts"
            )
        if b"Permission denied" in self._complaints:
            return (
                f". {self.host} does not accept a key of this user: bpsx-run types no password; set"
                f" up a key (ssh-copy-id {self.host})"
            )
        return ""

    def send(self, number: int) -> None:
        """Pass a signal to the process."""
        with contextlib.suppress(OSError, ValueError):  # ended, or closed
            os.write(self._control.fileno(), b"%d\n" % number)

    def close(self) -> None:
        """Close the input, which ends the process."""
        with contextlib.suppress(OSError):
            self._control.close()

    def story(self, status: int) -> str:
        """Text that explains an end that the agent did not report."""
        if self.up:
            return f"was lost: the connection to {self.host} has ended" + (
                "" if status == 128 + signal.SIGKILL else f" (ssh: status {status})"
            )
        return (
            f"could not be started on {self.host}: ssh ended with status {status}; what it said is"
            f" above{self._remedy()}"
        )
