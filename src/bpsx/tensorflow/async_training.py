"""Asynchronous training, in eager code, functions and v1 graphs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import tensorflow as tf

from bpsx.plugin import async_training
from bpsx.plugin.async_training import PREFIX
from bpsx.tensorflow.names import names_of
from bpsx.tensorflow.primitives import copies, sums
from bpsx.tensorflow.startup import compared


class Weights(async_training.Weights[Any]):
    """Synchronizes the variables of one optimizer with the servers."""

    def step_on(self, variables: Sequence[Any], update: Callable[[], Any]) -> Any:
        """Do as :meth:`step` does; in a v1 graph, return an operation that does it."""
        names = names_of(variables)
        if not tf.executing_eagerly() and not tf.inside_function():
            return self._step_in_graph(update, variables, [PREFIX + name for name in names])
        compared("DistributedOptimizer", variables)
        return self.step(update, dict(zip(names, variables, strict=True)))

    def _take(self, weights: Mapping[str, Any]) -> None:
        with tf.init_scope():  # run now, also while a function is traced
            given = [tf.convert_to_tensor(v) for v in weights.values()]
            values = copies(given, list(weights), 0, final=True)
            for variable, value in zip(weights.values(), values, strict=True):
                variable.assign(value)

    def _copy(self, name: str, weight: Any) -> tf.Tensor:
        return tf.identity(weight)

    def _push(self, weights: Mapping[str, Any], before: Mapping[str, Any]) -> None:
        variables = weights.values()
        moved = self._moved(variables, before.values(), list(weights))
        for variable, value in zip(variables, moved, strict=True):
            variable.assign(value)

    def _moved(
        self, after: Iterable[Any], before: Iterable[Any], names: list[str]
    ) -> list[tf.Tensor]:
        changes = [tf.convert_to_tensor(v) - b for v, b in zip(after, before, strict=True)]
        return sums(
            changes, names, average=False, priorities=[-i for i in range(len(names))], final=True
        )

    def _step_in_graph(
        self, base: Callable[[], Any], variables: Sequence[Any], names: list[str]
    ) -> Any:
        """Build the step in a v1 graph, where only control dependencies order operations."""
        # A resource and not a variable: checkpoints must not hold it, since another job has to seed
        # its own servers.
        seeded = tf.raw_ops.VarHandleOp(
            dtype=tf.bool,
            shape=(),
            shared_name=tf.compat.v1.get_default_graph().unique_name("bpsx_seeded"),
        )

        def seed() -> tf.Tensor:
            values = copies([v.read_value() for v in variables], names, 0, final=True)
            assigned = [
                v.assign(value, read_value=False)
                for v, value in zip(variables, values, strict=True)
            ]
            with tf.control_dependencies(assigned):
                done = tf.raw_ops.AssignVariableOp(resource=seeded, value=True)
            with tf.control_dependencies([done]):
                return tf.constant(True)

        with tf.control_dependencies(
            [
                tf.cond(
                    tf.raw_ops.VarIsInitializedOp(resource=seeded), lambda: tf.constant(True), seed
                )
            ]
        ):
            before = [v.read_value() for v in variables]
        with tf.control_dependencies(before):
            stepped = base()
        with tf.control_dependencies([stepped]):
            now = [v.read_value() for v in variables]
        values = self._moved(now, before, names)
        return tf.group(
            *[v.assign(value, read_value=False) for v, value in zip(variables, values, strict=True)]
        )
