"""Tensors of eager code for :mod:`bpsx.plugin.objects`."""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf

from bpsx.plugin.encoding import StateError
from bpsx.plugin.objects import Tensors


def _has_bytes(dtype: tf.DType) -> bool:
    return bool(dtype.is_floating or dtype.is_integer or dtype.is_bool or dtype.is_complex)


def _taken(value: Any, what: str) -> tuple[str, list[int], bytes] | None:
    eager = isinstance(value, tf.Tensor) and not tf.is_symbolic_tensor(value)
    if not eager or not _has_bytes(value.dtype):
        return None
    return value.dtype.name, value.shape.as_list(), value.numpy().tobytes()


def _made(dtype: str, shape: list[int], raw: bytes) -> tf.Tensor:
    known = tf.as_dtype(dtype)
    if not _has_bytes(known):
        raise StateError(f"received a tensor of dtype {known.name}, which cannot be sent")
    with tf.init_scope():  # also while a function is traced
        return tf.constant(np.frombuffer(raw, known.as_numpy_dtype).reshape(shape), known)


TENSORS = Tensors(_taken, _made)
