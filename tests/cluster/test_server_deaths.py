"""Jobs that lose servers at random moments: no sum is lost, and the bits are those of a job that
loses none.
"""

from __future__ import annotations

import hashlib
import random
import signal

import numpy as np
import pytest

from support.jobs import TRANSPORTS, Job

#: Elements of the tensors: sent in batches without and with acknowledgement, whole, and cut.
SIZES = [3, 2_000, 30_000, 200_000, 1_500_000]
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


def undisturbed(workers: int, steps: int, sizes: list[int] = SIZES) -> str:
    """The hash that the training ends with, computed without any exchange, by rank."""
    weights = [np.linspace(-1, 1, n, dtype=np.float32) for n in sizes]
    for step in range(steps):
        for w in weights:
            total = np.zeros_like(w)
            for rank in range(workers):
                total += w * np.float32(0.1 * (rank + 1)) + np.float32(step)
            w -= np.float32(0.01) * total
    return hashlib.sha256(b"".join(w.tobytes() for w in weights)).hexdigest()


@pytest.mark.parametrize("transport", ["zmq", "tcp", "shm"])
@pytest.mark.parametrize("workers", [2, 3])
def test_weights_are_those_of_an_undisturbed_job(transport, workers):
    """Two of three servers are killed, one after the other, in the middle of a step."""
    steps, seed = 30, random.randrange(2**32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    env = {**TRANSPORTS[transport], "BPSX_FIXED_ORDER": "1", "BPSX_ELASTIC": "servers"}
    source = _TRAINING.format(sizes=SIZES, steps=steps)
    with Job(source, workers=workers, servers=3, env=env) as job:
        for server, step in zip(rng.sample(job.servers, 2), (5, 15)):
            job.workers[rng.randrange(workers)].wait_for_line(str(step))
            server.signal(signal.SIGKILL)
            server.wait()
        for worker in job.workers:
            assert worker.wait() == 0, worker.text() + job.scheduler.text()
            assert worker.reports()[-1] == undisturbed(workers, steps)
        assert job.scheduler.wait() == 0, job.scheduler.text()
        assert "term 2" in job.scheduler.text()
