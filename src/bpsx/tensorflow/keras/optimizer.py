"""DistributedOptimizer for Keras: an optimizer that applies the gradients of all workers."""

from __future__ import annotations

import functools
import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import keras
import tensorflow as tf

from bpsx.errors import ConfigError
from bpsx.plugin import adapter
from bpsx.plugin.adapter import checked_passes
from bpsx.plugin.compression_params import Params
from bpsx.plugin.momentum import Momentum, has_momentum
from bpsx.system.tracebacks import public
from bpsx.tensorflow.async_training import Weights
from bpsx.tensorflow.compression import Compression, Compressor
from bpsx.tensorflow.exchange import Exchange, in_last
from bpsx.tensorflow.keras.checkpoint import KerasCompressionState
from bpsx.tensorflow.reductions import averages
from bpsx.tensorflow.tracing import as_it_is

log = logging.getLogger("bpsx.tensorflow")
_VERB = "DistributedOptimizer"
#: Attribute of an optimizer that is called by one that has exchanged the gradients already.
_WITHIN = "_bpsx_within"
LossScale = keras.optimizers.LossScaleOptimizer


class _Distributed:
    """Base class that is put before the class of the user's optimizer.

    Keras calls :meth:`apply` from all entry points.
    """

    _bpsx_exchange: Exchange
    _bpsx_weights: Weights
    _bpsx_momentum: Momentum

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Exchange as the optimizer whose class makes this one does.

        Keras makes optimizers from their configuration in this way.
        """
        super().__init__(*args, **kwargs)
        _equip(self, type(self)._bpsx_exchange.alike(), Weights())

    def __reduce__(self) -> Any:
        """Copies, deep or pickled, are distributed, too."""
        plain: Any = object.__new__(type(self).__mro__[2])
        object.__setattr__(
            plain,
            "__dict__",
            {key: value for key, value in self.__dict__.items() if not key.startswith("_bpsx_")},
        )
        return distributed, (plain, self._bpsx_exchange.alike())

    @as_it_is
    def apply(self, grads: Any, trainable_variables: Any = None) -> Any:
        """As the optimizer's ``apply``, with the sums or averages of all workers' gradients."""
        this: Any = self
        base: Any = super()
        gradients = list(grads)
        if trainable_variables is not None:
            trainable_variables = list(trainable_variables)
            if not this.built:
                with keras.name_scope(this.name):
                    this.build(trainable_variables)
        variables = (
            this._trainable_variables if trainable_variables is None else trainable_variables
        )
        if len(gradients) != len(variables):
            raise ConfigError(
                f"{_VERB}: apply: got {len(gradients)} gradients for {len(variables)} variables;"
                " each variable needs a gradient, or None"
            )
        if self.__dict__.get(_WITHIN):
            return base.apply(gradients, trainable_variables)
        if adapter.session().config.asynchronous:
            self._bpsx_exchange.check_async()
            with _within(this):
                return self._bpsx_weights.step_on(
                    variables, lambda: base.apply(gradients, trainable_variables)
                )
        found = self._exchanged(gradients, variables)
        if isinstance(this, LossScale):
            found = self._bpsx_exchange.overflow_together(found, variables)
        with self._bpsx_momentum.off(), _within(this):
            return base.apply(found, trainable_variables)

    def _exchanged(self, gradients: list[Any], variables: Any) -> list[Any]:
        """Return the gradients to apply.

        If the optimizer adds up gradients of several steps, workers exchange these sums in the last
        step. The optimizer then gets the sums' average, finds nothing added up, and divides.
        """
        this: Any = self
        known = this._trainable_variables
        steps = None if isinstance(this, LossScale) else this.gradient_accumulation_steps
        if not steps:
            return self._bpsx_exchange(
                gradients, variables, this.learning_rate, self._bpsx_momentum, known
            )
        own = [g if g is None else tf.convert_to_tensor(g) for g in gradients]
        kept = [this._accumulated_gradients[this._get_variable_index(v)] for v in variables]

        # Keras divides a gradient by this before it adds it up.
        scale = this.loss_scale_factor or 1.0
        overwrites = [getattr(v, "overwrite_with_gradient", False) for v in variables]

        def added_up(gradient: Any, sum_before: Any, overwrite: bool) -> Any:
            before = tf.convert_to_tensor(sum_before)
            if overwrite:
                return tf.maximum(gradient, before)
            return gradient + before * tf.cast(scale, before.dtype)

        def last() -> list[Any]:
            sums = [
                None if g is None else added_up(g, k, overwrite)
                for g, k, overwrite in zip(own, kept, overwrites, strict=True)
            ]
            instead = {i: tf.convert_to_tensor(kept[i]) for i, g in enumerate(own) if g is None}
            found = self._bpsx_exchange(
                sums, variables, this.learning_rate, self._bpsx_momentum, known, instead
            )
            for k, g in zip(kept, found, strict=True):
                if g is not None:
                    k.assign(tf.zeros_like(k))
            return found

        is_last = tf.equal((tf.convert_to_tensor(this._iterations) + 1) % steps, 0)
        return in_last(is_last, last, own)

    @property
    def loss_scale_factor(self) -> Any:
        """As Keras's attribute; setting it shows that a LossScaleOptimizer is put around this one.

        Under mixed_float16, ``compile`` puts Keras's LossScaleOptimizer around an optimizer. The
        LossScaleOptimizer sets this attribute when it is made. It applies nothing where a gradient
        is not finite, and would so leave out this worker's exchange. Therefore it exchanges in
        place of this optimizer, which does so only if it is called directly. The LossScaleOptimizer
        then looks at sums over all workers.
        """
        # Skip Keras's own methods that set an attribute, which read it first; then comes the
        # setter.
        frame: Any = sys._getframe(1)
        while frame is not None and frame.f_locals.get("self") is self:
            frame = frame.f_back
        outer = None if frame is None else frame.f_locals.get("self")
        if (
            isinstance(outer, LossScale)
            and not is_distributed(outer)
            and getattr(outer, "inner_optimizer", None) is self
        ):
            adopt(outer, self._bpsx_exchange, self._bpsx_weights)
        try:
            return self.__dict__["loss_scale_factor"]
        except KeyError:  # while it is made
            raise AttributeError("loss_scale_factor") from None

    @loss_scale_factor.setter
    def loss_scale_factor(self, value: Any) -> None:
        self.__dict__["loss_scale_factor"] = value


@contextmanager
def _within(optimizer: Any) -> Iterator[None]:
    """Context in which ``optimizer``'s inner optimizer does not exchange gradients again."""
    inner = getattr(optimizer, "inner_optimizer", None)
    if inner is None:
        yield
        return
    # several threads may be in here, one for each replica
    inner.__dict__[_WITHIN] = inner.__dict__.get(_WITHIN, 0) + 1
    try:
        yield
    finally:
        inner.__dict__[_WITHIN] -= 1


