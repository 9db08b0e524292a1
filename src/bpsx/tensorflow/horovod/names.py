"""Names on the wire of the tensors of Horovod's verbs, and checks of these tensors."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from bpsx.plugin.adapter import check_name
from bpsx.plugin.framework import UnsupportedTensor
from bpsx.tensorflow.ops import as_tensor, unnamed


def wire_name(verb: str, name: str | None, tensor: tf.Tensor, rows: bool = False) -> str:
    """Return an operation's name on the wire; verbs do not share names.

    ``rows``: the first dimension may differ between workers.
    """
    return f"{verb}.{name}" if name else unnamed(verb, tensor, rows)


def checked_tensor(verb: str, tensor: Any, name: str | None, rows: bool = False) -> tf.Tensor:
    """Return ``tensor`` as a dense tensor; with ``rows``, of at least one dimension.

    Raises :class:`ConfigError` for a name that is no string, :class:`UnsupportedTensor`.
    """
    check_name(name, verb)
    dense = as_tensor(tensor, f"{verb} of {name!r}" if name else verb)
    if rows and dense.shape.rank == 0:
        raise UnsupportedTensor(
            f"{verb}: expected a tensor of at least one dimension, not a scalar"
        )
    return dense


def with_gradient_times(tensor: tf.Tensor, factor: float) -> tf.Tensor:
    """Return ``tensor`` with its gradient multiplied by ``factor``."""
    if not tensor.dtype.is_floating:
        return tensor

    @tf.custom_gradient  # type: ignore[untyped-decorator]
    def same(given: tf.Tensor) -> Any:
        return tf.identity(given), lambda g: g * tf.constant(factor, g.dtype)

    return same(tensor)
