"""The launcher's end of the protocol with :mod:`bpsx.launch.ssh.agent`.

The protocol uses the input and output of an ssh. The launcher sends one line of JSON that says what
to run. Then come lines with the number of a signal to pass on, and ``tell LINE`` (a line for the
BPSX_STATE_FD of a worker machine's bpsx-run). The end of input ends the process.
SIGKILL is for the process and all of its descendants: the agent replies when none is left. It
replies on standard output, mixed with the process's own output: ``up``, ``port N``, ``state
LINE`` (a scheduler has written a line to BPSX_STATE_FD), ``ended STATUS KILLED``, behind a marker
that is unique to each process. Secrets travel in the request, never on a command line.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import secrets
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import Any, ClassVar

from bpsx.launch.backend import Process
from bpsx.launch.child import Child
from bpsx.launch.spawn import ENDING
from bpsx.system.host import SCRIPT_SIGNALS

#: Pipe size in bytes. Requests hold environments; a pipe that takes a whole one needs no second
#: thread.
_PIPE = 1 << 20
_COMPLAINTS = 4096  # bytes of ssh's standard error that are kept to explain a failure
#: Seconds from SIGKILL until the agent must have said that the far processes are gone.
_ANSWER = 5.0
_LOOK = 0.05


def new_marker() -> bytes:
    """Make a marker that the process's own output does not contain by chance."""
    return b"\x1e" + secrets.token_hex(8).encode() + b" "


def request(marker: bytes, **what: Any) -> bytes:
    """Encode the first line of input.

    ``what``: ``command``, ``environment``, ``directory`` ("" for any), ``path`` (a folder put first
    on the PATH, "" for none), ``find_port``, ``tells`` (whether it is a scheduler), ``hears``
    (whether it is a worker machine), ``kill_after``.
    """
    return json.dumps({"marker": marker.decode(), **what}).encode() + b"\n"


@dataclass(frozen=True)
class SshProcess(Process):
    """An ssh to start, and the process at its remote end.

    ``request``: the first line of input for the agent. ``host``: its host. ``marker``: prefix of
    its messages. ``machine``: the number of a worker's; its processes are those of the remote
    bpsx-run.
    """

    _: KW_ONLY
    request: bytes = field(repr=False)
    host: str
    marker: bytes
    machine: int = -1

    here: ClassVar[bool] = False
    stdin: ClassVar[int] = subprocess.PIPE

    @property
    def number(self) -> int:
        """See :class:`~bpsx.launch.backend.Process`."""
        return -1  # it may be several

    @property
    def place(self) -> str:
        """See :class:`~bpsx.launch.backend.Process`."""
        return f"machine {self.machine}" if self.machine >= 0 else ""

    @property
    def ignored(self) -> Sequence[int]:
        """See :class:`~bpsx.launch.backend.Process`."""
        return (*ENDING, *SCRIPT_SIGNALS)  # bpsx-run passes them to the remote process

    def child(self, started: subprocess.Popen[bytes]) -> SshChild:
        """See :class:`~bpsx.launch.backend.Process`."""
        return SshChild(self, started)


