"""Compressed keys of real workers and real lanes in one process, whose lanes are lost at any
moment: results, and the state that lanes keep, have the bits of a job that loses none.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Collection
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from bpsx._core import Core
from bpsx.compression.spec import CompressionSpec, compression, make, stream
from bpsx.compression.state import ask
from bpsx.core._handle import Request
from bpsx.core._tensor import Tensor
from bpsx.dtypes import BY_NAME
from bpsx.kernels.codecs import codec
from bpsx.planning.stages import stages_for
from core.test_moves import Job

ELEMENTS = [700, 9_001, 70_001]  # encoded: inline with and without acknowledgement, and large
#: Compressions, each with the element type of its tensors.
KINDS: dict[str, tuple[dict[str, Any], str]] = {
    "onebit": ({"compressor": "onebit", "scaling": True}, "float32"),
    "onebit-ef": ({"compressor": "onebit", "scaling": True, "ef": "vanilla"}, "float32"),
    "topk-ef": ({"compressor": "topk", "k": 0.3, "ef": "corrected"}, "bfloat16"),
    "topk-momentum": (
        {"compressor": "topk", "k": 0.3, "ef": "vanilla", "momentum": "nesterov"},
        "float16",
    ),
    "randomk": ({"compressor": "randomk", "k": 0.5}, "float32"),
    "randomk-sparse": ({"compressor": "randomk", "k": 0.5, "ef": "sparse"}, "bfloat16"),
    "dithering": ({"compressor": "dithering", "k": 4}, "float64"),
    "dithering-ef": ({"compressor": "dithering", "k": 4, "ef": "vanilla"}, "float32"),
}
ROUNDS = 16


def tensors(job: Job, kinds: list[str], rng: random.Random) -> list[list[Tensor]]:
    """For each worker, a compressed tensor of each kind and size, cut into two partitions."""
    found: list[list[Tensor]] = [[] for _ in job.cores]
    for kind in kinds:
        params, dtype = KINDS[kind]
        spec, item = compression(params), BY_NAME[dtype].itemsize
        for n in ELEMENTS:
            name, parts, cut = f"{kind}-{n}", [], n // 3 * item
            for begin, end in ((0, cut), (cut, n * item)):
                lane = rng.choice(job.living)
                parts.append(((len(found[0]) << 20) + len(parts), lane, job.slots[lane], begin,
                              end - begin))  # fmt: skip
                job.slots[lane] += 1
            for rank, core in enumerate(job.cores):
                core.open_pool(1)
                found[rank].append(_tensor(name, dtype, parts, spec, rank))
    return found


def _tensor(
    name: str, dtype: str, parts: list[tuple[int, ...]], spec: CompressionSpec, rank: int
) -> Tensor:
    made = [
        make(spec, dtype, length, stream(name.encode(), i), rank)
        for i, (*_, length) in enumerate(parts)
    ]
    return Tensor(
        name, BY_NAME[dtype].code, parts, stages_for("cpu", True), codec=spec.text(), made=made
    )


def gradient(tensor: Tensor, dtype: str, rank: int, round_: int) -> np.ndarray:
    """Return what a worker pushes, as bytes."""
    rng = np.random.default_rng([len(tensor.name), tensor.nbytes, rank, round_])
    n = tensor.nbytes // BY_NAME[dtype].itemsize
    values = rng.standard_normal(n).astype(np.float32)
    return values.astype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype).view(np.uint8)


class Run:
    """A training of all workers, each in a thread."""

    def __init__(
        self, kinds: list[str], workers: int, seed: int, *, beside: Collection[int], ratio: float
    ) -> None:
        self.kinds, self.rng = kinds, random.Random(seed)
        self.job = Job(workers, 4, beside=beside, fixed_order=True, log_ratio=ratio)
        self.tensors = tensors(self.job, kinds, self.rng)
        #: By worker and name: the results' bytes, and worker 0's view of the lanes' state.
        self.results: list[dict[str, bytes]] = [{} for _ in range(workers)]
        self.states: dict[str, bytes] = {}
        self.most_logged = 0
        self.failures: list[BaseException] = []
        self.reached = [threading.Event() for _ in range(ROUNDS)]
        self.threads = [
            threading.Thread(target=self._work, args=(rank,)) for rank in range(workers)
        ]

    def start(self) -> None:
        for thread in self.threads:
            thread.start()

    def _work(self, rank: int) -> None:
        try:
            for round_ in range(ROUNDS):
                self._round(rank, round_)
            if rank == 0:
                self._read_states()
        except BaseException as e:
            self.failures.append(e)

    def _round(self, rank: int, round_: int) -> None:
        core, begun = self.job.cores[rank], []
        if rank == 0 and round_ == ROUNDS // 2:
            self._restore(core)
        for tensor in self.tensors[rank]:
            dtype = KINDS[tensor.name.rsplit("-", 1)[0]][1]
            data = gradient(tensor, dtype, rank, round_)
            out = np.empty_like(data)
            request = Request(
                tensor.name, (data.ctypes.data, data.nbytes), (out.ctypes.data, out.nbytes),
                divisor=len(self.job.cores), rate=1 / (round_ + 1), owner=(data, out),
            )  # fmt: skip
            begun.append((tensor, out, core.submit(tensor, request)))
        self.reached[round_].set()
        for tensor, out, handle in begun:
            handle.wait(20)
            self.results[rank][f"{tensor.name} {round_}"] = out.tobytes()
        self.most_logged = max(self.most_logged, core.gauges()["logged"])

    def _restore(self, core: Core) -> None:
        """Set the lanes' state of the first tensor of each kind, as from a checkpoint."""
        for tensor in self.tensors[0][:: len(ELEMENTS)]:
            state = np.zeros(tensor.server_bytes, np.uint8)
            state[0] = 77  # the first partition's counter
            ask(core, tensor, state).wait(60)

    def _read_states(self) -> None:
        for tensor in self.tensors[0]:
            self.states[tensor.name] = ask(self.job.cores[0], tensor, None).wait(60).tobytes()

    def lose(self, lane: int) -> None:
        """End a lane, and tell each worker a moment later."""
        timers: list[threading.Timer] = []

        def later(call: Any) -> None:
            timers.append(threading.Timer(self.rng.random() * 0.01, call))
            timers[-1].start()

        workers = range(len(self.job.cores))
        self.job.lose(lane, later, self.rng.sample(workers, self.rng.randrange(len(workers))))
        for timer in timers:
            timer.join()

    def end(self) -> dict[str, int]:
        """Return the lanes' counters, added up."""
        for thread in self.threads:
            thread.join()
        self.job.close()
        assert not self.failures, (self.failures, self.job.log)
        counts = [part.counters() for part in (*self.job.cores, *self.job.lanes)]
        assert all(count["malformed"] == 0 for count in counts), counts
        lanes = [lane.counters() for lane in self.job.lanes]
        return {name: sum(lane[name] for lane in lanes) for name in lanes[0]}


