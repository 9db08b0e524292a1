"""``bench torch``: training steps of 2 workers on this machine under bpsx.torch.

The peer is PyTorch's DistributedDataParallel with gloo.

**step**: seconds of zero_grad, forward, backward and step. A sample is the mean of a few in a row
of the slower worker; the figure is the median. Ours and the peer's take turns. Transports: *tcp* is
two workers and one server over loopback, *machine* two processes of one machine that sum in shared
memory. ``step-<model>-<transport>`` is DistributedOptimizer. The suffixes ``-barrier`` and ``-ddp``
are CrossBarrier and ``bpsx.torch.parallel``, for information. ``alone-<model>`` is a step of two
processes side by side that exchange nothing: a lower bound.

**overlap**: the share of the time with at least one gradient in progress in which this worker's
``backward()`` runs; the mean of the workers. *In progress*, from the timeline
(docs/run/tracing.md): the union of the ``total`` rows of all gradients, from the hook's push to the
result in place. *Runs*: from the call of ``backward()`` to its return, on the same clock. 1 would
mean that ``step()`` never waits; the last gradient, which is the first layer's, cannot be hidden.

**crossbarrier**: the step with CrossBarrier against the step with DistributedOptimizer, on a slow
network. Every process is in a network namespace of its own whose link sends at most 1 Gbit/s. The
model's first layers are the largest; the optimizer is AdamW; there are as many servers as workers.
Both have the options that docs/tune/tuning.md gives for slow networks. ``crossbarrier-defaults`` is
without them, for information.

**small**: processor time that the exchange of 2,000 tensors of 4 elements adds to a step, per
tensor and worker. It includes all threads of the worker and its share of the server. Beside it is
the same figure of DistributedDataParallel with gloo, which sums buckets.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from collections import defaultdict
from dataclasses import dataclass

from bench import machine, network, peers
from bench.jobs import Child, Job, ask_all, progress
from bench.report import BenchError, Case, median_case
from bench.shapes import SMALL_ELEMENTS

WORKERS = 2
MODELS = ("mlp", "gpt")
#: For tests of this benchmark.
_MORE = ("tiny",)
CASES = ("step", "overlap", "crossbarrier", "small")
_MODULES = dict.fromkeys(range(WORKERS), "bench.torch_worker")
# With two processes on few cores, more threads would measure the operating system's scheduler.
_THREADS = {"OMP_NUM_THREADS": "1"}
_RATE = "1gbit"
_SLOW = {
    "BYTEPS_PARTITION_BYTES": "256000",
    "BYTEPS_SCHEDULING_CREDIT": "2",
    "BPSX_SEND_BUFFER_KB": "128",
}
_NOTES = {
    "tcp": "2 workers and 1 server, TCP loopback",
    "machine": "2 processes of a machine, shared memory",
}


@dataclass(frozen=True)
class Plan:
    """``turns``: how often ours and the peer's take turns. ``steps``: steps of each in a turn."""

    turns: int = 8
    steps: int = 6
    overlap_steps: int = 20


QUICK = Plan(turns=2, steps=2, overlap_steps=3)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--only",
        default=",".join(CASES),
        help="cases to run, separated by commas (default: %(default)s)",
    )
    parser.add_argument(
        "--models",
        default=",".join(MODELS),
        help="models for the case step, separated by commas (default: %(default)s)",
    )


def run(options: argparse.Namespace) -> list[Case]:
    """Return all cases. Raises :class:`BenchError` if one cannot run."""
    wanted, models = options.only.split(","), options.models.split(",")
    for given, known, option in (
        (wanted, CASES, "--only"),
        (models, (*MODELS, *_MORE), "--models"),
    ):
        if unknown := set(given) - set(known):
            raise BenchError(
                f"{option}: unknown: {', '.join(sorted(unknown))}; expected {', '.join(known)}"
            )
    plan = QUICK if options.quick else Plan()
    cases: list[Case] = []
    if "step" in wanted:
        cases += step(plan, models)
    if "overlap" in wanted:
        cases += overlap(plan)
    if "crossbarrier" in wanted:
        cases += crossbarrier(plan)
    if "small" in wanted:
        cases.append(small(plan))
    return cases


def _job(
    servers: int, more: dict[str, str] | None = None, links: network.Links | None = None
) -> Job:
    return Job(
        WORKERS, servers, environment={**_THREADS, **(more or {})}, modules=_MODULES, links=links
    )


def step(plan: Plan, models: list[str]) -> list[Case]:
    """Measure both transports and the peer in turn."""
    with _job(1) as tcp, _job(0) as machine, peers.gloo(WORKERS, "bench.torch_worker") as gloo:
        jobs = {"tcp": tcp.workers, "machine": machine.workers}
        return [case for model in models for case in _step_of(model, jobs, gloo, plan)]


