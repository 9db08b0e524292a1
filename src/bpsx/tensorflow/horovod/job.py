"""Horovod's functions for the job and its process sets; :mod:`bpsx.plugin.horovod` has most."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from bpsx.api import verbs
from bpsx.errors import ConfigError
from bpsx.plugin import adapter
from bpsx.plugin.horovod import Horovod
from bpsx.tensorflow.framework import TENSORFLOW
from bpsx.tensorflow.horovod.errors import verb

#: Result of Horovod's process_set_included_op before init().
_NOT_INITIALIZED = -1


HOROVOD = Horovod(TENSORFLOW, verbs.init)
init, barrier = HOROVOD.init, HOROVOD.barrier
add_process_set, remove_process_set = HOROVOD.add_process_set, HOROVOD.remove_process_set
check_process_set = HOROVOD.check_process_set


@verb
def join() -> tf.Tensor:
    """:func:`bpsx.join`: returns the rank of the last worker to join, as an int32 scalar.

    Raises :class:`~bpsx.errors.ConfigError` in functions and v1 graphs, where it would have no
    order among the exchanges.
    """
    if not tf.executing_eagerly():
        raise ConfigError(
            "join: must be called in eager code, outside of tf.function and v1 graphs, where it"
            " has no order among operations; with v1 graphs call bpsx.join() between two"
            " session.run"
        )
    return tf.constant(verbs.join(), tf.int32)


# ---- numbers that are known when a graph is executed


def _when_executed(value: Callable[[], int], name: str | None) -> tf.Tensor:
    """Return this process's ``value()``, an int32 scalar: now, or whenever the graph runs."""
    if tf.executing_eagerly():
        return tf.constant(value(), tf.int32, name=name)
    found = tf.numpy_function(lambda: np.int32(value()), [], tf.int32, name=name)
    found.set_shape(())
    return found


def _check_id(verb: str, process_set_id: Any) -> None:
    if adapter.as_integer(process_set_id) != 0:
        raise ConfigError(
            f"{verb}: process_set_id={process_set_id!r}: expected 0, the set of all workers"
        )


@verb
def size_op(process_set_id: int = 0, name: str | None = None) -> tf.Tensor:
    """:func:`bpsx.size` as an int32 scalar, known when the graph is executed."""
    _check_id("size_op", process_set_id)
    return _when_executed(verbs.size, name)


@verb
def rank_op(name: str | None = None) -> tf.Tensor:
    """:func:`bpsx.rank` as an int32 scalar, known when the graph is executed."""
    return _when_executed(verbs.rank, name)


@verb
def local_size_op(name: str | None = None) -> tf.Tensor:
    """:func:`bpsx.local_size` as an int32 scalar, known when the graph is executed."""
    return _when_executed(verbs.local_size, name)


@verb
def local_rank_op(name: str | None = None) -> tf.Tensor:
    """:func:`bpsx.local_rank` as an int32 scalar, known when the graph is executed."""
    return _when_executed(verbs.local_rank, name)


@verb
def process_set_included_op(process_set_id: int = 0, name: str | None = None) -> tf.Tensor:
    """Return 1, an int32 scalar: every worker is in the one set; -1 before :func:`init`."""
    _check_id("process_set_included_op", process_set_id)
    return _when_executed(lambda: 1 if adapter.initialised() else _NOT_INITIALIZED, name)
