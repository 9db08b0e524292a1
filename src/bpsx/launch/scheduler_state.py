"""Reads a scheduler's lines for its launcher: the state of the job, and its end."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass

_PIPE = 4096
#: The lines that a launcher passes on begin with one of these.
_NEWS = ("gone worker ", "entered worker ", "over")
#: The first line that a launcher passes on to another launcher whose machine the job had lost.
AGAIN = "again"


@dataclass(frozen=True)
class Blame:
    """The process that the scheduler names as the cause of the job's end, and its exception."""

    role: str
    rank: int
    pid: int
    cause: str


class SchedulerState:
    """The lines that a scheduler writes to the descriptor in BPSX_STATE_FD.

    ``far``: those of a scheduler elsewhere. Only :meth:`over`, :meth:`entries` and :meth:`gone`
    heed them: processes elsewhere have other process ids, and their lines may come late. They come
    from an ssh, or, with :meth:`hear`, from the launcher that has started this one.
    """

    def __init__(self) -> None:
        self.far: list[str] = []
        self._ear, self._ear_rest = -1, b""
        self._passed_on = 0, 0
        self._descriptor = -1
        self._read: list[bytes] = []
        self._frozen: str | None = None

    @contextlib.contextmanager
    def writer(self) -> Iterator[int]:
        """Yield the descriptor for a scheduler that is started meanwhile.

        Lines of an earlier scheduler stay.
        """
        self.close()
        self._descriptor, writing = os.pipe2(os.O_CLOEXEC)
        os.set_blocking(self._descriptor, False)
        try:
            yield writing
        finally:
            os.close(writing)

    @property
    def tells(self) -> bool:
        """Whether there is a scheduler on this machine that may write lines."""
        return self._descriptor >= 0

    def hear(self, descriptor: int) -> None:
        """Read the lines of ``far`` from a descriptor."""
        with contextlib.suppress(OSError):  # no such descriptor
            os.set_blocking(descriptor, False)
            self._ear = descriptor

    @property
    def hears(self) -> bool:
        """Whether another launcher passes lines on."""
        return self._ear >= 0

    def listen(self) -> None:
        """Read the lines of ``far`` that have come since the last call; for the main loop."""
        with contextlib.suppress(OSError):  # nothing has, or it cannot be read
            while self._ear >= 0:
                data = os.read(self._ear, _PIPE)
                *lines, self._ear_rest = (self._ear_rest + data).split(b"\n")
                self.far += [line.decode(errors="replace") for line in lines]
                if not data:
                    os.close(self._ear)
                    self._ear = -1

    def news(self) -> list[str]:
        """The lines about workers, and the end of the job, that have come since the last call."""
        ours, far = self._passed_on
        lines = self.text().rpartition("\n")[0].splitlines()
        self._passed_on = len(lines), len(self.far)
        new = lines[ours:] + self.far[far:]
        return [line for line in new if line.startswith(_NEWS)]

    @property
    def started_again(self) -> bool:
        """Whether another launcher has started this one in the place of a lost machine."""
        return AGAIN in self.far

    def text(self) -> str:
        """All that the scheduler has written."""
        if self._descriptor >= 0:
            with contextlib.suppress(BlockingIOError):
                # Whole lines, as a signal's handler reads, too.
                self._read.append(os.read(self._descriptor, _PIPE))
        return b"".join(self._read).decode()

    def forming(self) -> bool:
        """Whether the scheduler is known to be waiting for nodes."""
        return "waiting\n" in (text := self.text()) and "running\n" not in text

    def runs(self) -> int:
        """Number of schedulers that have had a running job."""
        return self.text().count("running\n")

    def may_die(self) -> bool:
        """Whether the running job would wait for another scheduler."""
        return "may die\n" in self.text()

    def over(self) -> bool:
        """Whether a scheduler has ended by itself, and the job with it."""
        return "over\n" in self.text() or "over" in self.far

    def deserted(self) -> bool:
        """Whether the latest scheduler has left a job that may go on with another one."""
        text = self.text()
        return text.rfind("deserted\n") > text.rfind("running\n")

    def freeze(self) -> None:
        """Ignore what the scheduler says from now on about the cause of the job's end.

        It would blame a process that bpsx-run has ended.
        """
        if self._frozen is None:
            self._frozen = self.text()

    def blame(self) -> Blame | None:
        """The cause of the job's end, or None if there is none or the scheduler does not know."""
        text = self.text() if self._frozen is None else self._frozen
        for line in text.splitlines():
            if line.startswith("blame "):
                _, role, rank, pid, *cause = line.split(" ", 4)
                return Blame(role, int(rank), int(pid), "".join(cause))
        return None

    def lost(self) -> set[tuple[str, int]]:
        """Roles and process ids of the servers and workers without which, as the scheduler has
        said, the job goes on.
        """
        lines = [line.split(" ") for line in self.text().splitlines()]
        return {(words[1], int(words[3])) for words in lines if words[0] == "lost"}

    def entries(self, place: str) -> int:
        """Number of times that a worker has joined the running job in ``place``."""
        return self._lines().count(f"entered {place}")

    def gone(self) -> set[str]:
        """The places whose latest processes are lost, while the job goes on."""
        found: set[str] = set()
        for line in self._lines():
            word, _, place = line.partition(" ")
            if word == "gone":
                found.add(place)
            elif word == "entered":
                found.discard(place)
        return found

    def _lines(self) -> list[str]:
        return self.text().splitlines() + self.far

    def close(self) -> None:
        """Close the descriptor; what has been written stays."""
        if self._descriptor >= 0:
            before = -1
            while before != (before := len(self.text())):
                pass
            os.close(self._descriptor)
            self._descriptor = -1
