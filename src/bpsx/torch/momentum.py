"""The optimizer's momentum, where ``compression_params`` has momentum in its place: taken over, and
switched off while it steps.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from typing import Any

import torch

from bpsx.errors import ConfigError
from bpsx.plugin import adapter

Groups = list[dict[str, Any]]
_WHAT = "DistributedOptimizer: compression_params: momentum='nesterov'"


def momentum_of(optimizer: torch.optim.Optimizer, names: Mapping[int, str]) -> dict[str, float]:
    """By parameter's name (``names``: by id), the momentum that the optimizer has for it, if it has
    any.
    """
    return {
        names[id(p)]: float(group["momentum"])
        for group in optimizer.param_groups
        if group.get("momentum")
        for p in group["params"]
    }


#: The momentum of a parameter's weight decay, in the optimizer's state of it: so it is saved and
#: broadcast like all that workers have alike.
_KEPT = "weight_decay_momentum"


class Decayed:
    """A parameter whose gradient weight decay is added to before the step, as the optimizer would
    do, and with a momentum of its own if it is asked for: that of the gradient is added before
    compression, and onebit would lose the decay (as BytePS has it).
    """

    def __init__(self, parameter: torch.Tensor, mu: float | None) -> None:
        self.parameter, self._mu = parameter, mu

    def add(self, decay: float, maximize: bool, kept: torch.Tensor | None) -> torch.Tensor | None:
        """Add ``decay`` times the parameter to its gradient, and with mu: m = mu m + that, gradient
        += mu m.

        Returns m, which was ``kept``.
        """
        gradient, parameter = self.parameter.grad, self.parameter.detach()
        if gradient is None:
            return kept
        sign = -1.0 if maximize else 1.0  # such an optimizer turns the gradient's sign first
        gradient.add_(parameter, alpha=sign * decay)
        if self._mu is not None:
            kept = torch.zeros_like(parameter) if kept is None else kept
            kept.mul_(self._mu).add_(parameter, alpha=decay)
            gradient.add_(kept, alpha=sign * self._mu)
        return kept


class TakenOver:
    """The momentum of those groups of an optimizer whose gradients get theirs on the way.

    Not thread-safe.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        names: Mapping[int, str],
        choices: Mapping[str, adapter.Compression],
    ) -> None:
        self._momenta: dict[int, float] = {}  # by group: what it was
        self._decayed: dict[int, list[Decayed]] = {}
        for i, group in enumerate(optimizer.param_groups):
            chosen = {names[id(p)]: choices.get(names[id(p)]) for p in group["params"]}
            with_momentum = [name for name, c in chosen.items() if c is not None and c.momentum]
            if not with_momentum:
                continue
            self._check(i, group, [name for name in chosen if name not in with_momentum], optimizer)
            self._momenta[i] = float(group.get("momentum") or 0.0)
            own = [
                c.mu if c is not None and c.momentum and c.compressor == "onebit" else None
                for c in chosen.values()
            ]
            if isinstance(optimizer, torch.optim.SGD) and any(mu is not None for mu in own):
                self._decayed[i] = [
                    Decayed(p, mu) for mu, p in zip(own, group["params"], strict=True)
                ]
                self._check_fused(i, group)

    @staticmethod
    def _check_fused(i: int, group: dict[str, Any]) -> None:
        """A fused step divides gradients by the loss's scale itself, and what weight decay adds
        before it would be divided too.
        """
        if dict.get(group, "fused") and dict.get(group, "weight_decay"):
            raise ConfigError(
                f"{_WHAT} with onebit adds weight decay to gradients before the step, which group"
                f" {i} with fused=True would scale: leave fused out"
            )

    @staticmethod
    def _check(
        i: int, group: dict[str, Any], without: list[str], optimizer: torch.optim.Optimizer
    ) -> None:
        if group.get("momentum") and not isinstance(optimizer, torch.optim.SGD):
            raise ConfigError(
                f"{_WHAT} cannot take the place of {type(optimizer).__name__}'s momentum (group"
                f" {i}: {group['momentum']}), which is not that of gradients; with"
                " torch.optim.SGD's it can. Leave momentum out here or there"
            )
        if group.get("momentum") and without:
            raise ConfigError(
                f"{_WHAT} takes the place of the momentum of group {i} for some of its parameters,"
                f" and not for {', '.join(map(repr, without[:5]))}: give all of a group momentum,"
                " or none"
            )
        if group.get("dampening"):
            raise ConfigError(
                f"{_WHAT} knows no dampening, and group {i} has dampening={group['dampening']}"
            )

    @contextmanager
    def off(self, groups: Groups, state: MutableMapping[torch.Tensor, Any]) -> Iterator[None]:
        """Inside, the optimizer has no momentum of its own in these groups, and what weight decay
        adds is in the gradients already.

        ``state``: the optimizer's.

        Raises :class:`ConfigError` if somebody has changed the momentum: what is added to gradients
        would not follow.
        """
        for i, before in self._momenta.items():
            now = float(dict.get(groups[i], "momentum") or 0.0)
            if now != before:
                raise ConfigError(
                    f"the momentum of group {i} is {now}, and was {before} when"
                    " DistributedOptimizer took it over for compression_params'"
                    " momentum='nesterov', which cannot follow: leave it as it is (schedulers:"
                    " cycle_momentum=False; checkpoints: of the same momentum)"
                )
        changed: list[tuple[dict[str, Any], str, Any]] = []
        kept: list[tuple[torch.Tensor, torch.Tensor]] = []
        try:
            for i, before in self._momenta.items():
                if before:
                    self._set(changed, groups[i], "momentum", 0.0)
                decay = dict.get(groups[i], "weight_decay")
                if decay and i in self._decayed:
                    self._check_fused(i, groups[i])
                    with torch.no_grad():
                        for decayed in self._decayed[i]:
                            of = decayed.parameter
                            m = decayed.add(
                                float(decay),
                                bool(dict.get(groups[i], "maximize")),
                                state[of].get(_KEPT) if of in state else None,
                            )
                            kept += [(of, m)] if m is not None else []
                    self._set(changed, groups[i], "weight_decay", 0.0)
            yield
        finally:
            for group, key, value in changed:
                group[key] = value
            # not before the step: an optimizer may begin by asking whether there is any state
            for parameter, m in kept:
                state[parameter][_KEPT] = m

    @staticmethod
    def _set(
        changed: list[tuple[dict[str, Any], str, Any]], group: dict[str, Any], key: str, value: Any
    ) -> None:
        changed.append((group, key, dict.__getitem__(group, key)))
        group[key] = value
