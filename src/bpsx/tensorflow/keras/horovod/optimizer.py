"""Horovod's DistributedOptimizer for Keras, and loading of models that have one."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, TypeAlias

from bpsx.errors import ConfigError
from bpsx.plugin.adapter import checked_passes
from bpsx.plugin.horovod import ProcessSet, ReduceOp, global_process_set
from bpsx.tensorflow.compression import Compression, Compressor
from bpsx.tensorflow.horovod.training import made_exchange, weights_of
from bpsx.tensorflow.keras import saving
from bpsx.tensorflow.keras.optimizer import check_optimizer, distributed, set_passes

_Groups: TypeAlias = int | Sequence[Sequence[Any]] | None


def DistributedOptimizer(  # noqa: N802  (Horovod's name)
    optimizer: Any,
    name: str | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: type[Compressor] = Compression.none,
    sparse_as_dense: bool = False,
    gradient_predivide_factor: float = 1.0,
    op: ReduceOp = ReduceOp.Average,
    backward_passes_per_step: int = 1,
    average_aggregated_gradients: bool = False,
    num_groups: int = 0,
    groups: _Groups = None,
    process_set: ProcessSet = global_process_set,
    scale_local_gradients: bool = True,
) -> Any:
    """:func:`bpsx.tensorflow.keras.DistributedOptimizer`, with Horovod's arguments.

    ``backward_passes_per_step``: Keras's ``gradient_accumulation_steps``, which it sets. The sum of
    so many steps' gradients is averaged over workers and applied in the last of them; with
    ``average_aggregated_gradients`` their mean is. ``register_local_var`` of the result takes a
    variable whose gradients stay the worker's own, divided by ``size()`` with
    ``scale_local_gradients``. Three arguments are checked and have no effect:
    ``gradient_predivide_factor``, ``num_groups`` and ``groups``. ``name``, ``device_dense`` and
    ``device_sparse`` are ignored.

    Raises :class:`~bpsx.errors.ConfigError`.
    """
    verb = "DistributedOptimizer"
    check_optimizer(optimizer)
    passes = checked_passes(backward_passes_per_step, verb)
    exchange = made_exchange(
        verb,
        compression,
        sparse_as_dense,
        op,
        gradient_predivide_factor,
        num_groups,
        groups,
        process_set,
        scale_local_gradients,
        factor=_factor(passes, average_aggregated_gradients),
    )
    set_passes(optimizer, passes)
    return distributed(optimizer, exchange)


def _factor(passes: int, averages: bool) -> float:
    """Return the factor of the gradients: Keras divides them by the number of passes."""
    return 1.0 if averages else float(passes)


def PartialDistributedOptimizer(  # noqa: N802  (Horovod's name)
    optimizer: Any,
    name: str | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: type[Compressor] = Compression.none,
    sparse_as_dense: bool = False,
    gradient_predivide_factor: float = 1.0,
    op: ReduceOp = ReduceOp.Average,
    groups: _Groups = None,
    process_set: ProcessSet = global_process_set,
    local_layers: Any = None,
    scale_local_gradients: bool = True,
) -> Any:
    """:func:`DistributedOptimizer` with all weights of ``local_layers`` as local variables.

    ``local_layers``: a layer of Keras, or a list of them.
    """
    local = weights_of("PartialDistributedOptimizer", local_layers)
    made = DistributedOptimizer(
        optimizer,
        name,
        device_dense,
        device_sparse,
        compression,
        sparse_as_dense,
        gradient_predivide_factor,
        op,
        groups=groups,
        process_set=process_set,
        scale_local_gradients=scale_local_gradients,
    )
    for variable in local:
        made.register_local_var(variable)
    return made


def load_model(
    filepath: Any,
    custom_optimizers: Iterable[type] | None = None,
    custom_objects: dict[str, Any] | None = None,
    compression: type[Compressor] = Compression.none,
    legacy_opts: bool = False,
    op: ReduceOp = ReduceOp.Average,
    average_aggregated_gradients: bool = False,
) -> Any:
    """:func:`bpsx.tensorflow.keras.load_model`: load a model and make its optimizer distributed.

    The file has the optimizer's ``gradient_accumulation_steps``, which ``backward_passes_per_step``
    has set. It has neither ``op`` nor ``average_aggregated_gradients``: give them as before, here.

    Raises :class:`~bpsx.errors.ConfigError` for ``legacy_opts``: Keras 3 has no such optimizers.
    """
    if legacy_opts:
        raise ConfigError(
            f"load_model: legacy_opts={legacy_opts!r}: Keras 3 has no legacy optimizers. Omit it,"
            " and save the model again with an optimizer of keras.optimizers"
        )

    def distribute(optimizer: Any) -> Any:
        check_optimizer(optimizer)
        steps = getattr(optimizer, "inner_optimizer", optimizer).gradient_accumulation_steps
        factor = _factor(steps or 1, average_aggregated_gradients)
        exchange = made_exchange(
            "load_model",
            compression,
            sparse_as_dense=False,
            op=op,
            predivide=1.0,
            num_groups=0,
            groups=None,
            process_set=global_process_set,
            scale_local_gradients=True,
            factor=factor,
        )
        return distributed(optimizer, exchange)

    return saving.loaded(filepath, custom_optimizers, custom_objects, distribute)
