"""Training with Keras' ``fit`` that goes on when workers are lost or join.

Set ``BPSX_ELASTIC=shrink`` on all processes. docs/train/uneven-and-elastic.md has an example.
"""

from __future__ import annotations

import weakref
from typing import Any

import keras

from bpsx.errors import ConfigError
from bpsx.plugin import elastic
from bpsx.plugin.adapter import as_integer
from bpsx.plugin.elastic import Departed, HostsUpdatedInterrupt, leave, run
from bpsx.system.tracebacks import public_methods
from bpsx.tensorflow.elastic import State, TensorFlowKerasState, steps

__all__ = [
    "CommitStateCallback",
    "Departed",
    "HostsUpdatedInterrupt",
    "KerasState",
    "State",
    "UpdateBatchStateCallback",
    "UpdateEpochStateCallback",
    "leave",
    "run",
    "steps",
]

#: By state: the callbacks that count for it in the ``fit`` that is running, by class.
_counting: weakref.WeakKeyDictionary[Any, dict[type, _Counting]] = weakref.WeakKeyDictionary()


class KerasState(TensorFlowKerasState):
    """:class:`bpsx.tensorflow.elastic.TensorFlowKerasState`, by Horovod's name for Keras."""

    def __init__(self, model: Any, optimizer: Any = None, **more: Any) -> None:
        super().__init__(model, optimizer, **more)


class _OfState(keras.callbacks.Callback):  # type: ignore[misc]
    """A callback with a state."""

    def __init__(self, state: elastic.State) -> None:
        super().__init__()
        if not isinstance(state, elastic.State):
            raise ConfigError(
                f"{type(self).__name__}: state is {type(state).__name__}; expected a KerasState"
            )
        self.state: Any = state


class _Counting(_OfState):
    """A callback that counts in a value of the state.

    A :class:`CommitStateCallback` that comes before this one lets it count, and then commits.
    """

    _value = ""

    def __init__(self, state: elastic.State) -> None:
        super().__init__(state)
        if not hasattr(state, self._value):
            raise ConfigError(
                f"{type(self).__name__}: the state has no value {self._value!r}; give it"
                f" {self._value}=0"
            )

    def on_train_begin(self, logs: Any = None) -> None:
        """Count from now on."""
        _counting.setdefault(self.state, {})[type(self)] = self

    def on_train_end(self, logs: Any = None) -> None:
        """Do not count any more."""
        _counting.get(self.state, {}).pop(type(self), None)

    def count_batches(self, batch: int) -> None:
        """Batch number ``batch`` of the epoch is over; may be called again."""

    def count_epoch(self) -> None:
        """The epoch is over; may be called again."""


@public_methods
class UpdateBatchStateCallback(_Counting):
    """Counts in ``state.batch`` the batches that have been made of the epoch.

    It goes on from the value that ``state.batch`` has: give ``fit`` only the rest of the epoch.
    """

    _value = "batch"

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        """Remember where the batch begins; Keras may make several in one call."""
        self._next = batch

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Count the batch."""
        self.count_batches(batch)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Begin again with 0."""
        self.count_epoch()

    def count_batches(self, batch: int) -> None:
        """As the base class says."""
        self.state.batch += batch + 1 - self._next
        self._next = batch + 1

    def count_epoch(self) -> None:
        """As the base class says."""
        self.state.batch = 0


@public_methods
class UpdateEpochStateCallback(_Counting):
    """Counts in ``state.epoch`` the epochs that have been made."""

    _value = "epoch"

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Count this one when it ends."""
        self._ended = False

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Count the epoch."""
        self.count_epoch()

    def count_epoch(self) -> None:
        """As the base class says."""
        self.state.epoch += 0 if self._ended else 1
        self._ended = True


@public_methods
class CommitStateCallback(_OfState):
    """Commits the state after every ``batches_per_commit`` batches, and after each epoch.

    There workers may join. Then ``fit`` ends with :class:`HostsUpdatedInterrupt`, and :func:`run`
    calls the training function again. Give it as the last callback: those after it do not hear of
    the batch or the epoch in which ``fit`` ends. All workers must make equally many batches of an
    epoch. After the last batch, if Keras knows which that is, only the epoch's end commits. Raises
    :class:`~bpsx.errors.ConfigError`.
    """

    def __init__(self, state: elastic.State, batches_per_commit: int = 1) -> None:
        super().__init__(state)
        number = as_integer(batches_per_commit)
        if number is None or number < 1:
            raise ConfigError(
                f"CommitStateCallback: batches_per_commit={batches_per_commit!r}: expected an"
                " integer from 1"
            )
        self.batches_per_commit = self.batches_remaining = number

    def on_train_begin(self, logs: Any = None) -> None:
        """Begin anew, so that all workers commit after the same batches."""
        self.batches_remaining = self.batches_per_commit

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Commit if it is time."""
        for counting in self._counters():
            counting.count_batches(batch)
        self.batches_remaining -= 1
        steps = self.params.get("steps")
        if self.batches_remaining <= 0 and (steps is None or batch + 1 < steps):
            self._commit()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Commit."""
        for counting in self._counters():
            counting.count_epoch()
        self._commit()

    def _counters(self) -> list[_Counting]:
        return list(_counting.get(self.state, {}).values())

    def _commit(self) -> None:
        self.batches_remaining = self.batches_per_commit
        try:
            self.state.commit()
        except BaseException:
            _counting.pop(self.state, None)  # fit() ends here, without on_train_end()
            raise
