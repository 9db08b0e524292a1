"""What compression keeps of gradients (residuals, momentum, counters), for checkpoints."""

from __future__ import annotations

import abc
from collections.abc import Iterable
from typing import Any

import tensorflow as tf

from bpsx.plugin import adapter
from bpsx.plugin.archive import packed, unpacked
from bpsx.plugin.checkpoint import kept_by_place
from bpsx.system.tracebacks import public_methods
from bpsx.tensorflow.exchange import PREFIX
from bpsx.tensorflow.names import names_of


class Archived(tf.train.experimental.PythonState):  # type: ignore[misc]
    """What TensorFlow's checkpoints have as a text; derived classes know what it is of."""

    def serialize(self) -> bytes:
        """The state.

        Raises :class:`~bpsx.errors.NotInitializedError`; :class:`~bpsx.errors.BpsxError` if
        gradients under way do not end.
        """
        return packed(self._save())

    def deserialize(self, string_value: bytes) -> None:
        """Put back what :meth:`serialize` has given, by another one perhaps.

        Raises :class:`~bpsx.errors.ConfigError` for anything else.
        """
        self._load(unpacked(string_value))

    @abc.abstractmethod
    def _save(self) -> dict[str, Any]:
        """The state, by places."""

    @abc.abstractmethod
    def _load(self, saved: dict[str, Any]) -> None:
        """Put it back."""


@public_methods
class CompressionState(Archived):
    """What compression keeps, on this worker, of the gradients of ``variables``: for
    ``tf.train.Checkpoint(..., compression=CompressionState(...))``.

    Keras's distributed optimizers have it with them: needed for tapes and for optimizers of v1.
    Each worker has to save and load a state of its own, see "Checkpoints" in
    ``docs/train/compression.md``; on worker 0 it has what the servers keep. What belongs to a
    variable is known by its place among ``variables``. Not to be saved or loaded while gradients
    are under way. Thread-safe.
    """

    def __init__(self, variables: Iterable[Any]) -> None:
        super().__init__()
        self._variables = list(variables)

    def _save(self) -> dict[str, Any]:
        return kept_by_place(self._wires())

    def _load(self, saved: dict[str, Any]) -> None:
        compressing = adapter.session().compressing
        wires = self._wires()
        compressing.restore(
            {wire: saved[str(i)] for i, wire in enumerate(wires) if str(i) in saved}
        )
        compressing.forget([wire for i, wire in enumerate(wires) if str(i) not in saved])

    def _wires(self) -> list[str]:
        return [PREFIX + name for name in names_of(self._variables)]
