"""Gradient exchange that leaves out the gradients of local variables."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
import tensorflow as tf

from bpsx.errors import ConfigError
from bpsx.plugin import adapter
from bpsx.plugin.adapter import check_flag
from bpsx.plugin.momentum import Momentum
from bpsx.tensorflow.compression import Compressor
from bpsx.tensorflow.exchange import Exchange
from bpsx.tensorflow.names import names_of
from bpsx.tensorflow.ops import push_pull


class Unnamed:
    """A source of gradients that is identified by its place instead of its name."""

    def __init__(self, source: Any) -> None:
        self.shape, self.dtype, self.source = source.shape, source.dtype, source


def _variable(source: Any) -> Any:
    """Return TensorFlow's variable in a Keras variable, or the source itself."""
    known = source.source if isinstance(source, Unnamed) else source
    return getattr(known, "_value", known)


def _times(gradient: Any, factor: float) -> Any:
    return gradient if factor == 1.0 else _scaled(gradient, factor)


def _scaled(gradient: Any, factor: Any) -> Any:
    """Return the gradient times ``factor``, a number or a scalar tensor; None stays None."""
    if gradient is None:
        return None
    if isinstance(gradient, tf.IndexedSlices):
        values = _scaled(gradient.values, factor)
        return tf.IndexedSlices(values, gradient.indices, gradient.dense_shape)
    return gradient * tf.cast(factor, gradient.dtype)


def _register_local_var(self: Any, var: Any) -> None:
    """Leave the gradients of ``var`` as they are on each worker.

    Raises :class:`ConfigError` if gradients are clipped by the norm of all: that norm would differ
    between workers, and so would the variables that they share.
    """
    for optimizer in (self, getattr(self, "inner_optimizer", None)):
        if norm := getattr(optimizer, "global_clipnorm", None):
            raise ConfigError(
                f"register_local_var: global_clipnorm={norm:g} clips by"
                " a norm that includes the gradients of local variables, which differ between"
                " workers. Use clipnorm, which clips each gradient by its own norm"
            )
    self._bpsx_exchange.keep_local(var)


class PartialExchange(Exchange):
    """Sums or averages all gradients but those of local variables; all are times ``factor``.

    ``scale_local``: divide local gradients by the number of workers. Workers must agree on which
    variables are local. Raises :class:`ConfigError`.
    """

    methods: ClassVar[dict[str, Callable[..., Any]]] = {"register_local_var": _register_local_var}

    def __init__(
        self,
        verb: str,
        average: bool,
        compression: type[Compressor],
        sparse_as_dense: bool,
        anew: bool = True,
        factor: float = 1.0,
        scale_local: Any = True,
        local: Sequence[Any] = (),
    ) -> None:
        super().__init__(verb, average, compression, None, sparse_as_dense, anew)
        check_flag(scale_local, "scale_local_gradients", verb)
        self._factor, self._scale_local = factor, scale_local
        self._options = verb, average, compression, sparse_as_dense, anew, factor, scale_local
        self._local = {id(v): v for v in local}

    def alike(self) -> Exchange:
        """Return another exchange with the same options and local variables."""
        return PartialExchange(*self._options, tuple(self._local.values()))

    def __reduce__(self) -> Any:
        """Copies have the same options. Raises :class:`ConfigError` if variables are local.

        Local variables are known by identity, which a copy loses.
        """
        if self._local:
            raise ConfigError(
                f"{self._verb}: an optimizer with local variables can be neither pickled nor"
                " deeply copied. Create a new one from an optimizer, and register its local"
                " variables"
            )
        return PartialExchange, self._options

    def keep_local(self, variable: Any) -> None:
        """Leave the gradients of ``variable`` as they are. Raises :class:`ConfigError`."""
        if not hasattr(variable, "assign"):
            raise ConfigError(
                f"{self._verb}: {variable!r} cannot be local, because it is not a variable"
            )
        known = _variable(variable)
        self._local[id(known)] = known

    def is_local(self, variable: Any) -> bool:
        """Whether the gradients of ``variable`` stay as they are."""
        return id(_variable(variable)) in self._local

    def overflow_together(self, gradients: list[Any], sources: Sequence[Any]) -> list[Any]:
        """Return exchanged gradients that are finite on all workers or on none.

        Local gradients may overflow on one worker only, and a LossScaleOptimizer decides from all
        of a worker's gradients whether to skip the step. All workers must call it.
        """
        local = [self.is_local(source) for source in sources]
        if not any(local):
            return gradients
        own = [g for g, here in zip(gradients, local, strict=True) if here and g is not None]
        finite = [tf.reduce_all(tf.math.is_finite(getattr(g, "values", g))) for g in own]
        failed = tf.cast(tf.logical_not(tf.reduce_all([True, *finite])), tf.float32)
        name = f"Overflow of {names_of([sources[local.index(True)]])[0]}"
        everywhere = push_pull(failed, name=name, average=False)
        factor = tf.where(everywhere > 0, np.float32("nan"), np.float32(1))
        return [_scaled(g, factor) for g in gradients]

    def check_async(self) -> None:
        """Raise :class:`ConfigError` for options that need gradients.

        In asynchronous training weights travel in their place.
        """
        super().check_async()
        if self._local or self._factor != 1.0:
            what = "local variables" if self._local else "sums of several passes"
            raise ConfigError(
                f"{self._verb}: {what} cannot be used with BYTEPS_ENABLE_ASYNC=1, because workers"
                " exchange weights, not gradients; omit them (average_aggregated_gradients=True)"
            )

    def __call__(
        self,
        gradients: Sequence[Any],
        sources: Sequence[Any],
        rate: Any = None,
        momentum: Momentum | None = None,
        among: Sequence[Any] | None = None,
        instead: Mapping[int, Any] | None = None,
    ) -> list[Any]:
        """As :meth:`Exchange.__call__`."""
        shared = [i for i, source in enumerate(sources) if not self.is_local(source)]
        given = {place: instead[i] for place, i in enumerate(shared) if instead and i in instead}
        known = among if among is None else [v for v in among if not self.is_local(v)]
        exchanged = super().__call__(
            [gradients[i] for i in shared],
            [sources[i] for i in shared],
            rate,
            momentum,
            known,
            given,
        )
        found = dict(zip(shared, exchanged, strict=True))
        if self._scale_local and len(found) < len(sources):
            adapter.session().require_all("scale_local_gradients")
        scale = 1 / adapter.session().size if self._scale_local else 1.0
        for i, gradient in enumerate(gradients):
            if i not in found:
                own = (instead or {}).get(i) if gradient is None else gradient
                found[i] = _times(own, scale)
        return [_times(found[i], self._factor) for i in range(len(sources))]
