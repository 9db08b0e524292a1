"""Asynchronous training: a worker steps on its own gradients and pushes its weights' changes."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from bpsx.errors import ConfigError
from bpsx.plugin import adapter
from bpsx.tensorflow.names import names_of
from bpsx.tensorflow.primitives import copies, sums
from bpsx.tensorflow.startup import compared

PREFIX = "Async."


def refuse_gradients(verb: str) -> None:
    """Raise :class:`ConfigError` in asynchronous training."""
    if adapter.session().config.asynchronous:
        raise ConfigError(
            f"{verb}: with BYTEPS_ENABLE_ASYNC=1 servers add what workers push to the weights, so"
            " workers must push changes of weights; use DistributedOptimizer"
        )


class Weights:
    """Synchronizes the weights of one optimizer with the servers, which hold them.

    The servers start from worker 0's weights. All workers wait for these before the first step; no
    later step waits for another worker.
    """

    def __init__(self) -> None:
        # names whose weights the servers hold, by session
        self._seeded: weakref.WeakKeyDictionary[Any, set[str]] = weakref.WeakKeyDictionary()

    def step(self, base: Callable[[], Any], variables: Sequence[Any]) -> Any:
        """Let ``base`` change ``variables``, push the changes, and assign the servers' values.

        In a v1 graph, return an operation that does it.
        """
        names = [PREFIX + name for name in names_of(variables)]
        if not tf.executing_eagerly() and not tf.inside_function():
            return self._step_in_graph(base, variables, names)
        compared("DistributedOptimizer", variables)
        with tf.init_scope():  # run now, also while a function is traced
            self._seed(variables, names)
        before = [tf.identity(v) for v in variables]
        result = base()
        for variable, value in zip(variables, self._moved(variables, before, names), strict=True):
            variable.assign(value)
        return result

    def _moved(
        self, variables: Sequence[Any], before: list[tf.Tensor], names: list[str]
    ) -> list[tf.Tensor]:
        changes = [tf.convert_to_tensor(v) - b for v, b in zip(variables, before, strict=True)]
        return sums(
            changes, names, average=False, priorities=[-i for i in range(len(names))], final=True
        )

    def _seed(self, variables: Sequence[Any], names: list[str]) -> None:
        seeded = self._seeded.setdefault(adapter.session(), set())
        new = [i for i, name in enumerate(names) if name not in seeded]
        seeded.update(names)
        given = [tf.convert_to_tensor(variables[i]) for i in new]
        for i, value in zip(
            new, copies(given, [names[i] for i in new], 0, final=True), strict=True
        ):
            variables[i].assign(value)

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
