"""The case *committed* of ``bench elastic``: processes of random roles are killed, by a count of
steps, and the steps of the others must count.
"""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Iterator

from bench import elastic_torchft
from bench.jobs import progress
from bench.mortal_job import ROLES, MortalJob, Watch
from bench.report import BenchError, Case

#: Steps per death: a failure a minute and one every 15 s, where a step takes 10 s.
EVERY = (6.0, 1.5)
WORKERS, SERVERS = 4, 3
_SECONDS = 120.0


def committed(
    transport: str, rng: random.Random, every: float, steps: int, seconds: float
) -> list[Case]:
    """Kill one process in each ``every`` steps of ``seconds`` seconds, and another comes at once.

    Returns the share of steps that count, the number of those that do not, and torchft's share.
    Raises :class:`BenchError` if the job fails.
    """
    progress(f"committed, a death in {every:g} steps: {steps} steps")
    job = MortalJob(ROLES, WORKERS, SERVERS, transport, steps=steps, seconds=seconds, rng=rng)
    with job:
        _strike(job, _moments(every, rng), steps, seconds)
        verdict = job.finish(_SECONDS)
    for fault in verdict.faults[:5]:
        progress(fault)
    if verdict.steps != steps:
        raise BenchError(f"the job has made {verdict.steps} steps of {steps}")
    dead = ", ".join(f"{job.killed[role]} {role}s" for role in ROLES)
    return [
        Case(
            f"committed-{every:g}",
            100 * verdict.counted / verdict.begun,
            "%",
            target=">= 99",
            samples=(verdict.counted, verdict.begun),
            note=(
                f"a death in {every:g} steps ({dead}): steps of survivors that count; median step"
                f" {verdict.median:.2f} s, longest {verdict.longest:.2f} s"
            ),
        ),
        Case(
            f"discarded-{every:g}",
            verdict.discarded,
            "steps",
            target="<= 0",
            samples=(verdict.discarded,),
            note=f"in {steps} steps; {sum(job.again.values())} newcomers had to start twice",
        ),
        elastic_torchft.committed(rng, WORKERS, every, _moments(every, rng), steps, seconds),
    ]


def _moments(every: float, rng: random.Random) -> Iterator[float]:
    """Yield when to kill, in steps: once in each ``every`` steps, at a random moment."""
    return (every * (i + rng.random()) for i in itertools.count())


def _strike(job: MortalJob, moments: Iterator[float], steps: int, seconds: float) -> None:
    """Kill processes until the last step has ended."""
    watch, due, before, since = Watch(), next(moments), -1, 0.0
    while (done := job.steps) < steps:
        watch.see(done)
        now = time.monotonic()
        if done != before:
            before, since = done, now
        job.tend()
        part = min(0.99, (now - since) / max(seconds, 0.001))
        if done and done + part >= due:
            due = next(moments)
            role = job.kill(ROLES)
            progress(f"step {done}: {role or 'no process'} killed")
        time.sleep(0.005)
