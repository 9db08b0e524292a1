"""Runs a test's functions in a worker of bpsx.mxnet; see :mod:`support.running`.

The functions are in separate files, ``mxnet_*_work.py``: MXNet has its own threads, and the process
that runs the tests must be able to start processes.
"""

from __future__ import annotations

import functools
import pickle
from pathlib import Path
from typing import Any

import numpy as np

from support import apart, running
from support.running import Finished, each

__all__ = ["Finished", "each", "load", "run_job", "values", "work"]

run_job = functools.partial(running.run_job, "mxnet_job")


def values(shape: Any, rank: int, dtype: str = "float32") -> np.ndarray:
    """Return small whole numbers that differ between workers."""
    return np.random.default_rng([rank, *shape]).integers(0, 20, shape).astype(dtype)


def load(file: Path) -> dict[str, Any]:
    """Load the results that a worker saved."""
    found: dict[str, Any] = pickle.loads(file.read_bytes())
    return found


def work(module_file: str, out: str, functions: list[str]) -> None:
    """Call ``functions`` between ``init`` and ``shutdown``.

    They must return objects of NumPy and Python.
    """
    import bpsx.mxnet as bps

    module = running.module_at(module_file)
    bps.init()
    results = {name: getattr(module, name)() for name in functions}
    running.place(out, bps.rank()).write_bytes(pickle.dumps(results))
    apart.assert_only("mxnet")
    bps.shutdown()