def adopt(optimizer: Any, exchange: Exchange, weights: Weights) -> Any:
    """Make ``optimizer`` itself a distributed one.

    Saved models name its class, and are loaded without bpsx as well. So the new class has the same
    name.
    """
    _equip(optimizer, exchange, weights)
    cls = type(optimizer)
    ours = type(
        cls.__name__,
        (_Distributed, cls),
        {
            "__module__": cls.__module__,
            "__qualname__": cls.__qualname__,
            "_bpsx_exchange": exchange,
            **exchange.methods,
        },
    )
    registered = keras.saving.get_registered_name(cls)
    names = keras.saving.get_registered_name.__globals__.get("GLOBAL_CUSTOM_NAMES")
    if registered != cls.__name__ and names is not None:
        # the name given to register_keras_serializable, which files contain
        names[ours] = registered
    # Keras tracks attributes that are set in the usual way
    object.__setattr__(optimizer, "__class__", ours)
    return optimizer


def _equip(optimizer: Any, exchange: Exchange, weights: Weights) -> None:
    """Give ``optimizer`` the attributes that :class:`_Distributed` needs."""
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    momentum = inner.__dict__.get("_bpsx_momentum") or Momentum(
        lambda: inner, [keras.optimizers.SGD]
    )
    optimizer.__dict__.update(
        _bpsx_exchange=exchange, _bpsx_weights=weights, _bpsx_momentum=momentum
    )
    if exchange.compresses:
        kept = inner.__dict__.get("_bpsx_kept") or KerasCompressionState(exchange)
        optimizer.__dict__["_bpsx_kept"] = kept  # Keras finds it there and saves it
        # so does tf.train.Checkpoint
        optimizer._track_trackable(kept, "_bpsx_kept", overwrite=True)


