"""Module hooks that update parameters when a module is called.

The first forward passes are watched to find out which module uses which parameter.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, NoReturn, Protocol

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from bpsx.errors import ConfigError
from bpsx.torch.dynamo import eager

# Reading these attributes of a parameter does not count as a use.
_HARMLESS = {
    "shape",
    "dtype",
    "device",
    "requires_grad",
    "is_leaf",
    "layout",
    "ndim",
    "grad",
    "is_cuda",
    "is_meta",
    "is_nested",
    "is_quantized",
}


class Updates(Protocol):
    """The object that makes the updates."""

    @property
    def pending(self) -> bool: ...
    def entered(self) -> None: ...
    def apply(self, parameters: Iterable[torch.Tensor]) -> None: ...
    def apply_all(self) -> None: ...


def check_model(model: Any) -> None:
    """Raise :class:`ConfigError` for a model that CrossBarrier cannot serve.

    That is a model whose module calls cannot be hooked, or one that averages by itself.
    """
    if not isinstance(model, nn.Module):
        raise ConfigError(
            f"CrossBarrier: model is a {type(model).__name__}; expected a torch.nn.Module"
        )
    for name, module in model.named_modules():
        what = f"CrossBarrier: module {name!r}" if name else "CrossBarrier: the model"
        if (
            type(module).__name__ == "OptimizedModule"
            or getattr(module, "_compiled_call_impl", None) is not None
        ):
            raise ConfigError(
                f"{what} is compiled, and a compiled module does not call its submodules one by"
                " one; use DistributedOptimizer"
            )
        if isinstance(module, torch.jit.ScriptModule):
            raise ConfigError(
                f"{what} is scripted, and a scripted module does not call its submodules one by"
                " one; use DistributedOptimizer"
            )
        if type(module).__name__ == "DistributedDataParallel":
            raise ConfigError(
                f"{what} averages its gradients itself; give CrossBarrier the module inside it"
            )


class Serving:
    """Updates parameters when the module that needs them first is called.

    Until :meth:`watch_no_more`, every module has a hook and every function call with a parameter is
    watched. Afterwards only the modules that serve parameters have a hook.
    """

    def __init__(self, model: nn.Module, parameters: list[torch.Tensor], updates: Updates) -> None:
        self.unserved: list[torch.Tensor] = []  # valid after watch_no_more()
        self.updates = updates
        self._modules = dict(model.named_modules())
        # Parameters that are updated when a module is called, by module.
        self._of: dict[nn.Module, list[torch.Tensor]] = {}
        self._parameters = {id(p): p for p in parameters}
        self._owners: dict[int, list[nn.Module]] = {id(p): [] for p in parameters}
        for module in self._modules.values():
            for p in module._parameters.values():
                if id(p) in self._owners:
                    self._owners[id(p)].append(module)
                    self._of.setdefault(module, []).append(p)
        self._called: set[nn.Module] = set()
        self._called_now: set[nn.Module] = set()  # during the current outermost call
        self._stack: list[nn.Module] = []
        self._uses = _Uses(self)
        self._watching = True
        enter, look, leave = (
            _Hook(self, self._enter),
            _Hook(self, self._look),
            _Hook(self, self._leave),
        )
        self._hooks = {
            m: [m.register_forward_pre_hook(enter, prepend=True)] for m in self._modules.values()
        }
        for module, hooks in self._hooks.items():
            hooks += [
                module.register_state_dict_pre_hook(look),
                module._register_load_state_dict_pre_hook(look),
            ]
        self._watch_hooks = [
            m.register_forward_hook(leave, always_call=True) for m in self._modules.values()
        ]

    def end(self) -> None:
        """Remove all hooks."""
        self.watch_no_more()
        for hooks in self._hooks.values():
            for hook in hooks:
                hook.remove()

    # ---- hooks

    def _enter(self, module: nn.Module, _: Any) -> None:
        """Take note of a call of ``module``, and make its pending updates."""
        updates = self.updates
        updates.entered()
        if self._watching:
            self._see_call(module)
        if updates.pending and module in self._of:
            updates.apply(self._of[module])

    def _look(self, *_: Any) -> None:
        self.updates.apply_all()

    # ---- watching

    def _see_call(self, module: nn.Module) -> None:
        if not self._stack:
            self._called_now = set()
            self._uses.__enter__()
        self._stack.append(module)
        self._called.add(module)
        self._called_now.add(module)

    def _leave(self, module: nn.Module, *_: Any) -> None:
        if self._stack:
            self._stack.pop()
            if not self._stack:
                self._uses.__exit__(None, None, None)

    def see_use(self, parameter: torch.Tensor) -> None:
        """Take note of a tensor that is passed to a function.

        If it is a parameter that no call has served in this forward pass, the running module serves
        it.
        """
        known = self._parameters.get(id(parameter))
        if known is None or any(owner in self._called_now for owner in self._owners[id(known)]):
            return
        served = self._of.setdefault(self._stack[-1], [])
        if not any(p is known for p in served):
            served.append(known)

    def watch_no_more(self) -> None:
        """Assign the remaining parameters to modules and stop watching.

        Call it between forward passes.
        """
        if not self._watching:
            return
        self._watching = False
        for hook in self._watch_hooks:
            hook.remove()
        names = {m: n for n, m in self._modules.items()}
        served_ones = {id(p) for m, served in self._of.items() if m in self._called for p in served}
        for key, p in self._parameters.items():
            if key in served_ones:
                continue
            above = {
                a
                for owner in self._owners[key]
                if (a := self._called_above(names[owner])) is not None
            }
            for module in above:
                self._of.setdefault(module, []).append(p)
            if not above:
                self.unserved.append(p)
        for module, hooks in self._hooks.items():
            if module not in self._of:
                hooks.pop(0).remove()

    def _called_above(self, name: str) -> nn.Module | None:
        while name:
            name = name.rpartition(".")[0]
            if self._modules[name] in self._called:
                return self._modules[name]
        return None

    def add(self, parameters: list[torch.Tensor]) -> None:
        """Add parameters whose use has not been watched."""
        for p in parameters:
            if id(p) not in self._parameters:
                self._parameters[id(p)] = p
                self._owners[id(p)] = []
                if not self._watching:
                    self.unserved.append(p)


class _Hook:
    """A hook on a module.

    A copy of the model gets no hooks. The model cannot be copied while updates are pending, since
    its weights are then of two steps.
    """

    def __init__(self, serving: Serving, act: Callable[..., None]) -> None:
        self._serving, self._act = serving, act

    @eager
    def __call__(self, *arguments: Any) -> None:
        self._act(*arguments)

    def __deepcopy__(self, memo: Any) -> Callable[..., None]:
        if self._serving.updates.pending:
            raise ConfigError(
                "the model cannot be copied while updates of its weights are pending; call"
                " optimizer.synchronize() first"
            )
        return _nothing

    def __reduce__(self) -> NoReturn:
        raise ConfigError("a model under CrossBarrier cannot be pickled; take its state_dict()")


def _nothing(*_: Any) -> None:
    """Stands for a hook in a copy of the model."""


class _Uses(TorchFunctionMode):  # type: ignore[misc]
    """Reports every tensor that is passed to a PyTorch function."""

    def __init__(self, serving: Serving) -> None:
        super().__init__()
        self._serving = serving

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if getattr(getattr(function, "__self__", None), "__name__", "") not in _HARMLESS:
            for tensor in _tensors_in([*args, *(kwargs or {}).values()]):
                self._serving.see_use(tensor)
        return function(*args, **(kwargs or {}))


def _tensors_in(arguments: Any) -> Iterator[torch.Tensor]:
    for argument in arguments:
        if isinstance(argument, torch.Tensor):
            yield argument
        elif isinstance(argument, (list, tuple)):
            yield from _tensors_in(argument)
