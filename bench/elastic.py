"""``bench elastic``: what the loss of a server costs a job, and what being ready for it costs.

* *server-gap*: kill -9. The longest step from then on, less the median step before.
* *silent-gap*: SIGSTOP. The same, less the time in which silence is no death.
* *worker-gap*: kill -9 of one of three workers, with BPSX_ELASTIC=shrink. The same, of the others.
* *replace*: kill -9 of one of three workers, with BPSX_ELASTIC=replace, and another in its place:
  seconds from its init() to the end of its first step.
* *scheduler-gap*: kill -9 of the scheduler. Steps go on; the median step while it is away against
  those before, and after another one has taken over.
* *committed*: a process of a random role is killed in each 6 steps, and in each 1.5, and another
  comes in its place. Steps of survivors that count.
* *bits*: the weights after killed servers and a killed scheduler against those of an undisturbed
  job.
* *overhead*: rate, round of many tensors and latency, against the same with BPSX_ELASTIC=off.
"""

from __future__ import annotations

import argparse
import random
import signal
import statistics
import time
from typing import TYPE_CHECKING

from bench import elastic_bits, elastic_committed, elastic_overhead, network
from bench.jobs import TRANSPORTS, Job, progress
from bench.report import BenchError, Case, Draw, median_case

if TYPE_CHECKING:
    from collections.abc import Sequence

WORKERS = 2
CASES = (
    "server-gap",
    "silent-gap",
    "worker-gap",
    "replace",
    "scheduler-gap",
    "committed",
    "bits",
    "overhead",
)
#: Model -> steps before a server is lost, and after.
MODELS = {"digits": (60, 60), "large": (6, 6)}
_INTERVAL, _TIMEOUT = 0.5, 2.0
_SECONDS = 120.0
#: Steps of which workers know at least, in a training without a fixed end.
_AHEAD = 50


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--only", default=",".join(CASES), help="cases to run (default: %(default)s)"
    )
    parser.add_argument(
        "--transport",
        choices=sorted({*TRANSPORTS} - {"rdma"}),
        default="zmq",
        help="transport between the processes (default: %(default)s)",
    )
    parser.add_argument("--runs", type=int, default=50, help="runs of the case bits (default: 50)")
    parser.add_argument(
        "--steps", type=int, default=500, help="steps of the case committed (default: 500)"
    )
    parser.add_argument(
        "--every",
        type=float,
        nargs="+",
        default=elastic_committed.EVERY,
        help="steps in which one process dies, in each job of the case (default: 6 1.5)",
    )
    parser.add_argument(
        "--step-seconds",
        type=float,
        default=0.5,
        help="seconds of the computation in these steps (default: 0.5)",
    )
    parser.add_argument(
        "--link",
        metavar="RATE",
        help="for overhead: give each process a link of this rate, as in 1gbit (needs root)",
    )
    parser.add_argument("--seed", type=int, default=1, help="chooses victims and moments")


def picture(options: argparse.Namespace) -> Draw:
    """Return the function that draws the gaps."""
    from bench import elastic_plot

    return elastic_plot.draw


