"""The exchange of the gradients of one tape or optimizer."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import tensorflow as tf

from bpsx import _adapter
from bpsx.choices import Params, choose
from bpsx.errors import ConfigError
from bpsx.tensorflow import xla
from bpsx.tensorflow.compression import Compressor, NoneCompressor, check_compression
from bpsx.tensorflow.momentum import Momentum
from bpsx.tensorflow.ops import check_summable
from bpsx.tensorflow.raw import sums
from bpsx.tensorflow.sparse import sum_of_slices

PREFIX = "Gradient."
#: Under this, with the first variable's name, eager workers count who has which gradients.
USERS = "Users of gradients from "


def names_of(sources: Sequence[Any]) -> list[str]:
    """A name for each source, alike on all workers: a variable's own, with a number if it is not the first of that name."""
    seen: Counter[str] = Counter()
    found = []
    for i, source in enumerate(sources):
        name = getattr(source, "path", None) or (source.name if isinstance(source, tf.Variable) else f"source.{i}")
        seen[name] += 1
        found.append(name if seen[name] == 1 else f"{name}#{seen[name]}")
    return found


class Exchange:
    """Sums or averages gradients. Thread-safe in what it calls; one thread at a time may call it first.

    ``compression``: as a type before the exchange; ``params``: ``compression_params``, on the way. ``sparse_as_dense``: nothing travels as
    IndexedSlices. ``anew``: nothing is kept of what compression had left over under the same names; otherwise it goes on, as from one step's tape to
    the next's. Raises :class:`ConfigError`.
    """

    def __init__(
        self, verb: str, average: bool, compression: type[Compressor], params: Params, sparse_as_dense: bool, anew: bool = True,
    ) -> None:
        check_compression(compression, verb)
        if params and compression is not NoneCompressor:
            raise ConfigError(f"{verb}: compression={compression.__name__} and compression_params: give one of them")
        self._verb, self._average, self._compression, self._params, self._as_dense = verb, average, compression, params, sparse_as_dense
        self._anew = anew
        self._given = verb, average, compression, params, sparse_as_dense, anew
        self._rates = False         # whether compression needs the learning rate
        self._choices: dict[str, _adapter.Compression] = {}     # by the names of sources, of those that are compressed
        self._begun: dict[str, None] = {}                       # of which this has taken charge, in the order of sources
        self._loaded: dict[str, Any] = {}                       # what is to be put back
        self._declared: weakref.WeakKeyDictionary[Any, set[str]] = weakref.WeakKeyDictionary()      # by session

    def alike(self) -> Exchange:
        """Another one, of the same options."""
        return Exchange(*self._given)

    @property
    def compresses(self) -> bool:
        """Whether compression may keep anything of gradients."""
        return bool(self._params)

    def check_async(self) -> None:
        """Raise :class:`ConfigError` if gradients were to be compressed, where changes of weights travel in their place."""
        if self._params or self._compression is not NoneCompressor:
            raise ConfigError(f"{self._verb}: with BYTEPS_ENABLE_ASYNC=1 servers add what is pushed to weights, in their own type: leave compression "
                              "and compression_params out")

    def declare(self, names: Sequence[str], momentum: Momentum | None = None) -> None:
        """Say how they travel, once in a job. ``momentum``: the optimizer's own, whose place compression may take. Raises :class:`ConfigError`."""
        if not self._anew and not self._params:
            return
        session = _adapter.session()
        known = self._declared.setdefault(session, set())
        new = [name for name in names if name not in known]
        if new:
            momenta = momentum.by_name(names) if momentum is not None else {}
            self._choices.update(choose(self._params, names, self._verb, momenta))
            self._rates = self._rates or any(choice.ef == "corrected" for choice in self._choices.values())
            for name in new:
                session.declare(PREFIX + name, self._choices.get(name), anew=self._anew and name not in self._begun)
            known.update(new)
            self._begun.update(dict.fromkeys(new))
            self._put_back()
        if momentum is not None:
            momentum.take_over(names, self._choices)

    # ---- for checkpoints

    def kept(self) -> dict[str, Any]:
        """What compression keeps of these gradients, see :meth:`bpsx.compressing.Compressing.save`, by their place among the sources: names may be
        others in the process that goes on, as Keras numbers them."""
        wires = {PREFIX + name: str(i) for i, name in enumerate(self._begun)}
        return {**self._loaded, **{wires[name]: state for name, state in _adapter.session().compressing.save(wires).items()}}

    def put_back(self, saved: Mapping[str, Any]) -> None:
        """Go on with what :meth:`kept` has given, now or when they are first exchanged; what is not in it begins anew."""
        self._loaded = dict(saved)
        if _adapter.session() in self._declared:
            _adapter.session().compressing.forget([PREFIX + name for i, name in enumerate(self._begun) if str(i) not in saved])
            self._put_back()

    def _put_back(self) -> None:
        ready = {PREFIX + name: self._loaded.pop(str(i)) for i, name in enumerate(self._begun) if str(i) in self._loaded}
        if ready:
            _adapter.session().compressing.restore(ready)

    def __call__(self, gradients: Sequence[Any], sources: Sequence[Any], rate: Any = None, momentum: Momentum | None = None) -> list[Any]:
        """The sums or averages of ``gradients``, each of which is a tensor, IndexedSlices or None; ``sources``: what they are the gradients of.

        ``rate``: the learning rate, a number or a scalar tensor; ``momentum``: the optimizer's. None stays None if no worker has a gradient for that
        source: for graphs, see "The TensorFlow plugin" in ARCHITECTURE.md. Raises :class:`ConfigError` for IndexedSlices that are to get momentum.
        """
        names = names_of(sources)
        self.declare(names, momentum)
        as_dense = self._as_dense or xla.is_compiled()      # which has to know shapes
        found: list[Any] = [tf.convert_to_tensor(g) if as_dense and isinstance(g, tf.IndexedSlices) else g for g in gradients]
        eager = tf.executing_eagerly()
        dense = [i for i, g in enumerate(found) if not isinstance(g, tf.IndexedSlices) and (g is not None or eager)]
        given = [found[i] if found[i] is not None else _zeros(sources[i]) for i in dense]
        for i, gradient in zip(dense, given, strict=True):
            check_summable(gradient, f"{self._verb}: gradient of {names[i]!r}")
        wires = [self._compression.compress(g) for g in given]
        tensors, wanted, urgent = [w for w, _ in wires], [PREFIX + names[i] for i in dense], [-i for i in dense]
        if eager and dense:
            one = _adapter.session().size if self._average else 1        # it goes with gradients that are averaged: the mean shall be the number
            tensors.append(tf.constant([one * (found[i] is not None) for i in dense], tf.int32))
            wanted.append(USERS + names[dense[0]])
            urgent.append(-len(found))
        totals = self._sums(tensors, wanted, urgent, rate)
        users = totals.pop().numpy() if eager and dense else [1] * len(dense)
        for i, total, (_, ctx), used in zip(dense, totals, wires, users, strict=True):
            found[i] = self._compression.decompress(total, ctx) if used else None
        for i, gradient in enumerate(found):
            if isinstance(gradient, tf.IndexedSlices):
                check_summable(gradient.values, f"{self._verb}: gradient of {names[i]!r}")
                self._check_sparse(names[i])
                found[i] = sum_of_slices(gradient, PREFIX + names[i], self._average, self._compression)
        return found

    def _check_sparse(self, name: str) -> None:
        if name in self._choices and self._choices[name].momentum:
            raise ConfigError(f"{self._verb}: gradient of {name!r}: it is tf.IndexedSlices, which are not compressed, and compression_params' "
                              "momentum='nesterov' cannot be added to them: give sparse_as_dense=True, or compression_params by variables' names")

    def _sums(self, tensors: list[tf.Tensor], names: list[str], priorities: list[int], rate: Any) -> list[tf.Tensor]:
        return sums(tensors, names, average=self._average, priorities=priorities, rate=rate if self._rates else None)


def _zeros(source: Any) -> tf.Tensor:
    return tf.zeros(source.shape, source.dtype)
