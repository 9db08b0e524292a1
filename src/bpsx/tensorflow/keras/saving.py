"""Loads saved Keras models for training with several workers."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import keras

from bpsx.errors import ConfigError
from bpsx.plugin.compression_params import Params
from bpsx.system.tracebacks import public
from bpsx.tensorflow.compression import Compression, Compressor
from bpsx.tensorflow.keras.optimizer import DistributedOptimizer


@public
def load_model(
    filepath: Any,
    custom_optimizers: Iterable[type] | None = None,
    custom_objects: dict[str, Any] | None = None,
    compression: type[Compressor] = Compression.none,
    compression_params: Params = None,
    sparse_as_dense: bool = False,
    op: Any = None,
) -> Any:
    """As :func:`keras.models.load_model`, and make the model's optimizer distributed.

    The optimizer keeps its state. The file has none of the arguments of
    :func:`DistributedOptimizer`: give ``compression``, ``sparse_as_dense`` and ``op`` again. Files
    that end in ``.keras`` also hold the state of compression with ``compression_params``.

    ``custom_optimizers``: classes of optimizers that Keras does not know. ``custom_objects``: other
    objects, by name. Raises Keras's errors, and :class:`~bpsx.errors.ConfigError`.
    """

    def distribute(optimizer: Any) -> Any:
        return DistributedOptimizer(
            optimizer,
            compression=compression,
            sparse_as_dense=sparse_as_dense,
            op=op,
            compression_params=compression_params,
        )

    model = loaded(filepath, custom_optimizers, custom_objects, distribute)
    if (
        getattr(model, "optimizer", None) is not None
        and compression_params
        and str(filepath).endswith(".keras")
    ):
        # Load again: only now an object exists that reads the state of compression.
        model.load_weights(filepath)
    return model


def loaded(
    filepath: Any,
    custom_optimizers: Iterable[type] | None,
    custom_objects: dict[str, Any] | None,
    distribute: Callable[[Any], Any],
) -> Any:
    """Load a saved model, and replace its optimizer by the result of ``distribute``.

    Raises Keras's errors, and :class:`~bpsx.errors.ConfigError` for ``custom_optimizers`` that are
    no classes of optimizers.
    """
    wrong = [
        cls
        for cls in custom_optimizers or ()
        if not (isinstance(cls, type) and issubclass(cls, keras.optimizers.Optimizer))
    ]
    if wrong:
        raise ConfigError(
            f"load_model: custom_optimizers contains {wrong[0]!r}; it must contain optimizer"
            " classes of Keras 3"
        )
    known = {cls.__name__: cls for cls in custom_optimizers or ()} | (custom_objects or {})
    model = keras.models.load_model(filepath, custom_objects=known or None)
    if getattr(model, "optimizer", None) is not None:
        model.optimizer = distribute(model.optimizer)
    return model