def run(options: argparse.Namespace) -> list[Case]:
    """Return all cases. Raises :class:`BenchError` if one cannot run."""
    wanted = set(options.only.split(","))
    if unknown := wanted - set(CASES):
        raise BenchError(
            f"--only: unknown: {', '.join(sorted(unknown))}; expected {', '.join(CASES)}"
        )
    if options.link and (reason := network.why_not()):
        raise BenchError(f"--link: {reason}")
    rng, turns = random.Random(options.seed), 2 if options.quick else 7
    cases: list[Case] = []
    if "server-gap" in wanted:
        cases += [server_gap(model, options.transport, rng, turns) for model in MODELS]
    if "silent-gap" in wanted:
        cases += [silent_gap(model, options.transport, rng, (turns + 1) // 2) for model in MODELS]
    if "worker-gap" in wanted:
        cases += [worker_gap(model, options.transport, rng, turns) for model in MODELS]
    if "replace" in wanted:
        cases += [replace(model, options.transport, rng, turns) for model in MODELS]
    if "scheduler-gap" in wanted:
        away = 3.0 if options.quick else 10.0
        cases += [scheduler_gap(model, options.transport, away) for model in MODELS]
    if "committed" in wanted:
        steps = min(options.steps, 24 if options.quick else 10**6)
        for every in options.every:
            cases += elastic_committed.committed(
                options.transport, rng, every, steps, options.step_seconds
            )
    if "bits" in wanted:
        runs = min(options.runs, 2 if options.quick else 10**6)
        cases += elastic_bits.bits(options.transport, rng, runs)
    if "overhead" in wanted:
        starts, turns = (1, 3) if options.quick else (4, 5)
        cases += elastic_overhead.overhead(options.transport, starts, turns, options.link)
    return cases


def strike(
    model: str, transport: str, rng: random.Random, number: int, **environment: str
) -> float:
    """Send a signal to a server of a job that trains.

    Returns how much longer the longest later step took than the median one before, in seconds.
    Raises :class:`BenchError` if workers have different weights.
    """
    before, after = MODELS[model]
    modules = dict.fromkeys(range(WORKERS), "bench.elastic_worker")
    environment = {"BPSX_ELASTIC": "servers", **environment}
    with Job(WORKERS, 2, transport, environment, modules) as job:
        job.ask("begin", model=model, steps=before + after)
        job.ask("wait_for", count=before, seconds=_SECONDS)
        time.sleep(rng.random() * 0.05)  # anywhere within a step
        victim, struck = rng.choice(job.servers), time.monotonic()
        victim.send_signal(number)
        try:
            found = job.ask("end", timeout=_SECONDS + 10, seconds=_SECONDS)
        finally:
            victim.send_signal(signal.SIGCONT)
    if len({digest for _, digest in found}) > 1:
        raise BenchError(f"{model}: workers have different weights")
    return max(excess(times, struck) for times, _ in found)


def excess(times: Sequence[float], struck: float) -> float:
    """Return the longest step that ended after ``struck`` less the median of those before."""
    steps = [(end, end - begin) for begin, end in zip(times, times[1:])]
    later = [seconds for end, seconds in steps if end > struck]
    if not later:
        raise BenchError("the training was over before the server was struck")
    return max(later) - statistics.median(seconds for end, seconds in steps if end <= struck)


def server_gap(model: str, transport: str, rng: random.Random, turns: int) -> Case:
    gaps = []
    for turn in range(turns):
        progress(f"server-gap, {model}: turn {turn + 1} of {turns}")
        gaps.append(strike(model, transport, rng, signal.SIGKILL))
    note = "kill -9 of one of 2 servers: longest step from then on, less the median step before"
    return median_case(f"server-gap-{model}", gaps, "s", target="<= 1", note=note)


def silent_gap(model: str, transport: str, rng: random.Random, turns: int) -> Case:
    heartbeats = {"PS_HEARTBEAT_INTERVAL": str(_INTERVAL), "PS_HEARTBEAT_TIMEOUT": str(_TIMEOUT)}
    gaps = []
    for turn in range(turns):
        progress(f"silent-gap, {model}: turn {turn + 1} of {turns}")
        gap = strike(model, transport, rng, signal.SIGSTOP, **heartbeats)
        gaps.append(max(0.0, gap - _INTERVAL - _TIMEOUT))
    note = f"SIGSTOP: the same, less interval and timeout of heartbeats, {_INTERVAL + _TIMEOUT:g} s"
    return median_case(f"silent-gap-{model}", gaps, "s", target="<= 1", note=note)


def worker_gap(model: str, transport: str, rng: random.Random, turns: int) -> Case:
    """Kill a worker; the others must end with the same weights."""
    gaps = []
    for turn in range(turns):
        progress(f"worker-gap, {model}: turn {turn + 1} of {turns}")
        gaps.append(lose_worker(model, transport, rng))
    note = f"kill -9 of one of {WORKERS + 1} workers: longest step of the others, less the median"
    return median_case(f"worker-gap-{model}", gaps, "s", target="<= 1", note=note)


def lose_worker(model: str, transport: str, rng: random.Random) -> float:
    """Return how much longer the longest step after a worker's death took than the median one.

    Raises :class:`BenchError` if the others have different weights.
    """
    before, after = MODELS[model]
    modules = dict.fromkeys(range(WORKERS + 1), "bench.elastic_worker")
    with Job(WORKERS + 1, 2, transport, {"BPSX_ELASTIC": "shrink"}, modules) as job:
        job.ask("begin", model=model, steps=before + after)
        job.ask("wait_for", count=before, seconds=_SECONDS)
        time.sleep(rng.random() * 0.05)  # anywhere within a step
        victim, struck = job.workers.pop(rng.randrange(WORKERS + 1)), time.monotonic()
        victim.process.kill()
        victim.close()
        found = job.ask("end", timeout=_SECONDS + 10, seconds=_SECONDS)
    if len({digest for _, digest in found}) > 1:
        raise BenchError(f"{model}: the workers that are left have different weights")
    return max(excess(times, struck) for times, _ in found)


def replace(model: str, transport: str, rng: random.Random, turns: int) -> Case:
    """Kill a worker and start another, which gets the model from the others."""
    entries, stops = [], []
    for turn in range(turns):
        progress(f"replace, {model}: turn {turn + 1} of {turns}")
        entry, stop = replace_worker(model, transport, rng)
        entries.append(entry)
        stops.append(stop)
    note = (
        "a new worker, from its init() to the end of its first step; the others stood still for"
        f" {statistics.median(stops):.2f} s, in which it was started, too"
    )
    return median_case(f"replace-{model}", entries, "s", target="<= 5", note=note)


def replace_worker(model: str, transport: str, rng: random.Random) -> tuple[float, float]:
    """Return the seconds from init() to the first step's end of a worker that joins a job.

    The second number is the longest step of the others, less the median one before. Raises
    :class:`BenchError` if the workers have different weights.
    """
    before, after = MODELS[model]
    modules = dict.fromkeys(range(WORKERS + 1), "bench.elastic_joiner")
    environment = {"BPSX_ELASTIC": "replace", "BPSX_ELASTIC_WAIT": "60"}
    with Job(WORKERS + 1, 2, transport, environment, modules) as job:
        job.ask("begin", model=model, steps=before + after)
        job.ask("wait_for", step=before, seconds=_SECONDS)
        which, struck = rng.randrange(WORKERS + 1), time.monotonic()
        newcomer = job.replace_worker(which)
        newcomer.ask("init", timeout=_SECONDS)
        newcomer.ask("begin", model=model, steps=before + after)
        found = job.ask("end", timeout=_SECONDS + 10, seconds=_SECONDS)
    if len({digest for *_, digest in found}) > 1:
        raise BenchError(f"{model}: the workers have different weights")
    began, times, _ = found.pop(which)
    return times[0] - began, max(excess(times, struck) for _, times, _ in found)


def scheduler_gap(model: str, transport: str, away: float) -> Case:
    """Steps without a scheduler for ``away`` seconds, against those before and after.

    These are weighted alike, as a machine may become faster or slower meanwhile.
    """
    progress(f"scheduler-gap, {model}")
    modules = dict.fromkeys(range(WORKERS), "bench.elastic_worker")
    with Job(WORKERS, 2, transport, {"BPSX_ELASTIC": "servers"}, modules) as job:
        assert job.scheduler is not None
        job.ask("begin", model=model, steps=2 * _AHEAD)
        job.ask("wait_for", count=MODELS[model][0], seconds=_SECONDS)
        begun, steps = time.monotonic(), train_on(job, away, 2 * _AHEAD)
        job.scheduler.kill()
        job.scheduler.wait()
        killed, steps = time.monotonic(), train_on(job, away, steps)
        job.start_scheduler_again()
        started = time.monotonic()
        train_on(job, away, steps)
        found = job.ask("end", timeout=_SECONDS + 10, seconds=_SECONDS)
    if len({digest for _, digest in found}) > 1:
        raise BenchError(f"{model}: workers have different weights")
    times, _ = found[0]
    spans = [(end, end - begin) for begin, end in zip(times, times[1:]) if begin >= begun]
    before = [seconds for end, seconds in spans if end <= killed]
    without = [seconds for end, seconds in spans if killed < end <= started]
    after = [seconds for end, seconds in spans if started < end]
    usual = (statistics.median(before) + statistics.median(after)) / 2
    return Case(
        f"scheduler-gap-{model}",
        statistics.median(without) / usual,
        "x",
        target="<= 1.05",
        samples=(max(without) / usual, max(before + after) / usual),
        note=(
            f"median of the {len(without)} steps without a scheduler, of the {len(before)} before"
            f" and {len(after)} after it ({1e3 * usual:.1f} ms); samples: the longest of both"
        ),
    )


def train_on(job: Job, seconds: float, steps: int) -> int:
    """Let a job train, whose workers have been told to make ``steps`` steps; returns how many now.

    They never run out of steps.
    """
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if steps - min(job.ask("passed")) < _AHEAD:
            steps += _AHEAD
            job.ask("more", steps=_AHEAD)
        time.sleep(0.01)
    return steps
