"""Our end of the conversation with :mod:`bpsx.launch.ssh.agent`, which runs a process on another
host: over the input and output of an ssh.

To there: one line of JSON that says what to run, then a line with a number for each signal to pass
on; the end of input ends the process. From there, on standard output among the process's own:
``up``, ``port N``, ``ended STATUS KILLED`` behind a marker that is made for each process. Secrets
travel in the request, never on a command line.
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

#: Requests hold environments; a pipe that takes a whole one needs no second thread.
_PIPE = 1 << 20
_COMPLAINTS = 4096  # bytes of ssh's standard error that are kept to explain why it failed


def new_marker() -> bytes:
    """A marker that the process's own output will not hold by chance."""
    return b"\x1e" + secrets.token_hex(8).encode() + b" "


def request(marker: bytes, **what: Any) -> bytes:
    """The first line of input.

    ``command``, ``environment``, ``directory`` ("" for any), ``path`` (a folder that comes first on
    the PATH, "" for none), ``find_port``, ``kill_after``.
    """
    return json.dumps({"marker": marker.decode(), **what}).encode() + b"\n"


class Far:
    """What we know of the far end of ``process``, whose ssh has been ``started``."""

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
        with contextlib.suppress(BrokenPipeError):  # has ended already, which its status will tell
            if os.write(self._control.fileno(), self._process.request) != len(
                self._process.request
            ):
                raise OSError(
                    f"the environment for {self._process.name} has more than {_PIPE} bytes"
                )

    def heard(self, message: bytes) -> None:
        """Take in a message from there."""
        match message.decode(errors="replace").split():
            case ["up"]:
                self.up = True
            case ["port", port] if port.isdigit():
                self.port = int(port)
            case ["ended", _, killed]:
                self.told = True
                self.killed = killed == "1"

    def overheard(self, data: bytes) -> None:
        """Take in what ssh, or the process once it is up, writes to standard error."""
        if not self.up:
            self._complaints = (self._complaints + data)[-_COMPLAINTS:]

    def _remedy(self) -> str:
        """What to do about ssh's complaint, as far as we know one."""
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
        """Have a signal passed on."""
        with contextlib.suppress(OSError, ValueError):  # gone, or closed
            os.write(self._control.fileno(), b"%d\n" % number)

    def close(self) -> None:
        """End the conversation, and the process with it."""
        with contextlib.suppress(OSError):
            self._control.close()

    def story(self, status: int) -> str:
        """Why its end was not told."""
        if self.up:
            return f"was lost: the connection to {self.host} has ended" + (
                "" if status == 128 + signal.SIGKILL else f" (ssh: status {status})"
            )
        return (
            f"could not be started on {self.host}: ssh ended with status {status}; what it said is"
            f" above{self._remedy()}"
        )
