"""Horovod's functions for the job and its process sets; :mod:`bpsx.plugin.horovod` has most."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import numpy as np
import tensorflow as tf

from bpsx.api import verbs
from bpsx.errors import ConfigError
from bpsx.plugin import adapter, horovod
from bpsx.plugin.horovod import ProcessSet, global_process_set
from bpsx.tensorflow.horovod.errors import verb

#: Result of Horovod's process_set_included_op before init().
_NOT_INITIALIZED = -1


def check_process_set(process_set: Any) -> None:
    """Raise :class:`~bpsx.errors.ConfigError` unless the set has all workers."""
    horovod.check_process_set(process_set)


def add_process_set(process_set: ProcessSet | Sequence[int]) -> ProcessSet:
    """Return the set if it has all workers. Raises :class:`~bpsx.errors.ConfigError` otherwise."""
    return horovod.checked_process_set(process_set, "")


def remove_process_set(process_set: ProcessSet) -> bool:
    """Return False: the workers of a job cannot be removed from it.

    Raises :class:`~bpsx.errors.ConfigError` for anything but a set of all workers.
    """
    check_process_set(process_set)
    return False


def init(
    comm: Sequence[int] | None = None, process_sets: Sequence[ProcessSet] | str | None = None
) -> None:
    """:func:`bpsx.init`. ``comm`` must be None, ``process_sets`` None or sets of all workers.

    Raises :class:`~bpsx.errors.ConfigError` for anything else, and as :func:`bpsx.init`.
    """
    horovod.init(verbs.init, comm, process_sets, "")


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


def barrier(process_set: ProcessSet = global_process_set) -> None:
    """Wait until every worker has called it."""
    check_process_set(process_set)
    verbs.barrier()


def refuse_elastic() -> NoReturn:
    """Raise :class:`~bpsx.errors.ConfigError`."""
    horovod.refuse_elastic("bpsx.tensorflow")


# ---- numbers that are known when a graph is executed


def _when_executed(value: Callable[[], int], name: str | None) -> tf.Tensor:
    """Return this process's ``value()``, an int32 scalar: now, or whenever the graph runs."""
    if tf.executing_eagerly():
        return tf.constant(value(), tf.int32, name=name)
    found = tf.numpy_function(lambda: np.int32(value()), [], tf.int32, name=name)
    found.set_shape(())
    return found


def _check_id(verb: str, process_set_id: Any) -> None:
    if adapter.integer(process_set_id) != 0:
        raise ConfigError(
            f"{verb}: process_set_id={process_set_id!r}: allowed is 0, the set of all workers"
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
