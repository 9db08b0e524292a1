"""Gradient exchange of one tape or optimizer."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import tensorflow as tf

from bpsx.errors import ConfigError
from bpsx.plugin import adapter
from bpsx.plugin.adapter import check_flag
from bpsx.plugin.compression_params import Params
from bpsx.plugin.exchange import KINDS, PREFIX, USED_COUNTS, GradientExchange
from bpsx.plugin.momentum import Momentum
from bpsx.session.refusals import counted_together
from bpsx.tensorflow import startup, xla
from bpsx.tensorflow.compression import Compressor, check_compression
from bpsx.tensorflow.names import names_of, own_names_of
from bpsx.tensorflow.op_order import in_graph
from bpsx.tensorflow.ops import check_summable
from bpsx.tensorflow.primitives import sums
from bpsx.tensorflow.sparse import sum_of_slices

#: Summand of a worker with a gradient in the count of users: larger than any number of workers, so
#: that an average over all of them is not 0.
_USED = 2**16
#: By session: number of times that workers had joined; and whether a source has sparse gradients
#: (tf.IndexedSlices) on some worker, and dense ones on none, where that is known. The same on all
#: workers.
_sparse: weakref.WeakKeyDictionary[Any, tuple[int, dict[str, bool]]] = weakref.WeakKeyDictionary()


class Exchange(GradientExchange):
    """Sums or averages gradients.

    ``compression``: converts tensors before the exchange. ``params``: ``compression_params``,
    applied on the way. ``sparse_as_dense``: send IndexedSlices as dense tensors. ``anew``: drop
    state that compression has kept under the same names; otherwise continue with it, as one step's
    tape does after the tape of the step before. ``has_momentum``: whether the optimizer of these
    gradients has a momentum. Calls are thread-safe, but for first calls, of which only one may run
    at a time. Raises :class:`ConfigError`.
    """

    #: Additional methods of a distributed Keras optimizer, by name.
    methods: ClassVar[dict[str, Callable[..., Any]]] = {}

    def __init__(
        self,
        verb: str,
        average: bool,
        compression: type[Compressor],
        params: Params,
        sparse_as_dense: bool,
        anew: bool = True,
        has_momentum: bool = False,
    ) -> None:
        check_compression(compression, verb)
        super().__init__(verb, params, compression, has_momentum, anew=anew)
        check_flag(sparse_as_dense, "sparse_as_dense", verb)
        self._average, self._as_dense = average, sparse_as_dense
        self._given = verb, average, compression, params, sparse_as_dense, anew, has_momentum

    def alike(self) -> Exchange:
        """Return another exchange with the same options."""
        return Exchange(*self._given)

    def __reduce__(self) -> Any:
        """Copies and unpickled objects are exchanges with the same options."""
        return Exchange, self._given

    def overflow_together(self, gradients: list[Any], sources: Sequence[Any]) -> list[Any]:
        """Return exchanged gradients that are finite on all workers or on none."""
        return gradients  # they are the same on all workers

    def declare(self, sources: Sequence[Any], momentum: Momentum | None = None) -> None:
        """Declare how the gradients of ``sources`` travel, once in a job.

        ``momentum``: the optimizer's own, which compression may replace.

        Raises :class:`ConfigError`.
        """
        names = names_of(sources)
        if not self._anew and not self._params:
            self._take_charge(names, ())
            return
        self._charge.traced = self._charge.traced or not tf.executing_eagerly()
        self.declare_all(
            names, momentum, lambda: dict(zip(names, own_names_of(sources), strict=True))
        )

    def _declare_like(self, names: Sequence[str], wires: Sequence[str]) -> None:
        """Declare names for the second use of sources in a graph, with the first's compression."""
        for name, wire in zip(names, wires, strict=True):
            if name in self.choices:
                adapter.session().declare(wire, self.choices[name], anew=self._anew)

    @counted_together(PREFIX, USED_COUNTS, KINDS)
    def __call__(
        self,
        gradients: Sequence[Any],
        sources: Sequence[Any],
        rate: Any = None,
        momentum: Momentum | None = None,
        among: Sequence[Any] | None = None,
        instead: Mapping[int, Any] | None = None,
    ) -> list[Any]:
        """Return the sums or averages of ``gradients``, each a tensor, IndexedSlices or None.

        ``sources``: the variables whose gradients they are. ``rate``: the learning rate, a number
        or a scalar tensor. ``momentum``: the optimizer's. ``among``: all sources of all calls, if
        they are known. None stays None if no worker has a gradient for that source; for graphs, see
        docs/internals/tensorflow-gradients.md. ``instead``: by place, the replacement of None
        where other workers have a gradient; by default zeros. Raises :class:`ConfigError` for
        IndexedSlices that need momentum.
        """
        names = names_of(sources)
        self.declare(sources if among is None else among, momentum)
        doubts = startup.compared(self._verb, sources if among is None else among)
        found = startup.after(doubts, gradients)
        plain = [PREFIX + name for name in names]
        wires = in_graph(plain)
        if wires != plain:
            self._declare_like(names, wires)
        as_dense = self._as_dense or xla.is_compiled()  # XLA must know shapes
        eager = tf.executing_eagerly()
        sparse = (
            _all_sparse(found, wires)
            if eager and not as_dense
            else [isinstance(g, tf.IndexedSlices) and not as_dense for g in found]
        )
        self._check_whole(names, sparse)
        found = [
            g if g is None else _slices(g) if s else tf.convert_to_tensor(g)
            for g, s in zip(found, sparse, strict=True)
        ]
        used = [g is not None for g in found]
        if eager:
            found = [
                _in_place_of(i, g, sources[i], sparse[i], instead or {})
                for i, g in enumerate(found)
            ]
        for i, gradient in enumerate(found):
            if gradient is not None:
                check_summable(
                    gradient.values if sparse[i] else gradient,
                    f"{self._verb}: gradient of {names[i]!r}",
                )
        dense = [i for i, g in enumerate(found) if g is not None and not sparse[i]]
        counts = self._exchange_dense(found, dense, wires, used if eager else None, rate)
        for i, gradient in enumerate(found):
            if not counts[i]:
                found[i] = None
            elif sparse[i]:
                self._check_sparse(names[i])
                found[i] = sum_of_slices(gradient, wires[i], self._average, self._compression)
        return found

    def _exchange_dense(
        self,
        found: list[Any],
        dense: list[int],
        wires: Sequence[str],
        used: list[bool] | None,
        rate: Any,
    ) -> list[Any]:
        """Replace the dense gradients in ``found`` by their sums.

        ``used``, in eager code: where this worker has a gradient. Returns for each source a number
        that is 0 if no worker has one.
        """
        wired = [self._compression.compress(found[i]) for i in dense]
        tensors, wanted, urgent = (
            [w for w, _ in wired],
            [wires[i] for i in dense],
            [-i for i in dense],
        )
        if used:
            order = _order_of(wires)
            # With averaged gradients this tensor is averaged, too, and must not become 0. The
            # number of workers would not do: a worker may be lost between here and the sum.
            tensors.append(tf.constant([_USED * used[i] for i in order], tf.int32))
            wanted.append(USED_COUNTS + wires[order[0]])
            urgent.append(-len(found))
        totals = sums(
            tensors,
            wanted,
            average=self._average,
            priorities=urgent,
            rate=rate if self.needs_rate else None,
            final=True,
        )
        counts: list[Any] = [g is not None for g in found]
        if used:
            for i, count in zip(order, totals.pop().numpy().tolist(), strict=True):
                counts[i] = count
        for i, total, (_, ctx) in zip(dense, totals, wired, strict=True):
            found[i] = self._compression.decompress(total, ctx)
        return counts

    def _check_whole(self, names: Sequence[str], sparse: Sequence[bool]) -> None:
        """Raise :class:`ConfigError` for sparse gradients in a job that goes on without workers.

        Numbers of rows travel first, so rows cannot count together with the other gradients.
        """
        found = [name for name, is_sparse in zip(names, sparse, strict=True) if is_sparse]
        if found and adapter.session().shrinks:
            raise ConfigError(
                f"{self._verb}: gradient of {found[0]!r}: it is a tf.IndexedSlices, which does not"
                " work with BPSX_ELASTIC=shrink. Give sparse_as_dense=True, or set"
                " BPSX_ELASTIC=servers"
            )

    def _check_sparse(self, name: str) -> None:
        if name in self.choices and self.choices[name].momentum:
            raise ConfigError(
                f"{self._verb}: gradient of {name!r}: it is a tf.IndexedSlices, which is not"
                " compressed, so compression_params' momentum='nesterov' cannot be added to it."
                " Give sparse_as_dense=True, or compression_params by variable name"
            )


