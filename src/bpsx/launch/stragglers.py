"""Processes that run on although the job is over for them, and when to send them which signal."""

from __future__ import annotations

import signal

from bpsx.launch.backend import Process
from bpsx.launch.child import Child, Ending
from bpsx.launch.scheduler_state import SchedulerState


class Stragglers:
    """Workers, and servers of this machine, that have to end while others go on.

    A process without which the job goes on, such as the neighbour of a process that has died, gets
    ``grace`` seconds. A worker that was started again, and has not joined before the job was over,
    gets none: it would wait for a scheduler, while others may still save something. Then they get
    SIGTERM, and SIGKILL ``kill_after`` seconds later. A bpsx-run elsewhere, which ends its own
    processes in the same way, is given the time for that, too.
    """

    def __init__(self, scheduler: SchedulerState, grace: float, kill_after: float) -> None:
        self._scheduler, self._grace, self._kill_after = scheduler, grace, kill_after
        # Process -> its place, and :meth:`entries` before it was started; -1 for a worker with
        # which the job begins, and for a server.
        self._places: dict[Child, tuple[str, int]] = {}
        self._graces: dict[Child, float] = {}
        self._endings: dict[Child, Ending] = {}

    def entries(self, process: Process) -> int:
        """Number of times that a worker has joined the running job in the place of ``process``."""
        return self._scheduler.entries(process.place)

    def started(self, child: Child, process: Process, before: int = -1) -> None:
        """Note a started process. ``before``: :meth:`entries` before it was started again."""
        place = process.place
        if process.role == "server" and process.here:
            place, before = f"server {child.process.pid}", -1
        if place:
            self._places[child] = place, before
            self._graces[child] = self._grace + (0.0 if process.here else 3 * self._kill_after)

    def look(self, now: float) -> None:
        """Find the processes that have to end."""
        over, gone = self._scheduler.over(), self._scheduler.gone()
        if not (over or gone):
            return
        for child, (place, _) in self._places.items():
            if child.status is not None or child in self._endings:
                continue
            joined = self._has_joined(child)
            if joined and place in gone:
                self._end(child, now, self._graces[child])
            elif over and not joined:
                self._end(child, now, 0.0)

    def _has_joined(self, child: Child) -> bool:
        place, before = self._places[child]
        if self._scheduler.started_again and child.role == "worker":
            before = max(before, 0)
        return self._scheduler.entries(place) > before

    def is_late(self, child: Child) -> bool:
        """Whether a worker has to end as the job was over before it has joined."""
        return child in self._endings and not self._has_joined(child)

    def _end(self, child: Child, now: float, grace: float) -> None:
        self._endings[child] = Ending(grace, self._kill_after)
        self._endings[child].begin(now)

    def __contains__(self, child: Child) -> bool:
        return child in self._endings

    @property
    def due(self) -> float | None:
        """Time at which the next signal is due; None if none is."""
        due = [e.due for c, e in self._endings.items() if c.status is None and e.due is not None]
        return min(due, default=None)

    def send(self, now: float) -> None:
        """Send the signals that are due."""
        for child, ending in self._endings.items():
            if not child.has_ended() and (number := ending.take(now)):
                if number == signal.SIGTERM and child.overdue:  # it has got one
                    continue
                child.send(number)
                child.overdue = child.overdue or f"{self._why(child)}, got {number.name} and "

    def _why(self, child: Child) -> str:
        if self._has_joined(child):
            return f"was still running {self._graces[child]:g} s after the job had lost it"
        return "had not joined when the job was over"
