"""Asynchronous training: an optimizer steps on its own gradients and exchanges weight changes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from bpsx.plugin import adapter
from bpsx.torch.broadcast import Overwriting
from bpsx.torch.exchange import Exchange
from bpsx.torch.exchange_round import ended, raise_first
from bpsx.torch.ops import Handle
from bpsx.torch.submit import submit
from bpsx.torch.tensors import check_tensor, check_writable, mark_written, summable

PREFIX = "Async."


class AsyncExchange(Exchange):
    """Exchange of the weights of one optimizer, without gradient hooks.

    The servers hold the weights. At the first step they get worker 0's, and all workers wait for
    that. Later steps do not wait for other workers.
    """

    asynchronous = True

    def __init__(
        self, names: list[tuple[str, torch.Tensor]], passes: int, what: str, ordinal: int | None
    ) -> None:
        # By parameter: its weights before the step, then the change that the step has made.
        self._before: dict[int, torch.Tensor] = {}
        self._seeded: set[int] = set()
        self._session: object = None  # session whose servers hold the weights
        # Handles that have not been waited for; an interruption leaves some.
        self._waiting: list[Handle] = []
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
        self._finish([])
        self._seed()
        ours = [m for m in self._managed if m.parameter.requires_grad]
        with torch.no_grad():
            for managed in ours:
                parameter = managed.parameter.detach()
                before = self._before.get(id(managed.parameter))
                if (
                    before is None
                    or before.shape != parameter.shape
                    or before.dtype != parameter.dtype
                ):
                    before = self._before[id(managed.parameter)] = torch.empty(
                        parameter.shape, dtype=parameter.dtype, device=parameter.device
                    )
                before.copy_(parameter)
        result = base(closure)
        failures: list[Exception] = []
        for managed in ours:
            parameter = managed.parameter.detach()
            change = self._before[id(managed.parameter)]
            with torch.no_grad():
                torch.sub(parameter, change, out=change)
            try:
                self._waiting.append(
                    submit(
                        change,
                        parameter,
                        PREFIX + managed.name,
                        average=False,
                        priority=managed.named.priority,
                    )
                )
            except Exception as e:
                failures.append(e)
        try:
            self._finish(failures)
        finally:
            for managed in ours:
                mark_written(managed.parameter)
        return result

    def _seed(self) -> None:
        """Give worker 0's weights to the servers and to every worker.

        Only parameters that are new since the last call are sent.
        """
        session = adapter.session()
        if self._session is not session:  # after resume() the servers are new
            self._session, self._seeded = session, set()
        new = [
            m
            for m in self._managed
            if m.parameter.requires_grad and id(m.parameter) not in self._seeded
        ]
        failures: list[Exception] = []
        for managed in new:
            self._seeded.add(id(managed.parameter))
            try:
                self._waiting.append(
                    Overwriting(managed.parameter, 0, PREFIX + managed.name, typed=True)
                )
            except Exception as e:
                failures.append(e)
        self._finish(failures)

    def _finish(self, failures: list[Exception]) -> None:
        """Wait for all started operations. Raises the first failure."""
        while self._waiting:
            failure = ended(self._waiting[0])
            del self._waiting[0]
            if failure is not None:
                failures.append(failure)
        raise_first(failures)
