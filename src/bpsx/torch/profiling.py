"""Collectives and push_pulls in ``torch.profiler``, as the collectives of PyTorch's own backends
are.

Each has two events: its operator's (``c10d::allreduce_``, ``bpsx::push_pull``), as long as the call
took, and ``bpsx:all_reduce`` or ``bpsx:push_pull NAME``, from the call to the result.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch.autograd.profiler import record_function

from bpsx.plugin.adapter import Handle, Item

_Begun = TypeVar("_Begun")
_FutureOf = Callable[[_Begun], "torch.futures.Future[Any]"]
# Newer releases have an event that shows tensors' shapes.
_fast: Any = getattr(getattr(torch._C, "_profiler", None), "_RecordFunctionFast", None)


def profiled() -> bool:
    """Whether a profiler is on for the calling thread."""
    return bool(torch._C._autograd._profiler_enabled())


def recorded(
    operator: str,
    name: str,
    tensors: Sequence[torch.Tensor],
    begin: Callable[[], _Begun],
    future_of: _FutureOf[_Begun],
) -> _Begun:
    """What ``begin()`` returns, with an event ``operator`` around the call and an event
    ``bpsx:NAME`` that ends with its future.

    ``tensors``: those whose shapes the event shows. Raises what ``begin`` raises. Call it only if
    :func:`profiled`.
    """
    with _event(operator, tensors), record_function(f"bpsx:{name}") as whole:
        begun = begin()
        whole._call_end_callbacks_on_future(future_of(begun))
        return begun


def followed(name: str, tensor: torch.Tensor, begin: Callable[[], Any]) -> Any:
    """What ``begin()`` returns, the handle of push_pull ``name``, with both events.

    Call it only if :func:`profiled`.
    """
    from bpsx.torch.futures import COMPLETER  # it is built on what push_pull is

    return recorded("bpsx::push_pull", f"push_pull {name}", [tensor], begin, COMPLETER.future_of)


def followed_together(items: Sequence[Item], begin: Callable[[], None]) -> None:
    """As :func:`followed` for push_pulls that ``begin()`` begins together: one ``bpsx::push_pull``,
    and one ``bpsx:push_pull NAME`` for each.
    """
    from bpsx.torch.futures import COMPLETER

    with contextlib.ExitStack() as events:
        events.enter_context(_event("bpsx::push_pull", []))
        wholes = [
            events.enter_context(record_function(f"bpsx:push_pull {item.name}")) for item in items
        ]
        begin()
        for whole, item in zip(wholes, items, strict=True):
            if isinstance(item.begun, Handle):  # else it is what has kept it from that
                whole._call_end_callbacks_on_future(COMPLETER.future_of(item.begun))


def _event(name: str, tensors: Sequence[torch.Tensor]) -> contextlib.AbstractContextManager[Any]:
    event: contextlib.AbstractContextManager[Any] = (
        record_function(name) if _fast is None else _fast(name, list(tensors))
    )
    return event
