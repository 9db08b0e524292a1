"""Errors for backward(), synchronize() and step() in an order that cannot work."""

from __future__ import annotations

import torch

from bpsx.errors import BpsxError, MismatchError
from bpsx.torch._gradients import Managed, is_alone, version
from bpsx.torch.unused_parameters import Count


class GradientOrderError(BpsxError, RuntimeError):
    """backward(), synchronize() and step() were called in a wrong order.

    Gradients would have been used or changed while in flight.
    """


def interrupted(managed: Managed) -> GradientOrderError:
    """Backward has computed a gradient after an interrupted wait for the previous ones."""
    return GradientOrderError(
        f"the gradient of {managed.name!r} was computed while an interrupted exchange is still"
        " under way. Call step() or synchronize() again to continue it, or zero_grad() to wait for"
        " its end and discard the gradients"
    )


def too_often(managed: Managed, passes: int, optimizer: str) -> GradientOrderError:
    """Backward has computed a gradient that is in flight."""
    text = (
        f"the gradient of {managed.name!r} was computed more than"
        f" backward_passes_per_step={passes} times since the last step() or zero_grad() of the"
        f" {optimizer}. If one step of it has several backward() calls, set"
        " backward_passes_per_step to their number. If a backward() belongs to a step of another"
        " optimizer (a GAN computes the generator's loss through the discriminator), call this"
        " optimizer's own zero_grad(), not the model's, before the first backward() of each of its"
        " steps, on all workers"
    )
    if managed.rivalled:
        text += (
            ". Another live distributed optimizer has this parameter, too: if it replaces this"
            " one, delete this one and everything that refers to it, such as a scheduler"
        )
    return GradientOrderError(text + ". With torch.utils.checkpoint, use use_reentrant=False")


def written_to(managed: Managed) -> GradientOrderError:
    """A gradient has been changed while it was in flight."""
    return GradientOrderError(
        f"the gradient of {managed.name!r} was changed while it was under way, so the workers' sum"
        " is not a sum of what backward computed. Call the optimizer's synchronize() first, then"
        " change gradients, then call step() inside skip_synchronize()"
    )


def was_replaced(managed: Managed, gradient: torch.Tensor | None) -> bool:
    """Return whether the script has set ``grad`` to another tensor than ``gradient``."""
    return managed.parameter.grad is not None and managed.parameter.grad is not gradient


def replaced(managed: Managed) -> GradientOrderError:
    """A gradient has been replaced while it was in flight."""
    return GradientOrderError(
        f"the gradient of {managed.name!r} was set to another tensor while it was under way, and"
        " the workers' sum does not contain that tensor. Call the optimizer's synchronize() first,"
        " then change gradients, then call step() inside skip_synchronize()"
    )


def check_not_added(managed: Managed) -> None:
    """Raise :class:`GradientOrderError` if backward has added to an average.

    After an implicit wait the next gradients must belong to a new step. Further gradients of the
    same step would be missing on the other workers.
    """
    gradient, averaged = managed.parameter.grad, managed.averaged
    if averaged is None or gradient is not averaged[0] or averaged[1] is None:
        return
    if version(gradient) == averaged[1] + 1 and is_alone(gradient):
        raise added_after_look(managed)


def added_after_look(managed: Managed) -> GradientOrderError:
    """Backward has added to an average."""
    return GradientOrderError(
        f"the gradient of {managed.name!r} was computed after the optimizer's param_groups had"
        " been read, and reading them waits for gradients under way. Read them before the first or"
        " after the last backward() of a step, or call zero_grad() to start again"
    )


def frozen_on_some(managed: Managed, count: Count) -> MismatchError:
    """Some workers train a parameter that others have frozen."""
    return MismatchError(
        f"{managed.name!r} is trained on {count.trained} workers and frozen (requires_grad=False)"
        f" on {count.frozen}; freeze and unfreeze parameters on all workers in the same step"
    )
