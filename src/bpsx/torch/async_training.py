"""Asynchronous training: an optimizer steps on its own gradients and exchanges weight changes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from bpsx.plugin import adapter, async_training
from bpsx.plugin.async_training import PREFIX
from bpsx.torch._gradients import Managed
from bpsx.torch.broadcast import Overwriting
from bpsx.torch.exchange import Exchange
from bpsx.torch.exchange_round import ended, raise_first
from bpsx.torch.ops import Handle
from bpsx.torch.submit import submit
from bpsx.torch.tensors import check_tensor, check_writable, mark_written, summable


class Weights(async_training.Weights[Managed]):
    """Synchronizes the parameters of one optimizer with the servers.

    All operations of a step are in flight together.
    """

    def __init__(self) -> None:
        super().__init__()
        # By name: a parameter's values before the step, then the change that the step has made.
        self._before: dict[str, torch.Tensor] = {}
        # Handles that have not been waited for; an interruption leaves some.
        self._waiting: list[Handle] = []

    def _take(self, weights: Mapping[str, Managed]) -> None:
        self._begin_all(weights, lambda name, m: Overwriting(m.parameter, 0, name, typed=True))

    def _copy(self, name: str, weight: Managed) -> torch.Tensor:
        parameter, before = weight.parameter.detach(), self._before.get(name)
        if (
            before is None
            or before.shape != parameter.shape
            or before.dtype != parameter.dtype
            or before.device != parameter.device
        ):
            before = self._before[name] = torch.empty(
                parameter.shape, dtype=parameter.dtype, device=parameter.device
            )
        return before.copy_(parameter)

    def _push(self, weights: Mapping[str, Managed], before: Mapping[str, torch.Tensor]) -> None:
        def begin(name: str, managed: Managed) -> Handle:
            parameter, change = managed.parameter.detach(), before[name]
            torch.sub(parameter, change, out=change)
            return submit(change, parameter, name, average=False, priority=managed.info.priority)

        try:
            self._begin_all(weights, begin)
        finally:
            for managed in weights.values():
                mark_written(managed.parameter)

    def _begin_all(
        self, weights: Mapping[str, Managed], begin: Callable[[str, Managed], Any]
    ) -> None:
        failures: list[Exception] = []
        for name, managed in weights.items():
            try:
                self._waiting.append(begin(name, managed))
            except Exception as e:
                failures.append(e)
        self.finish(failures)

    def finish(self, failures: list[Exception]) -> None:
        """Wait for all started operations. Raises the first failure."""
        while self._waiting:
            failure = ended(self._waiting[0])
            del self._waiting[0]
            if failure is not None:
                failures.append(failure)
        raise_first(failures)


class AsyncExchange(Exchange):
    """Exchange of the weights of one optimizer, without gradient hooks."""

    asynchronous = True

    def __init__(
        self, names: list[tuple[str, torch.Tensor]], passes: int, what: str, ordinal: int | None
    ) -> None:
        self._weights = Weights()
        super().__init__(names, None, passes, active=False, what=what, ordinal=ordinal)

    def add(self, names: list[tuple[str, torch.Tensor]], attach: bool = True) -> None:
        """Add parameters, each less urgent than all before it."""
        super().add(names, attach=False)
        for managed in self._managed:
            if managed.parameter.requires_grad:
                what = f"parameter {managed.name!r}"
                check_tensor(managed.parameter, what)
                check_writable(managed.parameter, what)
                summable(managed.parameter, what)
            adapter.session().declare(PREFIX + managed.name)

    def complete(self, discard: bool = False) -> None:
        """Do nothing: gradients are not exchanged."""

    def step(self, base: Callable[..., Any], closure: Callable[[], Any] | None) -> Any:
        """Let ``base`` step, push each weight's change, and take the servers' weights.

        Raises the first failure, after the last push has ended.
        """
        self.owner.check_current()
        self._weights.finish([])
        ours = {m.name: m for m in self._managed if m.parameter.requires_grad}
        return self._weights.step(lambda: base(closure), ours)
