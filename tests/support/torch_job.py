"""Runs a test's functions in a worker of bpsx.torch; see :mod:`support.running`."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import torch

from support import apart, running
from support.running import HERE, Finished, each, launch

__all__ = ["HERE", "Finished", "each", "launch", "load", "run_job", "source_of", "work"]

source_of = functools.partial(running.source_of, "torch_job")
run_job = functools.partial(running.run_job, "torch_job")


def load(file: Path) -> dict[str, Any]:
    """Load the results that a worker saved."""
    found: dict[str, Any] = torch.load(file, weights_only=False)
    return found


def work(module_file: str, out: str, functions: list[str]) -> None:
    """Call ``functions`` between ``init`` and ``shutdown``."""
    import bpsx.torch as bps

    module = running.module_at(module_file)
    torch.set_num_threads(1)
    bps.init()
    rank, results = bps.rank(), {}
    for name in functions:
        torch.manual_seed(
            100 + rank
        )  # the test must make equal what has to be equal on all workers
        results[name] = getattr(module, name)()
    torch.save(results, running.place(out, rank))
    apart.assert_only("torch")
    bps.shutdown()
