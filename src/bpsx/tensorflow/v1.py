"""DistributedOptimizer for ``tf.compat.v1.train``, in v1 graphs, functions and eager code."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from bpsx.errors import ConfigError
from bpsx.plugin import adapter
from bpsx.plugin.adapter import checked_passes
from bpsx.plugin.momentum import Momentum
from bpsx.system.tracebacks import public_methods
from bpsx.tensorflow.async_training import Weights
from bpsx.tensorflow.exchange import Exchange, in_last
from bpsx.tensorflow.names import names_of
from bpsx.tensorflow.tracing import as_it_is


class Accumulated:
    """Adds up gradients over several passes, in variables of its own."""

    def __init__(self, passes: int) -> None:
        self._passes = passes
        self._count: Any = None
        self._kept: dict[str, Any] = {}  # sums, by variable's name

    def add(self, pairs: list[tuple[Any, Any]]) -> tuple[Any, list[tuple[Any, Any]]]:
        """Add gradients; return whether this is the last pass, and pairs of sums and variables.

        A sum is None where no pass has had a gradient.
        """
        own = [g if g is None else tf.convert_to_tensor(g) for g, _ in pairs]
        names = names_of([v for _, v in pairs])
        with tf.init_scope() if tf.inside_function() else tf.name_scope("bpsx_passes"):
            if self._count is None:
                self._count = tf.compat.v1.Variable(
                    0, trainable=False, use_resource=True, name="bpsx_pass"
                )
            for name, gradient, (_, variable) in zip(names, own, pairs, strict=True):
                if name not in self._kept and gradient is not None:
                    self._kept[name] = tf.compat.v1.Variable(
                        tf.zeros(variable.shape, gradient.dtype), trainable=False, use_resource=True
                    )
        sums: list[Any] = []
        for name, gradient in zip(names, own, strict=True):
            kept = self._kept.get(name)
            sums.append(
                None
                if kept is None
                else (
                    kept.read_value()
                    if gradient is None
                    else kept.assign_add(gradient, read_value=True)
                )
            )
        number = self._count.assign_add(1, read_value=True)
        variables = [v for _, v in pairs]
        return tf.equal(number % self._passes, 0), [
            (s if s is None else tf.identity(s), v) for s, v in zip(sums, variables, strict=True)
        ]

    def clear(self, after: list[Any]) -> list[Any]:
        """Set the sums to zero once ``after`` is complete."""
        with tf.control_dependencies(after):
            return [
                k.assign(tf.zeros(k.shape, k.dtype), read_value=False) for k in self._kept.values()
            ]


@public_methods
class _DistributedOptimizer(tf.compat.v1.train.Optimizer):  # type: ignore[misc]
    """Result of :func:`bpsx.tensorflow.DistributedOptimizer` for v1 optimizers.

    It computes gradients of all workers, and leaves the rest to the optimizer.
    """

    def __init__(
        self, optimizer: Any, name: str | None, use_locking: bool, exchange: Exchange, passes: int
    ) -> None:
        super().__init__(
            name=name or f"Distributed{type(optimizer).__name__}", use_locking=use_locking
        )
        self._optimizer, self._exchange, self._weights = optimizer, exchange, Weights()
        self._momentum = Momentum(
            lambda: optimizer, [tf.compat.v1.train.MomentumOptimizer], "_momentum"
        )
        self._number = passes
        # Passes are counted for each set of variables: an optimizer may minimize several losses.
        self._passes: dict[tuple[str, ...], Accumulated] = {}
        # Whether the gradients computed last are complete, and whose they are.
        self._last: tuple[Any, Accumulated] | None = None

    @as_it_is
    def compute_gradients(self, *args: Any, **kwargs: Any) -> list[tuple[Any, Any]]:
        """As the optimizer's own, then summed or averaged over all workers.

        With ``backward_passes_per_step`` they are complete in the last pass;
        :meth:`apply_gradients` knows when.
        """
        pairs = list(self._optimizer.compute_gradients(*args, **kwargs))
        if adapter.session().config.asynchronous:
            return pairs
        if self._number == 1:
            return self._exchanged(pairs)
        names = tuple(names_of([v for _, v in pairs]))
        passes = self._passes.setdefault(names, Accumulated(self._number))
        is_last, sums = passes.add(pairs)
        self._last = is_last, passes
        gradients = in_last(
            is_last, lambda: [g for g, _ in self._exchanged(sums)], [g for g, _ in sums]
        )
        return list(zip(gradients, [v for _, v in sums], strict=True))

    def _exchanged(self, pairs: list[tuple[Any, Any]]) -> list[tuple[Any, Any]]:
        variables = [v for _, v in pairs]
        rate = getattr(self._optimizer, "_learning_rate", getattr(self._optimizer, "_lr", None))
        rate = rate() if callable(rate) else rate
        return list(
            zip(
                self._exchange([g for g, _ in pairs], variables, rate, self._momentum),
                variables,
                strict=True,
            )
        )

    @as_it_is
    def apply_gradients(
        self, grads_and_vars: Any, global_step: Any = None, name: str | None = None
    ) -> Any:
        """As the optimizer's own; with ``backward_passes_per_step``, only in the last pass."""
        pairs = list(grads_and_vars)

        def apply() -> Any:
            with self._momentum.off():
                return self._optimizer.apply_gradients(pairs, global_step=global_step, name=name)

        if adapter.session().config.asynchronous:
            self._exchange.check_async()
            return self._weights.step_on([v for g, v in pairs if g is not None], apply)
        if self._last is None:
            return apply()
        (last, passes), self._last = self._last, None

        def finish() -> Any:
            done = apply()
            cleared = passes.clear([done] if done is not None else [])
            with tf.control_dependencies([c for c in cleared if c is not None]):
                return tf.constant(True)

        if tf.executing_eagerly():
            return tf.cond(last, finish, lambda: tf.constant(False))
        # Enter the graph explicitly: otherwise, with disable_eager_execution(), TensorFlow does not
        # see it from within a branch, and makes slots eagerly.
        with tf.compat.v1.get_default_graph().as_default():
            return tf.cond(last, finish, lambda: tf.constant(False))

    def get_slot(self, *args: Any, **kwargs: Any) -> Any:
        """As the optimizer's own method."""
        return self._optimizer.get_slot(*args, **kwargs)

    def get_slot_names(self, *args: Any, **kwargs: Any) -> Any:
        """As the optimizer's own method."""
        return self._optimizer.get_slot_names(*args, **kwargs)

    def variables(self, *args: Any, **kwargs: Any) -> Any:
        """As the optimizer's own method."""
        return self._optimizer.variables(*args, **kwargs)


def distributed(
    optimizer: Any, name: str | None, use_locking: bool, exchange: Exchange, passes: Any
) -> _DistributedOptimizer:
    """Return ``optimizer`` with the gradients of all workers. Raises :class:`ConfigError`."""
    if isinstance(optimizer, _DistributedOptimizer):
        raise ConfigError(
            f"DistributedOptimizer: this {type(optimizer._optimizer).__name__} is distributed"
            " already"
        )
    return _DistributedOptimizer(
        optimizer, name, use_locking, exchange, checked_passes(passes, "DistributedOptimizer")
    )
