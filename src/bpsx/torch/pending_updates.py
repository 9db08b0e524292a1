"""Updates of CrossBarrier between ``step()`` and the forward pass: exchange, wait and update."""

from __future__ import annotations

import atexit
import contextlib
import itertools
import weakref
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn
from torch.optim import optimizer as _base

from bpsx.plugin import adapter
from bpsx.torch import _settling
from bpsx.torch._gradient_state import State
from bpsx.torch._gradients import Managed
from bpsx.torch.compression import Compressor
from bpsx.torch.exchange import Exchange, GradientOrderError
from bpsx.torch.exchange_round import ExchangeRound, ended, raise_first
from bpsx.torch.gradient_kinds import GradientKind
from bpsx.torch.module_hooks import Serving
from bpsx.torch.names import Names
from bpsx.torch.saved_options import OWN, SavedOptions


class PendingUpdates(Exchange):
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

    def serve(self, model: nn.Module) -> None:
        """Let the modules of ``model`` wait for the updates of their parameters."""
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

    def can_defer(self, optimizer: torch.optim.Optimizer) -> bool:
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

    def defer(self, optimizer: torch.optim.Optimizer) -> bool:
        """Push the remaining gradients and record the updates to make when the averages arrive.

        Returns False, with nothing done, if gradients travel sparse, in two parts. Raises the first
        failure, after the last push has ended.
        """
        with self.training_thread.at_work():
            return self._defer(optimizer)

    def _defer(self, optimizer: torch.optim.Optimizer) -> bool:
        self.attach()
        now = self._open_round()
        if not any(now.failures) and any(
            m.kind is GradientKind.SPARSE for m in self._managed if m.parameter.requires_grad
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
            for group in plain_groups(theirs["param_groups"])
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
            for group in plain_groups(theirs["param_groups"])
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


#: Exchanges whose hooks may still be on a model. Hooks that outlive the modules they use print
#: errors at the interpreter's exit.
_alive: weakref.WeakSet[PendingUpdates] = weakref.WeakSet()


def _forget_all() -> None:
    for exchange in list(_alive):
        exchange.forget()


atexit.register(_forget_all)


def plain_groups(groups: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yield copies of an optimizer's groups, without applying pending updates."""
    return (dict(dict.items(group)) for group in groups)


@contextlib.contextmanager
def _as_in_step() -> Iterator[None]:
    """Context without the modes that a forward pass may have switched on."""
    with torch.inference_mode(False), torch.no_grad(), torch.autocast("cpu", enabled=False):
        yield
