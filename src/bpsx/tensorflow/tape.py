"""DistributedGradientTape: a tape that gives the gradients of all workers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from bpsx.errors import ConfigError
from bpsx.plugin.async_training import refuse_gradients
from bpsx.plugin.compression_params import Params
from bpsx.system.tracebacks import public, public_methods
from bpsx.tensorflow.compression import Compression, Compressor
from bpsx.tensorflow.exchange import Exchange
from bpsx.tensorflow.reductions import averages
from bpsx.tensorflow.tracing import as_it_is


@public_methods
class Distributed(tf.GradientTape):  # type: ignore[misc]
    """Result of :func:`DistributedGradientTape`: the given tape's state, and another gradient()."""

    _exchange: Exchange

    @as_it_is
    def gradient(
        self,
        target: Any,
        sources: Any,
        output_gradients: Any = None,
        unconnected_gradients: Any = tf.UnconnectedGradients.NONE,
    ) -> Any:
        """As :meth:`tf.GradientTape.gradient`, then summed or averaged over all workers.

        ``sources`` and result may be any structure. All workers must ask for the gradients of the
        same sources in the same order.
        """
        return self._gradient(
            target, sources, output_gradients, unconnected_gradients, lambda flat: flat
        )

    def _gradient(
        self,
        target: Any,
        sources: Any,
        output_gradients: Any,
        unconnected_gradients: Any,
        known: Callable[[list[Any]], list[Any]],
    ) -> Any:
        """``known``: maps the list of sources to the objects that identify them in the exchange."""
        gradients = super().gradient(target, sources, output_gradients, unconnected_gradients)
        refuse_gradients("DistributedGradientTape")
        flat = known(tf.nest.flatten(sources))
        found = tf.nest.flatten(gradients, expand_composites=False)
        return tf.nest.pack_sequence_as(sources, self._exchange(found, flat))


def distributed(gradtape: Any, exchange: Exchange, kind: type[Distributed] = Distributed) -> Any:
    """Return a tape of class ``kind`` that records with ``gradtape``.

    Raises :class:`ConfigError` if that is no tape.
    """
    if not isinstance(gradtape, tf.GradientTape):
        raise ConfigError(
            f"DistributedGradientTape: expected a tf.GradientTape, not {type(gradtape).__name__}"
        )
    cls = type(gradtape)
    # The class has the exchange, as all tapes that are made of one share its attributes.
    ours = type(cls.__name__, (kind, cls), {"__module__": cls.__module__, "_exchange": exchange})
    made: Any = object.__new__(ours)
    made.__dict__ = gradtape.__dict__
    return made


@public
def DistributedGradientTape(
    gradtape: tf.GradientTape,
    device_dense: str = "",
    device_sparse: str = "",
    compression: type[Compressor] = Compression.none,
    sparse_as_dense: bool = False,
    op: Any = None,
    compression_params: Params = None,
) -> Any:
    """Return a tape like ``gradtape`` that gives sums or averages over all workers.

    ``gradtape``: a :class:`tf.GradientTape`, persistent or not, before, while or after it records;
    both tapes share the record. ``op``: ``Average`` (the default) or ``Sum``. ``sparse_as_dense``:
    gradients that are IndexedSlices travel as dense tensors. ``compression_params``: as for
    :func:`bpsx.torch.DistributedOptimizer`, one for all or by variables' names. ``device_dense``
    and ``device_sparse`` are BytePS's and ignored.

    Raises :class:`~bpsx.errors.ConfigError`.
    """
    average = averages(op, None, "DistributedGradientTape")
    exchange = Exchange(
        "DistributedGradientTape",
        average,
        compression,
        compression_params,
        sparse_as_dense,
        anew=False,
    )
    return distributed(gradtape, exchange)
