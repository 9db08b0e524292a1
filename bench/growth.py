"""``bench growth``: how the time of a push_pull grows with the number of workers.

Each worker has a machine of its own with a server beside it, in a network namespace whose link
carries at most the given rate each way (needs root). Every byte of a tensor that is not summed on
the worker's own machine crosses its link, and that is the narrowest place. So the time divided by
these bytes would be the same for any number of workers, if nothing else limited it.

**growth-<workers>**: seconds per GB through each worker's link; the peer is the same with the
smallest number of workers.

**gloo-<workers>**: the same of gloo's all_reduce, which takes turns with bpsx on the same links;
the peer is bpsx.
"""

from __future__ import annotations

import argparse
import collections
import statistics
from collections.abc import Mapping, Sequence

from bench import network, peers
from bench.jobs import Job, progress
from bench.report import BenchError, Case, integers, median_case
from bench.scaling import Plan, add_links, bytes_per_second, optimum, steady

BYTES = 100_000_000
_TARGET = "<= 1.1"
#: So that the processes of many machines share the cores of one.
_COMMON = {"OMP_NUM_THREADS": "1"}
#: Seconds that a command may take.
_PATIENCE = 600.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--workers",
        default="2,4,8,16",
        help="numbers of workers, separated by commas (default: %(default)s)",
    )
    add_links(parser, "1gbit")


def run(options: argparse.Namespace) -> list[Case]:
    """Return all cases. Raises :class:`BenchError` if one cannot run."""
    counts = sorted(set(integers("--workers", options.workers, "numbers of workers", least=2)))
    bytes_per_second(options.rate)  # names a wrong rate
    if why := network.why_not():
        raise BenchError(f"links cannot be slowed down here: {why}")
    plan = Plan(options.rate, options.transport, steady(), 1 if options.quick else 5)
    return report(plan, {workers: _measure(workers, plan) for workers in counts})


def _measure(workers: int, plan: Plan) -> dict[str, list[float]]:
    """Return the seconds of each call, by way: bpsx or gloo."""
    places = [f"worker {i}" for i in range(workers)]
    beside = {f"server {i}": place for i, place in enumerate(places)}
    seconds: dict[str, list[float]] = collections.defaultdict(list)
    with (
        network.Links(
            ["scheduler", *places], plan.rate, both=True, beside=beside, congestion=plan.congestion
        ) as links,
        Job(workers, workers, plan.transport, _COMMON, links=links) as job,
        peers.gloo(workers, links=links) as gloo,
    ):
        ways = {"bpsx": (job.workers, "one"), "gloo": (gloo, "all_reduce")}
        for turn in range(plan.turns):
            progress(f"{workers} workers: turn {turn + 1} of {plan.turns}")
            for way, (children, op) in ways.items():
                seconds[way] += peers.slowest(
                    children, op, timeout=_PATIENCE, nbytes=BYTES, calls=2, warm=1
                )
    # Printed now, in case a later measurement fails.
    medians = [f"{way} {statistics.median(found):.4g} s" for way, found in seconds.items()]
    progress(f"{workers} workers: {', '.join(medians)}")
    return seconds


def report(plan: Plan, found: Mapping[int, Mapping[str, Sequence[float]]]) -> list[Case]:
    """Return the cases from the seconds of calls, by the number of workers and by way."""
    cases: list[Case] = []
    least: float | None = None
    for workers, seconds in sorted(found.items()):
        per_gb = 1e9 / narrowest(workers)
        about = f"{workers} machines, links of {plan.rate} ({plan.congestion})"
        shortest = 1e9 / bytes_per_second(plan.rate)
        ours = median_case(
            f"growth-{workers}",
            [s * per_gb for s in seconds["bpsx"]],
            "s/GB",
            peer=least,
            target=None if least is None else _TARGET,
            note=(
                f"push_pull of {BYTES / 1e6:.0f} MB, {about}, at least {shortest:.3g}"
                f"{'' if least is None else '; with the fewest workers'}"
            ),
        )
        least = least or ours.value
        gloo = [s * per_gb for s in seconds["gloo"]]
        cases += [
            ours,
            median_case(
                f"gloo-{workers}", gloo, "s/GB", peer=ours.value, note="all_reduce of gloo; bpsx"
            ),
        ]
    return cases


def narrowest(workers: int) -> float:
    """Return the bytes that cross each worker's link, each way, in one push_pull."""
    return optimum(workers, 0, BYTES, 1.0)
