"""Keras callbacks: initial broadcast, averaged metrics, learning rates for many workers."""

from __future__ import annotations

import numbers
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from bpsx.errors import ConfigError
from bpsx.plugin import adapter
from bpsx.plugin.adapter import checked_root
from bpsx.system.tracebacks import public_methods
from bpsx.tensorflow import elastic
from bpsx.tensorflow.ops import broadcast, push_pull
from bpsx.tensorflow.variables import broadcast_variables


@public_methods
class BroadcastGlobalVariablesCallback(keras.callbacks.Callback):  # type: ignore[misc]
    """Broadcasts worker ``root_rank``'s variables when the first training begins.

    The model's and the optimizer's variables are broadcast, but not the states of random
    generators: workers must not all drop the same units. A model that is built by its first batch
    gets them after that batch. The model of an elastic state is left to that state. ``device`` is
    BytePS's and ignored. Raises :class:`~bpsx.errors.ConfigError`.
    """

    def __init__(self, root_rank: int, device: str = "") -> None:
        super().__init__()
        if adapter.initialised():
            checked_root(root_rank, "BroadcastGlobalVariablesCallback", adapter.session().size)
        self.root_rank, self.broadcast_done = root_rank, False
        self._kept: dict[int, Any] = {}

    def keep(self, variable: Any) -> None:
        """Leave ``variable`` as it is on each worker."""
        known = getattr(variable, "_value", variable)  # TensorFlow's variable in a Keras variable
        self._kept[id(known)] = known

    def on_train_begin(self, logs: Any = None) -> None:
        """Broadcast if the model is built.

        Keras makes the optimizer's variables in the first step. They are made here, since their
        initial values may have been loaded.
        """
        checked_root(self.root_rank, "BroadcastGlobalVariablesCallback", adapter.session().size)
        if self.model.built:
            if self.model.optimizer is not None and not self.model.optimizer.built:
                self.model.optimizer.build(self.model.trainable_variables)
            self._broadcast()

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Broadcast if the model was not built before its first batch."""
        self._broadcast()

    def _broadcast(self) -> None:
        if not self.broadcast_done and self.model not in elastic.models:
            optimizer = self.model.optimizer
            found = [*self.model.variables, *(optimizer.variables if optimizer is not None else [])]
            wanted = [
                v
                for v in found
                if not v.path.endswith(elastic.SEED)
                and id(getattr(v, "_value", v)) not in self._kept
            ]
            broadcast_variables(wanted, self.root_rank)
            self.broadcast_done = True


@public_methods
class MetricAverageCallback(keras.callbacks.Callback):  # type: ignore[misc]
    """Averages metrics in ``logs`` over all workers at the end of each epoch.

    Put it before callbacks that use metrics (early stopping, learning rates, logging). All workers
    must have the same metrics, and wait for each other here, in asynchronous training as well.
    ``device`` is BytePS's and ignored.
    """

    def __init__(self, device: str = "") -> None:
        super().__init__()

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Replace numbers in ``logs`` by their averages."""
        names = sorted(
            name
            for name, value in (logs or {}).items()
            if isinstance(value, (int, float)) or getattr(value, "ndim", None) == 0
        )
        if logs is None or not names:
            return
        own = tf.constant([float(logs[name]) for name in names], tf.float64)
        what = f"MetricAverage of {', '.join(names)}"
        session = adapter.session()
        if session.config.asynchronous:  # there a push_pull adds to the servers' values
            means = (
                tf.add_n(
                    [broadcast(own, root, name=f"{what}.{root}") for root in range(session.size)]
                )
                / session.size
            )
        else:
            means = push_pull(own, name=what)
        logs.update(zip(names, means.numpy().tolist(), strict=True))


