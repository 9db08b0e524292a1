"""The optimizer's momentum when ``compression_params`` replaces it.

It is taken over, and switched off while the optimizer steps.
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
    """Return the optimizer's momentum by parameter name, where it has one.

    ``names``: parameter names by id.
    """
    return {
        names[id(p)]: float(group["momentum"])
        for group in optimizer.param_groups
        if group.get("momentum")
        for p in group["params"]
    }


#: Key of the weight decay's momentum in the optimizer's state of a parameter. So it is saved and
#: broadcast like all state that is the same on all workers.
_KEPT = "weight_decay_momentum"


class Decayed:
    """A parameter with weight decay added to its gradient before the step.

    The optimizer would add the same decay. With ``mu``, the decay has a momentum of its own, as in
    BytePS: the gradient's momentum is added before compression, and onebit would lose the decay.
    """

    def __init__(self, parameter: torch.Tensor, mu: float | None) -> None:
        self.parameter, self._mu = parameter, mu

    def add(self, decay: float, maximize: bool, kept: torch.Tensor | None) -> torch.Tensor | None:
        """Add ``decay`` times the parameter to its gradient.

        With mu also: m = mu m + decay * parameter, gradient += mu m. Returns m; ``kept`` is its
        previous value.
        """
        gradient, parameter = self.parameter.grad, self.parameter.detach()
        if gradient is None:
            return kept
        sign = -1.0 if maximize else 1.0  # such an optimizer first negates the gradient
        gradient.add_(parameter, alpha=sign * decay)
        if self._mu is not None:
            kept = torch.zeros_like(parameter) if kept is None else kept
            kept.mul_(self._mu).add_(parameter, alpha=decay)
            gradient.add_(kept, alpha=sign * self._mu)
        return kept


class TakenOver:
    """The momentum of the groups whose gradients get their momentum from compression.

    Not thread-safe.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        names: Mapping[int, str],
        choices: Mapping[str, adapter.CompressionSpec],
    ) -> None:
        self._momenta: dict[int, float] = {}  # original momentum by group
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
        """Raise :class:`ConfigError` for a fused step with weight decay.

        A fused step divides gradients by the loss scale itself. It would also divide the weight
        decay that has been added before.
        """
        if dict.get(group, "fused") and dict.get(group, "weight_decay"):
            raise ConfigError(
                f"{_WHAT} with onebit adds weight decay to gradients before the step, and group"
                f" {i} with fused=True would scale it; omit fused"
            )

    @staticmethod
    def _check(
        i: int, group: dict[str, Any], without: list[str], optimizer: torch.optim.Optimizer
    ) -> None:
        if group.get("momentum") and not isinstance(optimizer, torch.optim.SGD):
            raise ConfigError(
                f"{_WHAT} cannot replace the momentum of {type(optimizer).__name__} (group {i}:"
                f" {group['momentum']}), which is not a momentum of gradients; it can replace only"
                " that of torch.optim.SGD. Omit one of the two momenta"
            )
        if group.get("momentum") and without:
            raise ConfigError(
                f"{_WHAT} replaces the momentum of some parameters of group {i}, but not of"
                f" {', '.join(map(repr, without[:5]))}; give momentum to all parameters of a"
                " group, or to none"
            )
        if group.get("dampening"):
            raise ConfigError(
                f"{_WHAT} does not support dampening, but group {i} has"
                f" dampening={group['dampening']}"
            )

    @contextmanager
    def off(self, groups: Groups, state: MutableMapping[torch.Tensor, Any]) -> Iterator[None]:
        """Context in which the optimizer has no momentum of its own in these groups.

        Weight decay has then been added to the gradients already. ``state``: the optimizer's state.

        Raises :class:`ConfigError` if the momentum has been changed, because the momentum that
        compression adds would not follow.
        """
        for i, before in self._momenta.items():
            now = float(dict.get(groups[i], "momentum") or 0.0)
            if now != before:
                raise ConfigError(
                    f"the momentum of group {i} has changed from {before} to {now} after"
                    " DistributedOptimizer took it over for compression_params'"
                    " momentum='nesterov', which cannot follow. Do not change it (schedulers:"
                    " cycle_momentum=False; checkpoints: with the same momentum)"
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
            # After the step: an optimizer may check first whether there is any state.
            for parameter, m in kept:
                state[parameter][_KEPT] = m

    @staticmethod
    def _set(
        changed: list[tuple[dict[str, Any], str, Any]], group: dict[str, Any], key: str, value: Any
    ) -> None:
        changed.append((group, key, dict.__getitem__(group, key)))
        group[key] = value
