"""Jobs with compressed gradients lose workers, and servers: the survivors go on with the bits of
simulated lanes, which have never seen a push of the lost worker that does not count.
"""

from __future__ import annotations

import inspect
import json
import random
import signal
import zlib
from typing import Any

import numpy as np
import pytest

from bpsx.compression.spec import compression
from bpsx.planning.partitioner import partition
from support.jobs import TRANSPORTS, Job
from support.simulated import Partition, Sum, counted

#: Two partitions each.
ELEMENTS, PARTITION, STEPS = 40_001, 65_536, 20
CUTS = [
    (begin // 4, (begin + length) // 4)
    for begin, length in partition(4 * ELEMENTS, PARTITION, compressed=True)
]
_OPTIONS: dict[str, dict[str, Any]] = {
    "onebit": {"scaling": True},
    "topk": {"k": 0.02},
    "randomk": {"k": 0.05, "seed": 3},
    "dithering": {"k": 4, "seed": 3},
}
#: Compression by the tensor's name: every error feedback, one with momentum.
CASES = {
    f"{compressor} {ef or 'none'}": {
        "compressor": compressor,
        **options,
        **({"ef": ef} if ef else {}),
        **({"momentum": "nesterov"} if ef == "vanilla" else {}),
    }
    for compressor, options in _OPTIONS.items()
    for ef in ("", "vanilla", "corrected", *(["sparse"] if compressor == "randomk" else []))
}


def share(name: str, n: int, step: int, of: int) -> np.ndarray:
    """What a worker pushes."""
    seed = [zlib.crc32(name.encode()), step, of]
    return np.random.default_rng(seed).standard_normal(n, np.float32)


#: A worker that reports the checksum of each partition of each result.
_TRAINING = (
    """
import bpsx, json, numpy as np, os, zlib
"""
    + inspect.getsource(share)
    + """
bpsx.init()
cases, n, steps = json.loads(os.environ["CASES"]), {elements}, {steps}
number = bpsx.rank()
for name, params in cases.items():
    bpsx.declare(name, compression=params)
for step in range(steps):
    handles = {{
        name: bpsx.push_pull_async(share(name, n, step, number), name=name,
                                   learning_rate=1 / (step + 1))
        for name in cases
    }}
    report(["step", step])
    for name, handle in handles.items():
        got = bpsx.synchronize(handle)
        report([name, step, [zlib.crc32(got[a:b].tobytes()) for a, b in {cuts}]])
bpsx.barrier()
report(bpsx.size())
bpsx.shutdown()
"""
).format(elements=ELEMENTS, steps=STEPS, cuts=CUTS)


class Compressed(Job):
    """A job that runs :data:`_TRAINING` with some of the cases."""

    def __init__(self, cases: list[str], workers: int, **more: Any) -> None:
        self.cases, self.struck = cases, 0
        env = {
            "BPSX_ELASTIC": "shrink",
            "BPSX_FIXED_ORDER": "1",
            "BPSX_ELASTIC_LOG": "0.3",
            "BYTEPS_PARTITION_BYTES": str(PARTITION),
            "BYTEPS_MIN_COMPRESS_BYTES": "0",
            "CASES": json.dumps({name: CASES[name] for name in cases}),
            **more.pop("env", {}),
        }
        super().__init__(_TRAINING, workers=workers, env=env, **more)

    def await_step(self, worker: int, step: int) -> None:
        self.workers[worker].wait_for_line(f'["step", {step}]')

    def strike(self, worker: int) -> None:
        """Kill a worker, and wait until all keys have been taken over without it."""
        self.workers[worker].signal(signal.SIGKILL)
        assert self.scheduler is not None
        self.scheduler.wait_for_line(f"workers go on without worker {worker}")

    def strike_server(self, server: int) -> None:
        """Kill a server, and wait until all keys have been taken over."""
        self.servers[server].signal(signal.SIGKILL)
        self.struck += 1
        assert self.scheduler is not None
        self.scheduler.wait_for_line("workers have moved", count=self.struck)

    def end_well(self, *lost: int, resets: bool = False) -> None:
        """Await the end. All survivors have the same results, and the right ones.

        ``lost``: workers, in this order. ``resets``: residuals may have been lost.
        """
        everything = [process.text for process in self.processes]
        reports = {}
        for of, worker in enumerate(self.workers):
            if of not in lost:
                assert worker.wait() == 0, "\n".join(text() for text in everything)
                *steps, size = worker.reports()
                assert size == len(self.workers) - len(lost)
                reports[of] = [one for one in steps if one[0] != "step"]
        first = next(iter(reports.values()))
        assert all(report == first for report in reports.values())
        sums = {(name, step): crcs for name, step, crcs in first}
        said = any("error feedback" in server.text() for server in self.servers)
        assert resets or not said, "\n".join(text() for text in everything)
        for name in self.cases:
            numbers = [self._counted(name, i, sums, lost, said) for i in range(2)]
            assert all(a & b for a, b in zip(*numbers)), (name, numbers)
            assert numbers[0][0] == {0} and numbers[0][-1] == {len(lost)}, (name, numbers)

    def _counted(
        self, name: str, i: int, sums: Any, lost: tuple[int, ...], resets: bool
    ) -> list[set[int]]:
        begin, end = CUTS[i]
        part = Partition(
            compression(CASES[name]), name, i, end - begin, "float32", len(self.workers)
        )
        rounds = [
            Sum(
                {of: share(name, ELEMENTS, step, of)[begin:end] for of in range(len(self.workers))},
                True,
                1 / (step + 1),
                lambda got, crc=sums[name, step][i]: zlib.crc32(got.tobytes()) == crc,
            )
            for step in range(STEPS)
        ]
        return counted(part, rounds, lost, resets)


@pytest.mark.parametrize("transport", ["zmq", "tcp", "shm"])
def test_survivors_have_the_bits_of_lanes_without_the_killed_worker(transport):
    lost, rng = random.randrange(3), random.Random()
    with Compressed(list(CASES), 3, servers=2, env=TRANSPORTS[transport]) as job:
        job.await_step(rng.randrange(3), 4)
        job.strike(lost)
        job.end_well(lost)


def test_a_server_is_killed_after_a_worker():
    """Once all keys are taken over, the others have all that a new lane needs."""
    with Compressed(list(CASES), 3, servers=3) as job:
        job.await_step(0, 3)
        job.strike(2)
        job.servers[random.randrange(3)].signal(signal.SIGKILL)
        job.end_well(2)


def test_two_workers_and_servers_are_killed_in_turn():
    with Compressed(list(CASES), 4, servers=3) as job:
        job.await_step(1, 2)
        job.strike_server(0)
        job.await_step(1, 5)
        job.strike(0)
        job.await_step(1, 8)
        job.strike_server(1)
        job.await_step(1, 11)
        job.strike(3)
        job.end_well(0, 3)


def test_a_worker_and_a_server_are_killed_at_once():
    """Counters survive. Residuals of the lost lanes may start from zero, and the servers say so."""
    with Compressed(list(CASES), 3, servers=2) as job:
        job.await_step(0, 3)
        both = [job.workers[1], job.servers[random.randrange(2)]]
        random.shuffle(both)
        for process in both:
            process.signal(signal.SIGKILL)
        job.end_well(1, resets=True)


_CHECKPOINT = """
import bpsx, numpy as np
from bpsx.api.verbs import session

bpsx.init()
number = bpsx.rank()
bpsx.declare("x", compression={"compressor": "topk", "k": 0.01, "ef": "vanilla"})

def step(of):
    rng = np.random.default_rng([of, number])
    return bpsx.push_pull(rng.standard_normal(50_000, np.float32), name="x")

for of in range(3):
    step(of)
report("ready")
hear()
step(3)
saved = session().compressing.save(["x"])
report(sorted(saved["x"]))
bpsx.barrier()
first = [step(4).tobytes(), step(5).tobytes()]
session().compressing.restore(saved)
bpsx.barrier()
report([step(4).tobytes(), step(5).tobytes()] == first)
session().compressing.forget(["x"])
bpsx.shutdown()
"""


def test_the_first_worker_that_lives_saves_and_restores_the_servers_state():
    env = {"BPSX_ELASTIC": "shrink", "BPSX_FIXED_ORDER": "1"}
    with Job(_CHECKPOINT, workers=3, servers=2, env=env) as job:
        for worker in job.workers:
            worker.wait_for_line("ready")
        job.workers[0].signal(signal.SIGKILL)
        assert job.scheduler is not None
        job.scheduler.wait_for_line("workers go on without worker 0")
        for worker in job.workers[1:]:
            worker.say("go")
        for number in (1, 2):
            assert job.workers[number].wait() == 0, job.workers[number].text()
            _, keys, same = job.workers[number].reports()
            assert ("server" in keys) == (number == 1) and same
