"""Errors for backward(), synchronize() and step() in an order that cannot work."""

from __future__ import annotations

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
        f"the gradient of {managed.name!r} was computed while an exchange that has been "
        "interrupted is "
        "still under way: call step() or synchronize() again, which goes on with it, or "
        "zero_grad(), "
        "which waits for its end and throws the gradients away"
    )


def too_often(managed: Managed, passes: int, optimizer: str) -> GradientOrderError:
    """Backward has computed a gradient that is in flight."""
    text = (
        f"the gradient of {managed.name!r} was computed more than "
        f"backward_passes_per_step={passes} "
        f"times since the last step() or zero_grad() of the {optimizer}. If several backward() "
        "belong "
        "to one step of it, give backward_passes_per_step their number. If one belongs to a step "
        "of "
        "another optimizer (a GAN's generator has its loss through the discriminator), call this "
        "optimizer's own zero_grad(), not the model's, before the first backward() of each of its "
        "steps, on all workers"
    )
    if managed.rivalled:
        text += (
            ". Another live distributed optimizer has this parameter, too: if it has taken this "
            "one's place, delete this one and whatever refers to it, such as a scheduler"
        )
    return GradientOrderError(text + ". Under torch.utils.checkpoint, use_reentrant=False")


def written_to(managed: Managed) -> GradientOrderError:
    """A gradient has been changed while it was in flight."""
    return GradientOrderError(
        f"the gradient of {managed.name!r} was written to while it was under way, so what the "
        "workers "
        "have summed is not what backward computed: call the optimizer's synchronize() first, then "
        "change gradients, then step() inside skip_synchronize()"
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
        f"the gradient of {managed.name!r} was computed after the optimizer's param_groups had "
        "been "
        "read, which waits for gradients under way: read them before the first or after the last "
        "backward() of a step, or call zero_grad() to begin anew"
    )


def frozen_on_some(managed: Managed, count: Count) -> MismatchError:
    """Some workers train a parameter that others have frozen."""
    return MismatchError(
        f"{managed.name!r} is trained on {count.trained} workers and frozen (requires_grad=False) "
        "on "
        f"{count.frozen}: freeze and thaw parameters on all workers in the same step"
    )
