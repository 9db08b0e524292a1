"""``bench cores``: how the rate of a job over TCP grows with the cores of its machine.

Two workers and some servers run on the first 2, 4, ... cores. Each worker has the I/O threads that
bpsx chooses for so many cores. That job takes turns with the same without I/O threads, with a job
over ZeroMQ, with gloo's all_reduce, and with plain sockets. Of these 1 to 24 pairs of processes
send at a time; the best number counts.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from bench import machine, peers
from bench.jobs import RATE_BYTES, Child, Job, ask_all, progress
from bench.report import BenchError, Case, Draw, integers, median_case

WORKERS = 2
_GLOO = 128 << 20
_SMALL = 4096
#: Each worker's bytes cross the loopback twice, to the servers and back.
_CROSSINGS = 2 * WORKERS
#: From so many cores on, the rate is to be 0.6 of what the sockets carry.
_MANY = 32


@dataclass(frozen=True)
class Plan:
    """Amount of measuring: turns, with their rounds and small calls; of plain sockets, seconds and
    how many pairs send at a time.
    """

    turns: int = 5
    rounds: int = 6
    calls: int = 200
    seconds: float = 0.25
    streams: tuple[int, ...] = (1, 2, 4, 8, 16, 24)


QUICK = Plan(turns=1, rounds=2, calls=50, seconds=0.1, streams=(1, 2))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--cores",
        help="numbers of cores, separated by commas (default: 2, 4, 8, ... and all there are)",
    )
    parser.add_argument("--servers", type=int, default=4, help="server processes (default: 4)")
    parser.add_argument(
        "--threads",
        help="further numbers of I/O threads to measure, separated by commas (default: none)",
    )
    parser.add_argument(
        "--shared", action="store_true", help="through shared memory instead of sockets"
    )


def run(options: argparse.Namespace) -> list[Case]:
    """Return all cases. Raises :class:`BenchError` if one cannot run."""
    everything = sorted(os.sched_getaffinity(0))
    counts = _counts("--cores", options.cores) or _doublings(len(everything))
    if max(counts) > len(everything):
        raise BenchError(f"--cores {max(counts)}: this machine has {len(everything)}")
    threads = {f"threads-{n}": str(n) for n in _counts("--threads", options.threads)}
    environment = {"BYTEPS_ENABLE_IPC": "1"} if options.shared else {}
    plan = QUICK if options.quick else Plan()
    cases: list[Case] = []
    for count in counts:
        with _only(everything[:count]):
            seconds, chosen = _measure(count, options.servers, threads, environment, plan)
        cases += report(count, seconds, chosen, plain=not options.shared)
    return cases


def picture(_: argparse.Namespace) -> Draw:
    """Return the function that draws the rates. Raises :class:`BenchError` without matplotlib."""
    from bench.cores_plot import draw

    return draw


def _counts(option: str, text: str | None) -> list[int]:
    return sorted(set(integers(option, text, least=1))) if text else []


def _doublings(most: int) -> list[int]:
    return sorted({*(2**i for i in range(1, most.bit_length()) if 2**i <= most), most})


@contextlib.contextmanager
def _only(cores: Sequence[int]) -> Iterator[None]:
    """Let this process, and those that it starts, use ``cores`` only."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def _measure(
    cores: int, servers: int, threads: Mapping[str, str], environment: Mapping[str, str], plan: Plan
) -> tuple[dict[str, list[float]], int]:
    """Return figures by way, in GB/s or microseconds, and the I/O threads that bpsx has chosen."""
    ways: dict[str, dict[str, str]] = {"default": {}, "one": {"BPSX_IO_THREADS": "0"}, "zeromq": {}}
    ways |= {name: {"BPSX_IO_THREADS": count} for name, count in threads.items()}
    figures: dict[str, list[float]] = defaultdict(list)
    with contextlib.ExitStack() as running:
        jobs = {
            name: running.enter_context(
                Job(WORKERS, servers, "zmq" if name == "zeromq" else "tcp", {**environment, **own})
            )
            for name, own in ways.items()
        }
        gloo = running.enter_context(peers.gloo(WORKERS))
        pairs = [running.enter_context(peers.walls()) for _ in range(min(max(plan.streams), cores))]
        for job in jobs.values():
            job.check_rate()
        chosen = machine.count_threads(jobs["default"].workers[0].pid, "bpsx-io-")
        for turn in range(plan.turns):
            progress(f"{cores} cores, turn {turn + 1} of {plan.turns}")
            for name, job in jobs.items():
                _turn(name, job, plan, figures)
            _peers_turn(gloo, pairs, plan, figures)
    return figures, chosen


