"""An optimizer's values at the time of ``step()``, for an update made later in parts."""

from __future__ import annotations

import numbers
from typing import Any

import torch

from bpsx.errors import ConfigError

#: Attributes of an optimizer that a partial update must neither share nor bring back.
OWN = {
    "param_groups",
    "state",
    "step",
    "_optimizer_step_pre_hooks",
    "_optimizer_step_post_hooks",
    "_exchange",
    "_barrier",
    "_should_synchronize",
    "_leaves_gradients",
}


class SavedOptions:
    """Values by name at the time of ``step()``, and the changes that the update has made to them.

    The changes must be the same in each part of the update. Numbers, containers of numbers and
    one-element tensors are copied, so later changes in place do not affect them. Other values are
    kept by reference.
    """

    def __init__(self, values: dict[str, Any]) -> None:
        self._values = {k: _copied(v) for k, v in values.items()}
        self._changed: dict[str, Any] = {}

    def copy(self) -> dict[str, Any]:
        """Return a copy of the values, which one part of the update may change."""
        return {k: _copied(v) for k, v in self._values.items()}

    def bring_back(
        self, after: dict[str, Any], original: dict[str, Any], who: str, where: str
    ) -> None:
        """Store a part's changes (a counter, for example) in the optimizer.

        Raises :class:`ConfigError` if parts have made different changes.
        """
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
                        f"CrossBarrier: the value that {who} gives {key!r} {where} depends on"
                        " which parameters step together, but CrossBarrier updates parameters at"
                        " different times; use DistributedOptimizer"
                    )
                continue
            self._changed[key] = _copied(value)
            there = original.get(key)
            if (
                isinstance(there, torch.Tensor)
                and isinstance(value, torch.Tensor)
                and there.shape == value.shape
            ):
                there.copy_(value)  # other references to this tensor see the change
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
