"""The case *overhead* of ``bench elastic``: rate, round of many tensors and latency of a job with
BPSX_ELASTIC=servers in which no process dies, against a job with BPSX_ELASTIC=off.
"""

from __future__ import annotations

import itertools
import statistics
from collections import defaultdict
from contextlib import ExitStack

from bench import network, peers
from bench.jobs import RATE_BYTES, Job, ask_all, progress
from bench.report import Case, median_case

_WORKERS, _SERVERS = 2, 2
#: Jobs -> BPSX_ELASTIC. Equal jobs differ by where the system puts their processes and memory: the
#: second one that is off shows by how much.
_JOBS = {"servers": "servers", "off": "off", "also off": "off"}
_ORDERS = list(itertools.permutations(_JOBS))
#: Kind -> unit, factor from seconds, what is measured, target.
_KINDS = {
    "rate": ("GB/s", RATE_BYTES / 1e9, "per worker, 32 x 4,096,000 B in flight", ">= 0.98"),
    "tiny": ("ms", 1e3, "round of 1000 x 4 KiB", "<= 1.02"),
    "latency": ("us", 1e6, "one push_pull of 4 KiB", "<= 1.02"),
}
_Seconds = dict[tuple[str, str], list[float]]


def overhead(transport: str, starts: int, turns: int, rate: str | None = None) -> list[Case]:
    """Measure jobs with BPSX_ELASTIC=servers and off, in turn.

    ``starts``: how often all jobs are started anew; ``turns``: of each job, in any order, per
    start. ``rate``: that of each process's link, in ``tc``'s notation; by default there are no
    links, and all processes share one machine's memory.
    """
    seconds: _Seconds = defaultdict(list)
    for start in range(starts):
        with ExitStack() as running:
            jobs = {
                name: running.enter_context(
                    Job(
                        _WORKERS,
                        _SERVERS,
                        transport,
                        {"BPSX_ELASTIC": elastic},
                        links=running.enter_context(_links(rate)) if rate else None,
                    )
                )
                for name, elastic in _JOBS.items()
            }
            for turn in range(start * turns, (start + 1) * turns):
                progress(f"overhead: turn {turn + 1} of {starts * turns}")
                # The order changes, as the load of the machine changes while the jobs take turns.
                for name in _ORDERS[turn % len(_ORDERS)]:
                    _measure(jobs[name], name, seconds)
    where = f"; links of {rate}, {network.congestion()}" if rate else ""
    return [_case(kind, seconds, where) for kind in _KINDS]


def _links(rate: str) -> network.Links:
    """Return a network in which each worker and each server has a link of its own."""
    places = [f"worker {i}" for i in range(_WORKERS)] + [f"server {i}" for i in range(_SERVERS)]
    return network.Links(["scheduler", *places], rate, both=True)


def _measure(job: Job, name: str, seconds: _Seconds) -> None:
    for kind, rounds in (("rate", 4), ("tiny", 10)):
        seconds[kind, name] += peers.slowest(job.workers, "many", kind=kind, rounds=rounds)
    ours = ask_all(job.workers, "one", calls=200)
    seconds["latency", name].append(max(map(statistics.median, ours)))


def _case(kind: str, seconds: _Seconds, where: str) -> Case:
    unit, factor, about, target = _KINDS[kind]

    def figures(name: str) -> list[float]:
        times = seconds[kind, name]
        return [factor / s if kind == "rate" else factor * s for s in times]

    off, again = (statistics.median(figures(name)) for name in ("off", "also off"))
    return median_case(
        f"overhead-{kind}",
        figures("servers"),
        unit,
        peer=statistics.median([*figures("off"), *figures("also off")]),
        target=target,
        note=(
            f"{about}; the same with BPSX_ELASTIC=off, of which two jobs differ by"
            f" {max(off, again) / min(off, again):.3f}{where}"
        ),
    )
