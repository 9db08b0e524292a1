"""Jobs that lose servers at random moments: no sum is lost, and the bits are those of a job that
loses none.
"""

from __future__ import annotations

import functools
import hashlib
import random
import signal
from pathlib import Path

import numpy as np
import pytest

from support.jobs import TRANSPORTS, Gates, Job

#: Elements of the tensors: sent in batches without and with acknowledgement, whole, and cut.
SIZES = [3, 2_000, 30_000, 100_000, 300_000]
#: The largest is cut into three.
CUT = {"BYTEPS_PARTITION_BYTES": "500000"}
_TRAINING = """
    import bpsx, hashlib, numpy as np

    SIZES, STEPS = {sizes}, {steps}
    bpsx.init()
    weights = [np.linspace(-1, 1, n, dtype=np.float32) for n in SIZES]
    for step in range(STEPS):
        if bpsx.rank() == 0:
            pass_gate(step)
        handles = []
        for i, w in enumerate(weights):
            gradient = w * np.float32(0.1 * (bpsx.rank() + 1)) + np.float32(step)
            handles.append(bpsx.push_pull_async(gradient, name=f"w{{i}}", average=False))
        for w, handle in zip(weights, handles):
            w -= np.float32(0.01) * bpsx.synchronize(handle)
        report(step)
    report(hashlib.sha256(b"".join(w.tobytes() for w in weights)).hexdigest())
    bpsx.shutdown()
"""


@functools.cache
def _undisturbed(workers: int, steps: int, sizes: tuple[int, ...]) -> str:
    weights = [np.linspace(-1, 1, n, dtype=np.float32) for n in sizes]
    for step in range(steps):
        for w in weights:
            total = np.zeros_like(w)
            for rank in range(workers):
                total += w * np.float32(0.1 * (rank + 1)) + np.float32(step)
            w -= np.float32(0.01) * total
    return hashlib.sha256(b"".join(w.tobytes() for w in weights)).hexdigest()


def undisturbed(workers: int, steps: int, sizes: list[int] = SIZES) -> str:
    """The hash that the training ends with, computed without any exchange, by rank."""
    return _undisturbed(workers, steps, tuple(sizes))


def lose_two_servers(
    tmp_path: Path, workers: int, env: dict[str, str], sizes: list[int] = SIZES
) -> None:
    """Kill two of three servers, one after the other, in the middle of a step; check the weights.

    The last step begins when both are dead.
    """
    steps, seed = 30, random.randrange(2**32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    gates = Gates(tmp_path)
    gates.close(29)
    env = {**CUT, **env, **gates.env}
    env |= {"BPSX_FIXED_ORDER": "1", "BPSX_ELASTIC": "servers"}
    source = _TRAINING.format(sizes=sizes, steps=steps)
    with Job(source, workers=workers, servers=3, env=env) as job:
        for server, step in zip(rng.sample(job.servers, 2), (5, 15)):
            job.workers[rng.randrange(workers)].wait_for_line(str(step))
            server.signal(signal.SIGKILL)
            server.wait()
        gates.open(29)
        for worker in job.workers:
            assert worker.wait() == 0, worker.text() + job.scheduler.text()
            assert worker.reports()[-1] == undisturbed(workers, steps, sizes)
        assert job.scheduler.wait() == 0, job.scheduler.text()
        assert "term 2" in job.scheduler.text()


@pytest.mark.parametrize("transport", ["zmq", "tcp", "shm"])
@pytest.mark.parametrize("workers", [2, 3])
def test_weights_are_those_of_an_undisturbed_job(tmp_path, transport, workers):
    lose_two_servers(tmp_path, workers, TRANSPORTS[transport])
