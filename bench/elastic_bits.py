"""The case *bits* of ``bench elastic``: the weights of jobs that lose servers and the scheduler,
against those of an undisturbed job.
"""

from __future__ import annotations

import random
from collections import Counter

from bench.jobs import Job, progress
from bench.report import BenchError, Case

WORKERS, SERVERS, STEPS = 3, 3, 120
_SECONDS = 120.0
_ENVIRONMENT = {
    "BPSX_ELASTIC": "servers",
    "BPSX_ELASTIC_WAIT": "60",
    "BPSX_FIXED_ORDER": "1",
    "BYTEPS_MIN_COMPRESS_BYTES": "0",
    "BYTEPS_LOG_LEVEL": "error",
    "BPSX_ANNOUNCE": "0",
}


def bits(transport: str, rng: random.Random, runs: int) -> list[Case]:
    """Train networks with several kinds of gradients in one job; returns a case for each kind."""
    progress("bits: the undisturbed run")
    undisturbed = train(transport, [])
    equal: Counter[str] = Counter()
    for turn in range(runs):
        progress(f"bits: run {turn + 1} of {runs}")
        victims = rng.sample(["server", "server", "scheduler"], 3)
        moments = sorted(rng.sample(range(5, STEPS - 5), 3))
        found = train(transport, list(zip(moments, victims)), rng)
        equal.update(kind for kind in undisturbed if found[kind] == undisturbed[kind])
    return [
        Case(
            f"bits-{kind}",
            100 * equal[kind] / runs,
            "%",
            target=">= 100",
            samples=(equal[kind], runs),
            note=f"of {runs} runs that have the weights of an undisturbed one",
        )
        for kind in undisturbed
    ]


def train(
    transport: str, deaths: list[tuple[int, str]], rng: random.Random | None = None
) -> dict[str, str]:
    """Run a job in which these roles die after so many steps, and others come in their places.

    Returns the SHA-256 of the weights by kind of gradients. Raises :class:`BenchError` if workers
    have different weights.
    """
    modules = dict.fromkeys(range(WORKERS), "bench.elastic_bits_worker")
    with Job(WORKERS, SERVERS, transport, _ENVIRONMENT, modules) as job:
        job.ask("begin", steps=STEPS)
        alive = list(job.servers)
        for moment, role in deaths:
            assert rng is not None
            job.workers[rng.randrange(WORKERS)].ask("wait_for", count=moment, seconds=_SECONDS)
            if role == "scheduler":
                assert job.scheduler is not None
                job.scheduler.kill()
                job.scheduler.wait()
                job.start_scheduler_again()
            else:
                alive.pop(rng.randrange(len(alive))).kill()
                job.add_server()
                alive.append(job.servers[-1])
        found = job.ask("end", timeout=_SECONDS + 10, seconds=_SECONDS)
    if len({digest for _, digest in found}) > 1:
        raise BenchError("bits: workers have different weights")
    return dict(part.split("=") for part in found[0][1].split())
