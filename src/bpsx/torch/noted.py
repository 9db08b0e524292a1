"""Values of an optimizer as they were when ``step()`` was called, for an update that is made later
in parts."""

from __future__ import annotations

import numbers
from typing import Any

import torch

from bpsx.errors import ConfigError

#: Attributes of an optimizer that a part of it must not share or bring back.
OWN = {
    "param_groups",
    "state",
    "step",
    "_optimizer_step_pre_hooks",
    "_optimizer_step_post_hooks",
    "_exchange",
    "_barrier",
    "_should_synchronize",
}


class Noted:
    """Values by name as they were when ``step()`` was called, and what the update has made of them
    since, the same in each of its parts.

    Numbers, containers of them and tensors of one element are known by value, whatever is changed
    in place meanwhile; others are what they are.
    """

    def __init__(self, values: dict[str, Any]) -> None:
        self._values = {k: _copied(v) for k, v in values.items()}
        self._changed: dict[str, Any] = {}

    def copy(self) -> dict[str, Any]:
        """For one part of the update, to change as it likes."""
        return {k: _copied(v) for k, v in self._values.items()}

    def bring_back(
        self, after: dict[str, Any], original: dict[str, Any], who: str, where: str
    ) -> None:
        """What a part has changed (a counter, say) is the optimizer's. Raises :class:`ConfigError`
        if parts have changed it differently."""
        for key, value in after.items():
            if (
                key in OWN
                or key == "params"
                or key in self._values
                and _alike(self._values[key], value)
            ):
                continue
            if key in self._changed:
                if not _alike(self._changed[key], value):
                    raise ConfigError(
                        f"CrossBarrier: {who} makes {key!r} {where} depend on which parameters step"
                        " together: it looks across parameters; use DistributedOptimizer"
                    )
                continue
            self._changed[key] = _copied(value)
            there = original.get(key)
            if (
                isinstance(there, torch.Tensor)
                and isinstance(value, torch.Tensor)
                and there.shape == value.shape
            ):
                there.copy_(value)  # who else looks at this tensor sees it
            else:
                original[key] = value


def _copied(value: Any) -> Any:
    kind = type(value)
    if kind in (list, tuple):
        return kind(map(_copied, value))
    if kind is dict:
        return {k: _copied(v) for k, v in value.items()}
    return value.detach().clone() if kind is torch.Tensor and value.numel() == 1 else value


def _alike(a: Any, b: Any) -> bool:
    if a is b:
        return True
    if type(a) is not type(b):
        return False
    if isinstance(a, torch.Tensor):
        return (
            a.shape == b.shape
            and a.dtype == b.dtype
            and bool(torch.allclose(a, b, rtol=0, atol=0, equal_nan=True))
        )
    if type(a) in (list, tuple):
        return len(a) == len(b) and all(map(_alike, a, b))
    if type(a) is dict:
        return a.keys() == b.keys() and all(_alike(v, b[k]) for k, v in a.items())
    if isinstance(a, (numbers.Number, str, bytes)):
        return bool(a == b or a != a and b != b)
    return False
