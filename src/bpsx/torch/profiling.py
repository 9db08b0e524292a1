"""Collectives in ``torch.profiler``, as those of PyTorch's own backends are.

Each has two events: its operator's (``c10d::allreduce_``), as long as the call took, and ``bpsx:all_reduce``, from the call to the result.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch.autograd.profiler import record_function

_Begun = TypeVar("_Begun")
_FutureOf = Callable[[_Begun], "torch.futures.Future[Any]"]
# Newer releases have an event that shows tensors' shapes.
_fast: Any = getattr(getattr(torch._C, "_profiler", None), "_RecordFunctionFast", None)


def profiled() -> bool:
    """Whether a profiler is on for the calling thread."""
    return bool(torch._C._autograd._profiler_enabled())


def recorded(operator: str, name: str, tensors: Sequence[torch.Tensor], begin: Callable[[], _Begun], future_of: _FutureOf[_Begun]) -> _Begun:
    """What ``begin()`` returns, with an event ``operator`` around the call and an event ``bpsx:NAME`` that ends with its future.

    ``tensors``: those whose shapes the event shows. Raises what ``begin`` raises. Call it only if :func:`profiled`.
    """
    with _event(operator, tensors), record_function(f"bpsx:{name}") as whole:
        begun = begin()
        whole._call_end_callbacks_on_future(future_of(begun))
        return begun


def _event(name: str, tensors: Sequence[torch.Tensor]) -> contextlib.AbstractContextManager[Any]:
    event: contextlib.AbstractContextManager[Any] = record_function(name) if _fast is None else _fast(name, list(tensors))
    return event
