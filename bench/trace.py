"""``bench trace``: what it costs to record a timeline of every step, on workers and server, against the same without."""

from __future__ import annotations

import argparse
import statistics
import tempfile

from bench.jobs import Job, progress
from bench.report import Case

#: Steps per turn. Short turns: a machine that others use, too, drifts, so neighbours in time are compared.
_STEPS = 5


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """None of its own."""


def run(options: argparse.Namespace) -> list[Case]:
    """The case ``trace-overhead``."""
    return [overhead(options.quick)]


def overhead(quick: bool = False) -> Case:
    """Seconds of a step with all of it recorded, against seconds without: two jobs of 2 workers and 1 server, which take turns.

    The one that goes first changes. Raises :class:`BenchError` when a job fails.
    """
    turns = 6 if quick else 40
    with tempfile.TemporaryDirectory(prefix="bpsx-bench-") as folder:
        recorded = {"BYTEPS_TRACE_ON": "1", "BYTEPS_TRACE_START_STEP": "1", "BYTEPS_TRACE_END_STEP": str(2**31), "BYTEPS_TRACE_DIR": folder}
        samples: dict[str, list[float]] = {"with": [], "without": []}
        with Job(environment=recorded) as traced, Job() as plain:
            jobs = {"with": traced, "without": plain}
            for job in jobs.values():
                job.ask("model", rounds=2)
            for turn in range(turns):
                if turn % 10 == 0:
                    progress(f"turn {turn + 1} of {turns}")
                for name in ("with", "without") if turn % 2 else ("without", "with"):
                    samples[name] += [max(step) for step in zip(*jobs[name].ask("model", rounds=_STEPS))]
    note = f"{len(samples['with'])} steps of 48 MB in 160 tensors each"
    return Case("trace-overhead", statistics.median(samples["with"]), "s", peer=statistics.median(samples["without"]), target="<= 1.02",
                samples=tuple(samples["with"]), note=note)
