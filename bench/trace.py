"""``bench trace``: the cost of recording a timeline of every step, on workers and server.

The peer is the same step without recording.
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

#: Steps per turn. Turns are short because the speed of a shared machine drifts: each comparison is
#: between neighbours in time.
_STEPS = 5


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add nothing: this benchmark has no options of its own."""


def run(options: argparse.Namespace) -> list[Case]:
    """Return the case ``trace-overhead``."""
    return [overhead(options.quick)]


def trust_cases(quick: bool) -> list[Case]:
    """Return the case for ``bench trust``."""
    return [overhead(quick)]


def overhead(quick: bool = False) -> Case:
    """Compare the seconds of a recorded step with those of a step without recording, in turns.

    One job of 2 workers and 1 server runs both: two jobs differ by more than the overhead. Raises
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
                time.sleep(0.2)  # in both turns: a pause changes the machine's speed
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
    """End the recording, and wait until every process has written its file.

    The writing is not measured.
    """
    observer.ask(trace=-1)
    end = time.monotonic() + 60
    while observer.ask()["traced_count"] < files:
        if time.monotonic() > end:
            raise BenchError("the timelines were not written within 60 s")
        time.sleep(0.02)
