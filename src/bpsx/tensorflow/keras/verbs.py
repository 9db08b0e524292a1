"""push_pull and broadcast of values, for scripts with Keras."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from bpsx.system.tracebacks import public
from bpsx.tensorflow import ops


@public
def push_pull(value: Any, name: str | None = None, average: bool = True) -> Any:
    """Return all workers' average (or sum) of ``value`` as an array; in functions a tensor.

    ``value``: a tensor, or a value that converts to one. As :func:`bpsx.tensorflow.push_pull`.
    """
    return _evaluated(ops.push_pull(value, name=name, average=average))


@public
def broadcast(value: Any, root_rank: int, name: str | None = None) -> Any:
    """Return worker ``root_rank``'s ``value`` as an array; in functions a tensor.

    As :func:`bpsx.tensorflow.broadcast`.
    """
    return _evaluated(ops.broadcast(value, root_rank, name=name))


def _evaluated(result: Any) -> Any:
    return result.numpy() if tf.executing_eagerly() else result
