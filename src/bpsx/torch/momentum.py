"""The optimizer's momentum when ``compression_params`` replaces it, and that of weight decay."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from bpsx.errors import ConfigError
from bpsx.plugin import adapter
from bpsx.plugin.momentum import WHAT, Momentum, decay_factors, decay_momentum

#: Key of the weight decay's momentum in the optimizer's state of a parameter. So it is saved and
#: broadcast like all state that is the same on all workers.
_KEPT = "weight_decay_momentum"


class _Decayed:
    """A parameter in :func:`~bpsx.plugin.momentum.decay_momentum`."""

    def __init__(
        self, parameter: torch.Tensor, group: dict[str, Any], mu: float, state: dict[Any, Any]
    ) -> None:
        self.mu, self.decay, self.weight = mu, float(group["weight_decay"]), parameter.detach()
        self._parameter, self._group, self._state = parameter, group, state
        self.momentum = state[parameter].get(_KEPT, 0.0) if parameter in state else 0.0

    def end(self, momentum: torch.Tensor) -> None:
        if self._parameter.grad is not None:
            self.weight.sub_(momentum, alpha=float(self._group["lr"]) * self.mu)
            self._state[self._parameter][_KEPT] = momentum


class Momenta:
    """Momentum of each group of an optimizer, and of its weight decay.

    ``names``: parameter names by id. Does not keep the optimizer alive. Not thread-safe.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, names: Mapping[int, str]) -> None:
        self._of = weakref.ref(optimizer)
        self._names = [[names[id(p)] for p in group["params"]] for group in self._groups()]
        self._momenta = [
            Momentum(
                self._of,
                [torch.optim.SGD],
                options=lambda optimizer, i=i: vars(optimizer)["param_groups"][i],  # type: ignore[misc]
                part=f"group {i} of ",
            )
            for i in range(len(self._names))
        ]
        self._mus: dict[str, float] = {}  # of weight decay's momentum

    def _groups(self) -> list[dict[str, Any]]:
        groups: list[dict[str, Any]] = vars(self._of())["param_groups"]
        return groups

    def by_name(self) -> dict[str, float]:
        """Return the optimizer's momentum by parameter name, where it has one."""
        each = zip(self._momenta, self._names, strict=True)
        return {k: v for momentum, names in each for k, v in momentum.by_name(names).items()}

    def take_over(self, choices: Mapping[str, adapter.CompressionSpec]) -> None:
        """Let compression add momentum where ``choices`` say so. Raises :class:`ConfigError`."""
        for i, momentum in enumerate(self._momenta):
            momentum.take_over(self._names[i], choices)
            dampening = self._groups()[i].get("dampening")
            if momentum.is_taken and dampening:
                raise ConfigError(
                    f"{WHAT} does not support dampening, but group {i} has dampening={dampening}"
                )
        self._mus = decay_factors(choices) if isinstance(self._of(), torch.optim.SGD) else {}
        self._decayed()

    def _decayed(self) -> list[_Decayed]:
        """Return the parameters whose weight decay has a momentum.

        Raises :class:`ConfigError` for a fused step, as it does not report the parameters that it
        left out because of an overflow.
        """
        found, state = [], vars(self._of())["state"]
        for i, names in enumerate(self._names):
            group = self._groups()[i]
            if not group.get("weight_decay") or self._mus.keys().isdisjoint(names):
                continue
            if group.get("fused"):
                raise ConfigError(
                    f"{WHAT} with onebit gives weight decay a momentum, which group {i} with"
                    " fused=True cannot have; omit fused"
                )
            found += [
                _Decayed(p, group, self._mus[name], state)
                for p, name in zip(group["params"], names, strict=True)
                if name in self._mus
            ]
        return found

    @contextmanager
    def off(self) -> Iterator[None]:
        """Context in which the optimizer steps without the momenta that compression adds.

        At its end weight decay's momentum is added. Raises :class:`ConfigError` if a momentum has
        changed, because the momentum that compression adds would not follow.
        """
        with ExitStack() as stack:
            for momentum in self._momenta:
                stack.enter_context(momentum.off())
            with decay_momentum(self._decayed()):
                yield
