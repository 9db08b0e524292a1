"""A child of the launcher, the signals that end it, and the signals that end the launcher.

Each child leads its own session, so that a signal reaches its descendants, too, and the terminal's
Ctrl-C arrives only through bpsx-run. An ended child is reaped only at the end of the job. Until
then its process id stays taken, and a signal cannot reach an unrelated process.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from types import FrameType

from bpsx.launch.output_mux import Pump
from bpsx.launch.spawn import passed_on


class Child:
    """A started process.

    ``status`` is None while it runs, then its exit status or 128 + the signal that killed it.
    ``overdue``: text that says why bpsx-run had to end it, or "".

    A back end whose processes run elsewhere derives from it.
    """

    #: The scheduler's port, if the child has reported it; else 0.
    port = 0
    #: Whether the process runs. A child that ends before has not reached its host, and no job can
    #: form without one of its hosts.
    up = True

    def __init__(self, name: str, role: str, process: subprocess.Popen[bytes]) -> None:
        self.name = name
        self.role = role
        self.process = process
        self.pid = process.pid  # 0 if it runs elsewhere, and its id there is not known
        self.status: int | None = None
        self.killed = False
        self.overdue = ""

    def begin(self) -> None:
        """Send what the process needs to start. Raises OSError."""

    def listen(self, heard: Callable[[str], None]) -> None:
        """Pass the lines on that the child, a scheduler elsewhere, tells its launcher."""

    def tell(self, line: str) -> None:
        """Pass a line of the scheduler on to the child, a bpsx-run elsewhere. Others ignore it."""

    def forward_output(self, pump: Pump) -> None:
        """Give both outputs to ``pump``."""
        for target, pipe in ((1, self.process.stdout), (2, self.process.stderr)):
            assert pipe
            pump.add(
                os.dup(pipe.fileno()),
                target,
                self.name,
                self.role,
                self.messages() if target == 1 else None,
                self.overhear if target == 2 else None,
            )
            pipe.close()

    def messages(self) -> tuple[bytes, Callable[[bytes], None]] | None:
        """Marker and receiver of messages to bpsx-run on standard output, or None."""
        return None

    def overhear(self, data: bytes) -> None:
        """Handle a piece of standard error, which is also shown."""

    def poll_exit(self) -> bool:
        """Check, without reaping it, whether it has ended since the last call."""
        if self.status is not None or (found := self._exit()) is None:
            return False
        self.killed = found.si_code != os.CLD_EXITED
        self.status = found.si_status + (128 if self.killed else 0)
        return True

    def has_ended(self) -> bool:
        """Whether it has ended, also if :meth:`poll_exit` has not seen that yet."""
        return self.status is not None or self._exit() is not None

    def _exit(self) -> os.waitid_result | None:
        """Return how it has ended, without reaping it; None if it runs."""
        return os.waitid(os.P_PID, self.process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)

    def send(self, number: int) -> None:
        """Signal its process group, with descendants that outlive it."""
        if self.process.returncode is None:  # not reaped
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.process.pid, number)

    @property
    def due(self) -> float | None:
        """Time at which to call :meth:`abandon` if the child still runs; None: never."""
        return None

    def abandon(self, now: float) -> str:
        """End the connection to a process elsewhere that SIGKILL has not ended in time.

        Returns a line for the user, or "" if it is not due.
        """
        return ""

    def reap(self) -> str:
        """Wait for its end, after SIGKILL; returns a line for the user, or ""."""
        self.process.wait()
        return ""

    def vanished(self) -> bool:
        """Whether its process group is empty. For use once the child itself has been reaped."""
        try:
            os.killpg(self.process.pid, 0)
        except (ProcessLookupError, PermissionError):
            return True
        return False

    def story(self) -> str:
        """Text that says how it ended.

        The scheduler numbers servers as they come, so only the process id says which one it is.
        """
        which = f" (pid {self.pid})" if self.role == "server" and self.pid else ""
        return f"{self.name}{which} {self.overdue}{self.end()}"

    def end(self) -> str:
        """The part of the story that follows its name."""
        assert self.status is not None
        if self.killed:
            return f"was killed by {signal_name(self.status - 128)}"
        return f"exited with status {self.status}"


class Ending:
    """Schedule of the signals for children that should end. Pure.

    SIGTERM is due after a grace time, SIGKILL ``kill_after`` seconds later.
    """

    def __init__(self, grace: float, kill_after: float) -> None:
        self._grace = grace
        self._kill_after = kill_after
        self._signal = signal.SIGTERM
        self.due: float | None = None

    def begin(self, now: float, grace: float | None = None) -> None:
        """Make SIGTERM due in ``grace`` seconds, unless it is due earlier or has been taken.

        ``grace`` defaults to the constructor's.
        """
        if self._signal is signal.SIGTERM:
            due = now + (self._grace if grace is None else grace)
            self.due = due if self.due is None else min(self.due, due)

    @property
    def begun(self) -> bool:
        """Whether a signal is due some day, or has been taken."""
        return self.due is not None or self._signal is not signal.SIGTERM

    def take(self, now: float) -> signal.Signals | None:
        """Return the signal that is due, once; else None."""
        if self.due is None or now < self.due:
            return None
        number = self._signal
        self.due = now + self._kill_after if number is signal.SIGTERM else None
        self._signal = signal.SIGKILL
        return number


def signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # most real-time signals have no name
        return f"signal {number}"


@contextlib.contextmanager
def signals(handler: Callable[[int, FrameType | None], None]) -> Iterator[int]:
    """Context manager that calls ``handler`` for the signals that end a job.

    Yields a descriptor that becomes readable after these signals and after SIGCHLD.
    """
    reading, writing = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    before = signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    replaced = {number: signal.signal(number, handler) for number in passed_on()}
    # SIGCHLD must not stay ignored, as some callers leave it: the kernel would drop exit statuses.
    replaced[signal.SIGCHLD] = signal.signal(signal.SIGCHLD, lambda *_: None)
    mask = signal.pthread_sigmask(signal.SIG_UNBLOCK, replaced)
    try:
        yield reading
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        for number, old in replaced.items():
            signal.signal(number, old)
        signal.set_wakeup_fd(before)
        os.close(reading)
        os.close(writing)
