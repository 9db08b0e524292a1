"""push_pull and broadcast of values, as scripts with Keras use them."""

from __future__ import annotations

from typing import Any

import numpy as np

from bpsx.tensorflow import ops


def push_pull(value: Any, name: str | None = None, average: bool = True) -> np.ndarray:
    """The average (or sum) over all workers of ``value``, a tensor or what becomes one, as an array. As :func:`bpsx.tensorflow.push_pull`."""
    result: np.ndarray = ops.push_pull(value, name=name, average=average).numpy()
    return result


def broadcast(value: Any, root_rank: int, name: str | None = None) -> np.ndarray:
    """Worker ``root_rank``'s ``value`` as an array. As :func:`bpsx.tensorflow.broadcast`."""
    result: np.ndarray = ops.broadcast(value, root_rank, name=name).numpy()
    return result
