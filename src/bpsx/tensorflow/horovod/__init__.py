"""Horovod's names for TensorFlow: ``import bpsx.tensorflow.horovod as hvd``.

It replaces ``import horovod.tensorflow as hvd``: the names of ``horovod.tensorflow`` 0.28, with its
arguments, order and defaults, built on :mod:`bpsx.tensorflow`. Features that summation servers lack
(Adasum, process sets of some of the workers) raise a :class:`~bpsx.errors.ConfigError` that names
the alternative. Questions about MPI, gloo, NCCL and the like return False: none of them is in use.
docs/start/migrating.md lists all names.

Thread-safety is that of :mod:`bpsx.tensorflow`.
"""

from __future__ import annotations

from importlib import import_module as _import_module
from typing import Any

from bpsx.api.verbs import local_rank, local_size, rank, shutdown, size
from bpsx.errors import BpsxError as HorovodInternalError
from bpsx.plugin.horovod import (
    ProcessSet,
    ReduceOp,
    cross_rank,
    cross_size,
    global_process_set,
    is_homogeneous,
    is_initialized,
    no,
    start_timeline,
    stop_timeline,
)
from bpsx.tensorflow import elastic
from bpsx.tensorflow.compression import Compression
from bpsx.tensorflow.horovod.gathers import (
    allgather,
    alltoall,
    broadcast,
    broadcast_,
    grouped_allgather,
)
from bpsx.tensorflow.horovod.job import (
    add_process_set,
    barrier,
    init,
    join,
    local_rank_op,
    local_size_op,
    process_set_included_op,
    rank_op,
    remove_process_set,
    size_op,
)
from bpsx.tensorflow.horovod.objects import allgather_object, broadcast_object, broadcast_object_fn
from bpsx.tensorflow.horovod.optimizer import DistributedOptimizer
from bpsx.tensorflow.horovod.reductions import (
    allreduce,
    grouped_allreduce,
    grouped_reducescatter,
    handle_average_backwards_compatibility,
    reducescatter,
)
from bpsx.tensorflow.horovod.training import (
    DistributedGradientTape,
    PartialDistributedGradientTape,
    broadcast_variables,
)
from bpsx.tensorflow.variables import BroadcastGlobalVariablesHook, broadcast_global_variables

Average, Sum, Adasum = ReduceOp.Average, ReduceOp.Sum, ReduceOp.Adasum
Min, Max, Product = ReduceOp.Min, ReduceOp.Max, ReduceOp.Product

mpi_threads_supported = mpi_enabled = mpi_built = gloo_enabled = gloo_built = no
nccl_built = ddl_built = ccl_built = cuda_built = rocm_built = no

__all__ = [
    "Adasum",
    "Average",
    "BroadcastGlobalVariablesHook",
    "Compression",
    "DistributedGradientTape",
    "DistributedOptimizer",
    "HorovodInternalError",
    "Max",
    "Min",
    "PartialDistributedGradientTape",
    "ProcessSet",
    "Product",
    "Sum",
    "SyncBatchNormalization",
    "add_process_set",
    "allgather",
    "allgather_object",
    "allreduce",
    "alltoall",
    "barrier",
    "broadcast",
    "broadcast_",
    "broadcast_global_variables",
    "broadcast_object",
    "broadcast_object_fn",
    "broadcast_variables",
    "ccl_built",
    "cross_rank",
    "cross_size",
    "cuda_built",
    "ddl_built",
    "elastic",
    "global_process_set",
    "gloo_built",
    "gloo_enabled",
    "grouped_allgather",
    "grouped_allreduce",
    "grouped_reducescatter",
    "handle_average_backwards_compatibility",
    "init",
    "is_homogeneous",
    "is_initialized",
    "join",
    "local_rank",
    "local_rank_op",
    "local_size",
    "local_size_op",
    "mpi_built",
    "mpi_enabled",
    "mpi_threads_supported",
    "nccl_built",
    "process_set_included_op",
    "rank",
    "rank_op",
    "reducescatter",
    "remove_process_set",
    "rocm_built",
    "shutdown",
    "size",
    "size_op",
    "start_timeline",
    "stop_timeline",
]


def __getattr__(name: str) -> Any:
    if name in ("SyncBatchNormalization", "keras"):  # Keras takes seconds to import
        module = _import_module("bpsx.tensorflow.keras.horovod")
        return module if name == "keras" else module.SyncBatchNormalization
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
