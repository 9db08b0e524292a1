"""Horovod's names for Keras 3 on TensorFlow: ``import bpsx.keras.horovod as hvd``.

It replaces ``import horovod.keras as hvd`` and ``import horovod.tensorflow.keras as hvd``, with the
names of both in version 0.28. Where the arguments differ, they are those of
``horovod.tensorflow.keras``, which has more. :mod:`bpsx.tensorflow.horovod` lists the features that
are refused.
"""

from __future__ import annotations

from bpsx.tensorflow.horovod import (
    Adasum,
    Average,
    Compression,
    HorovodInternalError,
    ProcessSet,
    Sum,
    add_process_set,
    ccl_built,
    cross_rank,
    cross_size,
    cuda_built,
    ddl_built,
    global_process_set,
    gloo_built,
    gloo_enabled,
    init,
    is_initialized,
    local_rank,
    local_size,
    mpi_built,
    mpi_enabled,
    mpi_threads_supported,
    nccl_built,
    rank,
    remove_process_set,
    rocm_built,
    shutdown,
    size,
    start_timeline,
    stop_timeline,
)
from bpsx.tensorflow.keras import elastic
from bpsx.tensorflow.keras.horovod import callbacks
from bpsx.tensorflow.keras.horovod.batch_norm import SyncBatchNormalization
from bpsx.tensorflow.keras.horovod.optimizer import (
    DistributedOptimizer,
    PartialDistributedOptimizer,
    load_model,
)
from bpsx.tensorflow.keras.horovod.verbs import allgather, allreduce, broadcast, reducescatter
from bpsx.tensorflow.variables import broadcast_global_variables

__all__ = [
    "Adasum",
    "Average",
    "Compression",
    "DistributedOptimizer",
    "HorovodInternalError",
    "PartialDistributedOptimizer",
    "ProcessSet",
    "Sum",
    "SyncBatchNormalization",
    "add_process_set",
    "allgather",
    "allreduce",
    "broadcast",
    "broadcast_global_variables",
    "callbacks",
    "ccl_built",
    "cross_rank",
    "cross_size",
    "cuda_built",
    "ddl_built",
    "elastic",
    "global_process_set",
    "gloo_built",
    "gloo_enabled",
    "init",
    "is_initialized",
    "load_model",
    "local_rank",
    "local_size",
    "mpi_built",
    "mpi_enabled",
    "mpi_threads_supported",
    "nccl_built",
    "rank",
    "reducescatter",
    "remove_process_set",
    "rocm_built",
    "shutdown",
    "size",
    "start_timeline",
    "stop_timeline",
]
