"""Checks of PyTorch tensors, and views of them that give bpsx their memory."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from bpsx.dtypes import BY_NAME
from bpsx.plugin.adapter import TensorView
from bpsx.plugin.framework import UnsupportedTensor
from bpsx.torch.framework import SUMMED, TORCH

_ALLOWED = f"expected a dense tensor of {', '.join(BY_NAME)}, on the CPU or a CUDA device"
#: Name a tensor's dtype, and an operation that was given no name.
dtype_name, unnamed = TORCH.dtype_of, TORCH.unnamed


def check_tensor(tensor: Any, what: str) -> None:
    """Raise :class:`UnsupportedTensor` unless ``tensor`` is dense and on the CPU or a GPU.

    ``what`` names the tensor in the message.
    """
    if not isinstance(tensor, torch.Tensor):
        raise UnsupportedTensor(f"{what}: expected a torch.Tensor, not {type(tensor).__name__}")
    if tensor.is_nested or tensor.is_quantized or tensor.layout != torch.strided:
        kind = (
            "nested"
            if tensor.is_nested
            else "quantized"
            if tensor.is_quantized
            else str(tensor.layout).removeprefix("torch.")
        )
        raise UnsupportedTensor(f"{what}: {kind} tensors cannot be sent; {_ALLOWED}")
    check_device(tensor, what)


def check_rows(tensor: torch.Tensor, verb: str) -> None:
    """Raise :class:`UnsupportedTensor` unless ``tensor`` has at least one dimension."""
    if tensor.dim() == 0:
        raise UnsupportedTensor(
            f"{verb}: expected a tensor with at least one dimension; give tensor.reshape(1)"
        )


def check_device(tensor: torch.Tensor, what: str) -> None:
    """Raise :class:`UnsupportedTensor` unless ``tensor`` is on the CPU or a GPU."""
    if tensor.device.type not in ("cpu", "cuda"):
        raise UnsupportedTensor(f"{what}: tensors on {tensor.device} cannot be sent; {_ALLOWED}")


def check_writable(tensor: torch.Tensor, what: str) -> None:
    """Raise :class:`UnsupportedTensor` if elements of ``tensor`` share memory.

    Such a tensor cannot hold a result.
    """
    if tensor.is_contiguous():
        return
    reach = 0
    for stride, length in sorted((s, n) for s, n in zip(tensor.stride(), tensor.shape) if n > 1):
        if stride <= reach:
            raise UnsupportedTensor(
                f"{what}: elements share memory (shape {tuple(tensor.shape)}, strides"
                f" {tensor.stride()}, as expand() makes them), so the result cannot be written in"
                " place; give a clone(), or use push_pull() to get a new tensor"
            )
        reach += stride * (length - 1)


def check_replaceable(tensor: torch.Tensor, what: str, instead: str = "push_pull()") -> None:
    """Raise :class:`UnsupportedTensor` unless ``tensor`` can hold the result in place.

    ``tensor`` has passed :func:`check_tensor`. A tensor that autograd computed is refused, because
    autograd would not notice that its values are overwritten.
    """
    if tensor.grad_fn is not None and torch.is_grad_enabled():
        raise UnsupportedTensor(
            f"{what}: the tensor is the result of an operation that autograd records, and autograd"
            f" would not notice that it is overwritten; use {instead}, which has a gradient, or"
            " detach() it first"
        )
    check_writable(tensor, what)


def is_plain(tensor: torch.Tensor) -> bool:
    """Return whether the memory at ``data_ptr()`` holds the elements in order.

    There must be no pending negation or conjugation.
    """
    return tensor.is_contiguous() and not tensor.is_neg() and not tensor.is_conj()


def plain_copy(tensor: torch.Tensor) -> torch.Tensor:
    """Return ``tensor`` itself, detached, if it is plain; otherwise a contiguous copy."""
    detached = tensor.detach()
    return detached if is_plain(detached) else detached.resolve_conj().resolve_neg().contiguous()


def mark_written(tensor: torch.Tensor) -> None:
    """Tell autograd of a write to ``tensor``, which it may have saved for a backward pass."""
    if not tensor.is_inference():
        torch.autograd.graph.increment_version(tensor)


def mark_all_written(tensors: list[torch.Tensor]) -> None:
    """Same as :func:`mark_written` for many tensors, none of which is an inference tensor."""
    if _MARKS_MANY:
        torch.autograd.graph.increment_version(tensors)
        return
    for tensor in tensors:
        mark_written(tensor)


def _marks_many() -> bool:
    """Return whether this PyTorch's ``increment_version`` takes many tensors in one call."""
    try:
        torch.autograd.graph.increment_version([])
    except (TypeError, AttributeError, RuntimeError):  # which of these depends on the release
        return False
    return True


_MARKS_MANY = _marks_many()


def summable(tensor: torch.Tensor, what: str) -> str:
    """Return the name of ``tensor``'s dtype.

    Raises :class:`~bpsx.dtypes.UnsupportedDType` if the dtype cannot be summed; the message says
    what to send instead.
    """
    return SUMMED.get(tensor.dtype) or TORCH.check_summable(tensor, what)


def view_of(tensor: torch.Tensor, dtype: str) -> TensorView:
    """Describe a plain tensor's memory to bpsx."""
    return view_at(tensor, tensor.nbytes, dtype, tuple(tensor.shape))


def view_at(tensor: torch.Tensor, nbytes: int, dtype: str, shape: tuple[int, ...]) -> TensorView:
    """Describe a plain tensor's memory as elements of type ``dtype`` and shape ``shape``."""
    if not tensor.is_cuda:
        return TensorView(tensor.data_ptr(), nbytes, dtype, shape, tensor)
    device = tensor.get_device()
    return TensorView(tensor.data_ptr(), nbytes, dtype, shape, tensor, device, streams_of(device))


def bytes_view(tensor: torch.Tensor) -> TensorView:
    """Return a view for broadcast, as bytes if the dtype cannot be summed.

    The byte view has the element size as its last dimension.
    """
    dtype = dtype_name(tensor)
    if dtype in BY_NAME:
        return view_of(tensor, dtype)
    size = tensor.element_size()
    return view_at(tensor, tensor.numel() * size, "uint8", (*tensor.shape, size))


@functools.cache
def streams_of(device: int) -> Callable[[], int]:
    """Return a function that gives the calling thread's current stream on ``device``.

    Where PyTorch has a function for the raw handle, that function is five times as fast.
    """
    raw = getattr(torch._C, "_cuda_getCurrentRawStream", None)
    if raw is not None:
        return functools.partial(raw, device)
    return lambda: int(torch.cuda.current_stream(device).cuda_stream)
