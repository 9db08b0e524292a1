"""DistributedOptimizer: gradients leave as backward produces them, and come home averaged before the step."""

from __future__ import annotations

import warnings
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, cast

import torch

from bpsx import _adapter
from bpsx.errors import ConfigError
from bpsx.torch.asynchronous import AsyncExchange
from bpsx.torch.compression import Compression, Compressor
from bpsx.torch.exchange import Exchange, GradientOrderError


def DistributedOptimizer(  # noqa: N802  (BytePS's name)
    optimizer: torch.optim.Optimizer, named_parameters: Iterable[tuple[str, torch.Tensor]] | None = None,
    compression: type[Compressor] = Compression.none, backward_passes_per_step: int = 1,
) -> torch.optim.Optimizer:
    """Make ``optimizer`` average gradients over all workers before it steps. Returns the same object, now of a subclass of its class.

    So ``isinstance``, ``param_groups``, ``state_dict`` and learning-rate schedulers work as before. Call it after ``init()`` and the same
    way on all workers. As backward finishes a gradient, the gradient is pushed; ``step()`` waits for all of them, then steps. Parameters
    that come first in ``named_parameters`` are the most urgent: the next forward pass needs them first.

    ``named_parameters``: (name, parameter) pairs, usually ``model.named_parameters()``, naming at least all parameters of ``optimizer``; by
    default they are called ``push_pull.noname.<group>.<index>``. Names, order, shapes and dtypes must be the same on all workers. Two
    distributed optimizers that live at once need different names. ``compression``: one of :class:`Compression`, for the wire only.
    ``backward_passes_per_step``: gradients of so many backward passes are added up locally before they are pushed; the result is averaged
    over workers, not over passes (divide the loss if you want that).

    **Parameters without a gradient.** Every ``step()`` and every ``synchronize()`` completes exactly one push of every parameter that
    requires a gradient, whatever backward has reached: what no hook has pushed is pushed then, as it stands or as zeros if ``grad`` is
    None. So workers whose batches use different parts of a model cannot wait for each other for ever, and all of them hold the same
    averages after it. A parameter that no worker has used gets a zero gradient, on which weight decay and momentum act. Frozen parameters
    are left alone; freezing or unfreezing must happen on all workers alike.

    **Asynchronous training** (``BYTEPS_ENABLE_ASYNC=1``). Gradients stay on their worker. ``step()`` lets the optimizer step on them, pushes what
    that has added to each parameter, which the servers add to the weights that they hold, and takes the weights as they are then: with the
    other workers' steps up to that moment, and without waiting for them. The steps are added, not averaged, so N workers move the weights N
    times as fast as one. The weights on the servers begin as worker 0's, at the first ``step()``, where all workers meet once; call
    ``broadcast_parameters`` before training all the same, or the first gradient is of other weights. Optimizer state stays local.
    ``synchronize()`` does nothing and ``skip_synchronize()`` changes nothing; ``backward_passes_per_step`` is checked and has no effect:
    passes add up in ``grad`` until you call ``step()``. Frozen parameters are left alone; one that is unfrozen is seeded from worker 0 at
    the next step, where all workers meet again. Compression is refused: what is pushed has to be of the weights' dtype. In half types a step
    below half a unit in the weight's last place is lost, as it is on a single worker.

    Extra methods: ``synchronize()``, ``skip_synchronize()``, ``set_backward_passes_per_step(n)``. With a single worker (unless
    ``BYTEPS_FORCE_DISTRIBUTED``) nothing is pushed.

    Raises :class:`ConfigError` (a :class:`ValueError`) for names given twice, parameters without a name, LBFGS, compression in
    asynchronous training;
    :class:`~bpsx.torch.UnsupportedTensor` and :class:`~bpsx.dtypes.UnsupportedDType` for parameters that cannot be sent;
    :class:`~bpsx.errors.NotInitializedError`. ``backward()`` raises :class:`UnsupportedTensor` for sparse gradients and
    :class:`GradientOrderError` if it runs again before ``step()``; ``step()`` raises whatever made a push fail, as
    :func:`bpsx.torch.synchronize` does. Not thread-safe.
    """
    check_optimizer(optimizer)
    names = names_of(optimizer, named_parameters)
    exchange = _exchange_for(names, compression, checked_passes(backward_passes_per_step))
    return mix_in(_DistributedOptimizer, optimizer, exchange)


