"""Horovod's functions for broadcasting weights, and its tapes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, TypeAlias

import tensorflow as tf

from bpsx.errors import ConfigError
from bpsx.plugin.horovod import (
    ProcessSet,
    ReduceOp,
    check_groups,
    checked_training_op,
    global_process_set,
)
from bpsx.tensorflow import tape as tapes
from bpsx.tensorflow import variables
from bpsx.tensorflow.compression import Compression, Compressor
from bpsx.tensorflow.horovod.errors import verb
from bpsx.tensorflow.horovod.job import check_process_set
from bpsx.tensorflow.horovod.partial import PartialExchange, Unnamed

Groups: TypeAlias = int | Sequence[Sequence[Any]] | None


@verb
def broadcast_variables(
    variables_: Iterable[Any],
    root_rank: int,
    process_set: ProcessSet = global_process_set,
    inplace: bool = False,
) -> Any:
    """As :func:`bpsx.tensorflow.broadcast_variables`. ``inplace`` is Horovod's and ignored."""
    check_process_set(process_set)
    return variables.broadcast_variables(variables_, root_rank)


def made_exchange(
    name: str,
    compression: type[Compressor],
    sparse_as_dense: bool,
    op: Any,
    predivide: Any,
    num_groups: Any,
    groups: Any,
    process_set: Any,
    scale_local_gradients: Any,
    anew: bool = True,
    factor: float = 1.0,
) -> PartialExchange:
    """Return the exchange that Horovod's arguments ask for. Raises :class:`ConfigError`."""
    check_process_set(process_set)
    kind = checked_training_op(name, op, predivide)
    check_groups(name, num_groups, groups, lambda v: hasattr(v, "assign"), "variable")
    return PartialExchange(
        name,
        kind is ReduceOp.Average,
        compression,
        sparse_as_dense,
        anew,
        factor,
        scale_local_gradients,
    )


class _Tape(tapes.Distributed):
    """Result of :func:`DistributedGradientTape`."""

    _exchange: PartialExchange

    @verb
    def gradient(  # type: ignore[override]
        self,
        target: Any,
        sources: Any,
        output_gradients: Any = None,
        use_generic_names: bool = False,
        unconnected_gradients: Any = tf.UnconnectedGradients.NONE,
    ) -> Any:
        """As :meth:`tf.GradientTape.gradient`, then summed or averaged over all workers.

        ``use_generic_names``: identify sources by their place instead of their name.
        """

        def known(flat: list[Any]) -> list[Any]:
            return [Unnamed(s) for s in flat] if use_generic_names else flat

        return self._gradient(target, sources, output_gradients, unconnected_gradients, known)

    def register_local_source(self, source: Any) -> None:
        """Leave the gradients of ``source``, a variable, as they are on each worker."""
        self._exchange.keep_local(source)

    def get_local_and_global_gradients(
        self,
        target: Any,
        sources: Any,
        output_gradients: Any = None,
        use_generic_names: bool = False,
    ) -> tuple[list[tuple[Any, Any]], list[tuple[Any, Any]]]:
        """Return (source, gradient) pairs: of the local sources, and of all other sources."""
        gradients = self.gradient(target, sources, output_gradients, use_generic_names)
        pairs = list(zip(sources, gradients, strict=True))
        local = [pair for pair in pairs if self._exchange.is_local(pair[0])]
        return local, [pair for pair in pairs if not self._exchange.is_local(pair[0])]


def DistributedGradientTape(  # noqa: N802  (Horovod's name)
    gradtape: tf.GradientTape,
    device_dense: str = "",
    device_sparse: str = "",
    compression: type[Compressor] = Compression.none,
    sparse_as_dense: bool = False,
    op: ReduceOp = ReduceOp.Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: Groups = None,
    process_set: ProcessSet = global_process_set,
    scale_local_gradients: bool = True,
) -> Any:
    """:func:`bpsx.tensorflow.DistributedGradientTape`, with Horovod's arguments and methods.

    Sources given to its ``register_local_source`` keep the worker's own gradients, divided by
    ``size()`` with ``scale_local_gradients``. Three arguments are checked and have no effect:
    ``gradient_predivide_factor`` (half types are added in float32 and divided before they are
    rounded), ``num_groups`` and ``groups`` (tensors are cut into partitions and sent by priority).
    ``device_dense`` and ``device_sparse`` are ignored. Raises :class:`ConfigError`.
    """
    exchange = made_exchange(
        "DistributedGradientTape",
        compression,
        sparse_as_dense,
        op,
        gradient_predivide_factor,
        num_groups,
        groups,
        process_set,
        scale_local_gradients,
        anew=False,
    )
    return tapes.distributed(gradtape, exchange, _Tape)


def PartialDistributedGradientTape(  # noqa: N802  (Horovod's name)
    gradtape: tf.GradientTape,
    device_dense: str = "",
    device_sparse: str = "",
    compression: type[Compressor] = Compression.none,
    sparse_as_dense: bool = False,
    op: ReduceOp = ReduceOp.Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: Groups = None,
    process_set: ProcessSet = global_process_set,
    local_layers: Any = None,
    scale_local_gradients: bool = True,
) -> Any:
    """:func:`DistributedGradientTape` with all weights of ``local_layers`` as local sources.

    ``local_layers``: a layer of Keras, or a list of them.
    """
    tape = DistributedGradientTape(
        gradtape,
        device_dense,
        device_sparse,
        compression,
        sparse_as_dense,
        op,
        gradient_predivide_factor,
        num_groups,
        groups,
        process_set,
        scale_local_gradients,
    )
    for weight in weights_of("PartialDistributedGradientTape", local_layers):
        tape.register_local_source(weight)
    return tape


def weights_of(name: str, layers: Any) -> list[Any]:
    """Return the trainable weights of a layer of Keras, or of a list of them.

    Raises :class:`ConfigError` for anything else.
    """
    import keras  # takes seconds

    single = isinstance(layers, keras.layers.Layer)
    listed = [] if layers is None else [layers] if single else layers
    ordered = isinstance(listed, Iterable) and not isinstance(listed, (str, bytes))
    if not ordered or not all(isinstance(layer, keras.layers.Layer) for layer in listed):
        raise ConfigError(
            f"{name}: local_layers={layers!r}: expected a layer of Keras 3, or a list of layers"
        )
    return [weight for layer in listed for weight in layer.trainable_weights]
