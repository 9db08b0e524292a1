"""TensorFlow's tensors and variables for :mod:`bpsx.plugin`."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import tensorflow as tf

from bpsx.plugin.framework import Framework
from bpsx.plugin.startup import sample_of, stride_of

#: TensorFlow's classes for the graphs of branches and loops.
_BODIES = ("CondBranchFuncGraph", "WhileCondFuncGraph", "WhileBodyFuncGraph")
_NUMBER = re.compile(r"_\d+$")


class TensorFlow(Framework[Any]):
    """Tensors of eager code and of graphs, and variables of TensorFlow and Keras."""

    module = "bpsx.tensorflow"
    instead = {
        "bool": "send tf.cast(tensor, tf.uint8); its sum is the number of workers with True",
        **dict.fromkeys(
            ("complex64", "complex128"), "send tf.math.real(tensor) and tf.math.imag(tensor)"
        ),
    }

    def dtype_of(self, tensor: Any) -> str:
        return str(tensor.dtype.base_dtype.name)

    def shape_of(self, tensor: Any) -> tuple[int, ...]:
        return tuple(tensor.shape)

    def cast(self, tensor: Any, dtype: str) -> tf.Tensor:
        return tf.cast(tensor, dtype)

    def unnamed(self, verb: str, tensor: Any, rows: bool = False) -> str:
        """As the contract says in eager code; in a graph, the operation's place there."""
        if not tf.is_symbolic_tensor(tensor):
            return super().unnamed(verb, tensor, rows)
        return f"{verb}.{_place_of(tensor.graph)}/{tensor.op.name}"

    def sample(self, tensor: Any) -> bytes:
        """As the contract says; empty if it is no variable. From a GPU, only these are copied."""
        if not hasattr(tensor, "assign"):
            return b""
        try:
            value = _value_of(tensor)
            if tuple(value.shape) != tuple(tensor.shape):
                return b""
            if "CPU" in value.device:
                return sample_of(np.asarray(value))
            flat = tf.reshape(value, [-1])
            return np.asarray(flat[:: stride_of(int(flat.shape[0]))]).tobytes()
        except (tf.errors.OpError, ValueError):
            return b""

    def digest_of(self, weights: Any) -> int:
        with tf.init_scope():  # also while a function is traced
            return super().digest_of(weights)


def _place_of(graph: Any) -> str:
    """Return the graph's name, and for the body of a loop or branch the names of those around it.

    The name of such a body ends with a number of this process, which no other worker has.
    """
    name = str(getattr(graph, "name", "graph"))
    outer = getattr(graph, "outer_graph", None)
    if type(graph).__name__ not in _BODIES or outer is None:
        return name
    return f"{_place_of(outer)}/{_NUMBER.sub('', name)}"


def _value_of(source: Any) -> tf.Tensor:
    """Return the value without a copy; tf.convert_to_tensor takes ten times as long."""
    variable = getattr(source, "_value", source)  # a Keras variable holds one of TensorFlow
    if isinstance(variable, tf.distribute.DistributedValues) or not hasattr(variable, "handle"):
        return tf.convert_to_tensor(source)
    return tf.raw_ops.ReadVariableOp(resource=variable.handle, dtype=variable.dtype)


TENSORFLOW = TensorFlow()
