"""The exchange of one optimizer's gradients: hooks that push as backward goes, and the wait before the step."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from bpsx import _adapter
from bpsx.dtypes import dtype_named
from bpsx.errors import BpsxError
from bpsx.torch.compression import Compressor, NoneCompressor
from bpsx.torch.ops import Handle, check_tensor, check_writable, dtype_name, submit

PREFIX = "Gradient."


class GradientOrderError(BpsxError, RuntimeError):
    """backward(), synchronize() and step() were called in an order in which gradients would be used or changed while under way."""


@dataclass
class _Pushed:
    """A gradient under way: ``gradient`` is what the average goes into, ``ctx`` the compressor's."""

    gradient: torch.Tensor
    handle: Handle
    ctx: Any


class _Managed:
    """A parameter: its name on the wire, its urgency, the backward passes left until it is pushed, and the push."""

    def __init__(self, name: str, parameter: torch.Tensor, priority: int, passes: int) -> None:
        self.name, self.parameter, self.priority, self.passes_left = name, parameter, priority, passes
        self.hook: Any = None
        self.pushed: _Pushed | None = None


class Exchange:
    """Moves the gradients of one optimizer. The hooks that it hangs on parameters do not keep it alive.

    ``active``: whether there is anybody to exchange with; followed through ``suspend`` and ``resume`` at every step.
    """

    asynchronous = False

    def __init__(
        self, names: list[tuple[str, torch.Tensor]], compression: type[Compressor] | None, passes: int, active: bool,
    ) -> None:
        self.active = active
        self.synchronized = False       # every grad holds the average, and backward has added nothing since
        self._compression, self._passes = compression or NoneCompressor, passes
        self._managed: list[_Managed] = []
        self.add(names, attach=False)

    def add(self, names: list[tuple[str, torch.Tensor]], attach: bool = True) -> None:
        """Take charge of parameters, each less urgent than all before it."""
        known = {id(m.parameter) for m in self._managed}
        for name, parameter in names:
            if id(parameter) not in known:
                self._managed.append(_Managed(name, parameter, -len(self._managed), self._passes))
                if self.active:
                    self._declare(name, parameter)
        if attach:
            self.attach()

    def _declare(self, name: str, parameter: torch.Tensor) -> None:
        if parameter.requires_grad:
            what = f"parameter {name!r}"
            check_tensor(parameter, what)
            dtype_named(dtype_name(parameter), what)
        _adapter.session().declare(PREFIX + name)

    @property
    def under_way(self) -> bool:
        """Whether a gradient has been pushed and not been waited for."""
        return any(m.pushed is not None for m in self._managed)

    def attach(self) -> None:
        """Hang hooks on parameters that require a gradient and have none yet (PyTorch allows no hook on a frozen one)."""
        if not self.active:
            return
        ref = weakref.ref(self)
        for managed in self._managed:
            if managed.hook is None and managed.parameter.requires_grad:
                managed.hook = managed.parameter.register_post_accumulate_grad_hook(_hook_for(ref, managed))

    def detach(self) -> None:
        """Take the hooks off."""
        for managed in self._managed:
            if managed.hook is not None:
                managed.hook.remove()
                managed.hook = None

    def set_passes(self, passes: int) -> None:
        """See :meth:`_DistributedOptimizer.set_backward_passes_per_step`."""
        self._passes = passes
        self.restart_count()

    def restart_count(self) -> None:
        """Forget backward passes that have been added up so far."""
        for managed in self._managed:
            managed.passes_left = self._passes

    def accumulated(self, managed: _Managed) -> None:
        """Backward has added to a gradient. Raises :class:`GradientOrderError`."""
        if managed.pushed is not None:
            raise GradientOrderError(
                f"the gradient of {managed.name!r} was computed more than backward_passes_per_step={self._passes} times before step(): "
                "raise backward_passes_per_step to add passes up, or call the optimizer's zero_grad() to throw the earlier gradients away")
        self.synchronized = False
        managed.passes_left -= 1
        if managed.passes_left == 0:
            self._push(managed)

    def complete(self) -> None:
        """Push what is missing, wait for everything. Raises the first failure, after the last push has ended."""
        self.active = _adapter.session().config.distributed     # resume() may have changed it
        if not self.active and not self.under_way:
            return
        self.attach()
        failures = [self._try(self._push, m) for m in self._managed if m.parameter.requires_grad and m.pushed is None]
        failures += [self._try(self._receive, m) for m in self._managed if m.pushed is not None]
        self.restart_count()
        for failure in failures:
            if failure is not None:
                raise failure
        self.synchronized = True

    @staticmethod
    def _try(act: Callable[[_Managed], None], managed: _Managed) -> Exception | None:
        try:
            act(managed)
        except Exception as e:
            return e
        return None

    def _push(self, managed: _Managed) -> None:
        parameter = managed.parameter
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter, requires_grad=False)
        gradient = parameter.grad
        what = f"gradient of {managed.name!r}"
        check_tensor(gradient, what)
        check_writable(gradient, what)
        plain = gradient.detach()
        wire, ctx = self._compression.compress(plain)
        handle = submit(wire, wire, PREFIX + managed.name, average=True, priority=managed.priority)
        managed.pushed = _Pushed(gradient, handle, ctx)

    def _receive(self, managed: _Managed) -> None:
        """Wait for a push and put the average where the optimizer looks for it, even if ``grad`` was replaced meanwhile."""
        pushed, managed.pushed = managed.pushed, None
        assert pushed is not None
        received = pushed.handle.wait()
        if pushed.ctx is not None or received.data_ptr() != pushed.gradient.data_ptr():
            with torch.no_grad():
                pushed.gradient.detach().copy_(self._compression.decompress(received, pushed.ctx))
        if managed.parameter.grad is not pushed.gradient:
            managed.parameter.grad = pushed.gradient


def _hook_for(exchange: weakref.ref[Exchange], managed: _Managed) -> Callable[[torch.Tensor], None]:
    def hook(_: torch.Tensor) -> None:
        alive = exchange()
        if alive is not None:
            alive.accumulated(managed)

    return hook
