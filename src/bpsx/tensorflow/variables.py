"""Broadcasts variables, so that all workers start from one worker's weights."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import tensorflow as tf

from bpsx.errors import ConfigError
from bpsx.plugin import adapter
from bpsx.plugin.adapter import checked_root
from bpsx.session.refusals import counted_together
from bpsx.system.tracebacks import public, public_methods
from bpsx.tensorflow.names import names_of
from bpsx.tensorflow.ops import check_bytes, check_scope
from bpsx.tensorflow.primitives import copies
from bpsx.tensorflow.tracing import as_it_is

PREFIX = "Variable."


@as_it_is
def broadcast_variables(variables: Iterable[Any], root_rank: int, scope: str = "") -> Any:
    """Assign worker ``root_rank``'s values to ``variables`` on all workers, bit for bit.

    ``variables``: of TensorFlow or Keras, of any dtype but strings; all workers give the same in
    the same order. In a v1 graph, returns an operation that does it. Otherwise returns None: the
    broadcast is done, or is part of the function that is being traced. On the wire a variable is
    called ``scope + "Variable." + its name``.

    Raises :class:`~bpsx.errors.ConfigError`, :class:`~bpsx.dtypes.UnsupportedDType`; and as
    :func:`push_pull` does.
    """
    return counted_together(f"{scope}{PREFIX}")(_broadcast_variables)(variables, root_rank, scope)


def _broadcast_variables(variables: Iterable[Any], root_rank: int, scope: str) -> Any:
    root = checked_root(root_rank, "broadcast_variables", adapter.session().size)
    check_scope(scope, "broadcast_variables")
    if hasattr(variables, "assign") or not isinstance(variables, Iterable):
        raise ConfigError(
            f"broadcast_variables: variables is a {type(variables).__name__}; expected a list of"
            " variables, such as model.variables"
        )
    given = list(variables)
    for i, variable in enumerate(given):
        if not hasattr(variable, "assign"):
            raise ConfigError(
                f"broadcast_variables: element {i} is a {type(variable).__name__}; expected a"
                " variable"
            )
    values = [tf.convert_to_tensor(variable) for variable in given]
    names = [f"{scope}{PREFIX}{name}" for name in names_of(given)]
    for value, name in zip(values, names, strict=True):
        check_bytes(value, f"broadcast_variables: {name!r}")
    done = [
        variable.assign(copy)
        for variable, copy in zip(given, copies(values, names, root), strict=True)
    ]
    return None if tf.executing_eagerly() or tf.inside_function() else tf.group(*done)


@public
def broadcast_global_variables(root_rank: int) -> Any:
    """Broadcast all global variables of the default v1 graph. Returns an operation.

    Raises :class:`~bpsx.errors.ConfigError` in TensorFlow 2's eager code and functions, which have
    no collection of global variables.
    """
    if tf.executing_eagerly() or tf.inside_function():
        raise ConfigError(
            "broadcast_global_variables: global variables exist only in a v1 graph; give your"
            " variables to broadcast_variables()"
        )
    return broadcast_variables(tf.compat.v1.global_variables(), root_rank)


@public_methods
class BroadcastGlobalVariablesHook(tf.compat.v1.train.SessionRunHook):  # type: ignore[misc]
    """Broadcasts all global variables when a v1 session has been created.

    For ``MonitoredTrainingSession`` and estimators. ``device`` is BytePS's and ignored.
    """

    def __init__(self, root_rank: int, device: str = "") -> None:
        super().__init__()
        if adapter.initialised():
            checked_root(root_rank, "BroadcastGlobalVariablesHook", adapter.session().size)
        self.root_rank, self._operation, self._graph = root_rank, None, None

    def begin(self) -> None:
        """Add the operation to the graph, once for each graph."""
        graph = tf.compat.v1.get_default_graph()
        if self._operation is None or self._graph is not graph:
            self._operation, self._graph = broadcast_global_variables(self.root_rank), graph

    def after_create_session(self, session: Any, coord: Any) -> None:
        """Run the operation."""
        session.run(self._operation)
