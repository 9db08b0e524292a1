"""Comparison of variables among workers when their gradients are first exchanged.

All workers must mean the same by a name, and have the same values. Python sees the first step of a
function when it is traced, and no later step. So workers compare during tracing, and wait for each
other. A graph of TensorFlow 1 compares when a session executes it. A job may have processes of an
earlier job, which may have kept traced functions and graphs; such a job compares only in eager
code. So does a job that workers have joined while it ran, since the others do not trace again.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from bpsx.errors import MismatchError, PeerLostError
from bpsx.plugin import adapter
from bpsx.plugin.startup import SAMPLES, Subject, digest_of, tell
from bpsx.system.tracebacks import warn
from bpsx.tensorflow import xla
from bpsx.tensorflow.framework import TENSORFLOW
from bpsx.tensorflow.names import meaning_of_all, names_of

_CALL = (
    "broadcast_variables(model.variables, root_rank=0), or with Keras' fit give the callback "
    "BroadcastGlobalVariablesCallback(0),"
)
_lock = threading.Lock()
_jobs: weakref.WeakKeyDictionary[Any, _Job] = weakref.WeakKeyDictionary()  # by session


class _Job:
    """Comparison state of a job: compared names, permanent errors, and doubts to compare again.

    All begin anew when workers have joined the job.
    """

    def __init__(self, entries: int) -> None:
        self.entries = entries
        self.known: set[str] = set()
        self.fatal: dict[str, str] = {}  # errors, by name
        self.doubts: list[Doubt] = []


class Doubt:
    """Variables whose values differed between workers in the first step.

    Scripts written for BytePS broadcast variables *after* the first step, when optimizers have
    theirs. So the second step compares again, and warns.
    """

    def __init__(self, subject: Subject, named: Mapping[str, Any]) -> None:
        self._subject, self._named = subject, dict(named)
        self._steps, self._entries = 0, adapter.session().entries
        self._lock = threading.Lock()

    @property
    def is_over(self) -> bool:
        """Whether nothing is left to compare."""
        return not self._named

    def concerns(self, names: Sequence[str]) -> bool:
        """Whether ``names`` includes one of its variables."""
        return not self._named.keys().isdisjoint(names)

    def begin_step(self) -> None:
        """Compare again if this is the second step, which all workers are in. Never raises."""
        with self._lock:
            self._steps += 1
            if self._steps < 2 or self.is_over:
                return
            named, self._named = self._named, {}
        if adapter.session().entries != self._entries:
            return  # a worker that has joined meanwhile does not compare
        try:
            _, problem = self._subject.compare(
                f"{min(named)}, again", 1, TENSORFLOW.digest_of(named)
            )
        except Exception:  # the exchange that follows reports it
            return
        if problem:
            warn(problem)


class GraphSteps:
    """Steps in sessions of TensorFlow 1: the first compares names' meanings, the second weights.

    Hooks broadcast variables before the first step, callbacks after it.
    """

    def __init__(self, verb: str, named: Mapping[str, Any]) -> None:
        self._named = dict(sorted(named.items()))
        self._subject = _subject(verb, self._named)
        self._own = meaning_of_all(self._named, False)
        self._run = 0
        self._lock = threading.Lock()

    def begin(self) -> np.bool_:
        """Count a step that a session executes; the first one compares names.

        Returns whether :meth:`compare` is to follow. Raises :class:`MismatchError`.
        """
        with self._lock:
            self._run += 1
            run = self._run
        if run == 1:
            refusal, _ = self._subject.compare(min(self._named), self._own, 0)
            if refusal:
                raise MismatchError(refusal)
        # Also where BPSX_CHECK_WEIGHTS is off, which another worker may not know.
        return np.bool_(run == 2 and not adapter.session().config.asynchronous)

    def compare(self, *samples: np.ndarray) -> np.bool_:
        """Compare the elements that :meth:`in_graph` reads."""
        if adapter.session().config.check_weights == "off":
            digest = 0
        else:
            digest = digest_of({name: s.tobytes() for name, s in zip(self._named, samples)})
        tell(self._subject.compare(f"{min(self._named)}, again", 1, digest)[1])
        return np.False_

    def in_graph(self) -> tf.Tensor:
        """Return a tensor that each step has to wait for; it makes the comparisons."""

        def compare() -> tf.Tensor:
            return tf.numpy_function(
                self.compare, [_sample_in_graph(v) for v in self._named.values()], tf.bool
            )

        return tf.cond(
            tf.numpy_function(self.begin, [], tf.bool), compare, lambda: tf.constant(False)
        )


def compared(verb: str, sources: Sequence[Any]) -> list[Doubt | GraphSteps]:
    """Compare variables that are new to this job; return the doubts about ``sources``.

    Raises :class:`~bpsx.errors.MismatchError`, on all workers and from then on, if workers mean
    different things by a name; once, with ``BPSX_CHECK_WEIGHTS=error``, if values differ.
    """
    session = adapter.session()
    in_graph = not tf.executing_eagerly() and not tf.inside_function()
    if not session.config.distributed or not (in_graph or _are_readable(sources)):
        return []
    named = dict(zip(names_of(sources), sources, strict=True))
    with _lock:
        job = _jobs.get(session)
        if job is None or job.entries != session.entries:
            job = _jobs[session] = _Job(session.entries)
        new = {name: named[name] for name in named.keys() - job.known}
        job.known.update(new)
    only_eager = session.continued or session.entries
    if in_graph:
        return [GraphSteps(verb, new)] if new and not only_eager else []
    if new and (tf.executing_eagerly() or not only_eager):
        _compare(job, verb, new)
    for name in job.fatal.keys() & named.keys():
        raise MismatchError(job.fatal[name])
    return [doubt for doubt in job.doubts if doubt.concerns(list(named))]


def after(doubts: Sequence[Doubt | GraphSteps], gradients: Sequence[Any]) -> list[Any]:
    """Return ``gradients`` after each doubt has counted a step: now, or when a graph runs."""
    values = [doubt for doubt in doubts if isinstance(doubt, Doubt)]
    if not doubts or tf.executing_eagerly():
        for doubt in values:
            doubt.begin_step()
        return list(gradients)

    def begin_step() -> np.bool_:
        for doubt in values:
            doubt.begin_step()
        return np.False_

    first = [d.in_graph() for d in doubts if isinstance(d, GraphSteps)]
    with tf.control_dependencies(first or [tf.numpy_function(begin_step, [], tf.bool)]):
        return [
            g if g is None else tf.nest.map_structure(tf.identity, g, expand_composites=True)
            for g in gradients
        ]


def _are_readable(sources: Sequence[Any]) -> bool:
    """Whether variables have values now, or outside of the function that is traced."""
    if any(isinstance(s, tf.Variable) and getattr(s, "_in_graph_mode", True) for s in sources):
        return False  # a session's variables; a session may execute a function, too
    return bool(tf.executing_eagerly() or tf.inside_function())


def _compare(job: _Job, verb: str, named: Mapping[str, Any]) -> None:
    session = adapter.session()
    subject = _subject(verb, named)
    # In asynchronous training the first step makes weights equal.
    checks = "off" if session.config.asynchronous else session.config.check_weights
    try:
        refusal, problem = subject.compare(
            min(named),
            meaning_of_all(named, bool(session.continued or session.entries)),
            TENSORFLOW.digest_of(named) if checks != "off" else 0,
        )
    except PeerLostError:  # the exchange fails, too, with TensorFlow's own error
        return
    if refusal:
        job.fatal.update(dict.fromkeys(named, refusal))
    elif problem and (checks == "error" or xla.is_compiled()):  # XLA cannot call Python later
        tell(problem)
    elif problem:
        job.doubts.append(Doubt(subject, named))


def _subject(verb: str, named: Mapping[str, Any]) -> Subject:
    first, more = min(named), len(named) - 1
    shape = tuple(getattr(named[first], "shape", ()))
    return Subject(
        f"{verb}: {first!r}" + (f" and {more} more" if more else ""),
        f"{len(named)} variables, the first {first!r} of shape {shape}",
        _CALL,
        "variables",
        "variables of one name are made, and their gradients first exchanged",
    )


def _sample_in_graph(source: Any) -> tf.Tensor:
    """Return the same elements as a tensor that a session computes."""
    if not hasattr(source, "assign"):
        return tf.zeros((0,))
    flat = tf.reshape(tf.convert_to_tensor(source), [-1])
    return flat[:: tf.maximum(1, tf.size(flat) // SAMPLES)]