def check_optimizer(optimizer: torch.optim.Optimizer) -> None:
    """Raise :class:`ConfigError` for an optimizer that cannot be made distributed."""
    if isinstance(optimizer, _DistributedOptimizer):
        raise ConfigError("DistributedOptimizer: this optimizer is distributed already")
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ConfigError("DistributedOptimizer: LBFGS evaluates its closure several times in a step, with other weights each time, so its "
                          "gradients cannot be averaged once per step; use a first-order optimizer (SGD, Adam, …)")


def mix_in(mixin: type[_DistributedOptimizer], optimizer: torch.optim.Optimizer, exchange: Exchange) -> torch.optim.Optimizer:
    """Put ``mixin`` in front of ``optimizer``'s class and begin to exchange. Returns the same object."""
    scheduled = _take_patched_step(optimizer)
    base = type(optimizer)
    optimizer.__class__ = type(base.__name__, (mixin, base), {"__module__": base.__module__, "__doc__": base.__doc__})
    mixed = cast("_DistributedOptimizer", optimizer)
    mixed._exchange, mixed._should_synchronize = exchange, True
    if scheduled:
        _patch_step_again(optimizer)
    exchange.attach()
    weakref.finalize(optimizer, exchange.detach).atexit = False
    return optimizer


if TYPE_CHECKING:
    class _Base:
        """What the mixin finds below itself: the user's optimizer class."""

        param_groups: list[dict[str, Any]]

        def step(self, closure: Callable[[], Any] | None = None) -> Any:
            raise NotImplementedError

        def zero_grad(self, set_to_none: bool = True) -> None:
            raise NotImplementedError

        def add_param_group(self, param_group: dict[str, Any]) -> None:
            raise NotImplementedError
else:
    _Base = object


class _DistributedOptimizer(_Base):
    """Goes in front of the user's optimizer class; see :func:`DistributedOptimizer`."""

    _exchange: Exchange
    _should_synchronize: bool

    def synchronize(self) -> None:
        """Push what has not been pushed, and wait until every ``grad`` holds the average.

        For looking at gradients before the step (clipping, unscaling); then step inside :meth:`skip_synchronize`. Raises what made a push
        fail, once all have ended.
        """
        self._exchange.complete()

    @contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Inside, ``step()`` takes the gradients as they are: for after :meth:`synchronize`."""
        self._should_synchronize = False
        try:
            yield
        finally:
            self._should_synchronize = True

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Change how many backward passes are added up before a push. Begins a new count for every parameter."""
        self._exchange.set_passes(checked_passes(passes))

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Evaluate ``closure`` once, if given, wait for the averaged gradients, and step. Returns the closure's result."""
        if isinstance(self._exchange, AsyncExchange):
            return self._exchange.step(super().step, closure)
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        exchange = self._exchange
        if self._should_synchronize:
            if exchange.synchronized:
                warnings.warn("step() after synchronize() pushes all gradients again; put step() inside optimizer.skip_synchronize()",
                              stacklevel=2)
            exchange.complete()
        elif exchange.under_way:
            raise GradientOrderError("step() inside skip_synchronize() while gradients are under way: call synchronize() first")
        exchange.synchronized = False
        result = super().step()
        return result if closure is None else loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As the base class. If gradients are under way, they are waited for first and thrown away; do that on all workers or none."""
        exchange = self._exchange
        if exchange.under_way:
            exchange.complete()
        exchange.synchronized = False
        exchange.restart_count()
        super().zero_grad(set_to_none)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As the base class; the new parameters are called ``push_pull.noname.<group>.<index>`` and are the least urgent."""
        super().add_param_group(param_group)
        group = len(self.param_groups) - 1
        self._exchange.add([(_default_name(group, i), p) for i, p in enumerate(self.param_groups[group]["params"])])

    # Optimizer.__setstate__ (load_state_dict) would wrap it and so run the user's step hooks twice: the base class's step runs them.
    step.hooked = True  # type: ignore[attr-defined]


