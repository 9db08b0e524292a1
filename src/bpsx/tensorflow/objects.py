"""Encodes TensorFlow's tensors for :mod:`bpsx.plugin.objects`."""

from __future__ import annotations

import io
import json
from typing import Any

import numpy as np
import tensorflow as tf

from bpsx.plugin import encoding, objects


class _Encoder(encoding.Encoder):
    """Encodes tensors of eager code as dtype, shape and bytes."""

    def _tensor(self, value: Any, where: str) -> list[Any] | None:
        eager = isinstance(value, tf.Tensor) and not tf.is_symbolic_tensor(value)
        if not eager or not _has_bytes(value.dtype):
            return None
        place = self._put_aside(value.numpy().tobytes(), where)
        return [value.dtype.name, value.shape.as_list(), place]


def _has_bytes(dtype: tf.DType) -> bool:
    return bool(dtype.is_floating or dtype.is_integer or dtype.is_bool or dtype.is_complex)


def _encoded(obj: Any, verb: str) -> bytes:
    """Encode as a text's length, the text (JSON: the value, and each blob's length), the blobs."""
    encoder = _Encoder(verb, exact=True)
    text = json.dumps([encoder.encode(obj, "the object"), list(map(len, encoder.blobs))]).encode()
    return len(text).to_bytes(8, "little") + text + b"".join(encoder.blobs)


def _decoded(body: bytes) -> Any:
    stream = io.BytesIO(body)
    encoded, lengths = json.loads(stream.read(int.from_bytes(stream.read(8), "little")))
    blobs = [stream.read(length) for length in lengths]

    def tensor(described: list[Any]) -> tf.Tensor:
        dtype = tf.as_dtype(described[0])
        if not _has_bytes(dtype):
            raise encoding.StateError(
                f"received a tensor of dtype {dtype.name}, which cannot be sent"
            )
        array = np.frombuffer(blobs[described[2]], dtype.as_numpy_dtype).reshape(described[1])
        with tf.init_scope():  # also while a function is traced
            return tf.constant(array, dtype)

    return encoding.decode(encoded, blobs.__getitem__, tensor)


CODEC = objects.Codec(_encoded, _decoded)
