"""Begin a push_pull of a PyTorch tensor: the way of verbs and gradients into the session."""

from __future__ import annotations

import functools

import torch

from bpsx.api.staged import Handle, StagedHandle
from bpsx.plugin import adapter
from bpsx.torch.framework import SUMMED
from bpsx.torch.tensors import is_plain, plain_copy, summable, unnamed, view_of


def submit(
    source: torch.Tensor,
    output: torch.Tensor,
    name: str | None,
    *,
    average: bool,
    priority: int = 0,
    will_wait: bool = False,
    rate: float = -1.0,
) -> Handle:
    """Begin to sum ``source`` over all workers into ``output``, which may be the same tensor.

    Both tensors are dense and have been checked.

    Raises :class:`~bpsx.dtypes.UnsupportedDType`, :class:`~bpsx.errors.NotInitializedError`.
    """
    dtype = SUMMED.get(source.dtype) or summable(
        source, f"push_pull of {name!r}" if name else "push_pull"
    )
    plain = is_plain(source)
    # Hot path: a step has hundreds of gradients.
    if source is output and plain:
        # A tensor object of our own: setting `source.data` meanwhile must not free the memory in
        # flight.
        stage_in = stage_out = source.detach()
        staged = False
    else:
        stage_in = source.detach() if plain else plain_copy(source)
        staged = not is_plain(output)
        if staged:
            stage_out = (
                torch.empty(output.shape, dtype=output.dtype, device=output.device)
                if plain
                else stage_in
            )
        else:
            stage_out = stage_in if output is source else output.detach()
    view = view_of(stage_in, dtype)
    handle: Handle = adapter.session().push_pull(
        name or unnamed("push_pull", source),
        view,
        view if stage_out is stage_in else view_of(stage_out, dtype),
        average=average,
        priority=priority,
        will_wait=will_wait,
        result=output,
        **({"rate": rate} if rate >= 0 else {}),
    )
    return (
        StagedHandle(handle, functools.partial(_overwrite, output, stage_out), output)
        if staged
        else handle
    )


def _overwrite(output: torch.Tensor, result: torch.Tensor) -> None:
    with torch.no_grad():
        output.detach().copy_(result)
