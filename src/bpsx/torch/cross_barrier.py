"""CrossBarrier: an optimizer that updates modules in the next forward pass, one by one."""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any, cast

import torch
from torch import nn

from bpsx.api.verbs import local_rank, local_size, rank, shutdown, size
from bpsx.errors import ConfigError
from bpsx.plugin import adapter
from bpsx.plugin.adapter import checked_passes
from bpsx.system.tracebacks import public_methods
from bpsx.torch import init
from bpsx.torch.broadcast import broadcast_optimizer_state, broadcast_parameters
from bpsx.torch.compression import Compression, Compressor
from bpsx.torch.dynamo import eager
from bpsx.torch.module_hooks import check_model
from bpsx.torch.names import names_of
from bpsx.torch.ops import poll, push_pull_async_inplace, synchronize
from bpsx.torch.optimizer import (
    _DistributedOptimizer,
    check_optimizer,
    check_options,
    is_unscaled,
    mix_in,
    needs_sparse,
    takes_closure,
)
from bpsx.torch.pending_updates import PendingUpdates, plain_groups

#: BytePS's name for :func:`push_pull_async_inplace`; BytePS's module of this name has it too.
byteps_push_pull = push_pull_async_inplace

__all__ = [
    "Compression",
    "CrossBarrier",
    "broadcast_optimizer_state",
    "broadcast_parameters",
    "byteps_push_pull",
    "init",
    "local_rank",
    "local_size",
    "poll",
    "rank",
    "shutdown",
    "size",
    "synchronize",
]

# Optimizers whose update of a parameter is known to depend on other parameters. Every distributed
# optimizer refuses LBFGS.
_LOOK_ACROSS = {
    "SAM",
    "ASAM",
    "GSAM",
    "Lookahead",
    "KFAC",
    "FusedLAMB",
    "Prodigy",
    "DAdaptAdam",
    "DAdaptSGD",
    "DAdaptAdaGrad",
    "DAdaptLion",
    "DAdaptAdan",
    "DAdaptAdanIP",
}
_NORM_OF_ALL = ("max_grad_norm", "clip_grad_norm")


def CrossBarrier(  # noqa: N802  (BytePS's name)
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    named_parameters: Iterable[tuple[str, torch.Tensor]] | None = None,
    compression: type[Compressor] = Compression.none,
    backward_passes_per_step: int = 1,
    num_steps: int = 10**6,
    sparse_as_dense: bool = False,
) -> torch.optim.Optimizer:
    """Same as :func:`bpsx.torch.DistributedOptimizer`, but without waiting in ``step()``.

    Each module of ``model`` waits for its own averages in its next forward pass, and is updated
    then. The first layers' gradients, which backward computes last, travel first. Each transfer
    overlaps with the forward pass of the layers before. Returns the same object, now of a subclass
    of its class.

    The update of a parameter must depend on that parameter alone (SGD, Adam, AdamW, RMSprop, …).
    Weights and state are bitwise those of :func:`~bpsx.torch.DistributedOptimizer`. An update uses
    the options (learning rate, …) that the groups had when ``step()`` was called, even if a
    scheduler has changed them since. Counters in the optimizer's groups or attributes, as numbers
    or one-element tensors, count once per step. ``zero_grad()`` may come before or after
    ``step()``, or not at all.

    **Pending updates** exist between a ``step()`` and the forward pass. They are applied before an
    access through ``model.state_dict()``, ``load_state_dict()`` of both,
    ``optimizer.state_dict()``, ``optimizer.state``, ``group["params"]``, or the next ``step()``.
    From step ``num_steps`` on, updates are made at once. Before any other access to the weights
    after ``step()``, call ``optimizer.synchronize()``. Examples are ``model.parameters()`` for a
    moving average or a penalty, and ``functional_call`` with parameters made from them.

    A module is updated when it is *called*. The forward passes before the first ``step()`` are
    watched. A parameter that is used without a call of its module (``MultiheadAttention.out_proj``)
    is updated by the module that uses it. A parameter of a module that is never called is updated
    by the nearest called module above. Later forward passes must use parameters through the same
    modules; otherwise ``backward()`` raises :class:`~bpsx.torch.GradientOrderError`. A step that
    cannot be deferred is made at once: within ``skip_synchronize()``, with step hooks, or with a
    gradient scaler fused into the step.

    ``model`` may be copied while no update is pending; copies of model and optimizer are ordinary
    ones. With sparse gradients every step is made at once, unless ``sparse_as_dense``. A parameter
    that no worker has used in the first step has dense gradients from then on. The other arguments
    and methods are those of :func:`~bpsx.torch.DistributedOptimizer`. ``synchronize()`` right after
    ``step()`` applies the pending updates and pushes nothing.

    Raises what :func:`~bpsx.torch.DistributedOptimizer` raises, and
    :class:`~bpsx.errors.ConfigError` for optimizers whose updates depend on several parameters,
    compiled and scripted modules, and asynchronous training. The error that made a push fail is
    raised by the first wait for it, in the forward pass or before. Weights may then be of two
    different steps, which a note on the exception says. Not thread-safe.
    """
    check_optimizer(optimizer, "CrossBarrier")
    check_options(compression, sparse_as_dense, "CrossBarrier")
    _check_alone(optimizer)
    check_model(model)
    if not isinstance(num_steps, int) or num_steps < 1:
        raise ConfigError(f"CrossBarrier: num_steps={num_steps!r}: expected an integer from 1")
    config = adapter.session().config
    if adapter.session().shrinks:
        raise ConfigError(
            "CrossBarrier: with BPSX_ELASTIC=shrink a step counts only as a whole, but CrossBarrier"
            " applies it in parts; use DistributedOptimizer"
        )
    if config.asynchronous:
        raise ConfigError(
            "CrossBarrier: with BYTEPS_ENABLE_ASYNC=1 there is no barrier between steps; use"
            " DistributedOptimizer"
        )
    names = names_of(optimizer, named_parameters, "CrossBarrier")
    barrier = PendingUpdates(
        names,
        compression,
        checked_passes(backward_passes_per_step, "CrossBarrier"),
        config.distributed,
        num_steps,
        sparse_as_dense,
        f"CrossBarrier ({type(optimizer).__name__})",
    )
    barrier.sparse_again = needs_sparse(optimizer)
    mixed = cast("_CrossBarrier", mix_in(_CrossBarrier, optimizer, barrier))
    mixed._barrier = barrier
    barrier.serve(model)
    return optimizer


