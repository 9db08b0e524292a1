"""``python -m bench``: list the benchmarks; ``python -m bench NAME``: run one."""

from __future__ import annotations

import argparse
import importlib
import signal
import sys

from bench import machine
from bench.report import BenchError, as_json, as_table

#: Name -> description. A benchmark is a module with ``add_arguments(parser)`` and
#: ``run(options) -> list[Case]``.
BENCHES = {
    "push_pull": (
        "rate, latency, spin, idle and steady state of a job of 2 workers; against gloo's"
        " all_reduce and the transport's walls"
    ),
    "sum": "the servers' kernels; against numpy.add and against float32; time to load them",
    "compress": (
        "the compressors' kernels; against memcpy. --end-to-end: training on slow links; against"
        " float32 and bfloat16"
    ),
    "trace": "step time with every step recorded, on workers and server; against the same without",
    "trust": (
        "seconds from a death to the exceptions, by role and stage; joining, start and stop of"
        " a job"
    ),
    "scheduler": "what one message costs the scheduler, of 64 and of 1,024 simulated workers",
    "soak": "jobs started and stopped 1,000 times: failures, leaks, leftovers",
    "torch": (
        "step time of an MLP and a small GPT; against DistributedDataParallel with gloo; what hides"
        " behind backward; CrossBarrier"
    ),
    "tensorflow": (
        "100 gradients against the NumPy API; a training step against MultiWorkerMirroredStrategy"
    ),
    "gpu": (
        "tensors on GPUs against PyTorch's NCCL: rates, latency, steps of large networks, on slow"
        " links too; against CPU tensors"
    ),
    "shaped": (
        "100 MB between 4 machines and 0 to 4 spare ones on slow links; against gloo's ring and"
        " against the optimum"
    ),
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
            help="fewer repetitions: to see that it runs, not to quote",
        )
        module.add_arguments(one)
        one.set_defaults(run=module.run)
    return parser


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
    about = machine.describe()
    try:
        cases = options.run(options)
    except BenchError as error:
        print(f"bench {options.bench}: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"bench {options.bench}: interrupted", file=sys.stderr)
        return 130
    print(as_table(options.bench, about, cases), file=sys.stderr if options.json else sys.stdout)
    if options.json:
        print(as_json(options.bench, about, cases))
    return 0


if __name__ == "__main__":
    sys.exit(main())
