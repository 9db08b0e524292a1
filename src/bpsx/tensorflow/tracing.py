"""Marks functions of bpsx for TensorFlow's tracing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import tensorflow as tf
from tensorflow.python.ops import control_flow_util

from bpsx.errors import BpsxError
from bpsx.tensorflow.interrupted import public

F = TypeVar("F", bound=Callable[..., Any])


def as_it_is(function: F) -> F:
    """Decorate a function that AutoGraph must not rewrite, since it builds graphs itself."""
    return public(tf.autograph.experimental.do_not_convert(function))  # type: ignore[no-any-return]


def gradient_of(operation: str) -> Callable[[F], F]:
    """Return a decorator that registers a function as the gradient of an operation."""
    return tf.RegisterGradient(operation)  # type: ignore[no-any-return]


class UnsupportedCompilation(BpsxError, RuntimeError):
    """XLA is to compile an exchange that it cannot compile."""


def is_compiled(graph: Any = None) -> bool:
    """Whether XLA will compile ``graph``, by default the graph that is being traced."""
    if graph is None:
        if tf.executing_eagerly():
            return False
        graph = tf.compat.v1.get_default_graph()
    return bool(control_flow_util.GraphOrParentsInXlaContext(graph))