def _check_alone(optimizer: torch.optim.Optimizer) -> None:
    """Raise :class:`ConfigError` if an update is known to depend on several parameters."""
    for cls in type(optimizer).__mro__:
        if cls.__name__ in _LOOK_ACROSS:
            raise ConfigError(
                f"CrossBarrier: a step of {cls.__name__} uses several parameters together, but"
                " CrossBarrier updates parameters at different times; use DistributedOptimizer"
            )
    for i, group in enumerate(optimizer.param_groups):
        for option in _NORM_OF_ALL:
            if group.get(option):
                raise ConfigError(
                    f"CrossBarrier: a step of {type(optimizer).__name__} with"
                    f" {option}={group[option]!r} in group {i} uses several parameters together,"
                    " but CrossBarrier updates parameters at different times; use"
                    " DistributedOptimizer"
                )


class _Group(dict[str, Any]):
    """Parameter group that applies pending updates before an access to its parameters.

    Access to options applies nothing.
    """

    owner: weakref.ref[_CrossBarrier]

    def __getitem__(self, key: str) -> Any:
        optimizer = self.owner() if key == "params" else None
        if optimizer is not None:
            optimizer._wait_before_read()
        return super().__getitem__(key)

    def __reduce__(self) -> Any:
        return dict, (dict(dict.items(self)),)


@public_methods
class _CrossBarrier(_DistributedOptimizer):
    """Mixin in front of the user's optimizer class; see :func:`CrossBarrier`."""

    _barrier: PendingUpdates

    @property
    def state(self) -> defaultdict[torch.Tensor, Any]:
        """The optimizer's state; reading it applies pending updates."""
        self._apply_pending()
        return cast("defaultdict[torch.Tensor, Any]", vars(self)["state"])

    @state.setter
    def state(self, state: Any) -> None:
        vars(self)["state"] = state

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The parameter groups.

        Access to a group's parameters applies pending updates; access to its options does not.
        """
        groups: list[dict[str, Any]] = vars(self)["param_groups"]
        for i, group in enumerate(groups):
            if not isinstance(group, _Group):
                groups[i] = wrapped = _Group(group)
                # A strong reference would keep the optimizer and its hooks until garbage
                # collection.
                wrapped.owner = weakref.ref(self)
        return groups

    @param_groups.setter
    def param_groups(self, groups: list[dict[str, Any]]) -> None:
        vars(self)["param_groups"] = groups

    def _apply_pending(self) -> None:
        barrier = vars(self).get("_barrier")
        if barrier is not None and barrier.pending and barrier.training_thread.may_be_here():
            barrier.apply_all()

    def _wait_before_read(self) -> None:
        """Prepare for an access to the parameters.

        It also waits for gradients that have been pushed, as code that unscales or clips gradients
        expects.
        """
        self._apply_pending()
        if not self._leaves_gradients:
            self._barrier.wait_before_read(all_due=is_unscaled())

    @eager
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Evaluate ``closure`` once, if given, and return its result.

        The update is made in the next forward pass.
        """
        barrier = self._barrier
        if barrier.active:
            barrier.check_knows(vars(self)["param_groups"])
        at_once = not barrier.can_defer(self) or not self._should_synchronize
        if closure is not None and takes_closure(self):
            barrier.apply_all()
            barrier.idle = True
            return super().step(closure)
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        barrier.apply_all()
        barrier.idle = True
        if not (at_once or barrier.synchronized) and barrier.defer(self):
            return loss
        result = super().step()
        return result if closure is None else loss

    def synchronize(self) -> None:
        """Apply pending updates; without any, wait for gradients.

        Right after ``step()`` it only applies pending updates. Otherwise it does as
        DistributedOptimizer: it pushes the remaining gradients and waits until every ``grad`` holds
        the average.
        """
        self._barrier.apply_all()
        if not self._barrier.idle:
            super().synchronize()

    @eager
    def zero_grad(self, set_to_none: bool = True) -> None:
        """Same as the base class; a pending step still uses its gradients."""
        barrier = self._barrier
        if barrier.under_way:
            barrier.apply_all()
        if not barrier.pending:
            super().zero_grad(set_to_none)
            return
        barrier.synchronized = barrier.implicit = False
        barrier.restart_count()
        for group in plain_groups(vars(self)["param_groups"]):
            for parameter in group["params"]:
                if parameter.grad is not None:
                    # The old memory is still to receive the average.
                    parameter.grad = None if set_to_none else torch.zeros_like(parameter.grad)

    def state_dict(self) -> dict[str, Any]:
        """Same as the base class, after applying pending updates."""
        self._apply_pending()
        return super().state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Same as the base class, after applying pending updates."""
        self._apply_pending()
        super().load_state_dict(state_dict)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Same as DistributedOptimizer; the new parameters are updated in ``step()`` itself."""
        super().add_param_group(param_group)
        self._barrier.know_more()

    step.hooked = True  # type: ignore[attr-defined]
