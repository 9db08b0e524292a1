"""When the launcher starts servers again that have died. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from bpsx.launch.backend import Process

#: Seconds from the death of a server to the start of the next: the first time, and at most.
SOONEST, LATEST = 0.5, 30.0
#: Seconds after which a server counts as healthy: its next death is like its first.
HEALTHY = 60.0


@dataclass
class _Place:
    """A server's place in the job, which one process after the other takes.

    ``started``: when the present one was. ``delay``: seconds until the next one, if this one dies.
    """

    process: Process
    started: float
    delay: float = SOONEST


class Restarts:
    """The servers of a job that may be started again, ``most`` times in all.

    Callers pass the time.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._count = 0
        self._places: dict[str, _Place] = {}  # by the name of the process
        self._waiting: dict[str, float] = {}  # name of the process -> when it is due

    def started(self, process: Process, now: float) -> None:
        """Note that a process has been started; only servers matter."""
        if process.role == "server":
            place = self._places.setdefault(process.name, _Place(process, now))
            place.started = now

    def ended(self, name: str, now: float) -> str:
        """A server has died; returns what follows, as text for people."""
        if name not in self._places or not self._most:
            return ""
        if self._count >= self._most:
            return f"not started again, as --max-restarts {self._most} is used up"
        self._count += 1
        place = self._places[name]
        if now - place.started >= HEALTHY:
            place.delay = SOONEST
        self._waiting[name] = now + place.delay
        text = f"started again in {place.delay:g} s ({self._count} of {self._most})"
        place.delay = min(2 * place.delay, LATEST)
        return text

    @property
    def due(self) -> float | None:
        """When the next process is to be started; None if no process is."""
        return min(self._waiting.values(), default=None)

    def take(self, now: float) -> list[Process]:
        """The processes that are to be started now, each once."""
        due = [name for name, when in self._waiting.items() if when <= now]
        for name in due:
            del self._waiting[name]
        return [self._places[name].process for name in due]

    def stop(self) -> None:
        """Start no process any more: the job ends."""
        self._waiting.clear()
        self._most = 0
