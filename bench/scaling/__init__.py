"""``bench shaped``: a push_pull of 100 MB between four machines on links that are all equally slow.

Up to four spare machines have a server only. bpsx is measured with its defaults, with what was the
best by hand, and with everything off that the job chooses by its machines and links. On request
(``--ways``) also with its defaults for fast links, as a job has them whose links have become
slower. The peers are gloo's ring and the best time that the links allow. The machines are network
namespaces on a bridge: :mod:`bench.network`. Needs root.

**defaults-k<spare>**, **by-hand-k<spare>**, **untuned-k<spare>**, **fast-links-k<spare>**: seconds
of a push_pull; the peer is the best time.

**gloo-k<spare>**: seconds of gloo's all_reduce; the peer is bpsx with its defaults.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import importlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from bench import network, peers
from bench.jobs import TRANSPORTS, Child, Job, progress
from bench.report import BenchError, Case, Draw, median_case

MACHINES = 4
BYTES = 100_000_000
_TARGET, _TARGET_OF_GLOO = "<= 1.06", ">= 1.46"
#: Options of bpsx by way. The small partitions are for links as slow as these: the last partition's
#: sum comes back only after everything has been pushed.
WAYS: Mapping[str, Mapping[str, str]] = {
    "defaults": {},
    "by-hand": {"BYTEPS_ENABLE_MIXED_MODE": "1", "BYTEPS_PARTITION_BYTES": "131072"},
    "untuned": {"BYTEPS_ENABLE_MIXED_MODE": "0", "BPSX_AUTOTUNE": "0"},
    "fast-links": {"BPSX_AUTOTUNE": "0"},
}
#: The ways that are measured by default: those of the picture, and the best by hand.
_USUAL = ("defaults", "by-hand", "untuned")
#: Of all processes, as gloo's: eight machines share the cores of one.
_COMMON = {"OMP_NUM_THREADS": "1"}
#: Used instead of BBR, which some hosts have. Every ten seconds BBR all but stops a connection for
#: a fifth of a second to measure the link, and a sum waits for the slowest connection.
_RATHER_THAN_BBR = "reno"
#: tc's units, in bits per second.
_UNITS = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9}
#: Seconds that a command may take; a whole round is slow on such a link.
_PATIENCE = 600.0


@dataclass(frozen=True)
class Plan:
    """Amount of measuring. ``rate``: rate of each link, in tc's notation. ``ways``: of bpsx."""

    rate: str
    transport: str
    congestion: str
    turns: int
    ways: Sequence[str] = _USUAL


@dataclass
class Division:
    """Seconds of each way, including "gloo", with one number of spare machines."""

    optimum: float
    seconds: dict[str, list[float]] = field(default_factory=lambda: collections.defaultdict(list))


def add_links(parser: argparse.ArgumentParser, rate: str) -> None:
    """Add the options of links. ``rate``: default."""
    parser.add_argument(
        "--rate", default=rate, help="rate of each link, in tc's notation (default: %(default)s)"
    )
    parser.add_argument(
        "--transport",
        choices=sorted(TRANSPORTS),
        default="shm",
        help=(
            "transport between the processes (default: %(default)s: shared memory within a "
            "machine, plain sockets between machines)"
        ),
    )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_links(parser, "500mbit")
    parser.add_argument(
        "--spare",
        default="0,1,2,3,4",
        help="numbers of spare machines, separated by commas (default: %(default)s)",
    )
    parser.add_argument(
        "--congestion",
        help=(
            "TCP congestion control for bpsx and for gloo (default: the host's; if that is bbr,"
            " reno)"
        ),
    )
    parser.add_argument(
        "--ways",
        default=",".join(_USUAL),
        help=f"ways of bpsx, separated by commas, of {', '.join(WAYS)} (default: %(default)s)",
    )


def picture(options: argparse.Namespace) -> Draw:
    """Return the function that draws the cases. Raises :class:`BenchError` without matplotlib."""
    draw: Draw = importlib.import_module("bench.scaling.plot").draw
    return draw


def run(options: argparse.Namespace) -> list[Case]:
    """Return all cases. Raises :class:`BenchError` if one cannot run."""
    spares = [_spare(text) for text in options.spare.split(",")]
    ways = options.ways.split(",")
    if unknown := [way for way in ways if way not in WAYS]:
        raise BenchError(f"--ways {unknown[0]!r}: expected some of {', '.join(WAYS)}")
    if "defaults" not in ways:
        raise BenchError("--ways: defaults must be among them, because gloo is compared with it")
    per_second = bytes_per_second(options.rate)
    if options.congestion and options.congestion not in network.congestions():
        raise BenchError(
            f"--congestion {options.congestion!r}: expected {', '.join(network.congestions())}"
        )
    if reason := network.why_not():
        raise BenchError(f"links cannot be slowed down here: {reason}")
    turns = 1 if options.quick else 5
    plan = Plan(options.rate, options.transport, options.congestion or steady(), turns, ways)
    found = {spare: _measure(spare, per_second, plan) for spare in spares}
    return [case for spare, division in found.items() for case in _cases(spare, division, plan)]


