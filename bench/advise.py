"""``bench advise``: what ``bpsx-run advise`` predicts, against steps on slow links. Needs root.

Four machines with a worker and a server each, and spare ones, are network namespaces whose links
carry the given rate. A script without training exchanges 103 MB a step. ``bpsx-run advise`` sees it
run alone, and gets the number of machines, the rate of the links and the cores of a machine.

**<method>-k<spare>**: milliseconds of a step; the peer is the prediction.

**error-k<spare>**: the largest error of these predictions, in percent of the step.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path

from bench import network, peers
from bench.jobs import Job, progress
from bench.report import BenchError, Case, integers, median_case
from bench.scaling import bytes_per_second, steady
from bpsx.launch.advise_methods import METHODS

MACHINES = 4
_PATIENCE = 600.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--rate", default="500mbit", help="of each link, in tc's notation (default: %(default)s)"
    )
    parser.add_argument(
        "--spare", default="0,2,4", help="numbers of spare machines (default: %(default)s)"
    )


def run(options: argparse.Namespace) -> list[Case]:
    """Return all cases. Raises :class:`BenchError` if one cannot run."""
    if why := network.why_not():
        raise BenchError(why)
    cases: list[Case] = []
    turns = 1 if options.quick else 5
    for spare in integers("--spare", options.spare):
        predicted = _predict(spare, options.rate)
        found = _measure(spare, options.rate, turns)
        cases += report(spare, predicted, found)
    return cases


def _predict(spare: int, rate: str) -> dict[str, float]:
    """Return the seconds of a step by method, as ``bpsx-run advise`` says."""
    progress(f"{spare} spare machines: predictions")
    # Spare machines do little, so nearly all of this one's cores are the workers'.
    cores = len(os.sched_getaffinity(0)) / MACHINES
    gbit = bytes_per_second(rate) * 8 / 1e9
    words = ["--workers", str(MACHINES), "--link", f"{gbit:g}", "--spare", str(spare)]
    command = [sys.executable, "-m", "bench.advise_worker", "alone"]
    done = subprocess.run(
        [
            *[sys.executable, "-m", "bpsx.launch", "advise", "--json", "--cores", f"{cores:g}"],
            *words,
            "--",
            *command,
        ],
        stdout=subprocess.PIPE,
        text=True,
        timeout=_PATIENCE,
        check=False,
        cwd=Path(__file__).resolve().parents[1],
    )
    if done.returncode:
        raise BenchError(f"bpsx-run advise failed with status {done.returncode}; see above")
    methods = json.loads(done.stdout)["methods"]
    return {name: found["seconds"][str(spare)] for name, found in methods.items()}


def _measure(spare: int, rate: str, turns: int) -> dict[str, list[float]]:
    """Return the seconds of steps by method, which take turns."""
    workers = [f"worker {i}" for i in range(MACHINES)]
    beside = {f"server {i}": worker for i, worker in enumerate(workers)}
    names = ["scheduler", *workers, *(f"server {MACHINES + i}" for i in range(spare))]
    modules = dict.fromkeys(range(MACHINES), "bench.advise_worker")
    found: dict[str, list[float]] = {method: [] for method in METHODS}
    with (
        network.Links(names, rate, both=True, beside=beside, congestion=steady()) as links,
        Job(
            MACHINES,
            MACHINES + spare,
            "shm",
            {"OMP_NUM_THREADS": "1"},
            modules=modules,
            links=links,
        ) as job,
    ):
        for turn in range(turns):
            for method in METHODS:
                progress(f"{spare} spare machines: turn {turn + 1} of {turns}, {method}")
                found[method] += peers.slowest(
                    job.workers, "steps", timeout=_PATIENCE, method=method, count=2
                )
    return found


def report(spare: int, predicted: dict[str, float], found: dict[str, list[float]]) -> list[Case]:
    """Return the cases of one number of spare machines."""
    cases = [
        median_case(
            f"{method}-k{spare}",
            [1e3 * s for s in found[method]],
            "ms",
            peer=1e3 * predicted[method],
            note=f"{MACHINES} machines, {spare} spare, {steady()}; predicted",
        )
        for method in METHODS
    ]
    errors = {
        method: abs(predicted[method] / statistics.median(found[method]) - 1) for method in METHODS
    }
    worst = max(errors, key=lambda method: errors[method])
    return [
        *cases,
        Case(f"error-k{spare}", 100 * errors[worst], "%", target="<= 10", note=f"that of {worst}"),
    ]
