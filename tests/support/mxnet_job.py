"""What a worker of a test of bpsx.mxnet does; see :mod:`support.running`.

Its functions are in files of their own, ``mxnet_*_work.py``: MXNet has threads of its own, and who
runs the tests starts processes.
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
    """Small whole numbers, others on each worker."""
    return np.random.default_rng([rank, *shape]).integers(0, 20, shape).astype(dtype)


def load(file: Path) -> dict[str, Any]:
    """What a worker has left."""
    found: dict[str, Any] = pickle.loads(file.read_bytes())
    return found


def work(module_file: str, out: str, functions: list[str]) -> None:
    """Call ``functions`` between ``init`` and ``shutdown``.

    What they return has to be made of NumPy's and Python's.
    """
    import bpsx.mxnet as bps

    module = running.module_at(module_file)
    bps.init()
    results = {name: getattr(module, name)() for name in functions}
    running.place(out, bps.rank()).write_bytes(pickle.dumps(results))
    apart.assert_only("mxnet")
    bps.shutdown()