def whole(
    kinds: list[str], workers: int, seed: int, ratio: float, beside: Collection[int] = ()
) -> Run:
    """Return a finished run that has lost no lane."""
    run = Run(kinds, workers, seed, beside=beside, ratio=ratio)
    run.start()
    counts = run.end()
    assert counts["taken_over"] == counts["replayed"] == 0
    return run


def disturbed(
    kinds: list[str], workers: int, seed: int, ratio: float, beside: Collection[int] = ()
) -> tuple[Run, dict[str, int]]:
    """Return a finished run that has lost three lanes of four, and the lanes' counters."""
    run = Run(kinds, workers, seed, beside=beside, ratio=ratio)
    run.start()
    moments = sorted(run.rng.sample(range(1, ROUNDS - 1), 3))
    for moment, lane in zip(moments, run.rng.sample(range(4), 3)):
        run.reached[moment].wait(60)
        threading.Event().wait(run.rng.random() * 0.01)
        run.lose(lane)
    counts = run.end()
    assert counts["taken_over"]
    return run, counts


def assert_same(run: Run, other: Run) -> None:
    for rank, results in enumerate(run.results):
        wrong = [name for name, got in results.items() if got != other.results[rank][name]]
        assert not wrong, (rank, wrong[:5])
    wrong = [name for name, state in run.states.items() if state != other.states[name]]
    assert not wrong, wrong


@pytest.mark.parametrize("workers", [2, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_bits_are_those_of_a_job_that_loses_no_lane(kind, workers):
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    right = whole([kind], workers, seed, 0)
    keeps, replayed = "ef" in KINDS[kind][0], 0
    for ratio in (0.01, 0.3, 0.3, 2):
        run, counts = disturbed([kind], workers, seed, ratio)
        assert_same(run, right)
        replayed += counts["replayed"]  # none if each lane was lost just after a snapshot
        if ratio < 1 or not keeps:
            assert bool(counts["snapshots"]) == keeps
    assert bool(replayed) == keeps


def test_snapshots_are_held_beside_their_lane():
    """Worker 0 is beside lanes 0 and 1, so it holds their snapshots, and all of them if there is
    no other lane.
    """
    run = Run(["onebit-ef"], 3, 1, beside=[0, 1, 2, 3], ratio=0.01)
    held = [0] * 3
    run.start()
    for thread in run.threads:
        thread.join()
    for rank, core in enumerate(run.job.cores):
        held[rank] = core.gauges()["held"]
    run.end()
    assert held[0] == sum(tensor.server_bytes for tensor in run.tensors[0]) and held[1:] == [0, 0]


def test_logs_and_snapshots_are_bounded():
    ratio = 0.2
    run = whole(["onebit-ef", "topk-ef"], 2, 5, ratio)
    state = sum(tensor.server_bytes for tensor in run.tensors[0])
    # Two more pushes of each key may come until its snapshot is stored, of at most its own bytes.
    assert 0 < run.most_logged <= ratio * state + 3 * 0.6 * state
    assert not any(core.gauges()["logged"] for core in whole(["onebit"], 2, 5, ratio).job.cores)


def test_a_codec_that_remembers_more_than_a_counter_is_replayed_without_a_residual(monkeypatch):
    monkeypatch.setattr(type(codec("onebit")), "remembers", True)
    right = whole(["onebit"], 2, 3, 0)
    run, counts = disturbed(["onebit"], 2, 3, 0.5)
    assert_same(run, right)
    assert counts["replayed"] and counts["snapshots"]
