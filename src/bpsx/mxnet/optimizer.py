"""DistributedOptimizer: for the Module API and for loops without a Trainer."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Sequence
from typing import Any

import mxnet as mx

from bpsx.errors import ConfigError
from bpsx.mxnet.async_training import Weights
from bpsx.mxnet.ops import behind_engine, check_array, refuse, submit
from bpsx.mxnet.startup import FirstStep
from bpsx.plugin import adapter
from bpsx.plugin.exchange import PREFIX
from bpsx.session.refusals import counted_together
from bpsx.system.tracebacks import public_methods

#: Numbers of the DistributedOptimizers, whose gradients have the same indices.
_numbers = itertools.count(1)


@public_methods
class DistributedOptimizer(mx.optimizer.Optimizer):  # type: ignore[misc]
    """Wraps ``optimizer`` so that it uses the averages of all workers' gradients.

    For ``Module.fit`` (with ``kvstore=None``; for a Module on several devices ``"local"``, which
    sums over them), and for custom updaters. Gradients are identified by the indices or names that
    the Module gives. Each is exchanged when it is updated; the first layers' have the highest
    priority. Weights must be equal at the start: see :func:`broadcast_parameters`. The first step
    compares a sample of them (``BPSX_CHECK_WEIGHTS``). In asynchronous training the weights'
    changes travel, see ``docs/train/async.md``.

    With gluon use :class:`DistributedTrainer`. Raises :class:`~bpsx.errors.ConfigError`.
    """

    def __init__(self, optimizer: mx.optimizer.Optimizer) -> None:
        if not isinstance(optimizer, mx.optimizer.Optimizer):
            raise ConfigError(
                "DistributedOptimizer: expected an optimizer of MXNet, not"
                f" {type(optimizer).__name__}; create one with mxnet.optimizer.create(name, ...)"
            )
        if isinstance(optimizer, DistributedOptimizer):
            raise ConfigError("DistributedOptimizer: this optimizer is distributed already")
        self.__setstate__({"_optimizer": optimizer})

    def __getattr__(self, name: str) -> Any:
        if name == "_optimizer":  # during unpickling
            raise AttributeError(name)
        return getattr(self._optimizer, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._optimizer, name, value)

    def __getstate__(self) -> dict[str, Any]:
        return {"_optimizer": self._optimizer}

    def __setstate__(self, state: dict[str, Any]) -> None:
        number = next(_numbers)
        self.__dict__.update(
            state, _weights=Weights(), _first_step=None, _suffix="" if number == 1 else f"#{number}"
        )

    def update(self, index: Any, weight: Any, grad: Any, state: Any) -> None:
        """Exchange the gradient, then update as the optimizer itself does."""
        self._step(self._optimizer.update, index, weight, grad, state)

    def update_multi_precision(self, index: Any, weight: Any, grad: Any, state: Any) -> None:
        """Exchange the gradient, then update as the optimizer itself does."""
        self._step(self._optimizer.update_multi_precision, index, weight, grad, state)

    def _step(self, update: Any, index: Any, weight: Any, grad: Any, state: Any) -> None:
        several = isinstance(index, (list, tuple))
        indices, weights, grads = (index, weight, grad) if several else ([index], [weight], [grad])
        try:
            self._exchange(indices, weights, grads, lambda: update(index, weight, grad, state))
        except Exception as e:
            if not _is_called_by_kvstore():
                raise
            refuse({f"{i}{self._suffix}": w for i, w in zip(indices, weights)}, e)

    @counted_together(PREFIX)
    @behind_engine
    def _exchange(
        self,
        indices: Sequence[Any],
        weights: Sequence[Any],
        grads: Sequence[Any],
        update: Callable[[], Any],
    ) -> None:
        if adapter.session().config.asynchronous:
            self._weights.step_of(
                self._optimizer,
                update,
                {f"{i}{self._suffix}": [w] for i, w in zip(indices, weights, strict=True)},
            )
            return
        first = self._step_of_this_job()
        first.meet(indices, weights)
        for i, g in zip(indices, grads, strict=True):
            check_array(g, f"DistributedOptimizer: gradient {i}")
            submit(
                g,
                f"{PREFIX}{i}{self._suffix}",
                average=True,
                priority=-i if isinstance(i, int) else 0,
            )
        update()
        first.end_if_complete()

    def _step_of_this_job(self) -> FirstStep:
        # A Module updates its weights one by one, so there is no telling where a step ends.
        adapter.session().require_all("DistributedOptimizer of bpsx.mxnet")
        first: FirstStep | None = self._first_step
        if first is None or not first.is_of_this_job:
            first = FirstStep(self._suffix, self._optimizer.idx2name)
            self.__dict__["_first_step"] = first
        return first


def _is_called_by_kvstore() -> bool:
    """Whether MXNet's C library has called an updater: it prints exceptions and drops them."""
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name == "updater_handle" and frame.f_globals.get(
            "__name__", ""
        ).startswith("mxnet."):
            return True
        frame = frame.f_back  # type: ignore[assignment]
    return False


def _delegated(name: str) -> Any:
    def method(self: DistributedOptimizer, *args: Any, **kwargs: Any) -> Any:
        return getattr(self._optimizer, name)(*args, **kwargs)

    method.__name__, method.__doc__ = name, f"As the optimizer's own ``{name}``."
    return method


def _reading(name: str) -> Callable[[Any], Any]:
    return lambda self: getattr(self._optimizer, name)


# Python finds attributes of the base class before it calls __getattr__.
for _name, _value in vars(mx.optimizer.Optimizer).items():
    if not _name.startswith("__") and _name not in vars(DistributedOptimizer):
        if isinstance(_value, property):
            setattr(DistributedOptimizer, _name, property(_reading(_name)))
        elif callable(_value) and not isinstance(_value, staticmethod):
            setattr(DistributedOptimizer, _name, _delegated(_name))