class SshChild(Child):
    """An ssh, and what its remote end has reported so far."""

    def __init__(self, process: SshProcess, started: subprocess.Popen[bytes]) -> None:
        super().__init__(process.name, process.role, started)
        assert started.stdin
        self.up = False
        self.pid = 0
        self._start = process
        self._ended = False  # whether the agent has reported the end
        self._killed = False  # whether a signal ended the remote process
        self._control = started.stdin
        self._complaints = b""
        self._due: float | None = None  # when the end must have been reported
        self._heard: Callable[[str], None] = lambda _: None

    def listen(self, heard: Callable[[str], None]) -> None:
        """See :class:`~bpsx.launch.child.Child`."""
        self._heard = heard

    def tell(self, line: str) -> None:
        """See :class:`~bpsx.launch.child.Child`."""
        self._order(f"tell {line}".encode())

    def begin(self) -> None:
        """Send the request. Raises OSError if it is too large."""
        with contextlib.suppress(OSError):
            fcntl.fcntl(self._control, fcntl.F_SETPIPE_SZ, _PIPE)
        os.set_blocking(self._control.fileno(), False)
        with contextlib.suppress(BrokenPipeError):  # ssh has ended already; its status explains it
            request = self._start.request
            if os.write(self._control.fileno(), request) != len(request):
                raise OSError(f"the environment for {self.name} has more than {_PIPE} bytes")

    def messages(self) -> tuple[bytes, Callable[[bytes], None]]:
        """See :class:`~bpsx.launch.child.Child`."""
        return self._start.marker, self._receive

    def _receive(self, message: bytes) -> None:
        """Handle a message from the agent."""
        match message.decode(errors="replace").split():
            case ["up"]:
                self.up = True
            case ["pid", pid] if pid.isdigit():
                self.pid = int(pid)
            case ["port", port] if port.isdigit():
                self.port = int(port)
            case ["state", *words]:
                self._heard(" ".join(words))
            case ["ended", _, killed]:
                self._ended = True
                self._killed = killed == "1"

    def overhear(self, data: bytes) -> None:
        """Handle standard error of ssh, or of the process once it is up."""
        if not self.up:
            self._complaints = (self._complaints + data)[-_COMPLAINTS:]

    def poll_exit(self) -> bool:
        """See :class:`~bpsx.launch.child.Child`."""
        if not super().poll_exit():
            return False
        with contextlib.suppress(OSError):
            self._control.close()
        return True

    def send(self, number: int) -> None:
        """Signal the remote process; SIGKILL is for its descendants, too.

        SIGKILL ends ssh where no agent can be reached.
        """
        ordered = self._order(b"%d" % number)
        if number != signal.SIGKILL:
            return
        if ordered and self.up and self.status is None:
            self._due = self._due or time.monotonic() + _ANSWER
        else:
            super().send(number)

    def _order(self, line: bytes) -> bool:
        """Send a line to the agent; returns whether ssh has taken it."""
        with contextlib.suppress(OSError, ValueError):  # ended or blocked, or closed
            return os.write(self._control.fileno(), line + b"\n") > 0
        return False

    @property
    def due(self) -> float | None:
        """See :class:`~bpsx.launch.child.Child`."""
        return self._due

    def abandon(self, now: float) -> str:
        """See :class:`~bpsx.launch.child.Child`."""
        if self._due is None or now < self._due:
            return ""
        self._due = None
        super().send(signal.SIGKILL)
        return (
            f"{self.name}: no word from {self._start.host} for {_ANSWER:g} s after SIGKILL;"
            " bpsx-run does not wait any longer, and processes of the job may still run there"
        )

    def reap(self) -> str:
        """See :class:`~bpsx.launch.child.Child`."""
        text = ""
        while self.process.poll() is None and not text and self._due is not None:
            text = self.abandon(time.monotonic())
            time.sleep(_LOOK)
        return super().reap() or text

    def end(self) -> str:
        """See :class:`~bpsx.launch.child.Child`."""
        if self._ended:
            self.killed = self._killed
            return super().end()
        host = self._start.host
        if self.up:
            return f"was lost: the connection to {host} ended" + (
                "" if self.status == 128 + signal.SIGKILL else f" (ssh: status {self.status})"
            )
        return (
            f"could not be started on {host}: ssh exited with status {self.status}; its message is"
            f" above{self._remedy()}"
        )

    def _remedy(self) -> str:
        """Advice for ssh's error message, or ""."""
        host = self._start.host
        if b"Host key verification failed" in self._complaints:
            return (
                f". ssh does not know the key of {host}: connect once by hand (ssh {host}) and"
                " compare the fingerprint, or add the key to ~/.ssh/known_hosts"
            )
        if b"Permission denied" in self._complaints:
            return (
                f". {host} accepts no key of this user, and bpsx-run cannot type a password: set up"
                f" a key (ssh-copy-id {host})"
            )
        return ""
