"""Learning-rate schedulers, which wrap an optimizer's ``step()`` and change its rates."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch

from bpsx.errors import ConfigError

#: Marks of a step() that a learning-rate scheduler has replaced: since PyTorch 2.4, and before.
_SCHEDULED = ("_wrapped_by_lr_sched", "_with_counter")


def take_patched_step(optimizer: torch.optim.Optimizer) -> bool:
    """Remove the ``step`` that an earlier learning-rate scheduler put on the object.

    It would hide the mixin's ``step``. Returns whether there was one.
    """
    patched = vars(optimizer).get("step")
    if patched is None:
        return False
    if not any(hasattr(patched, mark) for mark in _SCHEDULED):
        raise ConfigError(
            "DistributedOptimizer: this optimizer's step() has been replaced; make the optimizer"
            " distributed before that"
        )
    del optimizer.step
    return True


def patch_step_again(optimizer: torch.optim.Optimizer) -> None:
    """Wrap ``step`` as the scheduler did, so that the scheduler sees that steps are taken."""
    ref = weakref.ref(optimizer)

    def step(*args: Any, **kwargs: Any) -> Any:
        alive = ref()
        assert alive is not None
        alive._opt_called = True
        if hasattr(alive, "_step_count"):  # PyTorch before 2.4 looks there
            alive._step_count += 1
        return type(alive).step(alive, *args, **kwargs)

    for mark in _SCHEDULED:
        setattr(step, mark, True)
    optimizer.step = step


def current_rates(optimizer: torch.optim.Optimizer) -> Callable[[torch.Tensor], float]:
    """Return a function that gives a parameter's current learning rate.

    The function does not keep the optimizer alive.
    """
    ref, places = weakref.ref(optimizer), dict[int, int]()

    def rate(parameter: torch.Tensor) -> float:
        alive = ref()
        assert alive is not None
        groups: list[dict[str, Any]] = vars(alive)["param_groups"]
        if id(parameter) not in places:  # groups are only added, never removed
            places.update(
                {
                    id(p): i
                    for i, group in enumerate(groups)
                    for p in dict.__getitem__(group, "params")
                }
            )
        return float(dict.__getitem__(groups[places[id(parameter)]], "lr"))

    return rate
