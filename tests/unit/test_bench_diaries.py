"""What ``bench elastic --only committed`` and ``bench chaos`` make of the diaries of workers."""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

ROOT = Path(__file__).resolve().parents[2]
PLACES = 3


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Any]:
    """Function that imports a module of the benchmarks."""
    monkeypatch.syspath_prepend(str(ROOT))
    return lambda name: importlib.import_module(f"bench.{name}")


class Simulated:
    """A job of three workers without processes, which write diaries."""

    def __init__(self, load: Callable[[str], Any], folder: Path) -> None:
        self.diary, self.model, self._folder = load("diary"), load("roll_call"), folder
        self.diaries: list[Any] = []
        self._weights = self.model.start_weights(PLACES)

    def start(self, number: int) -> Any:
        """A process begins to write."""
        path = self._folder / f"diary {len(self.diaries)}"
        self.diaries.append(self.diary.Diary(number, path))
        return self.diary.Writer(str(path))

    def sums(self, step: int, members: list[int], stops: bool = False) -> list[int]:
        """Make the step of ``members`` as a server does; returns who is in each tensor's sum."""
        found = []
        for w in self._weights:
            parts = [self.model.gradient(w, step, m, PLACES, stops) for m in members]
            average = sum(parts[1:], parts[0]) / np.float32(len(parts))
            assert self.model.stops(average, PLACES) == stops
            found.append(self.model.members(average, PLACES))
            w -= np.float32(self.model.RATE) * average
        return found

    @property
    def digest(self) -> int:
        return int(self.model.digest(self._weights, PLACES))

    def judge(self, **more: Any) -> Any:
        for diary in self.diaries:
            diary.read()
        return self.diary.judge(self.diaries, PLACES, **more)


@pytest.fixture
def job(load: Callable[[str], Any], tmp_path: Path) -> Simulated:
    return Simulated(load, tmp_path)


def test_steps_of_survivors_count(job: Simulated) -> None:
    """Worker 2 dies in step 1, which counts without it; another enters for step 2."""
    first, second, dead = (job.start(i) for i in range(3))
    writers = {0: first, 1: second, 2: dead}
    for step, members in enumerate([[0, 1, 2], [0, 1], [0, 1, 2]]):
        for writer in writers.values():
            writer.begun(step)
        told = job.sums(step, members)
        if step == 1:
            writers[2] = job.start(2)
        for number in members:
            writers[number].ended(step, job.digest, told)
    assert told == [0b111] * len(job.model.SIZES)
    job.diaries[2].killed = True
    verdict = job.judge()
    assert (verdict.steps, verdict.begun, verdict.counted, verdict.discarded) == (3, 8, 8, 0)
    assert not verdict.faults and verdict.longest >= verdict.median > 0


def _two_steps(
    job: Simulated, spoil: Callable[[int, int, list[int]], tuple[int, list[int]]]
) -> Any:
    """Two steps of three workers, of which worker 1 tells what ``spoil`` makes of the second."""
    writers = [job.start(i) for i in range(3)]
    for step in range(2):
        told = job.sums(step, [0, 1, 2])
        for number, writer in enumerate(writers):
            writer.begun(step)
            digest, members = job.digest, told
            if step and number == 1:
                digest, members = spoil(digest, list(told))
            writer.ended(step, digest, members)
    return job.judge()


def test_other_weights_do_not_count(job: Simulated) -> None:
    verdict = _two_steps(job, lambda digest, members: (digest + 1, members))
    assert (verdict.begun, verdict.counted) == (6, 5) and "step 1" in verdict.faults[0]


def test_workers_that_disagree_on_a_tensor_have_no_step(job: Simulated) -> None:
    verdict = _two_steps(job, lambda digest, members: (digest, [0b101, *members[1:]]))
    assert (verdict.begun, verdict.counted) == (6, 3) and "step 1" in verdict.faults[0]


def test_a_survivor_that_is_not_in_the_sum_has_no_step(job: Simulated) -> None:
    writers = [job.start(i) for i in range(3)]
    told = job.sums(0, [0, 2])
    for writer in writers:
        writer.begun(0)
        writer.ended(0, job.digest, told)
    verdict = job.judge()
    assert (verdict.begun, verdict.counted, len(verdict.faults)) == (3, 2, 1)
    verdict = job.judge(loses_workers=False)
    assert verdict.counted == 0, "all must be in if no worker dies"


def test_a_step_that_is_made_again_does_not_count_twice(job: Simulated) -> None:
    writers = [job.start(i) for i in range(3)]
    told = job.sums(0, [0, 1, 2])
    for writer in (*writers, writers[1]):
        writer.begun(0)
        writer.ended(0, job.digest, told)
    writers[0].begun(1)  # and never ended, though nobody killed it
    verdict = job.judge()
    assert (verdict.begun, verdict.counted, verdict.discarded) == (5, 3, 2)


def test_what_a_process_does_after_it_was_cut_off_does_not_count(job: Simulated) -> None:
    writer = job.start(0)
    (diary,) = job.diaries
    writer.begun(0)
    diary.read()
    diary.killed, diary.until = True, time.monotonic()
    writer.ended(0, 1, [1])
    writer.begun(1)
    diary.read()
    assert (diary.begun, diary.ended, diary.attempts) == ([0], [], 0)
    diary.revive()  # it was part of the job all the time
    assert (diary.begun, len(diary.ended), diary.attempts) == ([0, 1], 1, 2)


def test_the_longest_step_is_without_silences(job: Simulated) -> None:
    job.start(0)
    (diary,) = job.diaries
    steps = [(0, 10.0), (1, 11.0), (2, 21.0), (3, 24.0)]
    diary.ended = [job.diary.Ended(step, at, 0, (1,)) for step, at in steps]
    silences = [(12.0, 15.0), (14.0, 18.0), (13.0, 14.0), (20.5, 22.0)]
    assert job.diary.judge(job.diaries, PLACES).longest == 10.0
    verdict = job.diary.judge(job.diaries, PLACES, silences=silences)
    assert verdict.longest == 3.5 and verdict.median == 3.0


def test_half_a_line_is_read_when_it_is_whole(job: Simulated) -> None:
    job.start(0).begun(7)
    (diary,) = job.diaries
    with diary.path.open("ab") as file:
        file.write(b"ended 7 1.5 99 1,")
        file.flush()
        diary.read()
        assert (diary.begun, diary.ended) == ([7], [])
        file.write(b"1\n")
    diary.read()
    diary.read()
    assert diary.ended == [(7, 1.5, 99, (1, 1))] and diary.attempts == 1
