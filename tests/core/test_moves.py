"""Real workers and real lanes in one process, whose lanes are lost at any moment."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Collection, Sequence
from functools import partial

import numpy as np
import pytest

from bpsx._core import Core
from bpsx.core._handle import Request
from bpsx.core._tensor import Tensor
from bpsx.planning.stages import stages_for
from bpsx.server._engine import Lane
from bpsx.transports.loopback.endpoint import LoopbackEndpoint

#: Bytes of the tensors' partitions: inline without and with acknowledgement, and large.
SIZES = [0, 64, 8192, 40_000, 100_000]


class Job:
    """Workers and lanes over loopback. Lane ``i`` belongs to server ``i``."""

    def __init__(
        self,
        workers: int,
        lanes: int,
        *,
        beside: Collection[int] = (),
        asynchronous: bool = False,
        **options: object,
    ) -> None:
        """``beside``: servers that are on the machine of worker 0. ``options``: of the lanes."""
        if asynchronous:
            options |= {"asynchronous": True, "elastic": True}
        self.worker_ends = [LoopbackEndpoint() for _ in range(workers)]
        self.lane_ends = [LoopbackEndpoint() for _ in range(lanes)]
        for i, worker in enumerate(self.worker_ends):
            for j, lane in enumerate(self.lane_ends):
                worker.link(j, lane, i)
                lane.link(i, worker, j)
        self.log: list[str] = []
        self.lanes = [
            Lane(end, job=7, senders=workers, log=self.log.append, **options)
            for end in self.lane_ends
        ]
        self.threads = [threading.Thread(target=lane.run) for lane in self.lanes]
        for thread in self.threads:
            thread.start()
        self.cores = [
            Core(
                end,
                rank=i,
                job=7,
                lanes=list(range(lanes)),
                credit=50_000,
                spin_us=0,
                elastic=True,
                asynchronous=asynchronous,
                senders=workers,
                beside=() if i else beside,
            )
            for i, end in enumerate(self.worker_ends)
        ]
        for core in self.cores:
            core.start()
        self.living = list(range(lanes))
        self.slots = [0] * lanes
        self.term = 0
        self._key = 0

    def tensors(self, sizes: list[int], rng: random.Random) -> list[list[Tensor]]:
        """For each worker, tensors of these sizes, each cut into up to three partitions."""
        places = []
        for size in sizes:
            parts = []
            cuts = sorted({0, size, *(rng.randrange(0, size + 1) // 8 * 8 for _ in range(2))})
            for begin, end in zip(cuts, cuts[1:]) if size else [(0, 0)]:
                lane = rng.choice(self.living)
                parts.append((self._key, lane, self.slots[lane], begin, end - begin))
                self.slots[lane] += 1
                self._key += 1
            places.append(parts)
        return [
            [Tensor(f"t{parts[0][0]}", 3, parts, stages_for("cpu")) for parts in places]
            for _ in self.cores
        ]

    def lose(
        self, lane: int, later: Callable[[Callable[[], None]], None], early: Sequence[int] = ()
    ) -> None:
        """End a lane; ``later`` calls what tells each worker, when it likes.

        The workers ``early`` drop the lane while it still works: answers of rounds that they have
        pushed reach the others only.
        """
        self.living.remove(lane)
        self.term += 1
        m = len(self.living)
        targets = [(other, self.slots[other]) for other in self.living]
        for other in self.living:
            self.slots[other] += -(-self.slots[lane] // m)
        for rank in early:
            self.cores[rank].begin_term(self.term, [(lane, targets)])
        if early:
            threading.Event().wait(0.002)
        self.lanes[lane].stop()
        self.threads[lane].join()
        for rank, core in enumerate(self.cores):
            if rank not in early:
                later(partial(core.begin_term, self.term, [(lane, targets)]))

    def close(self) -> None:
        for core in self.cores:
            core.close()
        for lane, thread in zip(self.lanes, self.threads):
            lane.stop()
            thread.join()
        for end in [*self.worker_ends, *self.lane_ends]:
            end.close()


def run_worker(job: Job, rank: int, tensors: list[Tensor], seed: int, rounds: int) -> list[str]:
    """Push every tensor in each round, in an order of its own; return what was wrong."""
    core, rng, wrong = job.cores[rank], random.Random(seed * 1000 + rank), []
    for round_ in range(rounds):
        order = list(range(len(tensors)))
        rng.shuffle(order)
        begun = []
        for i in order:
            n = tensors[i].nbytes // 4
            data = np.full(n, (rank + 1) * (1 + round_ * 16 + i), np.float32)
            out = np.empty_like(data) if rng.random() < 0.5 else data
            handle = core.submit(tensors[i], Request(tensors[i].name, data, out))
            begun.append((i, out, handle))
        for i, out, handle in begun:
            handle.wait(60)
            workers = len(job.cores)
            want = workers * (workers + 1) // 2 * (1 + round_ * 16 + i)
            if not (out == want).all():
                wrong.append(f"worker {rank} round {round_} tensor {i}: {out[:4]}, not {want}")
    return wrong


class Run:
    """A job under way, whose lanes are lost one after the other."""

    def __init__(self, workers: int, rounds: int, **options: bool) -> None:
        self.seed = random.randrange(2**32)
        self.rng = random.Random(self.seed)
        self.job = Job(workers, 4, **options)
        tensors = self.job.tensors([self.rng.choice(SIZES) for _ in range(6)], self.rng)
        self.wrong: list[str] = []
        self.threads = [
            threading.Thread(target=self._work, args=(rank, tensors[rank], rounds))
            for rank in range(workers)
        ]
        for thread in self.threads:
            thread.start()

    def _work(self, rank: int, tensors: list[Tensor], rounds: int) -> None:
        self.wrong += run_worker(self.job, rank, tensors, self.seed, rounds)

    def lose(self, lane: int) -> None:
        """End a lane, and tell each worker a moment later, each at a moment of its own."""
        timers: list[threading.Timer] = []

        def later(call: Callable[[], None]) -> None:
            timers.append(threading.Timer(self.rng.random() * 0.01, call))
            timers[-1].start()

        self.job.lose(lane, later, self.rng.choice([(), self._some()]))
        for timer in timers:  # each worker gets its terms in order
            timer.join()

    def _some(self) -> list[int]:
        return self.rng.sample(range(len(self.job.cores)), self.rng.randrange(len(self.job.cores)))

    def end(self) -> None:
        for thread in self.threads:
            thread.join()
        self.job.close()
        assert not self.wrong, f"seed {self.seed}: {self.wrong[:3]}"
        counts = [part.counters() for part in (*self.job.cores, *self.job.lanes)]
        assert all(count["malformed"] == 0 for count in counts), f"seed {self.seed}: {counts}"


@pytest.mark.parametrize("fixed_order", [False, True])
@pytest.mark.parametrize("scheduled", [False, True])
@pytest.mark.parametrize("workers", [1, 2, 3])
def test_sums_stay_right_when_lanes_are_lost_at_any_moment(workers, scheduled, fixed_order):
    for _ in range(10):
        run = Run(workers, 12, fixed_order=fixed_order, scheduled=scheduled)
        for lane in run.rng.sample(range(4), 3):
            threading.Event().wait(run.rng.random() * 0.02)
            run.lose(lane)
        run.end()
