"""The rows of torchft in ``bench elastic --only committed``: its share of committed steps, with as
many workers and deaths as bpsx.

torchft has no servers, and its lighthouse has to live, so all that die are workers. As with bpsx,
more than half of the workers are left alive, and another one is started at once.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

from bench.diary import Diary
from bench.jobs import Child, progress
from bench.report import BenchError, Case

_MODULE = "bench.torchft_peer"
_SECONDS = 120.0
#: The job ends after so many times the time that its steps take, even if there are fewer.
_PATIENCE = 3.0


def why_not() -> str:
    """Return why torchft cannot be measured here, or an empty string if it can."""
    if importlib.util.find_spec("torchft") is None:
        return "torchft is not installed (pip install torchft)"
    words = [sys.executable, "-c", "import torchft, torchft.coordination"]
    tried = subprocess.run(words, capture_output=True, text=True, timeout=_SECONDS, check=False)
    return tried.stderr.strip().rpartition("\n")[2] if tried.returncode else ""


def committed(
    rng: random.Random,
    workers: int,
    every: float,
    moments: Iterator[float],
    steps: int,
    seconds: float,
) -> Case:
    """Kill a worker in each ``every`` steps of ``seconds`` seconds, and another comes at once.

    ``moments``: when, in steps.
    """
    if reason := why_not():
        return Case(f"torchft-{every:g}", 0.0, "runs", note=f"not measured: {reason}")
    progress(f"torchft, a death in {every:g} steps: {steps} steps")
    with Peers(workers, steps, seconds, rng) as job:
        job.strike(moments)
    begun = sum(d.attempts for d in job.diaries)
    counted = sum(len(d.ended) for d in job.diaries)
    version = importlib.metadata.version("torchft")
    return Case(
        f"torchft-{every:g}",
        100 * counted / begun,
        "%",
        samples=(counted, begun),
        note=(
            f"torchft {version} with gloo: the same; {job.killed} workers killed, {job.steps} steps"
            f" in {job.took:.0f} s"
        ),
    )


class Peers:
    """A job of torchft whose workers may be killed. A context manager."""

    def __init__(self, workers: int, steps: int, seconds: float, rng: random.Random) -> None:
        self._workers, self._rng = workers, rng
        self._goal, self._seconds = steps, seconds
        self._stack = ExitStack()
        self._children: list[Child] = []
        self.diaries: list[Diary] = []
        self._present: list[Diary] = []
        self.killed, self.took = 0, 0.0

    def __enter__(self) -> Peers:
        with self._stack:
            folder = self._stack.enter_context(tempfile.TemporaryDirectory(prefix="bpsx-bench-"))
            self._folder = Path(folder)
            self._lighthouse = str(self._start("lighthouse").ask("lighthouse", timeout=_SECONDS))
            for number in range(self._workers):
                child, diary = self._worker(number)
                self._children.append(child)
                self._present.append(diary)
            self._stack = self._stack.pop_all()
        return self

    def __exit__(self, *what: object) -> None:
        self._stack.close()
        for diary in self.diaries:
            diary.read()
            diary.killed = True  # the last step was under way

    def _start(self, name: str) -> Child:
        log = self._folder / f"{len(self.diaries)} {name}.log"
        child = Child(_MODULE, name, log=log, OMP_NUM_THREADS="1", GLOO_SOCKET_IFNAME="lo")
        self._stack.callback(child.close)
        self._stack.callback(child.process.kill)
        return child

    def _worker(self, number: int) -> tuple[Child, Diary]:
        child = self._start(f"worker {number}")
        diary = Diary(number, self._folder / f"diary-{len(self.diaries)}")
        self.diaries.append(diary)
        child.tell(
            "train",
            number=number,
            lighthouse=self._lighthouse,
            diary=str(diary.path),
            steps=self._goal,
            seconds=self._seconds,
        )
        return child, diary

    @property
    def steps(self) -> int:
        """Number of steps that some worker has committed. Reads all diaries."""
        for diary in self._present:
            diary.read()
        return max((d.ended[-1].step + 1 for d in self.diaries if d.ended), default=0)

    def strike(self, moments: Iterator[float]) -> None:
        """Kill workers until the last step has ended, or the time is over."""
        due, began, before, since = next(moments), time.monotonic(), -1, 0.0
        waits = began + _SECONDS  # for the first step
        while (done := self.steps) < self._goal:
            now = time.monotonic()
            if done != before:
                before, since = done, now
            if not done:
                began = now
                if now > waits:
                    raise BenchError("torchft has made no step")
            if now > began + _PATIENCE * self._goal * self._seconds:
                break
            if done and done + min(0.99, (now - since) / self._seconds) >= due:
                due = next(moments)
                self._kill()
            self._tend()
            time.sleep(0.005)
        self.took = time.monotonic() - began

    def _tend(self) -> None:
        """Start a worker again that has ended by itself."""
        for number, child in enumerate(self._children):
            if child.process.poll() is not None and self.steps < self._goal:
                self._children[number], self._present[number] = self._worker(number)

    def _kill(self) -> None:
        """Kill a worker, unless too few others take part."""
        number = self._rng.randrange(self._workers)
        others = [d for i, d in enumerate(self._present) if i != number and d.ended]
        if 2 * len(others) <= self._workers:
            return
        self.killed += 1
        self._children[number].process.kill()
        self._children[number], self._present[number] = self._worker(number)