def _decide_auto() -> None:
    """Have ``jit_compile="auto"`` mean no for a distributed optimizer.

    With "auto" Keras has XLA compile steps where there is a GPU. There XLA cannot exchange
    gradients.
    """
    for cls in keras.Model.__mro__:
        decide = cls.__dict__.get("_resolve_auto_jit_compile")
        if decide is not None:
            break
    else:
        return  # this Keras decides in another way

    @functools.wraps(decide)
    def decides(model: Any) -> bool:
        if not is_distributed(getattr(model, "optimizer", None)):
            return bool(decide(model))
        log.info(
            "jit_compile='auto' is off, because the step exchanges gradients, which XLA can"
            " compile only for the CPU"
        )
        return False

    cls._resolve_auto_jit_compile = decides


def is_distributed(optimizer: Any) -> bool:
    """Whether ``optimizer`` exchanges gradients."""
    return isinstance(optimizer, _Distributed)


def distributed(optimizer: Any, exchange: Exchange) -> Any:
    """Return a distributed optimizer that shares all state with ``optimizer``."""
    made = object.__new__(type(optimizer))
    object.__setattr__(made, "__dict__", optimizer.__dict__)
    return adopt(made, exchange, Weights())


@public
def DistributedOptimizer(
    optimizer: Any,
    name: str | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: type[Compressor] = Compression.none,
    sparse_as_dense: bool = False,
    op: Any = None,
    backward_passes_per_step: int = 1,
    compression_params: Params = None,
) -> Any:
    """Return a Keras optimizer that applies averages (``op=Sum``: sums) of all workers' gradients.

    Otherwise it is ``optimizer``, any of Keras 3; both share all state. A
    :class:`keras.optimizers.LossScaleOptimizer` looks at the averages, so an overflow on one worker
    is one on all, also where ``compile`` puts it around the returned optimizer.
    ``backward_passes_per_step``: Keras's ``gradient_accumulation_steps``, which it sets. Only the
    last of so many steps exchanges gradients: it applies the mean of theirs.
    ``sparse_as_dense``: gradients of embeddings travel as dense tensors. ``compression_params``: as
    for :func:`bpsx.torch.DistributedOptimizer`, one for all or by variables' paths; its momentum
    replaces SGD's, and its state is saved with the optimizer's variables. ``name``,
    ``device_dense`` and ``device_sparse`` are BytePS's and ignored.

    Saved models have the class of ``optimizer``: load them with :func:`load_model` to continue with
    several workers. In asynchronous training the weights' changes travel, see
    ``docs/train/async.md``. Raises :class:`~bpsx.errors.ConfigError`.
    """
    check_optimizer(optimizer)
    exchange = Exchange(
        _VERB,
        averages(op, None, _VERB),
        compression,
        compression_params,
        sparse_as_dense,
        has_momentum=has_momentum(getattr(optimizer, "inner_optimizer", optimizer)),
    )
    set_passes(optimizer, backward_passes_per_step)
    return distributed(optimizer, exchange)


def check_optimizer(optimizer: Any) -> None:
    """Raise :class:`~bpsx.errors.ConfigError` unless ``optimizer`` can be distributed."""
    if keras.backend.backend() != "tensorflow":
        raise ConfigError(
            f"{_VERB}: Keras uses the backend {keras.backend.backend()}; bpsx.tensorflow needs"
            " TensorFlow: set KERAS_BACKEND=tensorflow"
        )
    if not isinstance(optimizer, keras.optimizers.Optimizer):
        raise ConfigError(
            f"{_VERB}: expected an optimizer of Keras 3, not {type(optimizer).__name__}"
        )
    if is_distributed(optimizer):
        raise ConfigError(f"{_VERB}: this {type(optimizer).__name__} is distributed already")


def set_passes(optimizer: Any, passes: Any) -> None:
    """Have ``optimizer`` add up the gradients of ``passes`` steps.

    Raises :class:`~bpsx.errors.ConfigError`.
    """
    passes = checked_passes(passes, _VERB)
    if passes == 1:
        return
    inner = optimizer.inner_optimizer if isinstance(optimizer, LossScale) else optimizer
    if inner.built or inner.gradient_accumulation_steps not in (None, passes):
        raise ConfigError(
            f"{_VERB}: backward_passes_per_step={passes} sets gradient_accumulation_steps, but"
            f" that is {inner.gradient_accumulation_steps} in this optimizer, which"
            f" has{'' if inner.built else ' not'} been built. Give only one of the two, before the"
            " optimizer is built"
        )
    inner.gradient_accumulation_steps = passes


_decide_auto()
