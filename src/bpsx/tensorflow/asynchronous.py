"""Asynchronous training: a worker steps on its own gradients, and the change of the weights is what travels."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from bpsx import _adapter
from bpsx.tensorflow.exchange import names_of
from bpsx.tensorflow.raw import copies, sums

PREFIX = "Async."


class Weights:
    """Moves the weights of one optimizer. The servers hold them: worker 0's, before the first step, for which all workers wait; no later step waits
    for anybody."""

    def __init__(self) -> None:
        self._seeded: weakref.WeakKeyDictionary[Any, set[str]] = weakref.WeakKeyDictionary()        # by session

    def step(self, base: Callable[[], Any], variables: Sequence[Any]) -> Any:
        """Let ``base`` change ``variables``, push by how much, and assign what the servers have then; in eager code or while a function is traced."""
        names = [PREFIX + name for name in names_of(variables)]
        with tf.init_scope():           # when a function is traced: now
            self._seed(variables, names)
        before = [tf.identity(v) for v in variables]
        result = base()
        changes = [tf.convert_to_tensor(v) - b for v, b in zip(variables, before, strict=True)]
        for variable, value in zip(variables, sums(changes, names, average=False, priorities=[-i for i in range(len(names))]), strict=True):
            variable.assign(value)
        return result

    def _seed(self, variables: Sequence[Any], names: list[str]) -> None:
        seeded = self._seeded.setdefault(_adapter.session(), set())
        new = [i for i, name in enumerate(names) if name not in seeded]
        seeded.update(names)
        given = [tf.convert_to_tensor(variables[i]) for i in new]
        for i, value in zip(new, copies(given, [names[i] for i in new], 0), strict=True):
            variables[i].assign(value)
