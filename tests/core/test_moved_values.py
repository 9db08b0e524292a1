"""Real workers and real lanes of an asynchronous job in one process: lanes are lost at any moment,
and workers end.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable

import numpy as np
import pytest

from bpsx.core._handle import Handle, Request
from bpsx.core._tensor import Tensor
from bpsx.planning.stages import stages_for
from core.test_moves import SIZES, Job


def begin(job: Job, rank: int, tensor: Tensor, data: np.ndarray) -> tuple[Handle, np.ndarray]:
    """Begin an asynchronous push, in place; returns its handle, and the array."""
    request = Request(tensor.name, data, data, asynchronous=True)
    return job.cores[rank].submit(tensor, request), data


class Run:
    """A job under way.

    Worker ``r`` adds 1 to each element of a tensor whose number is ``r`` modulo the number of
    workers. So each value tells how many pushes of whom it has.
    """

    def __init__(self, workers: int, pushes: list[int], **options: bool) -> None:
        """``pushes``: how often each worker pushes each tensor."""
        self.seed = random.randrange(2**32)
        self.rng = random.Random(self.seed)
        self.pushes = pushes
        self.job = Job(workers, 4, asynchronous=True, **options)
        self.tensors = self.job.tensors([self.rng.choice(SIZES) for _ in range(6)], self.rng)
        self.wrong: list[str] = []
        self.threads = [threading.Thread(target=self._work, args=(r,)) for r in range(workers)]

    def start(self, *ranks: int) -> None:
        """Let workers push."""
        for rank in ranks:
            self.threads[rank].start()

    def _work(self, rank: int) -> None:
        workers, rng = len(self.pushes), random.Random(self.seed + rank)
        for pushed in range(1, self.pushes[rank] + 1):
            order = rng.sample(self.tensors[rank], 6)
            begun = [begin(self.job, rank, t, self._share(rank, t)) for t in order]
            for tensor, (handle, out) in zip(order, begun, strict=True):
                handle.wait(60)
                if not (out[rank::workers] == pushed).all():
                    self.wrong.append(f"worker {rank}, {tensor.name}: {out[:4]}, not {pushed}")

    def _share(self, rank: int, tensor: Tensor) -> np.ndarray:
        n, workers = tensor.nbytes // 4, len(self.pushes)
        return (np.arange(n) % workers == rank).astype(np.float32)

    def lose(self, lane: int) -> None:
        """End a lane, and tell each worker a moment later, each at a moment of its own."""
        timers: list[threading.Timer] = []

        def later(call: Callable[[], None]) -> None:
            timers.append(threading.Timer(self.rng.random() * 0.01, call))
            timers[-1].start()

        workers = range(len(self.pushes))
        some = self.rng.sample(workers, self.rng.randrange(len(self.pushes)))
        self.job.lose(lane, later, self.rng.choice([(), some]))
        for timer in timers:
            timer.join()

    def leave(self, rank: int) -> None:
        """The lanes hear that a worker has left, and have noted it when this returns."""
        for lane in self.job.living:
            self.job.lanes[lane].gone(rank)
        for lane in self.job.living:
            slot, self.job.slots[lane] = self.job.slots[lane], self.job.slots[lane] + 1
            places = [(10_000 + lane, lane, slot, 0, 64)]
            marker = Tensor(f"marker{lane}", 3, places, stages_for("cpu"))
            begin(self.job, 1, marker, np.zeros(16, np.float32))[0].wait(60)

    def end(self) -> None:
        """Let all workers end; the values have to have all pushes once."""
        for thread in self.threads:
            thread.join()
        for tensor in self.tensors[0]:
            n = tensor.nbytes // 4
            handle, got = begin(self.job, 0, tensor, np.zeros(n, np.float32))
            handle.wait(60)
            want = np.array(self.pushes, np.float32)[np.arange(n) % len(self.pushes)]
            if not (got == want).all():
                self.wrong.append(f"{tensor.name}: {got[:4]}, not {want[:4]}")
        self.job.close()
        assert not self.wrong, f"seed {self.seed}: {self.wrong[:3]}"
        counts = [part.counters() for part in (*self.job.cores, *self.job.lanes)]
        assert all(count["malformed"] == 0 for count in counts), f"seed {self.seed}: {counts}"


@pytest.mark.parametrize("scheduled", [False, True])
@pytest.mark.parametrize("workers", [1, 2, 3])
def test_each_push_counts_once_when_lanes_are_lost_at_any_moment(workers, scheduled):
    for _ in range(10):
        run = Run(workers, [20] * workers, scheduled=scheduled)
        run.start(*range(workers))
        for lane in run.rng.sample(range(4), 3):
            threading.Event().wait(run.rng.random() * 0.02)
            run.lose(lane)
        run.end()


def push_last() -> Run:
    """Return a job in which worker 2 has pushed when the others had ended."""
    run = Run(3, [3, 3, 3])
    run.start(0, 1)
    for thread in run.threads[:2]:
        thread.join()
    run.start(2)
    run.threads[2].join()
    return run


def test_an_idle_worker_reads_the_values_that_it_is_to_keep() -> None:
    run = push_last()
    before = run.job.cores[0].counters()["bytes_received"]
    run.leave(2)
    values = sum(tensor.nbytes for tensor in run.tensors[0])
    end = time.monotonic() + 60
    while run.job.cores[0].counters()["bytes_received"] < before + values:
        assert time.monotonic() < end
        time.sleep(0.01)
    run.end()


@pytest.mark.parametrize("nth", range(10))
def test_pushes_of_a_worker_that_has_left_are_not_lost_with_their_lane(nth):
    """Worker 2 pushes last, so no other worker has got a value with its pushes. Worker 0 gets them
    while it has nothing else to do.
    """
    run = push_last()
    run.leave(2)
    for lane in run.rng.sample(range(4), 1 + nth % 3):
        run.lose(lane)
    run.end()
