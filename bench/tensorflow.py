"""``bench tensorflow``: bpsx.tensorflow with 2 workers and 1 server on this machine, over TCP.

**overhead**: seconds in which 100 gradients of 256 KiB are averaged, from existing tensors to the
resulting tensors. It is measured in a ``tf.function`` (100 operations) and in eager code (one
call). The peer is the same bytes through the NumPy API (100 ``push_pull_async`` and their waits).

**step**: seconds of a training step of a small convolutional network in a ``tf.function``. The peer
is ``tf.distribute.MultiWorkerMirroredStrategy`` with its own collectives between two processes.
Both have the same model, data and optimizer. ``step-alone`` is the step without any exchange.

All take turns; a sample is the mean of a few in a row, of the slower worker.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import socket
import statistics
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

from bench import peers
from bench.jobs import Child, Job, ask_all, closing_all, progress
from bench.report import BenchError, Case, median_case

WORKERS = 2
CASES = ("overhead", "step")
_MODULE = "bench.tensorflow_worker"
_QUIET = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "TF_CPP_MIN_LOG_LEVEL": "2"}


@dataclass(frozen=True)
class Plan:
    """``turns``: how often all take turns. ``calls``: calls of each in a turn."""

    turns: int = 10
    calls: int = 10


QUICK = Plan(turns=2, calls=2)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--only",
        default=",".join(CASES),
        help="cases to run, separated by commas (default: %(default)s)",
    )


def run(options: argparse.Namespace) -> list[Case]:
    """Return all cases. Raises :class:`BenchError` if one cannot run."""
    wanted = options.only.split(",")
    if unknown := set(wanted) - set(CASES):
        raise BenchError(
            f"--only: unknown: {', '.join(sorted(unknown))}; expected {', '.join(CASES)}"
        )
    plan = QUICK if options.quick else Plan()
    with Job(WORKERS, 1, environment=_QUIET, modules=dict.fromkeys(range(WORKERS), _MODULE)) as job:
        cases = overhead(job, plan) if "overhead" in wanted else []
        return cases + (step(job, plan) if "step" in wanted else [])


def overhead(job: Job, plan: Plan) -> list[Case]:
    """Measure **overhead**: see the module's docstring."""
    ways = {"function": "100 operations of a tf.function", "eager": "one call of eager code"}
    seconds: dict[str, list[float]] = defaultdict(list)
    for turn in range(plan.turns):
        progress(f"overhead: turn {turn + 1} of {plan.turns}")
        for way in ("numpy", *ways):
            seconds[way] += peers.slowest(job.workers, "exchange", way=way, count=plan.calls)
    peer = 1e3 * statistics.median(seconds["numpy"])
    return [
        median_case(
            f"overhead-{way}",
            _ms(seconds[way]),
            "ms",
            peer=peer,
            target="<= 1.1",
            note=f"{what}; the same bytes through NumPy",
        )
        for way, what in ways.items()
    ]


def step(job: Job, plan: Plan) -> list[Case]:
    """Measure **step**: see the module's docstring."""
    ways = {
        "step": "DistributedGradientTape in a tf.function",
        "step-keras": "Keras's optimizer, distributed, in a tf.function",
        "step-alone": "no exchange",
    }
    seconds: dict[str, list[float]] = defaultdict(list)
    with mirrored() as group:
        for turn in range(plan.turns):
            progress(f"step: turn {turn + 1} of {plan.turns}")
            for way in ways:
                seconds[way] += peers.slowest(job.workers, "steps", way=way, count=plan.calls)
            seconds["peer"] += peers.slowest(group, "steps", way="mirrored", count=plan.calls)
        for workers, way in (
            (job.workers, "step"),
            (job.workers, "step-keras"),
            (group, "mirrored"),
        ):
            if len(set(ask_all(workers, "checksum", way=way))) != 1:
                raise BenchError(f"{way}: the workers' weights differ")
    peer = 1e3 * statistics.median(seconds["peer"])
    return [
        median_case(
            way,
            _ms(seconds[way]),
            "ms",
            peer=peer,
            target=None if way == "step-alone" else "<= 1.0",
            note=f"{what}; MultiWorkerMirroredStrategy",
        )
        for way, what in ways.items()
    ]


def _ms(seconds: list[float]) -> list[float]:
    return [1e3 * s for s in seconds]


@contextlib.contextmanager
def mirrored() -> Iterator[list[Child]]:
    """Context manager of the peer's processes."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(WORKERS)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        places = [f"127.0.0.1:{one.getsockname()[1]}" for one in sockets]
    cluster = {"worker": places}
    with closing_all(
        Child(
            _MODULE,
            f"peer {i}",
            TF_CONFIG=json.dumps({"cluster": cluster, "task": {"type": "worker", "index": i}}),
            **_QUIET,
        )
        for i in range(WORKERS)
    ) as group:
        ask_all(group, "init")
        yield group
