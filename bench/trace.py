"""``bench trace``: what it costs to record a timeline of every step, on workers and server, against
the same without.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time

from bench.jobs import Job, progress
from bench.report import BenchError, Case
from bpsx.config import Config, child_environment
from bpsx.launch.job_view import Observer

#: Steps per turn. Short turns: a machine that others use, too, drifts, so neighbours in time are
#: compared.
_STEPS = 5


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """None of its own."""


def run(options: argparse.Namespace) -> list[Case]:
    """The case ``trace-overhead``."""
    return [overhead(options.quick)]


def trust_cases(quick: bool) -> list[Case]:
    """For ``bench trust``."""
    return [overhead(quick)]


def overhead(quick: bool = False) -> Case:
    """Seconds of a step with all of it recorded, against seconds without, in turns of one job of 2
    workers and 1 server.

    The same processes in both: two jobs differ by more than what is looked for. Raises
    :class:`BenchError` when the job fails.
    """
    turns = 6 if quick else 40
    samples: dict[bool, list[float]] = {True: [], False: []}
    with (
        tempfile.TemporaryDirectory(prefix="bpsx-bench-") as folder,
        Job(environment={"BYTEPS_TRACE_DIR": folder}) as job,
        Observer(Config(child_environment(**job.environment))) as observer,
    ):
        job.ask("model", rounds=3)
        for turn in range(turns):
            if turn % 10 == 0:
                progress(f"turn {turn + 1} of {turns}")
            for on in (False, True):
                if on:
                    observer.ask(trace=3600)
                time.sleep(0.2)  # also without: after a pause the machine is not the same
                samples[on] += [max(step) for step in zip(*job.ask("model", rounds=_STEPS))]
                if on:
                    _stop(observer, (turn + 1) * 3)
    note = f"{len(samples[True])} steps of 48 MB in 160 tensors each"
    return Case(
        "trace-overhead",
        statistics.median(samples[True]),
        "s",
        peer=statistics.median(samples[False]),
        target="<= 1.02",
        samples=tuple(samples[True]),
        note=note,
    )


def _stop(observer: Observer, files: int) -> None:
    """End the recording, and wait until every process has written: that is not what is measured."""
    observer.ask(trace=-1)
    end = time.monotonic() + 60
    while observer.ask()["traced_count"] < files:
        if time.monotonic() > end:
            raise BenchError("the timelines were not written within 60 s")
        time.sleep(0.02)
