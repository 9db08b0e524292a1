"""``bench push_pull``: a job of two workers against gloo's all_reduce with two processes.

Also against the upper bounds of ZeroMQ and TCP.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections import defaultdict
from dataclasses import dataclass

from bench import machine, peers
from bench.jobs import RATE, RATE_BYTES, TRANSPORTS, Child, Job, ask_all, progress
from bench.report import BenchError, Case, median_case

WORKERS = 2
_PARTITION = RATE[1]
_GLOO = 128 << 20
_SMALL = 4096
_LOOKS = 9
#: Targets of rate, tiny and latency by transport. RDMA has none: there was no card to set them by.
_TARGETS = {
    "zmq": (">= 0.70", "<= 0.10", "<= 0.6"),
    "tcp": (">= 0.75", "<= 0.04", "<= 0.4"),
    "rdma": (None, None, None),
    "shm": (">= 3.0", "<= 0.04", "<= 0.3"),
}
CASES = ("rate", "tiny", "latency", "spin", "idle", "steady", "machine", "walls")


@dataclass(frozen=True)
class Plan:
    """Amount of measuring.

    ``turns``: how often ours and the peer's take turns. The other fields are per turn or in all.
    """

    turns: int = 12
    rounds: int = 4
    tiny_rounds: int = 10
    calls: int = 200
    idle_seconds: float = 10.0
    steps_before: int = 1000
    steps: int = 10_000
    wall_turns: int = 3
    wall_messages: int = 200


QUICK = Plan(
    turns=3,
    rounds=2,
    tiny_rounds=4,
    calls=100,
    idle_seconds=2.0,
    steps_before=200,
    steps=1000,
    wall_turns=1,
    wall_messages=100,
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--servers", type=int, default=1, help="server processes (default: 1)")
    parser.add_argument(
        "--transport",
        choices=sorted(TRANSPORTS),
        default="zmq",
        help="transport between the processes (default: %(default)s)",
    )
    parser.add_argument(
        "--only",
        default=",".join(CASES),
        help="cases to run, separated by commas (default: %(default)s)",
    )


def run(options: argparse.Namespace) -> list[Case]:
    """Return all cases. Raises :class:`BenchError` if one cannot run."""
    wanted = set(options.only.split(","))
    if unknown := wanted - set(CASES):
        raise BenchError(
            f"--only: unknown: {', '.join(sorted(unknown))}; expected {', '.join(CASES)}"
        )
    plan = QUICK if options.quick else Plan()
    cases: list[Case] = []
    if wanted & {"rate", "tiny", "latency", "spin", "idle"}:
        with Job(WORKERS, options.servers, options.transport) as job, peers.gloo(WORKERS) as gloo:
            cases = speed(Turns(job, gloo, wanted, plan).run(), wanted, _TARGETS[options.transport])
            if "idle" in wanted:
                cases += idle(job, plan)
    if "rate" in wanted and options.transport == "shm":
        cases.append(memory_bound(plan, cases[0]))
    if "steady" in wanted:
        # A separate job: malloc keeps freed memory of the large rounds, which would hide a leak.
        with Job(WORKERS, options.servers, options.transport) as job:
            cases += steady(job, plan)
    if "machine" in wanted:
        cases += one_machine(plan)
    if "walls" in wanted:
        cases += walls(plan, cases)
    return cases


class Turns:
    """Measure ours and the peer's in turn (A B A B ...), so that a slow minute of the machine hits
    both.
    """

    def __init__(self, job: Job, gloo: list[Child], wanted: set[str], plan: Plan) -> None:
        self.job, self.gloo, self.wanted, self.plan = job, gloo, wanted, plan
        #: Seconds per call or round of all turns, by name of the measurement.
        self.seconds: dict[str, list[float]] = defaultdict(list)

    def run(self) -> dict[str, list[float]]:
        """Return the seconds of all turns by name of the measurement."""
        if self.wanted & {"rate", "spin"}:
            self.job.check_rate()
        for turn in range(self.plan.turns):
            progress(f"turn {turn + 1} of {self.plan.turns}")
            if self.wanted & {"rate", "spin"}:
                self._rate()
            if "spin" in self.wanted:
                self._spin()
            if self.wanted & {"tiny", "latency"}:
                self._small()
        return self.seconds

    def _rate(self) -> None:
        self.seconds["rate"] += peers.slowest(
            self.job.workers, "many", kind="rate", rounds=self.plan.rounds
        )
        self.seconds["gloo rate"] += peers.slowest(
            self.gloo, "all_reduce", nbytes=_GLOO, calls=self.plan.rounds
        )

    def _spin(self) -> None:
        first = self.job.workers[0]
        first.ask("spin", on=True)
        self.seconds["spin"] += peers.slowest(
            self.job.workers, "many", kind="rate", rounds=self.plan.rounds
        )
        first.ask("spin", on=False)

    def _small(self) -> None:
        calls = self.plan.calls
        gloo = ask_all(self.gloo, "all_reduce", nbytes=_SMALL, calls=calls, warm=20)
        self.seconds["gloo latency"].append(max(map(statistics.median, gloo)))
        if "latency" in self.wanted:
            ours = self.job.ask("one", calls=calls)
            self.seconds["latency"].append(max(map(statistics.median, ours)))
        if "tiny" in self.wanted:
            self.seconds["tiny"] += peers.slowest(
                self.job.workers, "many", kind="tiny", rounds=self.plan.tiny_rounds
            )


def speed(
    seconds: dict[str, list[float]],
    wanted: set[str],
    targets: tuple[str | None, str | None, str | None],
) -> list[Case]:
    """Return the cases whose peer is gloo or bpsx itself."""
    cases = []
    rate = _rates(seconds["rate"], RATE_BYTES)
    if "rate" in wanted:
        gloo = statistics.median(_rates(seconds["gloo rate"], _GLOO))
        cases.append(
            median_case(
                "rate",
                rate,
                "GB/s",
                peer=gloo,
                target=targets[0],
                note="per worker, 32 x 4,096,000 B in flight; gloo all_reduce of 128 MiB",
            )
        )
    gloo_us = 1e6 * statistics.median(seconds["gloo latency"] or [0.0])
    if "tiny" in wanted:
        cases.append(
            median_case(
                "tiny",
                [1e3 * s for s in seconds["tiny"]],
                "ms",
                peer=gloo_us,
                target=targets[1],
                note="round of 1000 x 4 KiB; 1000 x gloo's 4 KiB latency",
            )
        )
    if "latency" in wanted:
        cases.append(
            median_case(
                "latency",
                [1e6 * s for s in seconds["latency"]],
                "us",
                peer=gloo_us,
                target=targets[2],
                note="one push_pull of 4 KiB, medians by turn; gloo all_reduce of 4 KiB",
            )
        )
    if "spin" in wanted:
        # The thread takes one core. Of two cores half is left, of more cores a larger share.
        cases.append(
            median_case(
                "spin",
                _rates(seconds["spin"], RATE_BYTES),
                "GB/s",
                peer=statistics.median(rate),
                target=">= 0.50",
                note=(
                    "rate with a spinning Python thread in worker 0; rate without. It takes 1 of 2"
                    " cores: 0.5 is left"
                ),
            )
        )
    return cases


def memory_bound(plan: Plan, rate: Case) -> Case:
    """Return the rate against the bound that memory sets, by decision 26.

    Each worker's tensor is copied in and out, which moves 4 bytes for each byte of the tensor. The
    lane reads the share of every worker and writes one sum. A copy moves two bytes for each byte
    that it copies.
    """
    progress("memcpy on all cores that the job can use")
    processes = min(WORKERS + 1, len(os.sched_getaffinity(0)))
    copied = [
        peers.memcpy_together(processes, _PARTITION, 4 * plan.wall_messages) / 1e9
        for _ in range(plan.wall_turns)
    ]
    bound = 2 * statistics.median(copied) / (WORKERS * (4 + (WORKERS + 1) / WORKERS))
    return Case(
        "memory",
        rate.value,
        "GB/s",
        peer=bound,
        target=">= 0.50",
        samples=rate.samples,
        note=(
            f"rate; what {processes} cores' memcpy of {statistics.median(copied):.1f} GB/s lets"
            " through"
        ),
    )


def one_machine(plan: Plan) -> list[Case]:
    """Measure two processes of one machine, which sum in shared memory, against two of gloo."""
    with Job(WORKERS, 0) as job, peers.gloo(WORKERS) as gloo:
        seconds = Turns(job, gloo, {"rate", "latency"}, plan).run()
        rate, gloo_rate = (
            _rates(seconds["rate"], RATE_BYTES),
            statistics.median(_rates(seconds["gloo rate"], _GLOO)),
        )
        return [
            median_case(
                "machine-rate",
                rate,
                "GB/s",
                peer=gloo_rate,
                note="as rate, between two processes of one machine, no server",
            ),
            median_case(
                "machine-latency",
                [1e6 * s for s in seconds["latency"]],
                "us",
                peer=1e6 * statistics.median(seconds["gloo latency"]),
                note="as latency, between two processes of one machine, no server",
            ),
        ]


def _rates(seconds: list[float], nbytes: int) -> list[float]:
    return [nbytes / s / 1e9 for s in seconds]


def idle(job: Job, plan: Plan) -> list[Case]:
    """Measure the processor time of an idle job."""
    progress(f"idle for {plan.idle_seconds:.0f} s")
    time.sleep(0.5)  # threads that still yield after their last work go to sleep
    started = time.monotonic()
    before = {name: machine.cpu_seconds(pid) for name, pid in job.pids.items()}
    time.sleep(plan.idle_seconds)
    spent = {name: machine.cpu_seconds(pid) - before[name] for name, pid in job.pids.items()}
    seconds = time.monotonic() - started
    share = {name: 100 * cpu / seconds for name, cpu in spent.items()}
    worst = max(share, key=lambda name: share[name])
    whole = sum(share.values())
    return [
        Case(
            "idle",
            whole,
            "% core",
            peer=1.0,
            target="< 1",
            samples=(whole,),
            note="all processes of the job together; 1 % of a core",
        ),
        Case(
            "idle-worst",
            share[worst],
            "% core",
            peer=1.0,
            samples=tuple(share.values()),
            note=f"the busiest process: {worst}",
        ),
    ]


def steady(job: Job, plan: Plan) -> list[Case]:
    """Measure the growth of resident memory while the same tensors are summed again and again.

    The samples show its course in the worst process.
    """
    progress(f"{plan.steps} steps of 1 x 1 MiB + 20 x 4 KiB")
    pids = {name: pid for name, pid in job.pids.items() if name != "scheduler"}
    job.ask("steps", count=plan.steps_before)
    course = {name: [machine.rss_bytes(pid)] for name, pid in pids.items()}
    for _ in range(_LOOKS):
        job.ask("steps", count=(plan.steps - plan.steps_before) // _LOOKS, timeout=300.0)
        for name, pid in pids.items():
            course[name].append(machine.rss_bytes(pid))
    growth = {
        name: [100 * (rss / course[name][0] - 1) for rss in course[name][1:]] for name in pids
    }
    worst = max(growth, key=lambda name: growth[name][-1])
    whole, late = growth[worst][-1], 100 * (course[worst][-1] / course[worst][_LOOKS // 2] - 1)
    return [
        Case(
            "steady",
            whole,
            "%",
            target="<= 5",
            samples=growth[worst],
            note=(
                f"growth of RSS from step {plan.steps_before} to {plan.steps}, worst of workers and"
                f" servers: {worst} from {course[worst][0] / 2**20:.1f} MiB; one arena of Python's"
                " is 1 MiB"
            ),
        ),
        Case(
            "steady-late",
            late,
            "%",
            target="<= 0.5",
            samples=(late,),
            note=(
                "growth in the second half of the steps: with a leak memory keeps growing, a heap"
                " that finds its size stops"
            ),
        ),
    ]


def walls(plan: Plan, cases: list[Case]) -> list[Case]:
    """Return the upper bounds of the cases, and rows that compare our figures with them."""
    progress("walls: bare ZeroMQ echo, TCP, memcpy")
    large, small, tcp, copy = [], [], [], []
    with peers.walls() as (server, client):
        for _ in range(plan.wall_turns):
            times = peers.echo(server, client, _PARTITION, 8, plan.wall_messages)
            large.append(_PARTITION * len(times) / sum(times) / 1e9)
            small.append(
                1e6
                * statistics.median(peers.echo(server, client, _SMALL, 1, 10 * plan.wall_messages))
            )
            tcp.append(peers.tcp_rate(server, client, 1.0) / 1e9)
            copy.append(peers.memcpy_rate(client, _PARTITION, 2 * plan.wall_messages) / 1e9)
    rows = [
        median_case(
            "wall-echo",
            large,
            "GB/s",
            note="bare ZeroMQ echo of 4,096,000 B, 8 in flight, each way",
        ),
        median_case("wall-echo-latency", small, "us", note="bare ZeroMQ echo of 4 KiB from Python"),
        median_case(
            "wall-tcp", tcp, "GB/s", note="plain socket on loopback, one way, 1 MiB writes"
        ),
        median_case("wall-memcpy", copy, "GB/s", note="4,096,000 B, one core, out of cache"),
    ]
    return rows + _fractions({case.case: case for case in cases + rows})


def _fractions(by_name: dict[str, Case]) -> list[Case]:
    """Return the ratios of our figures to the upper bounds."""
    rows = []
    if "rate" in by_name:
        rate = by_name["rate"].value
        echo = by_name["wall-echo"].value / WORKERS
        tcp = by_name["wall-tcp"].value / (2 * WORKERS)
        rows += [
            Case(
                "rate-of-echo",
                rate,
                "GB/s",
                peer=echo,
                samples=(rate,),
                note=f"rate; wall-echo / {WORKERS}: the workers share what a server can echo",
            ),
            Case(
                "rate-of-tcp",
                rate,
                "GB/s",
                peer=tcp,
                samples=(rate,),
                note=(
                    f"rate; wall-tcp / {2 * WORKERS}: each worker's bytes pass the loopback there"
                    " and back"
                ),
            ),
        ]
    if "latency" in by_name:
        latency = by_name["latency"].value
        rows.append(
            Case(
                "latency-of-echo",
                latency,
                "us",
                peer=by_name["wall-echo-latency"].value,
                samples=(latency,),
                note="latency; wall-echo-latency",
            )
        )
    return rows