def check_number(verb: str, argument: str, value: Any, least: float, allowed: str) -> None:
    """Raise :class:`~bpsx.errors.ConfigError` unless ``value`` is a number from ``least``."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real) or not float(value) >= least:
        raise ConfigError(f"{verb}: {argument}={value!r}: expected {allowed}")


@public_methods
class LearningRateScheduleCallback(keras.callbacks.Callback):  # type: ignore[misc]
    """Sets the learning rate to ``initial_lr * multiplier(epoch)`` for a range of epochs.

    The range is from ``start_epoch`` on, before ``end_epoch``. ``multiplier``: a number, or a
    function of the epoch. The epoch is a whole number with ``staircase``; otherwise it has a
    fraction, so that the rate changes with every batch. ``initial_lr``: by default the optimizer's
    when training begins. ``steps_per_epoch``: by default the number that ``fit`` knows.
    ``momentum_correction``: when the rate changes, the optimizer's momenta change in proportion, as
    they hold gradients times the earlier rate (Goyal et al. 2017, section 2.1). The rate is added
    to ``logs`` as ``lr``.

    Raises :class:`~bpsx.errors.ConfigError` for an optimizer whose learning rate is a schedule of
    its own.
    """

    def __init__(
        self,
        multiplier: float | Callable[[float], float],
        start_epoch: int = 0,
        end_epoch: int | None = None,
        staircase: bool = True,
        momentum_correction: bool = True,
        steps_per_epoch: int | None = None,
        initial_lr: float | None = None,
    ) -> None:
        super().__init__()
        self.start_epoch, self.end_epoch, self.momentum_correction = (
            start_epoch,
            end_epoch,
            momentum_correction,
        )
        self.staircase = staircase or not callable(multiplier)
        self.initial_lr, self.steps_per_epoch, self.current_epoch = initial_lr, steps_per_epoch, 0
        self.multiplier: Callable[[float], float] = (
            multiplier if callable(multiplier) else lambda epoch: multiplier
        )
        what = type(self).__name__
        if not callable(multiplier):
            check_number(
                what, "multiplier", multiplier, 0, "a number from 0, or a function of the epoch"
            )
        if initial_lr is not None:
            check_number(what, "initial_lr", initial_lr, 0, "a number from 0, or None")
        if steps_per_epoch is not None:
            check_number(what, "steps_per_epoch", steps_per_epoch, 1, "a number from 1, or None")
        if end_epoch is not None:
            check_number(
                what,
                "end_epoch",
                end_epoch,
                start_epoch,
                f"a number from start_epoch={start_epoch}, or None",
            )

    def on_train_begin(self, logs: Any = None) -> None:
        """Fill in arguments that were left out."""
        what = type(self).__name__
        optimizer = getattr(self.model.optimizer, "inner_optimizer", self.model.optimizer)
        if isinstance(
            optimizer._learning_rate, keras.optimizers.schedules.LearningRateSchedule
        ) or not hasattr(optimizer._learning_rate, "assign"):
            raise ConfigError(
                f"{what}: the optimizer's learning rate is a"
                f" {type(optimizer._learning_rate).__name__}, which cannot be set; give the"
                " optimizer a number"
            )
        if self.initial_lr is None:
            self.initial_lr = self._rate()
        if self.steps_per_epoch is None:
            self.steps_per_epoch = self.params.get("steps")
        if not self.staircase and not self.steps_per_epoch:
            raise ConfigError(
                f"{what}: give steps_per_epoch, because fit() does not know the number of batches"
                " of an epoch"
            )

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Record the epoch."""
        self.current_epoch = epoch

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        """Set the learning rate."""
        if (
            self.current_epoch < self.start_epoch
            or self.end_epoch is not None
            and self.current_epoch >= self.end_epoch
        ):
            return
        if self.staircase and batch == 0:
            self._set(self.current_epoch)
        elif not self.staircase:
            self._set(self.current_epoch + batch / float(self.steps_per_epoch or 1))

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Add the learning rate to ``logs``."""
        if logs is not None:
            logs["lr"] = self._rate()

    def _rate(self) -> float:
        return float(tf.convert_to_tensor(self.model.optimizer.learning_rate))

    def _set(self, epoch: float) -> None:
        self._set_rate(float(self.initial_lr or 0.0) * self.multiplier(epoch))

    def _set_rate(self, now: float) -> None:
        before = self._rate()
        if now == before:
            return
        self.model.optimizer.learning_rate = now
        if self.momentum_correction and before:
            optimizer = getattr(self.model.optimizer, "inner_optimizer", self.model.optimizer)
            for momentum in (
                getattr(optimizer, "momentums", [])
                if isinstance(optimizer, keras.optimizers.SGD)
                else []
            ):
                momentum.assign(momentum * (now / before))


@public_methods
class LearningRateWarmupCallback(LearningRateScheduleCallback):
    """Raises the learning rate with every batch over ``warmup_epochs``, up to ``initial_lr``.

    It begins at ``initial_lr / size()``; ``initial_lr`` is the rate of one worker times ``size()``
    (Goyal et al. 2017, section 2.2). ``verbose``: print a line when the warmup is done. Other
    arguments as in :class:`LearningRateScheduleCallback`.
    """

    def __init__(
        self,
        warmup_epochs: float = 5,
        momentum_correction: bool = True,
        steps_per_epoch: int | None = None,
        verbose: int = 0,
        initial_lr: float | None = None,
    ) -> None:
        check_number(type(self).__name__, "warmup_epochs", warmup_epochs, 0, "a number from 0")

        def multiplier(epoch: float) -> float:
            # That of the job's beginning: when a worker is lost, the others notice it in different
            # batches, and must have the same rate in each.
            size = adapter.session().config.size
            # with the last batch of an epoch the rate reaches the value for the epoch's end
            done = epoch + 1.0 / float(self.steps_per_epoch or 1)
            return 1.0 / size * (min(done / warmup_epochs, 1.0) * (size - 1) + 1)

        super().__init__(
            multiplier,
            start_epoch=0,
            end_epoch=int(-(-warmup_epochs // 1)),
            staircase=False,
            momentum_correction=momentum_correction,
            steps_per_epoch=steps_per_epoch,
            initial_lr=initial_lr,
        )
        self.verbose = verbose

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Add the learning rate to ``logs``.

        At the end of the last warmup epoch it is ``initial_lr``, whatever the number of batches
        was.
        """
        if self.end_epoch is not None and epoch == self.end_epoch - 1:
            self._set_rate(float(self.initial_lr or 0.0))
        super().on_epoch_end(epoch, logs)
        if self.end_epoch is not None and epoch == self.end_epoch - 1 and self.verbose > 0:
            print(
                f"\nEpoch {epoch + 1}: finished gradual learning rate warmup to {self._rate():g}."
            )