def in_last(last: tf.Tensor, exchanged: Callable[[], list[Any]], own: list[Any]) -> list[Any]:
    """Return ``exchanged()`` if this is the last of several steps, else ``own``.

    In a graph, where that is known later, None stays None.
    """
    if tf.executing_eagerly():
        return exchanged() if last else own
    there = [i for i, g in enumerate(own) if g is not None]
    found = tf.cond(
        last,
        lambda: [g for g in exchanged() if g is not None],
        lambda: [tf.identity(own[i]) for i in there],
    )
    result = list(own)
    for i, gradient in zip(there, found, strict=True):
        result[i] = gradient
    return result


def _order_of(wires: Sequence[str]) -> list[int]:
    """Return the places of sources in an order that all workers share, even for a set."""
    return sorted(range(len(wires)), key=wires.__getitem__)


def _all_sparse(gradients: Sequence[Any], wires: Sequence[str]) -> list[bool]:
    """In eager code, return which sources have sparse gradients somewhere, and dense ones nowhere.

    Workers exchange this where it is not known yet.
    """
    session = adapter.session()
    since, known = _sparse.get(session, (-1, {}))
    if since != session.entries:
        known = {}
        _sparse[session] = session.entries, known
    unknown = [i for i in _order_of(wires) if wires[i] not in known]
    if unknown:
        is_sparse = [isinstance(gradients[i], tf.IndexedSlices) for i in unknown]
        is_dense = [
            gradients[i] is not None and not s for i, s in zip(unknown, is_sparse, strict=True)
        ]
        (told,) = sums(
            [tf.constant([is_sparse, is_dense], tf.int32)],
            [KINDS + wires[unknown[0]]],
            average=False,
        )
        for i, sparse, dense in zip(unknown, *told.numpy().tolist(), strict=True):
            if sparse or dense:
                known[wires[i]] = not dense
    return [known.get(wire, False) for wire in wires]


def _in_place_of(
    i: int, gradient: Any, source: Any, sparse: bool, instead: Mapping[int, Any]
) -> Any:
    """Return the gradient, or a replacement of None that does not change the sum."""
    if gradient is not None:
        return gradient
    if i in instead:
        return instead[i]
    if not sparse:
        return tf.zeros(source.shape, source.dtype)
    return tf.IndexedSlices(
        tf.zeros((0, *source.shape[1:]), source.dtype),
        tf.zeros((0,), tf.int64),
        tf.constant(source.shape, tf.int64),
    )


def _slices(gradient: Any) -> tf.IndexedSlices:
    """Return a gradient as IndexedSlices: its source has sparse gradients on other workers."""
    if isinstance(gradient, tf.IndexedSlices):
        return gradient
    return tf.IndexedSlices(
        gradient, tf.range(gradient.shape[0], dtype=tf.int64), tf.shape(gradient, tf.int64)
    )
