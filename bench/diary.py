"""Diaries: each worker of a job writes down its steps, and a check compares all of them."""

from __future__ import annotations

import math
import os
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from bench import roll_call


class Writer:
    """A file to which each line is written at once, so that a killed process leaves it behind."""

    def __init__(self, path: str) -> None:
        self._file = os.open(path, os.O_CREAT | os.O_WRONLY | os.O_APPEND)

    def begun(self, step: int) -> None:
        """Note that a step begins."""
        self._write(f"begun {step} {time.monotonic():.6f}")

    def ended(self, step: int, digest: int, members: Sequence[int]) -> None:
        """Note that a step has ended, with these weights and these workers in each sum."""
        told = ",".join(map(str, members))
        self._write(f"ended {step} {time.monotonic():.6f} {digest} {told}")

    def _write(self, line: str) -> None:
        os.write(self._file, line.encode() + b"\n")


class Ended(NamedTuple):
    """A step that has ended. ``members``: bits of those in its sums, for each tensor."""

    step: int
    at: float
    digest: int
    members: tuple[int, ...]


@dataclass
class Diary:
    """Steps of the process in the place ``number``.

    ``killed``: its last step is lost. ``until``: when it was cut off from the others, by the
    monotonic clock; what it does later does not count.
    """

    number: int
    path: Path
    killed: bool = False
    until: float = math.inf
    begun: list[int] = field(default_factory=list)
    ended: list[Ended] = field(default_factory=list)
    _read: int = 0

    def read(self) -> None:
        """Read what the process has written since the last call."""
        if not self.path.exists():
            return
        with self.path.open("rb") as file:
            file.seek(self._read)
            whole, newline, _ = file.read().rpartition(b"\n")
        self._read += len(whole) + len(newline)
        for line in whole.decode().splitlines():
            kind, step, at, *rest = line.split()
            if float(at) > self.until:
                continue
            if kind == "begun":
                self.begun.append(int(step))
            else:
                bits = tuple(map(int, rest[1].split(",")))
                self.ended.append(Ended(int(step), float(at), int(rest[0]), bits))

    def revive(self) -> None:
        """The process has been part of the job all the time."""
        self.killed, self.until, self._read = False, math.inf, 0
        self.begun.clear()
        self.ended.clear()
        self.read()

    @property
    def attempts(self) -> int:
        """Number of steps that were begun, without the one in which the process was killed."""
        return len(self.begun) - (self.killed and len(self.begun) > len(self.ended))

    @property
    def spans(self) -> list[tuple[float, float]]:
        """From the end of each step to that of the next one, by the monotonic clock."""
        return [(a.at, b.at) for a, b in zip(self.ended, self.ended[1:])]


@dataclass
class Verdict:
    """Result of the check of a job's diaries.

    ``steps``: that the job has made. ``begun``: by survivors, counted for each worker. ``counted``:
    those that ended, with this worker and the same others in all sums, and with the weights that
    follow from these. ``median``, ``longest``: seconds of a step; the latter without the silences.
    """

    steps: int
    begun: int
    counted: int
    median: float
    longest: float
    faults: list[str]

    @property
    def discarded(self) -> int:
        """Steps that survivors have begun and that do not count."""
        return self.begun - self.counted


def judge(
    diaries: Sequence[Diary],
    places: int,
    *,
    loses_workers: bool = True,
    silences: Sequence[tuple[float, float]] = (),
) -> Verdict:
    """Replay the job from what its workers say of who was in each sum.

    ``loses_workers``: whether workers may be missing. ``silences``: from when to when a process was
    silent that did not count as dead yet, by the monotonic clock.
    """
    allowed = range(1 if loses_workers else 2**places - 1, 2**places)
    at: dict[int, list[tuple[Diary, Ended]]] = {}
    for diary in diaries:
        for one in diary.ended:
            at.setdefault(one.step, []).append((diary, one))
    weights, counted, faults = roll_call.start_weights(places), 0, []
    for step in range(len(at)):
        found = at.get(step)
        if not found:
            faults.append(f"no worker has ended step {step}")
            break
        bits = _agreed({b for _, one in found for b in one.members})
        if bits not in allowed:
            faults.append(f"step {step}: {[(d.number, one.members) for d, one in found]}")
            break
        roll_call.next_weights(weights, step, bits, places)
        want = roll_call.digest(weights, places)
        good = {d.path for d, one in found if bits >> d.number & 1 and one.digest == want}
        counted += len(good)
        if len(good) < len(found):
            have = [(d.number, one.digest) for d, one in found]
            faults.append(f"step {step} of {bits:b}: expected {want}, found {have}")
    spans = [span for diary in diaries for span in diary.spans] or [(0.0, 0.0)]
    begun = sum(diary.attempts for diary in diaries)
    median = statistics.median(end - begin for begin, end in spans)
    longest = max(end - begin - _silence(begin, end, silences) for begin, end in spans)
    return Verdict(len(at), begun, counted, median, longest, faults)


def _silence(begin: float, end: float, silences: Sequence[tuple[float, float]]) -> float:
    """Return the seconds between ``begin`` and ``end`` in which some process was silent."""
    found, until = 0.0, begin
    for first, last in sorted(silences):
        found += max(0.0, min(end, last) - max(until, first))
        until = max(until, last)
    return found


def _agreed(members: set[int]) -> int:
    """Return who was in a step; 0 if workers or tensors differ."""
    return members.pop() if len(members) == 1 else 0