def _step_of(model: str, jobs: dict[str, list[Child]], gloo: list[Child], plan: Plan) -> list[Case]:
    ways = ("optimizer", "barrier", "ddp")
    ask_all(gloo, "make", workload=model, way="gloo")
    for workers in jobs.values():
        for way in ways:
            ask_all(workers, "make", workload=model, way=way)
    seconds: dict[str, list[float]] = defaultdict(list)
    for turn in range(plan.turns):
        progress(f"{model}: turn {turn + 1} of {plan.turns}")
        seconds["gloo"] += peers.slowest(
            gloo, "steps", workload=model, way="gloo", count=plan.steps
        )
        for transport, workers in jobs.items():
            for way in ways:
                seconds[f"{transport} {way}"] += peers.slowest(
                    workers, "steps", workload=model, way=way, count=plan.steps
                )
        seconds["alone"] += peers.slowest(gloo, "alone", workload=model, count=plan.steps)
    peer = 1e3 * statistics.median(seconds["gloo"])
    cases = [
        median_case(
            f"alone-{model}",
            _ms(seconds["alone"]),
            "ms",
            peer=peer,
            note="two processes that exchange nothing; DDP with gloo",
        )
    ]
    for transport, workers in jobs.items():
        for way in ways:
            _check(workers, model, way)
            name = f"step-{model}-{transport}" + ("" if way == "optimizer" else f"-{way}")
            cases.append(
                median_case(
                    name,
                    _ms(seconds[f"{transport} {way}"]),
                    "ms",
                    peer=peer,
                    target="<= 1.0" if way == "optimizer" else None,
                    note=_NOTES[transport],
                )
            )
    return cases


def _ms(seconds: list[float]) -> list[float]:
    return [1e3 * s for s in seconds]


def _check(workers: list[Child], model: str, way: str) -> None:
    if len(set(ask_all(workers, "checksum", workload=model, way=way))) != 1:
        raise BenchError(f"{model} with {way}: the workers' weights differ")


def overlap(plan: Plan) -> list[Case]:
    """Measure **overlap**: see the module's docstring."""
    cases = []
    for transport, servers in (("tcp", 1), ("machine", 0)):
        with (
            tempfile.TemporaryDirectory(prefix="bpsx-bench-") as folder,
            Job(
                WORKERS,
                servers,
                environment={**_THREADS, "BYTEPS_TRACE_DIR": folder},
                modules=_MODULES,
            ) as job,
        ):
            for model in MODELS:
                progress(f"overlap: {model}, {transport}")
                job.ask("make", workload=model, way="optimizer")
                job.ask("steps", workload=model, way="optimizer", count=2)
                found = job.ask(
                    "overlap", workload=model, way="optimizer", count=plan.overlap_steps
                )
                shares = [f["hidden"] / f["under_way"] for f in found]
                cases.append(
                    Case(
                        f"overlap-{model}-{transport}",
                        statistics.mean(shares),
                        "share",
                        samples=tuple(shares),
                        note="of the time with gradients under way, that in which backward runs",
                    )
                )
    return cases


def small(plan: Plan) -> Case:
    """Measure **small**: see the module's docstring.

    The figure is the least of all turns: other processes' work on the machine makes caches cold.
    """
    found: dict[str, list[float]] = defaultdict(list)
    with _job(1) as job, peers.gloo(WORKERS, "bench.torch_worker") as gloo:
        n = ask_all(gloo, "make", workload="small", way="gloo")[0] // SMALL_ELEMENTS
        job.ask("make", workload="small", way="optimizer")
        for turn in range(plan.turns):
            progress(f"small: turn {turn + 1} of {plan.turns}")
            for name, workers, way in (
                ("ours", job.workers, "optimizer"),
                ("gloo", gloo, "gloo"),
                ("alone", gloo, "alone"),
            ):
                before = sum(machine.cpu_seconds(server.pid) for server in job.servers)
                each = ask_all(workers, "processor", workload="small", way=way, count=plan.steps)
                servers = sum(machine.cpu_seconds(server.pid) for server in job.servers) - before
                found[name].append(
                    (statistics.mean(each) + servers / plan.steps / WORKERS) / n * 1e6
                )
    alone = min(found["alone"])
    return Case(
        "small",
        min(found["ours"]) - alone,
        "us",
        peer=max(min(found["gloo"]) - alone, 1e-3),
        samples=tuple(each - alone for each in found["ours"]),
        note=f"per tensor, besides the {alone:.3g} us of a step alone; DDP with gloo",
    )


def crossbarrier(plan: Plan) -> list[Case]:
    """Measure steps with and without CrossBarrier in turn, on slow links.

    Returns no case where network namespaces are not possible.
    """
    if reason := network.why_not():
        progress(f"crossbarrier: skipped, {reason}")
        return []
    return [
        _crossbarrier("crossbarrier", plan, _SLOW, "<= 0.9"),
        _crossbarrier("crossbarrier-defaults", plan, {}, None),
    ]


def _crossbarrier(name: str, plan: Plan, options: dict[str, str], target: str | None) -> Case:
    ways = ("optimizer", "barrier")
    names = [
        "scheduler",
        *(f"server {i}" for i in range(WORKERS)),
        *(f"worker {i}" for i in range(WORKERS)),
    ]
    with network.Links(names, _RATE) as links, _job(WORKERS, more=options, links=links) as job:
        for way in ways:
            job.ask("make", workload="front", way=way)
        seconds: dict[str, list[float]] = defaultdict(list)
        for turn in range(plan.turns):
            progress(f"{name}: turn {turn + 1} of {plan.turns}")
            for way in ways:
                seconds[way] += peers.slowest(
                    job.workers, "steps", workload="front", way=way, count=plan.steps
                )
        for way in ways:
            _check(job.workers, "front", way)
        return median_case(
            name,
            _ms(seconds["barrier"]),
            "ms",
            peer=1e3 * statistics.median(seconds["optimizer"]),
            target=target,
            note=(
                "step with CrossBarrier, large first layers, every link 1 Gbit/s; step with"
                " DistributedOptimizer"
            ),
        )
