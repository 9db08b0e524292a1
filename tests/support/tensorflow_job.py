"""Runs a test's functions in a worker of bpsx.tensorflow; see :mod:`support.running`."""

from __future__ import annotations

import functools
import pickle
from pathlib import Path
from typing import Any

from support import apart, running
from support.running import Finished, each

__all__ = ["WORKER", "Finished", "each", "load", "run_job", "work"]

#: Whether this process is a worker. Test modules import TensorFlow under ``if WORKER:``; see
#: :mod:`support.apart`.
WORKER = False

#: Hides TensorFlow's log lines, and GPUs, which tests of the host do not use.
QUIET = {"TF_CPP_MIN_LOG_LEVEL": "2", "CUDA_VISIBLE_DEVICES": ""}
run_job = functools.partial(running.run_job, "tensorflow_job", **QUIET)


def load(file: Path) -> dict[str, Any]:
    """Load the results that a worker saved."""
    found: dict[str, Any] = pickle.loads(file.read_bytes())
    return found


def work(module_file: str, out: str, functions: list[str]) -> None:
    """Call ``functions`` between ``init`` and ``shutdown``.

    They must return objects of NumPy and Python.
    """
    global WORKER
    import tensorflow as tf

    import bpsx.tensorflow as bps

    WORKER = True

    tf.config.threading.set_inter_op_parallelism_threads(2)
    tf.config.threading.set_intra_op_parallelism_threads(1)
    module = running.module_at(module_file)
    bps.init()
    rank, results = bps.rank(), {}
    for name in functions:
        # the test must make equal what has to be equal on all workers
        tf.random.set_seed(100 + rank)
        results[name] = getattr(module, name)()
    running.place(out, rank).write_bytes(pickle.dumps(results))
    apart.assert_only("tensorflow")
    bps.shutdown()
