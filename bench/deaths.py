"""Ways in which a process of a job may go, and how it must end.

* *kill*: SIGKILL.
* *stop*: SIGSTOP, until the others count the process as dead; then SIGCONT.
* *cut*: its link drops every packet for as long.
* *term*: SIGTERM. Servers hand over and workers leave, with status 0.

A process that comes back after *stop* or *cut* must end with an error that says what has happened.
It may stay in the job if no scheduler has seen its silence.
"""

from __future__ import annotations

import re
import signal
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path

from bench.network import Links, why_no_cuts
from bench.report import BenchError

KINDS = ("kill", "stop", "cut", "term")
#: Kinds that only silence shows.
SILENT = ("stop", "cut")
#: Interval and timeout of heartbeats, in seconds, in jobs of these kinds.
INTERVAL, TIMEOUT = 0.5, 3.0
SILENCE = INTERVAL + TIMEOUT
#: Seconds in which a process must have ended, after it is back or has got SIGTERM.
PATIENCE = 20.0
#: What the error of a process must say that was silent for too long.
_CLEAR = re.compile(
    r"is gone|has been replaced|was lost|are gone|went on without|not part of|is over|been silent"
)


def allowed(wanted: str) -> list[str]:
    """Return the kinds that ``--kinds`` names.

    "all": those that this machine can do. Raises :class:`BenchError` for others.
    """
    no_cuts = why_no_cuts()
    if wanted == "all":
        return [kind for kind in KINDS if kind != "cut" or not no_cuts]
    kinds = wanted.split(",")
    if unknown := set(kinds) - {*KINDS}:
        raise BenchError(f"--kinds: unknown: {', '.join(sorted(unknown))}")
    if "cut" in kinds and no_cuts:
        raise BenchError(f"--kinds cut: {no_cuts}")
    return kinds


def can(kind: str, role: str) -> bool:
    """Whether a job survives a process of this role that goes so.

    A scheduler that gets SIGTERM ends the job.
    """
    return (kind, role) != ("term", "scheduler")


@dataclass
class Going:
    """A process that has been struck, and has not ended yet.

    ``where``: its place in the network. ``struck``, ``back``: when, by the monotonic clock.
    ``early``: another process comes in its place before it is back, at the time ``due``.
    ``may_stay``: no scheduler has seen all of its silence; ``stays``: it is still in the job.
    """

    kind: str
    role: str
    place: int
    where: str
    process: subprocess.Popen[bytes]
    log: Path
    struck: float
    back: float
    due: float = 0.0
    early: bool = False
    may_stay: bool = False
    stays: bool = False
    returned: bool = False

    def strike(self, links: Links | None) -> None:
        if self.kind == "cut":
            assert links is not None
            links.cut(self.where)
        else:
            self.process.send_signal(_SIGNALS[self.kind])

    def tend(self, links: Links | None) -> bool:
        """Let it go on when its time has come; returns whether it has ended, or stays.

        Raises :class:`BenchError` if it does not end in time.
        """
        now = time.monotonic()
        if not self.returned and now >= self.back:
            self.release(links)
        if self.process.poll() is not None:
            self.release(links)  # another process comes in its place of the network
            return True
        if now >= self.back + PATIENCE:
            if self.may_stay:
                self.stays = True
                return True
            raise BenchError(f"{self} has not ended after {PATIENCE:g} s")
        return False

    def release(self, links: Links | None) -> None:
        """Undo the stop or the cut."""
        if self.returned:
            return
        self.returned = True
        if self.kind == "cut":
            assert links is not None
            links.mend(self.where)
        elif self.kind == "stop":
            self.process.send_signal(signal.SIGCONT)

    @property
    def fault(self) -> str:
        """Why the way in which it has ended is wrong; empty if it is right."""
        status, text = self.process.returncode, self.log.read_text(errors="replace")
        if self.kind == "term":
            return "" if status == 0 else f"{self} has ended with status {status}"
        if self.kind in SILENT and (status <= 0 or not _CLEAR.search(text)):
            return f"{self} has ended with status {status}, and said: {text[-1000:]}"
        return ""

    def __str__(self) -> str:
        return f"{self.where} (pid {self.process.pid}, {self.kind})"


_SIGNALS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP, "term": signal.SIGTERM}