def _exchange_for(names: list[tuple[str, torch.Tensor]], compression: type[Compressor], passes: int) -> Exchange:
    """Of gradients, or of weights in asynchronous training. Raises :class:`ConfigError`."""
    config = _adapter.session().config
    if not config.asynchronous:
        return Exchange(names, compression, passes, config.distributed)
    if compression is not Compression.none:
        raise ConfigError(f"DistributedOptimizer: compression={compression.__name__} with BYTEPS_ENABLE_ASYNC=1: servers add to the weights "
                          "themselves, so only Compression.none is possible")
    return AsyncExchange(names, passes)


def _default_name(group: int, index: int) -> str:
    return f"push_pull.noname.{group}.{index}"


def names_of(optimizer: torch.optim.Optimizer, named: Iterable[tuple[str, torch.Tensor]] | None) -> list[tuple[str, torch.Tensor]]:
    """The optimizer's parameters with their names, most urgent first, each once. Raises :class:`ConfigError`."""
    ours = {id(p): (g, i, p) for g, group in enumerate(optimizer.param_groups) for i, p in enumerate(group["params"])}
    if named is None:
        return [(_default_name(g, i), p) for g, i, p in ours.values()]
    pairs = list(named)
    for pair in pairs:
        if not (isinstance(pair, tuple) and len(pair) == 2 and isinstance(pair[0], str) and isinstance(pair[1], torch.Tensor)):
            raise ConfigError("DistributedOptimizer: named_parameters must be (name, parameter) pairs, as model.named_parameters() gives "
                              f"them, not {type(pair).__name__}")
    twice = sorted(name for name, n in Counter(name for name, _ in pairs).items() if n > 1)
    if twice:
        raise ConfigError(f"DistributedOptimizer: named_parameters gives these names twice: {', '.join(twice)}")
    first: dict[int, tuple[str, torch.Tensor]] = {}
    for name, p in pairs:
        if id(p) in ours:
            first.setdefault(id(p), (name, p))      # a shared parameter under several names counts once
    unnamed = [f"group {g}, index {i}, shape {tuple(p.shape)}" for key, (g, i, p) in ours.items() if key not in first]
    if unnamed:
        raise ConfigError(f"DistributedOptimizer: named_parameters lacks {len(unnamed)} of the optimizer's parameters: "
                          f"{'; '.join(unnamed[:10])}")
    return list(first.values())


def checked_passes(passes: Any) -> int:
    if not isinstance(passes, int) or passes < 1:
        raise ConfigError(f"backward_passes_per_step={passes!r}: allowed are integers from 1")
    return passes


def _take_patched_step(optimizer: torch.optim.Optimizer) -> bool:
    """A learning-rate scheduler made before replaces ``step`` on the object, which would hide ours. Returns whether there was one."""
    patched = vars(optimizer).get("step")
    if patched is None:
        return False
    if not hasattr(patched, "_wrapped_by_lr_sched"):
        raise ConfigError("DistributedOptimizer: something has replaced this optimizer's step(); make the optimizer distributed first")
    del optimizer.step
    return True


def _patch_step_again(optimizer: torch.optim.Optimizer) -> None:
    """Do what the scheduler did, around our ``step``, so that it sees that steps are taken."""
    ref = weakref.ref(optimizer)

    def step(*args: Any, **kwargs: Any) -> Any:
        alive = ref()
        assert alive is not None
        alive._opt_called = True
        return type(alive).step(alive, *args, **kwargs)

    step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
    optimizer.step = step

