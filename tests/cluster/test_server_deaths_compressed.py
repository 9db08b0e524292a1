"""Jobs with compressed gradients lose servers at random moments: results and weights have the bits
of a job that loses none, with residuals of workers and servers, momentum and counters.
"""

from __future__ import annotations

import functools
import json
import random
import signal
from typing import Any

import pytest

from support.jobs import TRANSPORTS, Gates, Job

#: Two partitions each, of which the second is smaller and odd: compressed ones have twice as much.
ELEMENTS, PARTITION, STEPS = 30_001, 32_768, 24
_EF = {
    "onebit": ("", "vanilla", "corrected"),
    "topk": ("", "vanilla", "corrected"),
    "randomk": ("", "vanilla", "corrected", "sparse"),
    "dithering": ("", "vanilla", "corrected"),
    "powersgd": ("", "vanilla"),
}
_OPTIONS: dict[str, dict[str, Any]] = {
    "onebit": {"scaling": True},
    "topk": {"k": 0.02},
    "randomk": {"k": 0.05, "seed": 3},
    "dithering": {"k": 4, "seed": 3},
    "powersgd": {"rank": 4},
}


def cases(compressor: str) -> dict[str, tuple[str, dict[str, Any]]]:
    """Every error feedback and momentum, each with two element types, by name."""
    return {
        f"{ef or 'none'} {momentum or 'plain'} {dtype}": (
            dtype,
            {
                "compressor": compressor,
                **_OPTIONS[compressor],
                **({"ef": ef} if ef else {}),
                **({"momentum": momentum} if momentum else {}),
            },
        )
        for ef in _EF[compressor]
        for momentum in ("", "nesterov")
        for dtype in ("float32", "bfloat16")
    }


_TRAINING = """
import bpsx, hashlib, json, ml_dtypes, numpy as np, os
from bpsx.api.verbs import session

bpsx.init()
cases, n = json.loads(os.environ["CASES"]), int(os.environ["ELEMENTS"])
steps, restore_at = int(os.environ["STEPS"]), int(os.environ["RESTORE"])
rank, saved = bpsx.rank(), None
shapes = {}
for name, (dtype, params) in cases.items():
    bpsx.declare(name, compression=params)
    shapes[name] = (n // 300, 300) if params["compressor"] == "powersgd" else (n,)
weights = {
    name: np.linspace(-1, 1, np.prod(shape), dtype=np.float32).reshape(shape)
    for name, shape in shapes.items()
}
for step in range(steps):
    if rank == 0:
        pass_gate(step)
    rate, handles = 1 / (step + 1), {}
    for name, (dtype, params) in cases.items():
        noise = np.random.default_rng([len(name), step, rank]).standard_normal(shapes[name])
        g = (weights[name] * np.float32(0.1 * (rank + 1)) + noise.astype(np.float32)).astype(
            ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype
        )
        handles[name] = bpsx.push_pull_async(g, name=name, learning_rate=rate)
    report(step)
    for name, handle in handles.items():
        weights[name] -= np.float32(rate) * bpsx.synchronize(handle).astype(np.float32)
    if step + 3 == restore_at:
        saved = session().compressing.save(cases)
    if step == restore_at:
        session().compressing.restore(saved)
state = session().compressing.save(cases)
report({
    name: hashlib.sha256(
        w.tobytes() + b"".join(state.get(name, {}).get(key, b"") for key in ("worker", "server"))
    ).hexdigest()
    for name, w in weights.items()
})
report(session()._core.gauges())
bpsx.shutdown()
"""


class Trained:
    """What a job ended with: hashes by name for each worker, and its gauges."""

    def __init__(self, job: Job) -> None:
        assert job.scheduler is not None
        for worker in job.workers:
            assert worker.wait() == 0, worker.text() + job.scheduler.text()
        assert job.scheduler.wait() == 0, job.scheduler.text()
        self.hashes = [worker.reports()[-2] for worker in job.workers]
        self.gauges = [worker.reports()[-1] for worker in job.workers]
        self.servers = [server.text() for server in job.servers]
        self.scheduler = job.scheduler.text()


