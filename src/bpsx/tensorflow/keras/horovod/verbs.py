"""Horovod's verbs on values, for scripts with Keras; see :mod:`bpsx.tensorflow.horovod`."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from bpsx.plugin.horovod import ReduceOp
from bpsx.tensorflow import horovod as hvd
from bpsx.tensorflow.compression import Compression, Compressor


def allreduce(
    value: Any,
    name: str | None = None,
    average: bool | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    op: ReduceOp | None = None,
    compression: type[Compressor] = Compression.none,
) -> Any:
    """Return the reduction of all workers' ``value``, by default the average.

    ``value``: a tensor, or a value that converts to one.
    """
    return hvd.allreduce(
        value,
        average,
        compression=compression,
        op=op,
        name=name,
        prescale_factor=prescale_factor,
        postscale_factor=postscale_factor,
    )


def allgather(value: Any, name: str | None = None) -> tf.Tensor:
    """Return the rows of all workers' ``value``, a tensor or a value that converts to one."""
    return hvd.allgather(value, name)


def broadcast(value: Any, root_rank: int, name: str | None = None) -> tf.Tensor:
    """Return worker ``root_rank``'s ``value``, a tensor or a value that converts to one."""
    return hvd.broadcast(value, root_rank, name)


def reducescatter(
    value: Any, name: str | None = None, op: ReduceOp = ReduceOp.Average
) -> tf.Tensor:
    """Return this worker's rows of the sum or average of all workers' ``value``."""
    return hvd.reducescatter(value, op=op, name=name)
