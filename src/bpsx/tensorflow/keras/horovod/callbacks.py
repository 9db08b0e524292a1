"""Horovod's forms of the callbacks in :mod:`bpsx.tensorflow.keras.callbacks`."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import keras

from bpsx.errors import ConfigError
from bpsx.plugin import adapter
from bpsx.tensorflow.keras import callbacks as ours
from bpsx.tensorflow.keras.callbacks import MetricAverageCallback
from bpsx.tensorflow.keras.elastic import (
    CommitStateCallback,
    UpdateBatchStateCallback,
    UpdateEpochStateCallback,
)

__all__ = [
    "BestModelCheckpoint",
    "BroadcastGlobalVariablesCallback",
    "CommitStateCallback",
    "LearningRateScheduleCallback",
    "LearningRateWarmupCallback",
    "MetricAverageCallback",
    "UpdateBatchStateCallback",
    "UpdateEpochStateCallback",
]


class BroadcastGlobalVariablesCallback(ours.BroadcastGlobalVariablesCallback):
    """As bpsx's; ``local_variables``, one or several, keep each worker's own values."""

    def __init__(self, root_rank: int, device: str = "", local_variables: Any = None) -> None:
        super().__init__(root_rank, device)
        given = [] if local_variables is None else local_variables
        several = isinstance(given, Iterable) and not hasattr(given, "assign")
        for variable in given if several else [given]:
            self.register_local_var(variable)

    def register_local_var(self, var: Any) -> None:
        """Do not broadcast ``var``. Raises :class:`~bpsx.errors.ConfigError` for no variable."""
        if not hasattr(var, "assign"):
            raise ConfigError(
                f"BroadcastGlobalVariablesCallback: local_variables: {var!r} is not a variable;"
                " expected a list of variables"
            )
        self.keep(var)


class LearningRateScheduleCallback(ours.LearningRateScheduleCallback):
    """As bpsx's, but ``initial_lr`` is required, and a number as ``multiplier`` is a decay.

    The rate is then ``initial_lr * multiplier ** (epoch - start_epoch)``.
    """

    def __init__(
        self,
        initial_lr: float,
        multiplier: float | Callable[[float], float],
        start_epoch: int = 0,
        end_epoch: int | None = None,
        staircase: bool = True,
        momentum_correction: bool = True,
        steps_per_epoch: int | None = None,
    ) -> None:
        _check_initial(type(self).__name__, initial_lr)
        decay = multiplier
        if not callable(decay):
            ours.check_number(
                type(self).__name__,
                "multiplier",
                decay,
                0,
                "a number from 0, or a function of the epoch",
            )

            def multiplier(epoch: float) -> float:
                return float(decay ** (epoch - start_epoch))

        super().__init__(
            multiplier,
            start_epoch,
            end_epoch,
            staircase,
            momentum_correction,
            steps_per_epoch,
            initial_lr,
        )


class LearningRateWarmupCallback(ours.LearningRateWarmupCallback):
    """As bpsx's, but ``initial_lr`` is required, and ``verbose`` is for worker 0."""

    def __init__(
        self,
        initial_lr: float,
        warmup_epochs: float = 5,
        momentum_correction: bool = True,
        steps_per_epoch: int | None = None,
        verbose: int = 0,
    ) -> None:
        _check_initial(type(self).__name__, initial_lr)
        super().__init__(warmup_epochs, momentum_correction, steps_per_epoch, verbose, initial_lr)

    def on_train_begin(self, logs: Any = None) -> None:
        """As bpsx's."""
        super().on_train_begin(logs)
        if adapter.session().rank != 0:
            self.verbose = 0


def _check_initial(what: str, initial_lr: Any) -> None:
    if initial_lr is None:
        raise ConfigError(f"{what}: initial_lr=None: must be a number of at least 0")


class BestModelCheckpoint(keras.callbacks.ModelCheckpoint):  # type: ignore[misc]
    """Keras's ``ModelCheckpoint`` of the best model; set its ``filepath`` before training."""

    def __init__(
        self,
        monitor: str = "val_loss",
        verbose: int = 0,
        save_weights_only: bool = False,
        mode: str = "auto",
        save_freq: Any = "epoch",
    ) -> None:
        # Keras requires a path with the right suffix; there is none yet.
        super().__init__(
            "none.weights.h5" if save_weights_only else "none.keras",
            monitor,
            verbose,
            save_best_only=True,
            save_weights_only=save_weights_only,
            mode=mode,
            save_freq=save_freq,
        )
        self.filepath = None

    def on_train_begin(self, logs: Any = None) -> None:
        """Raise :class:`~bpsx.errors.ConfigError` if there is no ``filepath``."""
        if self.filepath is None:
            raise ConfigError(
                "BestModelCheckpoint: there is no path to save the model to. Set its filepath, or"
                " use keras.callbacks.ModelCheckpoint(path, save_best_only=True)"
            )
        super().on_train_begin(logs)