def environment(compressor: str, transport: str) -> dict[str, str]:
    return {
        **TRANSPORTS[transport],
        "BPSX_FIXED_ORDER": "1",
        "BPSX_ELASTIC": "servers",
        "BPSX_ELASTIC_LOG": "0.3",
        "BYTEPS_PARTITION_BYTES": str(PARTITION),
        "BYTEPS_MIN_COMPRESS_BYTES": "0",
        "CASES": json.dumps(cases(compressor)),
        "ELEMENTS": str(ELEMENTS),
        "STEPS": str(STEPS),
        "RESTORE": str(STEPS // 2),
    }


@functools.cache
def undisturbed(compressor: str, workers: int, processes: int = 1) -> list[dict[str, str]]:
    """What workers end with in a job that loses no server; ``processes`` form one machine."""
    env = {**environment(compressor, "zmq"), "BPSX_ELASTIC": "off"}
    with Job(_TRAINING, workers=workers, servers=3, env=env, processes=processes) as job:
        trained = Trained(job)
    assert not any(gauge["logged"] or gauge["held"] for gauge in trained.gauges)
    return trained.hashes


def disturb(job: Job, rng: random.Random, gates: Gates) -> None:
    """Kill a server before the state is restored, and another one afterwards.

    The gate before the last step is opened then.
    """
    moments = rng.randrange(1, STEPS // 2), rng.randrange(STEPS // 2 + 1, STEPS - 1)
    for server, step in zip(rng.sample(job.servers, 2), moments):
        job.workers[rng.randrange(len(job.workers))].wait_for_line(str(step))
        server.signal(signal.SIGKILL)
        server.wait()
    gates.open(STEPS - 1)


@pytest.mark.parametrize(
    ("compressor", "workers", "processes", "transport"),
    [
        ("onebit", 2, 1, "zmq"),
        ("onebit", 3, 1, "shm"),
        ("onebit", 4, 2, "zmq"),
        ("topk", 2, 1, "tcp"),
        ("topk", 3, 1, "zmq"),
        ("randomk", 3, 1, "tcp"),
        ("dithering", 2, 1, "shm"),
        ("dithering", 3, 1, "zmq"),
        ("powersgd", 2, 1, "tcp"),
        ("powersgd", 4, 2, "shm"),
    ],
)
def test_bits_are_those_of_an_undisturbed_job(tmp_path, compressor, workers, processes, transport):
    """Two of three servers are killed, the second one after a restored checkpoint."""
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    gates = Gates(tmp_path)
    gates.close(STEPS - 1)
    env = {**environment(compressor, transport), **gates.env}
    with Job(_TRAINING, workers=workers, servers=3, env=env, processes=processes) as job:
        disturb(job, random.Random(seed), gates)
        trained = Trained(job)
    assert "term 2" in trained.scheduler
    for got, right in zip(trained.hashes, undisturbed(compressor, workers, processes)):
        assert [name for name, value in got.items() if value != right[name]] == []
    # Lanes keep nothing of factors.
    assert any(gauge["held"] for gauge in trained.gauges) == (compressor != "powersgd")


_UNEVEN = """
import bpsx, hashlib, json, numpy as np, os

bpsx.init()
cases, n = json.loads(os.environ["CASES"]), int(os.environ["ELEMENTS"])
rank, pushed, seen = bpsx.rank(), 0, hashlib.sha256()
for name, params in cases.items():
    bpsx.declare(name, compression=params)

def step():
    global pushed
    pushed += 1
    handles = []
    for name in cases:
        shape = (n // 300, 300) if name.startswith("powersgd") else n
        g = np.random.default_rng([len(name), pushed, rank]).standard_normal(shape)
        handles.append(bpsx.push_pull_async(g.astype(np.float32), name=name))
    report(f"step {pushed}")
    for handle in handles:
        seen.update(bpsx.synchronize(handle).tobytes())

for _ in range(6 if rank == 0 else 14):
    step()
bpsx.join()
report("all have joined")
for _ in range(8):
    step()
report(seen.hexdigest())
bpsx.shutdown()
"""


def test_uneven_workers_have_the_bits_of_an_undisturbed_job():
    """A server is killed while one of the workers is in join(), and another one afterwards."""
    all_cases = {
        f"{compressor} {ef or 'none'}": {
            "compressor": compressor,
            **_OPTIONS[compressor],
            **({"ef": ef} if ef else {}),
        }
        for compressor in _EF
        for ef in _EF[compressor]
        if ef != "corrected"
    }
    env = {**environment("onebit", "zmq"), "CASES": json.dumps(all_cases)}
    found = []
    for kills in (False, True):
        with Job(_UNEVEN, workers=2, servers=3, env=env) as job:
            if kills:
                for server, line in zip(job.servers, ("step 10", "step 18")):
                    job.workers[1].wait_for_line(line)
                    server.signal(signal.SIGKILL)
                    server.wait()
            for worker in job.workers:
                assert worker.wait() == 0, worker.text() + job.scheduler.text()
            found.append([worker.reports()[-1] for worker in job.workers])
    assert found[0] == found[1] and found[0][0] != found[0][1]
