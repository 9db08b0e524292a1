"""Schedule of the launcher's restarts of processes that have died. Pure."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from bpsx.launch.backend import Process

#: Seconds from the death of a process to the start of the next: the first time, and at most.
SOONEST, LATEST = 0.5, 30.0
#: Seconds after which a process counts as healthy: its next death is like its first.
HEALTHY = 60.0
#: Restarts of a scheduler without --max-restarts.
SCHEDULERS = 3


@dataclass
class _Place:
    """A place in the job, which one process after the other takes.

    ``started``: when the present one was. ``delay``: seconds until the next one, if this one dies.
    """

    process: Process
    started: float
    delay: float = SOONEST


class Restarts:
    """The processes of a job that may be started again.

    ``most``: most restarts, of all servers together, of all worker machines together, and of the
    scheduler; None: :data:`SCHEDULERS` for the scheduler only. As the processes of a machine end
    together, a restart of each of them counts once. Callers pass the time.
    """

    def __init__(self, most: int | None) -> None:
        others = most or 0
        schedulers = SCHEDULERS if most is None else others
        self._most = {"server": others, "worker": others, "scheduler": schedulers}
        self._counts: Counter[str] = Counter()  # by the name of the process
        self._places: dict[str, _Place] = {}  # by the name of the process
        self._waiting: dict[str, float] = {}  # name of the process -> when it is due

    def started(self, process: Process, now: float) -> None:
        """Note that a process has been started."""
        place = self._places.setdefault(process.name, _Place(process, now))
        place.process, place.started = process, now

    def ended(self, name: str, now: float) -> str:
        """Note that a process has died; returns the consequence, as text for people."""
        place = self._places.get(name)
        if place is None or not self._most[place.process.role]:
            return ""
        role = place.process.role
        self._counts[name] += 1
        if self._used(role) > self._most[role]:
            self._counts[name] -= 1
            return f"not started again, as --max-restarts {self._most[role]} is used up"
        if now - place.started >= HEALTHY:
            place.delay = SOONEST
        self._waiting[name] = now + place.delay
        text = f"started again in {place.delay:g} s ({self._used(role)} of {self._most[role]})"
        place.delay = min(2 * place.delay, LATEST)
        return text

    def _used(self, role: str) -> int:
        """Number of restarts of a role's processes; those of a machine count once together."""
        most: dict[str, int] = {}
        for name, place in self._places.items():
            if place.process.role == role:
                group = place.process.dies_with
                most[group] = max(most.get(group, 0), self._counts[name])
        return sum(most.values())

    def is_due(self, name: str) -> bool:
        """Whether a process is to be started again."""
        return name in self._waiting

    @property
    def due(self) -> float | None:
        """Time at which the next process is to be started; None if no process is."""
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
        self._most = dict.fromkeys(self._most, 0)
