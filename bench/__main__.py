"""``python -m bench``: list the benchmarks; ``python -m bench NAME``: run one."""

from __future__ import annotations

import argparse
import importlib
import signal
import sys
from collections.abc import Mapping, Sequence
from datetime import date
from typing import Any

from bench import machine
from bench.report import BenchError, Case, as_json, as_table, read

#: Name -> description. A benchmark is a module with ``add_arguments(parser)`` and
#: ``run(options) -> list[Case]``; one with a picture has ``picture(options) -> Draw``, too.
BENCHES = {
    "push_pull": (
        "rate, latency, spin, idle and steady state of a job of 2 workers; against gloo's"
        " all_reduce and the transport's limits"
    ),
    "cores": (
        "rate, latency and CPU time over TCP by number of cores; against no I/O threads, gloo's"
        " all_reduce and plain sockets"
    ),
    "sum": "the servers' kernels; against numpy.add and against float32; time to load them",
    "compress": (
        "the compressors' kernels; against memcpy. --end-to-end: training on slow links; against"
        " float32 and bfloat16"
    ),
    "trace": "step time with every step recorded, on workers and server; against the same without",
    "trust": (
        "seconds from a process's death to the exceptions, by role and stage; joining, start and"
        " stop of a job"
    ),
    "elastic": (
        "seconds that a job stands still when it loses a process; steps that count; equal weights;"
        " cost of being ready for it, against the same without"
    ),
    "chaos": "jobs whose processes are killed at random: longest step, equal weights",
    "scheduler": "the scheduler's time per message, with 64 and with 1,024 simulated workers",
    "soak": "jobs started and stopped 1,000 times: failures, leaks, leftovers",
    "torch": (
        "step time of an MLP and a small GPT; against DistributedDataParallel with gloo; overlap"
        " with backward; CrossBarrier"
    ),
    "tensorflow": (
        "100 gradients against the NumPy API; a training step against MultiWorkerMirroredStrategy"
    ),
    "gpu": (
        "tensors on GPUs against PyTorch's NCCL: rates, latency, steps of large networks, on slow"
        " links too; against CPU tensors"
    ),
    "gpu8": (
        "a machine of two to eight GPUs in under ten minutes: its tests, rates, which GPUs copy to"
        " the host, four imitated machines; against NCCL and PyTorch's hooks"
    ),
    "shaped": (
        "100 MB between 4 machines and 0 to 4 spare ones on slow links; against gloo's ring and"
        " against the optimum"
    ),
    "advise": "step times that bpsx-run advise predicts; against steps on slow links",
    "growth": (
        "time of a push_pull by number of workers, 2 to 16, on links of 1 Gbit/s; against gloo's"
        " all_reduce"
    ),
    "far": "rate between machines that are far apart, by default; against larger send buffers",
    "install": "seconds of each step of make demo in a fresh copy; size of its environment",
    "demo": "step time of examples/pytorch/digits.py; against DistributedDataParallel with gloo",
}


_MODULES = {"shaped": "scaling"}


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m bench", description="Benchmarks of bpsx against peers in the same run."
    )
    names = parser.add_subparsers(dest="bench", metavar="NAME")
    for name, about in BENCHES.items():
        module = importlib.import_module(f"bench.{_MODULES.get(name, name)}")
        one = names.add_parser(name, help=about, description=about)
        one.add_argument(
            "--json",
            action="store_true",
            help="one JSON object on standard output; the table goes to standard error",
        )
        one.add_argument(
            "--quick",
            action="store_true",
            help="fewer repetitions, to check that the benchmark runs; do not quote the figures",
        )
        module.add_arguments(one)
        if picture := getattr(module, "picture", None):
            _add_picture(one)
        one.set_defaults(run=module.run, picture=picture)
    return parser


def _add_picture(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--plot", metavar="FILE", help="draw what was found (.svg, .png); needs matplotlib"
    )
    parser.add_argument(
        "--redraw",
        metavar="JSON",
        help="measure nothing; take the figures that an earlier run printed with --json",
    )


def _found(options: argparse.Namespace) -> tuple[Mapping[str, Any], Sequence[Case]]:
    """Return the machine and the cases, measured now or by an earlier run."""
    if options.picture and options.redraw:
        return read(options.redraw, options.bench)
    return {"date": date.today().isoformat(), **machine.describe()}, options.run(options)


def main(arguments: list[str] | None = None) -> int:
    """Run the benchmark that the command line names.

    Returns the exit status: 0 whatever the figures, 1 if the benchmark could not run, 2 for wrong
    arguments, 130 after an interrupt.
    """
    options = _parser().parse_args(arguments)
    if options.bench is None:
        print("\n".join(f"{name:<10} {about}" for name, about in BENCHES.items()))
        return 0
    # SIGTERM raises KeyboardInterrupt, so that namespaces and processes are cleaned up.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        # Before the long run, since matplotlib may be missing.
        draw = options.picture(options) if options.picture and options.plot else None
        about, cases = _found(options)
        _print(options, about, cases)
        if draw is not None:
            draw(about, cases, options.plot)
    except BenchError as error:
        print(f"bench {options.bench}: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"bench {options.bench}: interrupted", file=sys.stderr)
        return 130
    return 0


def _print(options: argparse.Namespace, about: Mapping[str, Any], cases: Sequence[Case]) -> None:
    table = as_table(options.bench, about, cases)
    print(table, file=sys.stderr if options.json else sys.stdout)
    if options.json:
        print(as_json(options.bench, about, cases))


if __name__ == "__main__":
    sys.exit(main())
