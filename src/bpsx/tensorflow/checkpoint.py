"""State that compression keeps of gradients (residuals, momentum, counters), for checkpoints."""

from __future__ import annotations

import abc
from collections.abc import Iterable
from typing import Any

import tensorflow as tf

from bpsx.plugin.archive import packed, unpacked
from bpsx.plugin.checkpoint import Keeping, by_place
from bpsx.plugin.exchange import PREFIX
from bpsx.system.tracebacks import public_methods
from bpsx.tensorflow.names import names_of


class Archived(tf.train.experimental.PythonState):  # type: ignore[misc]
    """State that TensorFlow's checkpoints store as text; derived classes say which."""

    def serialize(self) -> bytes:
        """Return the state.

        Raises :class:`~bpsx.errors.NotInitializedError`; :class:`~bpsx.errors.BpsxError` if
        gradient exchanges under way do not end.
        """
        return packed(self._save())

    def deserialize(self, string_value: bytes) -> None:
        """Restore a state that :meth:`serialize` has returned, here or on another object.

        Raises :class:`~bpsx.errors.ConfigError` for anything else.
        """
        self._load(unpacked(string_value))

    @abc.abstractmethod
    def _save(self) -> dict[str, Any]:
        """Return the state, keyed by place."""

    @abc.abstractmethod
    def _load(self, saved: dict[str, Any]) -> None:
        """Restore the state."""


@public_methods
class CompressionState(Archived):
    """State that compression keeps, on this worker, of the gradients of ``variables``.

    Use it as ``tf.train.Checkpoint(..., compression=CompressionState(...))`` for tapes and for v1
    optimizers; Keras's distributed optimizers include it. Each worker must save and load its own
    state, see "Checkpoints" in ``docs/train/compression.md``; worker 0's includes the servers'
    state. A variable is identified by its place in ``variables``. Do not save or load while
    gradients are exchanged. Thread-safe.
    """

    def __init__(self, variables: Iterable[Any]) -> None:
        super().__init__()
        self._variables = list(variables)

    def _save(self) -> dict[str, Any]:
        return self._keeping().save()

    def _load(self, saved: dict[str, Any]) -> None:
        self._keeping().load(saved)

    def _keeping(self) -> Keeping:
        return Keeping(by_place(PREFIX + name for name in names_of(self._variables)))
