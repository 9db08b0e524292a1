"""``bench compress --end-to-end``: train a network with each compressor on slow links, and without.

It answers whether compression pays. 2 workers and 1 server each run in a network namespace whose
link sends at most the given rate. The two slow links have the options that docs/tune/tuning.md
gives for such links, which are the best for float32, too. The fast link has the defaults. The
network is that of examples/pytorch/digits.py, but wider: 9.9 MB of gradients a step.

All ways begin with the same weights and see the same pictures in the same order with the same
learning rate, which falls from epoch to epoch. They take turns, an epoch each. With the same
options the bits do not depend on the link, which is checked.

**step-<link>-<way>**: milliseconds of a step of the slower worker, median.

**wire-<way>**: bytes that a worker sends and receives in a step, all headers included, on the
slowest link.

**accuracy-<way>**: share of the test pictures that are recognised after the last epoch (its
samples: after each epoch), on the slowest link.

**until-<link>-<way>**: seconds of training to the end of the first epoch after which the accuracy
is at least 95 %; no case where it never is.

The peer is float32 in the same run. *alone*: no exchange.

**Pays**: reaches 95 % in at most 0.9 of the time of float32 and of bfloat16. bfloat16 costs a user
four lines and almost no processor time.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from bench import network
from bench.jobs import Job, ask_all, progress
from bench.report import BenchError, Case, median_case

WORKERS = 2
#: Pictures of one worker in a step; width of the two hidden layers.
BATCH, WIDTH = 64, 1536
LEARNING_RATE, EPOCHS = 0.05, 12
#: Accuracy that all ways should reach.
ENOUGH = 0.95
_SLOW = {
    "BYTEPS_PARTITION_BYTES": "256000",
    "BYTEPS_SCHEDULING_CREDIT": "2",
    "BPSX_SEND_BUFFER_KB": "128",
}
#: Options of the job by link.
LINKS: Mapping[str, Mapping[str, str]] = {"10gbit": {}, "1gbit": _SLOW, "200mbit": _SLOW}
#: ``compression_params`` by way; None: the way is not one of bpsx's compressors.
WAYS: Mapping[str, Mapping[str, Any] | None] = {
    "alone": None,
    "float32": None,
    "bfloat16": None,
    # "corrected", since the learning rate falls.
    "onebit": {"compressor": "onebit", "scaling": True, "ef": "corrected"},
    "topk": {"compressor": "topk", "k": 0.01, "ef": "corrected"},
    "randomk": {"compressor": "randomk", "k": 0.01, "ef": "sparse", "seed": 1},
    "dithering-linear": {"compressor": "dithering", "k": 2, "seed": 1},
    "dithering-natural": {"compressor": "dithering", "k": 4, "partition": "natural", "seed": 1},
    "powersgd": {"compressor": "powersgd", "rank": 4, "ef": "vanilla"},
}
#: Ways that always run: the compressors are compared with them.
BASE = ("alone", "float32", "bfloat16")
_SECONDS = 600.0


@dataclass
class Run:
    """One way on one link.

    ``steps``: seconds of each step. ``moved``: bytes sent and received in a step. ``scores``:
    accuracy after each epoch. ``seconds``: seconds of all training up to the end of each epoch.
    """

    steps: list[float] = field(default_factory=list)
    moved: float = 0.0
    scores: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)

    @property
    def step(self) -> float:
        """Median of a step in milliseconds."""
        return 1e3 * statistics.median(self.steps)

    @property
    def until(self) -> float | None:
        """Seconds until the accuracy is reached; None if it never was."""
        return next((s for s, score in zip(self.seconds, self.scores) if score >= ENOUGH), None)


#: Runs by link, then by way.
Runs = dict[str, dict[str, Run]]


def cases(only: str, quick: bool) -> list[Case]:
    """Run the benchmark for the ways whose name contains ``only``.

    Raises :class:`BenchError` if it cannot run.
    """
    ways = [way for way in WAYS if way in BASE or only in way]
    if len(ways) == len(BASE):
        raise BenchError(
            f"--only {only!r}: unknown; expected {', '.join(w for w in WAYS if w not in BASE)}"
        )
    if reason := network.why_not():
        raise BenchError(f"--end-to-end needs links that can be slowed down: {reason}")
    runs = {link: _trained(link, ways, *((2, 6) if quick else (EPOCHS, None))) for link in LINKS}
    _check(runs)
    found = report(runs)
    for line in verdict(runs):
        progress(line)
    return found


def _trained(link: str, ways: list[str], epochs: int, steps: int | None) -> dict[str, Run]:
    """Train all ways in turn, an epoch each, or only its first ``steps`` steps."""
    runs = {way: Run() for way in ways}
    modules = dict.fromkeys(range(WORKERS), "bench.end_to_end_worker")
    with (
        network.Links(
            ["scheduler", "server 0", *(f"worker {i}" for i in range(WORKERS))], link
        ) as links,
        Job(
            WORKERS,
            1,
            environment={"OMP_NUM_THREADS": "1", **LINKS[link]},
            modules=modules,
            links=links,
        ) as job,
    ):
        for way in ways:
            ask_all(job.workers, "make", timeout=_SECONDS, way=way)
        for epoch in range(epochs):
            progress(f"{link}: epoch {epoch + 1} of {epochs}")
            for way, run in runs.items():
                _add(
                    run,
                    ask_all(
                        job.workers, "steps", timeout=_SECONDS, way=way, epoch=epoch, count=steps
                    ),
                    job.ask("score", way=way),
                )
        for way in ways:
            if way != "alone" and len(set(job.ask("checksum", way=way))) != 1:
                raise BenchError(f"{way}: the workers' weights differ")
    return runs


def _add(run: Run, told: list[dict[str, Any]], scores: list[float]) -> None:
    run.steps += [max(both) for both in zip(*(t["steps"] for t in told))]
    run.moved = statistics.mean(t["bytes"] for t in told)
    run.seconds.append((run.seconds[-1] if run.seconds else 0.0) + max(t["seconds"] for t in told))
    run.scores.append(scores[0])


def _check(runs: Runs) -> None:
    for one, other in itertools.pairwise(runs):
        ways = runs[one] if LINKS[one] == LINKS[other] else {}
        if unlike := [way for way, run in ways.items() if run.scores != runs[other][way].scores]:
            raise BenchError(
                f"{', '.join(unlike)}: the accuracy depends on the link, so bits were lost on the"
                " way"
            )


def report(runs: Runs) -> list[Case]:
    """Return the cases that the module's docstring describes."""
    found = []
    for link, ways in runs.items():
        plain, half = ways["float32"].step, ways["bfloat16"].step
        found += [
            median_case(
                f"step-{link}-{way}",
                [1e3 * s for s in run.steps],
                "ms",
                peer=plain,
                note=f"{run.step / half:.2f} of bfloat16's",
            )
            for way, run in ways.items()
        ]
    ways = {way: run for way, run in list(runs.values())[-1].items() if way != "alone"}
    plain_run = ways["float32"]
    found += [
        Case(
            f"wire-{way}",
            run.moved / 1e6,
            "MB",
            peer=plain_run.moved / 1e6,
            note="sent and received by a worker in a step",
        )
        for way, run in ways.items()
    ]
    found += [
        Case(
            f"accuracy-{way}",
            100 * run.scores[-1],
            "%",
            peer=100 * plain_run.scores[-1],
            samples=[100 * s for s in run.scores],
            note=_reaches(run),
        )
        for way, run in ways.items()
    ]
    for link, on in runs.items():
        found += [
            Case(
                f"until-{link}-{way}",
                run.until,
                "s",
                peer=on["float32"].until,
                note=f"to {ENOUGH:.0%}",
            )
            for way, run in on.items()
            if way in ways and run.until is not None
        ]
    return found


