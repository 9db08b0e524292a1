"""What compression keeps of gradients (residuals, momentum, counters), for checkpoints."""

from __future__ import annotations

import abc
import io
import json
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import tensorflow as tf

from bpsx import _adapter
from bpsx.errors import ConfigError
from bpsx.tensorflow.exchange import PREFIX, kept_by_place
from bpsx.tensorflow.names import names_of

_VERSION = 1
#: The array that holds the rest, as JSON.
_REST = "rest"


def packed(saved: Mapping[str, Any]) -> bytes:
    """What :meth:`bpsx.compressing.Compressing.save` has given, as an archive of NumPy's."""
    arrays: dict[str, Any] = {}
    rest = {}
    for i, (name, state) in enumerate(saved.items()):
        arrays.update({f"{i}.{key}": value for key, value in state.items() if isinstance(value, np.ndarray)})
        rest[name] = {key: value for key, value in state.items() if not isinstance(value, np.ndarray)}
    text = json.dumps({"version": _VERSION, "names": rest}).encode()
    to = io.BytesIO()
    arrays[_REST] = np.frombuffer(text, np.uint8)
    np.savez(to, **arrays)
    return to.getvalue()


def unpacked(archive: bytes) -> dict[str, Any]:
    """What :func:`packed` has been given; of nothing, nothing. Raises :class:`ConfigError` for what is no such archive."""
    if not archive:
        return {}
    try:
        with np.load(io.BytesIO(archive)) as found:     # which reads no objects
            rest = json.loads(found[_REST].tobytes())
            if rest["version"] != _VERSION:
                raise ValueError(f"version {rest['version']!r}; {_VERSION} is known")
            saved = {name: dict(state) for name, state in rest["names"].items()}
            of = list(saved.values())
            for key in found.files:
                if key != _REST:
                    i, _, what = key.partition(".")
                    of[int(i)][what] = found[key]
    except Exception as e:          # whatever zip files, NumPy and JSON raise for what is none of theirs
        raise ConfigError(f"state of compression: {len(archive)} bytes that are none: {e}") from e
    return saved


class Archived(tf.train.experimental.PythonState):  # type: ignore[misc]
    """What TensorFlow's checkpoints have as a text; derived classes know what it is of."""

    def serialize(self) -> bytes:
        """The state. Raises :class:`~bpsx.errors.NotInitializedError`; :class:`~bpsx.errors.BpsxError` if gradients under way do not end."""
        return packed(self._save())

    def deserialize(self, string_value: bytes) -> None:
        """Put back what :meth:`serialize` has given, by another one perhaps. Raises :class:`~bpsx.errors.ConfigError` for anything else."""
        self._load(unpacked(string_value))

    @abc.abstractmethod
    def _save(self) -> dict[str, Any]:
        """The state, by places."""

    @abc.abstractmethod
    def _load(self, saved: dict[str, Any]) -> None:
        """Put it back."""


class CompressionState(Archived):
    """What compression keeps, on this worker, of the gradients of ``variables``: for ``tf.train.Checkpoint(..., compression=CompressionState(...))``.

    Keras's distributed optimizers have it with them: needed for tapes and for optimizers of v1. Each worker has to save and load a state of its own,
    see "Checkpoints" in ``docs/compression.md``; on worker 0 it has what the servers keep. What belongs to a variable is known by its place among
    ``variables``. Not to be saved or loaded while gradients are under way. Thread-safe.
    """

    def __init__(self, variables: Iterable[Any]) -> None:
        super().__init__()
        self._variables = list(variables)

    def _save(self) -> dict[str, Any]:
        return kept_by_place(self._wires())

    def _load(self, saved: dict[str, Any]) -> None:
        compressing = _adapter.session().compressing
        wires = self._wires()
        compressing.restore({wire: saved[str(i)] for i, wire in enumerate(wires) if str(i) in saved})
        compressing.forget([wire for i, wire in enumerate(wires) if str(i) not in saved])

    def _wires(self) -> list[str]:
        return [PREFIX + name for name in names_of(self._variables)]