def optimum(machines: int, spare: int, nbytes: int, per_second: float) -> float:
    """Return the least seconds for ``nbytes`` on each machine, set by the most loaded network card.

    ``spare``: at most ``machines``. Source: BytePS, OSDI'20, 4.1.
    """
    n, k = machines, spare
    return 2 * n * (n - 1) * nbytes / ((n * n + k * n - 2 * k) * per_second)


def bytes_per_second(rate: str) -> float:
    """Convert tc's notation of a rate. Raises :class:`BenchError` for any other notation."""
    match = re.fullmatch(r"([0-9.]+)(kbit|mbit|gbit)", rate)
    if match is None or not float(match[1]):
        raise BenchError(
            f"--rate {rate!r}: expected a number followed by kbit, mbit or gbit, as in 500mbit"
        )
    return float(match[1]) * _UNITS[match[2]] / 8


def _spare(text: str) -> int:
    if not text.isdigit() or int(text) > MACHINES:
        raise BenchError(f"--spare {text!r}: expected 0 to {MACHINES}")
    return int(text)


def steady() -> str:
    """Return the congestion control to use: the host's, unless that is BBR."""
    own = network.congestion()
    return _RATHER_THAN_BBR if own == "bbr" and _RATHER_THAN_BBR in network.congestions() else own


def _measure(spare: int, per_second: float, plan: Plan) -> Division:
    """Measure all ways in turn, on the same links.

    Each comes after a call that does not count, since TCP begins anew after a pause.
    """
    workers = [f"worker {i}" for i in range(MACHINES)]
    beside = {f"server {i}": worker for i, worker in enumerate(workers)}
    division = Division(optimum(MACHINES, spare, BYTES, per_second))
    names = ["scheduler", *workers, *(f"server {MACHINES + i}" for i in range(spare))]
    with (
        network.Links(
            names, plan.rate, both=True, beside=beside, congestion=plan.congestion
        ) as links,
        contextlib.ExitStack() as stack,
    ):
        ways = _started(stack, spare, plan, links)
        progress(f"{spare} spare machines: first calls")
        for children, op in ways.values():
            _calls(children, op, 1)
        for turn in range(plan.turns):
            progress(f"{spare} spare machines: turn {turn + 1} of {plan.turns}")
            for way, (children, op) in ways.items():
                division.seconds[way] += _calls(children, op, 2)
    return division


def _started(
    stack: contextlib.ExitStack, spare: int, plan: Plan, links: network.Links
) -> dict[str, tuple[list[Child], str]]:
    """Start a job for each way, all on the same links. Returns its workers and their command."""
    ways = {}
    for way in plan.ways:
        options = {**_COMMON, **WAYS[way]}
        job = Job(MACHINES, MACHINES + spare, plan.transport, options, links=links)
        ways[way] = stack.enter_context(job).workers, "one"
    return {**ways, "gloo": (stack.enter_context(peers.gloo(MACHINES, links=links)), "all_reduce")}


def _calls(children: list[Child], op: str, calls: int) -> list[float]:
    return peers.slowest(children, op, timeout=_PATIENCE, nbytes=BYTES, calls=calls, warm=1)


def _cases(spare: int, division: Division, plan: Plan) -> list[Case]:
    ours = [
        median_case(
            f"{way}-k{spare}",
            division.seconds[way],
            "s",
            peer=division.optimum,
            target=_TARGET if way == "defaults" else None,
            note=(
                f"push_pull of {BYTES / 1e6:.0f} MB, {MACHINES} machines, {spare} spare"
                f" ({plan.congestion}),"
                f" {' '.join(f'{k}={v}' for k, v in WAYS[way].items()) or 'no options'};"
                " the optimum for these links"
            ),
        )
        for way in plan.ways
    ]
    gloo = median_case(
        f"gloo-k{spare}",
        division.seconds["gloo"],
        "s",
        peer=ours[plan.ways.index("defaults")].value,
        target=_TARGET_OF_GLOO if spare == MACHINES else None,
        note="gloo's all_reduce on the same links; bpsx, defaults",
    )
    return [*ours, gloo]
