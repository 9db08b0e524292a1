"""Horovod's API for PyTorch: ``import bpsx.torch.horovod as hvd``.

It replaces ``import horovod.torch as hvd``. It has all of ``horovod.torch`` 0.28, with its
arguments, order and defaults, on top of :mod:`bpsx.torch`. Summation servers cannot do Adasum
and process sets of some of the workers. These raise a :class:`~bpsx.errors.ConfigError` that names
the alternative. Queries about MPI, gloo, NCCL and the
like return False, because none of them is in use. docs/start/migrating.md lists all names.

Thread-safety is that of :mod:`bpsx.torch`.
"""

from __future__ import annotations

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
from bpsx.torch import elastic
from bpsx.torch.batch_norm import SyncBatchNorm
from bpsx.torch.compression import Compression
from bpsx.torch.horovod.gathers import (
    allgather,
    allgather_async,
    alltoall,
    alltoall_async,
    broadcast,
    broadcast_,
    broadcast_async,
    broadcast_async_,
    grouped_allgather,
    grouped_allgather_async,
)
from bpsx.torch.horovod.job import add_process_set, barrier, init, join, remove_process_set
from bpsx.torch.horovod.pending import poll, synchronize
from bpsx.torch.horovod.reductions import (
    allreduce,
    allreduce_,
    allreduce_async,
    allreduce_async_,
    grouped_allreduce,
    grouped_allreduce_,
    grouped_allreduce_async,
    grouped_allreduce_async_,
    sparse_allreduce_async,
)
from bpsx.torch.horovod.scattering import (
    grouped_reducescatter,
    grouped_reducescatter_async,
    reducescatter,
    reducescatter_async,
)
from bpsx.torch.horovod.training import (
    DistributedOptimizer,
    allgather_object,
    broadcast_object,
    broadcast_optimizer_state,
    broadcast_parameters,
)

Average, Sum, Adasum = ReduceOp.Average, ReduceOp.Sum, ReduceOp.Adasum
Min, Max, Product = ReduceOp.Min, ReduceOp.Max, ReduceOp.Product

mpi_threads_supported = mpi_enabled = mpi_built = gloo_enabled = gloo_built = no
nccl_built = ddl_built = ccl_built = cuda_built = rocm_built = no

__all__ = [
    "Adasum",
    "Average",
    "Compression",
    "DistributedOptimizer",
    "HorovodInternalError",
    "Max",
    "Min",
    "ProcessSet",
    "Product",
    "Sum",
    "SyncBatchNorm",
    "add_process_set",
    "allgather",
    "allgather_async",
    "allgather_object",
    "allreduce",
    "allreduce_",
    "allreduce_async",
    "allreduce_async_",
    "alltoall",
    "alltoall_async",
    "barrier",
    "broadcast",
    "broadcast_",
    "broadcast_async",
    "broadcast_async_",
    "broadcast_object",
    "broadcast_optimizer_state",
    "broadcast_parameters",
    "ccl_built",
    "cross_rank",
    "cross_size",
    "cuda_built",
    "ddl_built",
    "global_process_set",
    "gloo_built",
    "gloo_enabled",
    "elastic",
    "grouped_allgather",
    "grouped_allgather_async",
    "grouped_allreduce",
    "grouped_allreduce_",
    "grouped_allreduce_async",
    "grouped_allreduce_async_",
    "grouped_reducescatter",
    "grouped_reducescatter_async",
    "init",
    "is_homogeneous",
    "is_initialized",
    "join",
    "local_rank",
    "local_size",
    "mpi_built",
    "mpi_enabled",
    "mpi_threads_supported",
    "nccl_built",
    "poll",
    "rank",
    "reducescatter",
    "reducescatter_async",
    "remove_process_set",
    "rocm_built",
    "shutdown",
    "size",
    "sparse_allreduce_async",
    "start_timeline",
    "stop_timeline",
    "synchronize",
]
