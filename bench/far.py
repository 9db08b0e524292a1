"""``bench far``: rate of two workers and two servers that are far apart, with default settings.

Each process is in a namespace of its own (needs root). Its link carries at most the given rate each
way, and relays (:mod:`bench.relay`) delay packets. The job with default settings takes turns with
jobs whose send buffers or partitions were set by hand; the best of those counts. Another job has
the small buffers of near connections.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import statistics
from collections import defaultdict
from collections.abc import Mapping

from bench import network, peers
from bench.jobs import RATE_BYTES, TRANSPORTS, Job, progress
from bench.report import BenchError, Case, integers, median_case

WORKERS, SERVERS = 2, 2
_SMALL = {"BPSX_SEND_BUFFER_KB": "224"}
_BY_HAND = {
    "system": {"BPSX_SEND_BUFFER_KB": "0"},
    "ahead": {"BPSX_SEND_BUFFER_KB": "0", "BPSX_SEND_AHEAD_MS": "0"},
    "small partitions": {"BYTEPS_PARTITION_BYTES": "131072"},
    "middle partitions": {"BYTEPS_PARTITION_BYTES": "524288"},
    "large partitions": {"BPSX_AUTOTUNE": "0"},
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--links", default="200mbit,1gbit", help="rates in tc's notation (default: %(default)s)"
    )
    parser.add_argument(
        "--round-trips",
        default="0,10,30,100",
        help="milliseconds, separated by commas (default: %(default)s)",
    )
    parser.add_argument(
        "--transport", choices=sorted(TRANSPORTS), default="tcp", help="default: %(default)s"
    )


def run(options: argparse.Namespace) -> list[Case]:
    """Return all cases. Raises :class:`BenchError` if one cannot run."""
    if why := network.why_not():
        raise BenchError(why)
    round_trips = integers("--round-trips", options.round_trips, "integers of ms")
    turns, rounds = (1, 1) if options.quick else (3, 2)
    cases: list[Case] = []
    rates = [rate.strip() for rate in options.links.split(",")]
    for rate, milliseconds in itertools.product(rates, round_trips):
        found = _measure(rate, milliseconds, options.transport, turns, rounds)
        cases += report(f"{rate}-{milliseconds}", found)
    return cases


def _measure(
    rate: str, milliseconds: int, transport: str, turns: int, rounds: int
) -> dict[str, list[float]]:
    """Return Mbit/s by way."""
    ways = {"default": {}, "small": _SMALL, **_BY_HAND}
    places = [f"worker {i}" for i in range(WORKERS)] + [f"server {i}" for i in range(SERVERS)]
    found: dict[str, list[float]] = defaultdict(list)
    with contextlib.ExitStack() as running:
        links = running.enter_context(
            network.Links(["scheduler", *places], rate, both=True, round_trip=milliseconds / 1e3)
        )
        jobs = {
            way: running.enter_context(Job(WORKERS, SERVERS, transport, own, links=links))
            for way, own in ways.items()
        }
        for job in jobs.values():
            job.check_rate()
        for turn in range(turns):
            progress(f"{rate}, {milliseconds} ms, turn {turn + 1} of {turns}")
            for way, job in jobs.items():
                seconds = peers.slowest(job.workers, "many", kind="rate", rounds=rounds)
                found[way] += [8 * RATE_BYTES / s / 1e6 for s in seconds]
    return found


def report(name: str, found: Mapping[str, list[float]]) -> list[Case]:
    """Return the cases of one link."""
    medians = {way: statistics.median(rates) for way, rates in found.items()}
    best = max(_BY_HAND, key=lambda way: medians[way])
    ours, about = found["default"], f"per worker, {network.congestion()}"
    by_hand = " ".join(f"{key}={value}" for key, value in _BY_HAND[best].items())
    return [
        median_case(
            name, ours, "Mbit/s", peer=medians[best], target=">= 0.95", note=f"{about}; {by_hand}"
        ),
        median_case(
            f"{name}-small",
            ours,
            "Mbit/s",
            peer=medians["small"],
            note=f"{about}; buffers of 224 KiB",
        ),
    ]