def _reaches(run: Run) -> str:
    first = next((i + 1 for i, score in enumerate(run.scores) if score >= ENOUGH), None)
    return f"after {len(run.scores)} epochs; " + (
        f"never {ENOUGH:.0%}" if first is None else f"{ENOUGH:.0%} after {first}"
    )


def verdict(runs: Runs) -> list[str]:
    """Return sentences that say where compression pays and where it does not."""
    lines = []
    for link, ways in runs.items():
        bound = min(
            (u for way in ("float32", "bfloat16") if (u := ways[way].until) is not None),
            default=None,
        )
        if bound is None:
            return [
                "too little training to say which compression pays: float32 has not reached"
                f" {ENOUGH:.0%}"
            ]
        judged = {way: _judged(run.until, bound) for way, run in ways.items() if way not in BASE}
        lines += [f"{link}: {_list(judged, True)}", f"{link}: {_list(judged, False)}"]
    return [line for line in lines if not line.endswith(": ")]


def _judged(until: float | None, bound: float) -> tuple[bool, str]:
    if until is None:
        return False, f"never {ENOUGH:.0%}"
    return until <= 0.9 * bound, f"{until / bound:.2f} of the time"


def _list(judged: Mapping[str, tuple[bool, str]], pays: bool) -> str:
    named: Iterable[str] = [f"{way} ({why})" for way, (does, why) in judged.items() if does is pays]
    joined = ", ".join(named)
    verdict = "pays" if pays else "does not pay"
    return joined and f"{verdict}, against the better of float32 and bfloat16: {joined}"
