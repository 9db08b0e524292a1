"""Dense push_pull, as a function that autograd can follow."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from bpsx.api.staged import Handle
from bpsx.errors import ConfigError
from bpsx.plugin import adapter
from bpsx.plugin.adapter import check_name, check_priority
from bpsx.torch.compression import Compression, Compressor
from bpsx.torch.profiling import followed, profiled
from bpsx.torch.submit import submit
from bpsx.torch.tensors import check_replaceable, check_tensor, mark_written, unnamed


def checked(tensor: Any, average: bool, name: str | None, version: int, priority: int) -> str:
    """Check a push_pull's arguments; return what messages call it.

    Raises :class:`~bpsx.errors.ConfigError`, :class:`~bpsx.torch.UnsupportedTensor`.
    """
    check_arguments(average, name, version, priority)
    what = f"push_pull of {name!r}" if name else "push_pull"
    check_tensor(tensor, what)
    return what


def check_arguments(average: Any, name: Any, version: Any, priority: Any) -> None:
    """Raise :class:`~bpsx.errors.ConfigError` unless all are what push_pull takes."""
    adapter.check_flag(average, "average", "push_pull")
    check_name(name, "push_pull")
    if not isinstance(version, int):
        raise ConfigError(f"push_pull: version must be an integer, not {type(version).__name__}")
    check_priority(priority, "push_pull")


def begin(
    tensor: torch.Tensor,
    average: bool,
    name: str | None,
    version: int,
    priority: int,
    inplace: bool,
    will_wait: bool,
) -> Handle:
    """Check the arguments and begin a push_pull, under the profiler if one runs."""
    what = checked(tensor, average, name, version, priority)
    if inplace:
        check_replaceable(tensor, what)
    output = tensor if inplace else torch.empty_like(tensor, requires_grad=False)
    if profiled():
        wire = name or unnamed("push_pull", tensor)
        handle: Handle = followed(
            wire,
            tensor,
            lambda: submit(
                tensor, output, wire, average=average, priority=priority, will_wait=will_wait
            ),
        )
    else:
        handle = submit(
            tensor, output, name, average=average, priority=priority, will_wait=will_wait
        )
    if inplace:
        mark_written(tensor)
    return handle


class Options(NamedTuple):
    """Arguments of a push_pull that its derivative needs."""

    average: bool
    name: str
    priority: int
    compression: type[Compressor]


class _PushPull(torch.autograd.Function):  # type: ignore[misc]
    """Sum or average over the workers; :func:`push_pull` describes the derivative."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, options: Options) -> torch.Tensor:
        """Return the sum or average."""
        ctx.options = options
        return _summed(tensor, options)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        """Push_pull the gradient, under a name of its own; differentiable again."""
        return (
            differentiable(gradient, ctx.options._replace(name=f"{ctx.options.name}.grad")),
            None,
        )


def differentiable(tensor: torch.Tensor, options: Options) -> torch.Tensor:
    """Return the sum or average; autograd follows it in synchronous training."""
    if (
        tensor.requires_grad
        and torch.is_grad_enabled()
        and not adapter.session().config.asynchronous
    ):
        result: torch.Tensor = _PushPull.apply(tensor, options)
        return result
    return _summed(tensor, options)


def _summed(tensor: torch.Tensor, options: Options) -> torch.Tensor:
    given = tensor.detach()
    wire, ctx = options.compression.compress(given)
    handle = begin(
        wire,
        options.average,
        options.name,
        0,
        options.priority,
        inplace=wire is not given,
        will_wait=True,
    )
    return options.compression.decompress(handle.wait(), ctx)


def push_pull_dense(
    tensor: torch.Tensor,
    average: bool = True,
    name: str | None = None,
    version: int = 0,
    priority: int = 0,
    compression: type[Compressor] = Compression.none,
) -> torch.Tensor:
    """Same as :func:`bpsx.torch.push_pull`, for dense tensors only.

    The caller is a verb, or is counted as one (:func:`bpsx.session.refusals.counted`).
    """
    checked(tensor, average, name, version, priority)
    return differentiable(
        tensor, Options(average, name or unnamed("push_pull", tensor), priority, compression)
    )
