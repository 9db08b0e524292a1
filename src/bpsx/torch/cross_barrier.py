"""CrossBarrier: an optimizer that updates modules in the next forward pass, one by one."""

from __future__ import annotations

import atexit
import contextlib
import itertools
import weakref
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Iterator
from typing import Any, cast

import torch
from torch import nn
from torch.optim import optimizer as _base

from bpsx.api.verbs import local_rank, local_size, rank, shutdown, size
from bpsx.errors import ConfigError
from bpsx.plugin import adapter
from bpsx.plugin.adapter import checked_passes
from bpsx.system.tracebacks import public_methods
from bpsx.torch import _settling, init
from bpsx.torch._gradient_state import State
from bpsx.torch._gradients import Managed
from bpsx.torch.broadcast import broadcast_optimizer_state, broadcast_parameters
from bpsx.torch.compression import Compression, Compressor
from bpsx.torch.dynamo import eager
from bpsx.torch.exchange import Exchange, GradientOrderError, Kind
from bpsx.torch.exchange_round import ExchangeRound, ended, raise_first
from bpsx.torch.module_hooks import Serving, check_model
from bpsx.torch.names import Names, names_of
from bpsx.torch.ops import poll, push_pull_async_inplace, synchronize
from bpsx.torch.optimizer import (
    _DistributedOptimizer,
    check_optimizer,
    check_options,
    mix_in,
    needs_sparse,
    takes_closure,
)
from bpsx.torch.saved_options import OWN, SavedOptions

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
    if config.asynchronous:
        raise ConfigError(
            "CrossBarrier: with BYTEPS_ENABLE_ASYNC=1 there is no barrier between steps; use"
            " DistributedOptimizer"
        )
    names = names_of(optimizer, named_parameters, "CrossBarrier")
    barrier = _Barrier(
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
    barrier.serve(model, mixed)
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


class _Barrier(Exchange):
    """Exchange of gradients with the updates that wait for it."""

    decides_early = True  # asking would wait for the slowest worker in every step
    outlives = True  # it updates a model, whose class may refer to the optimizer
    has_quick_hooks = False  # each must check whether its parameter's update is pending

    def __init__(
        self,
        names: Names,
        compression: type[Compressor],
        passes: int,
        active: bool,
        steps: int,
        sparse_as_dense: bool,
        what: str,
    ) -> None:
        # The gradients in State.PENDING by id of parameter, most urgent first.
        self._pending: dict[int, Managed] = {}
        self._stepped: ExchangeRound | None = None  # round in which they were pushed
        # Options of each group when step() was called.
        self._options: list[SavedOptions] = []
        # Number of parts in which the update has been made so far.
        self._parts = 0
        # A step in several parts has shown that the parts do not depend on each other.
        self._parts_agree = False
        # The optimizer's own class and its attributes, which an update needs, while one is pending.
        # The optimizer itself may be deleted meanwhile.
        self._held: tuple[Any, dict[str, Any]] | None = None
        self._gone = False
        self._steps_left = steps
        self.idle = False  # since step(), no forward pass that could lead to gradients
        super().__init__(
            names, compression, passes, active, sparse_as_dense, what=what, ordinal=names.ordinal
        )
        _alive.add(self)

    def serve(self, model: nn.Module, optimizer: _CrossBarrier) -> None:
        self._serving = Serving(model, [m.parameter for m in self._managed], self)

    def know_more(self) -> None:
        """Take note of added parameters."""
        self._serving.add([m.parameter for m in self._managed])

    def detach(self) -> None:
        """Remove the hooks when the optimizer is deleted.

        Module hooks stay until no update is pending.
        """
        super().detach()
        self._gone = True
        self._let_go()

    def forget(self) -> None:
        """Remove all hooks, whatever is pending, and cancel later work."""
        for managed in self._pending.values():
            managed.drop()
        self._pending.clear()
        self.detach()
        if self.finalizer is not None:
            self.finalizer.detach()

    def _let_go(self) -> None:
        if not self._pending:
            self._held = None
            self._parts_agree = self._parts_agree or self._parts > 1
            if self._gone:
                self._serving.end()

    # ---- called by Serving and by hooks

    @property
    def pending(self) -> bool:
        """Whether updates are pending."""
        return bool(self._pending)

    def entered(self) -> None:
        """Take note of a module call."""
        if self.idle and torch.is_grad_enabled():
            self.idle = False

    def accumulated(self, managed: Managed) -> None:
        if managed.state is State.PENDING:
            raise GradientOrderError(
                f"{managed.name!r} was used in a forward pass before its update. CrossBarrier"
                " updates a module's parameters when the module is called, but the forward passes"
                " before the first step() did not use this parameter in that way. Call"
                " optimizer.synchronize() after step(), or use DistributedOptimizer"
            )
        self.idle = False
        super().accumulated(managed)

    # ---- deferring a step

    def can_defer(self, optimizer: _CrossBarrier) -> bool:
        """Return whether this step may be deferred; counts the step."""
        self.active = adapter.session().config.distributed  # resume() may have changed it
        last, self._steps_left = self._steps_left <= 1, max(self._steps_left - 1, 0)
        ours = vars(optimizer)
        hooks = (
            _base._global_optimizer_pre_hooks,
            _base._global_optimizer_post_hooks,
            ours.get("_optimizer_step_pre_hooks"),
            ours.get("_optimizer_step_post_hooks"),
        )
        return self.active and not (
            last or any(hooks) or "grad_scale" in ours or "found_inf" in ours
        )

    def defer(self, optimizer: _CrossBarrier) -> bool:
        """Push the remaining gradients and record the updates to make when the averages arrive.

        Returns False, with nothing done, if gradients travel sparse, in two parts. Raises the first
        failure, after the last push has ended.
        """
        with self.training_thread.at_work():
            return self._defer(optimizer)

    def _defer(self, optimizer: _CrossBarrier) -> bool:
        self.attach()
        now = self._open_round()
        if not any(now.failures) and any(
            m.kind is Kind.SPARSE for m in self._managed if m.parameter.requires_grad
        ):
            return False
        self._push_missing(now)
        ours = _settling.pushed_of(self._managed)
        if any(now.failures):
            for managed in ours:
                self._await(self._receive, managed, now)
            self._evaluate_usage(now)
            self._round = None
            raise_first(now.failures)
        for managed in ours:
            self._pending[id(managed.parameter)] = managed
            managed.step()
        self._stepped, self._round = now, None
        self._note(type(optimizer).__bases__[1], vars(optimizer))
        self._parts = 0
        self._serving.watch_no_more()
        # A parameter frozen while it has a gradient is still updated, as in one process. That
        # update waits for no average.
        with _as_in_step():
            self._step(
                {
                    id(m.parameter)
                    for m in self._managed
                    if id(m.parameter) not in self._pending
                    and m.wanted
                    and m.parameter.grad is not None
                }
            )
        self.apply(self._serving.unserved)
        return True

    # ---- making the pending updates

    @property
    def busy(self) -> bool:
        """Whether there are updates or sums to wait for."""
        return self.pending or self.under_way

    def apply_all(self) -> None:
        """Make all pending updates."""
        if self._pending:
            self.apply([managed.parameter for managed in self._pending.values()])

    def apply(self, parameters: Iterable[torch.Tensor]) -> None:
        """Wait for the pending averages of ``parameters``, and update them.

        It also makes the updates whose averages have arrived by then: many updates at once cost
        little more than a few. Raises the first failure, after all pending pushes have ended; then
        no update is pending any more.
        """
        due = [id(p) for p in parameters if id(p) in self._pending]
        if due and self._stepped is not None:
            with self.training_thread.at_work():
                self._apply(due, self._stepped)

    def _apply(self, due: list[int], now: ExchangeRound) -> None:
        self._evaluate_usage(now)
        # An interruption here leaves everything as it was; failures are raised below.
        for key in due:
            ended(self._pending[key].pushed)
        pending = [*(self._pending[key] for key in due), *self._arrived(due)]
        gradients = [managed.pushed.gradient for managed in pending]
        # zero_grad() may have been called already.
        before = [managed.parameter.grad for managed in pending]
        now.failures += self._receive_all(pending)
        if any(now.failures):
            now.failures += self._receive_all(list(self._pending.values()))
            self._let_go()
            next(f for f in now.failures if f is not None).add_note(
                "CrossBarrier: some modules have been updated and others have not, so the weights"
                " are from two different steps"
            )
            raise_first(now.failures)
        with _as_in_step():
            self._step({id(managed.parameter) for managed in pending if managed.wanted})
        for managed, gradient, grad in zip(pending, gradients, before, strict=True):
            if not managed.wanted and managed.stands_in:
                managed.parameter.grad = None
            elif grad is not gradient:
                managed.parameter.grad = grad
        self._let_go()

    def _arrived(self, due: list[int]) -> list[Managed]:
        """Return the gradients whose averages have arrived, without those that are due.

        Averages arrive by urgency, which is the order here. So the search stops at the first one
        that has not arrived. The first step is made module by module: an optimizer that depends on
        several parameters is then detected whatever the network's timing.
        """
        if not self._parts_agree:
            return []
        waited = set(due)
        others = (managed for key, managed in self._pending.items() if key not in waited)
        return list(itertools.takewhile(lambda managed: managed.pushed.done(), others))

    def _receive_all(self, pending: list[Managed]) -> list[Exception | None]:
        failures = []
        for managed in pending:
            failures.append(self._try(self._receive, managed))
            del self._pending[id(managed.parameter)]
        return failures

    def _note(self, base: Any, theirs: dict[str, Any]) -> None:
        """Save the optimizer's state for the update, which is still to be made in parts."""
        self._held = base, theirs
        self._attributes = SavedOptions({k: v for k, v in theirs.items() if k not in OWN})
        self._options = [
            SavedOptions({k: v for k, v in group.items() if k != "params"})
            for group in _plain(theirs["param_groups"])
        ]

    def _step(self, which: set[int]) -> None:
        """Step on some parameters, through a copy of the optimizer that has only these.

        The copy has the options and attributes of the time of ``step()``.
        """
        assert self._held is not None
        base, theirs = self._held
        part = base.__new__(base)
        chosen = [
            [p for p in group["params"] if id(p) in which]
            for group in _plain(theirs["param_groups"])
        ]
        numbers = [i for i, params in enumerate(chosen) if params]
        if not numbers:
            return
        self._parts += 1
        vars(part).update(
            self._attributes.copy(),
            state=theirs["state"],
            _optimizer_step_pre_hooks=OrderedDict(),
            _optimizer_step_post_hooks=OrderedDict(),
        )
        part.param_groups = [{**self._options[i].copy(), "params": chosen[i]} for i in numbers]
        base.step(part)
        for i, group in zip(numbers, part.param_groups, strict=True):
            self._options[i].bring_back(
                group, theirs["param_groups"][i], base.__name__, f"of group {i}"
            )
        self._attributes.bring_back(vars(part), theirs, base.__name__, "of itself")


#: Barriers whose hooks may still be on a model. Hooks that outlive the modules they use print
#: errors at the interpreter's exit.
_alive: weakref.WeakSet[_Barrier] = weakref.WeakSet()


def _forget_all() -> None:
    for barrier in list(_alive):
        barrier.forget()


atexit.register(_forget_all)


def _plain(groups: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yield copies of the groups, without applying pending updates."""
    return (dict(dict.items(group)) for group in groups)


@contextlib.contextmanager
def _as_in_step() -> Iterator[None]:
    """Context without the modes that a forward pass may have switched on."""
    with torch.inference_mode(False), torch.no_grad(), torch.autocast("cpu", enabled=False):
        yield


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

    _barrier: _Barrier

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
        self._barrier.wait_before_read()

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
        for group in _plain(vars(self)["param_groups"]):
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