def _turn(name: str, job: Job, plan: Plan, figures: dict[str, list[float]]) -> None:
    pids = list(job.pids.values())
    ask = {"op": "many", "kind": "rate", "rounds": plan.rounds}
    _rounds(name, job.workers, pids, RATE_BYTES, ask, figures)
    each = job.ask("one", calls=plan.calls)
    figures[f"{name} latency"].append(1e6 * max(map(statistics.median, each)))


def _rounds(
    name: str,
    children: list[Child],
    pids: Sequence[int],
    nbytes: int,
    ask: Mapping[str, Any],
    figures: dict[str, list[float]],
) -> None:
    """Measure the rate of rounds of ``nbytes``, and the CPU time of ``pids`` per GB of a worker."""
    before = sum(map(machine.cpu_seconds, pids))
    seconds = peers.slowest(children, **ask)
    spent = sum(map(machine.cpu_seconds, pids)) - before
    figures[f"{name} cpu"].append(spent / (WORKERS * nbytes * len(seconds) / 1e9))
    figures[name] += [nbytes / s / 1e9 for s in seconds]


def _peers_turn(
    gloo: list[Child],
    pairs: Sequence[tuple[Child, Child]],
    plan: Plan,
    figures: dict[str, list[float]],
) -> None:
    ask = {"op": "all_reduce", "nbytes": _GLOO, "calls": plan.rounds}
    _rounds("gloo", gloo, [child.pid for child in gloo], _GLOO, ask, figures)
    small = ask_all(gloo, "all_reduce", nbytes=_SMALL, calls=plan.calls, warm=20)
    figures["gloo latency"].append(1e6 * max(map(statistics.median, small)))
    for streams in plan.streams:
        if streams <= len(pairs):
            rate = peers.tcp_together(pairs[:streams], plan.seconds)
            figures[f"sockets {streams}"].append(rate / 1e9)


def report(
    cores: int, figures: Mapping[str, list[float]], chosen: int, plain: bool = True
) -> list[Case]:
    """Return the cases of one number of cores.

    ``chosen``: number of I/O threads by default. ``plain``: over sockets.
    """
    middle = {name: statistics.median(figures[name]) for name in figures}
    ours, what = figures["default"], f"{chosen} I/O threads by default"
    cases = [
        median_case(
            f"rate-{cores}",
            ours,
            "GB/s",
            peer=middle["gloo"],
            note=f"per worker, {what}; gloo's all_reduce of 128 MiB",
        ),
        median_case(f"gain-{cores}", ours, "GB/s", peer=middle["one"], note=f"{what}; none"),
        median_case(f"zeromq-{cores}", ours, "GB/s", peer=middle["zeromq"], note="rate; ZeroMQ's"),
        *(
            median_case(
                f"{name}-{cores}",
                figures[name],
                "GB/s",
                peer=middle["one"],
                note=f"{name.removeprefix('threads-')} I/O threads; none",
            )
            for name in figures
            if name.startswith("threads-") and " " not in name
        ),
    ]
    if plain:
        best = max(middle[name] for name in figures if name.startswith("sockets "))
        cases.append(
            median_case(
                f"sockets-{cores}",
                ours,
                "GB/s",
                peer=best / _CROSSINGS,
                target=">= 0.60" if cores >= _MANY else None,
                note=f"rate; what plain sockets carry, {best:.1f} GB/s, / {_CROSSINGS}",
            )
        )
    return cases + _costs(cores, figures, middle)


def _costs(
    cores: int, figures: Mapping[str, list[float]], middle: Mapping[str, float]
) -> list[Case]:
    """Return latency and CPU time by default, against no I/O threads and against gloo."""
    about = {
        "latency": ("us", "one push_pull of 4 KiB"),
        "cpu": ("s/GB", "CPU time of all processes, per GB of a worker"),
    }
    return [
        median_case(
            f"{name}-{cores}{suffix}",
            figures[f"default {name}"],
            unit,
            peer=middle[f"{peer} {name}"],
            note=f"{note}; {against}",
        )
        for name, (unit, note) in about.items()
        for peer, suffix, against in (
            ("one", "", "without I/O threads"),
            ("zeromq", "-zeromq", "over ZeroMQ"),
            ("gloo", "-gloo", "gloo's all_reduce"),
        )
    ]
