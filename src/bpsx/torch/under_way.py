"""A gradient on its way: what is waited for, what may happen to its memory meanwhile, and how waits end."""

from __future__ import annotations

from typing import Any, Protocol

import torch

from bpsx.torch.ops import Handle

#: References to the memory of a tensor that is alone: its own, and that of who asks.
_ALONE = 2


class Pushed:
    """A gradient under way: ``gradient`` is what the average goes into, ``ctx`` the compressor's. ``own``: nothing else is in its memory, and so
    it may travel as it lies, and a write to it meanwhile is noticed."""

    def __init__(self, gradient: torch.Tensor, handle: Handle, ctx: Any, own: bool) -> None:
        self.gradient, self.handle, self.ctx, self.own = gradient, handle, ctx, own
        self.written = False        # to the gradient, meanwhile; known after the wait
        self._version = version(gradient) if own else None
        self._waited = False

    def done(self) -> bool:
        return self.handle.done()

    def wait(self) -> torch.Tensor:
        if not self._waited:        # the wait may itself write, to bring home what had to be laid out in another way
            self.written = self._version is not None and self.gradient._version != self._version and is_alone(self.gradient)
        received: torch.Tensor = self.handle.wait()
        self._waited = True
        return received


class Waited(Protocol):
    def done(self) -> bool: ...

    def wait(self) -> Any: ...


def ended(operation: Waited) -> Exception | None:
    """Wait until ``operation`` has ended. Returns what made it fail, and raises what has interrupted the wait: then it is still under way."""
    try:
        operation.wait()
    except Exception as e:
        if not operation.done():
            raise
        return e
    return None


def raise_first(failures: list[Exception | None] | list[Exception]) -> None:
    """Raise the first of them, if any. The list is emptied: from its caller's frame, which the exception refers to, it would refer to the exception,
    and with it the optimizer and its hooks would live until the garbage collection."""
    first = next((f for f in failures if f is not None), None)
    failures.clear()
    if first is not None:
        try:
            raise first
        finally:
            del first


def version(tensor: torch.Tensor) -> int | None:
    """How often ``tensor``, or another one in the same memory, has been written to; None if nobody counts."""
    return tensor._version if tensor.layout is torch.strided and not tensor.is_inference() else None


def zero_gradient(parameter: torch.Tensor) -> torch.Tensor:
    """What a gradient of ``parameter`` would be that is zero; its dtype need not be the parameter's (PyTorch 2.10 and newer)."""
    dtype = getattr(parameter, "grad_dtype", None) or parameter.dtype
    return torch.zeros_like(parameter, dtype=dtype, requires_grad=False)


def is_shared(gradient: torch.Tensor) -> bool:
    """Whether other tensors have their elements in the same memory. Autograd may give two parameters one gradient's memory: where both go into one
    sum through views of them. The average of the first would come home into what the second has still to push."""
    users: Any = getattr(torch._C, "_storage_Use_Count", None)
    return users is not None and users(gradient.untyped_storage()._cdata) > _ALONE


def is_alone(tensor: torch.Tensor) -> bool:
    """Whether no other tensor can live in the same memory, and so share its version counter."""
    return bool(tensor.untyped_storage().nbytes() == tensor.nbytes)
