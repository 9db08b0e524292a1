"""Events of collectives and push_pulls for ``torch.profiler``, as PyTorch's backends have them.

Each has two events. The operator's (``c10d::allreduce_``, ``bpsx::push_pull``) spans the call.
``bpsx:all_reduce`` or ``bpsx:push_pull NAME`` spans the time from the call to the result.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch.autograd.profiler import record_function

from bpsx.plugin.adapter import Handle, Item
from bpsx.torch.futures import COMPLETER

_Begun = TypeVar("_Begun")
_FutureOf = Callable[[_Begun], "torch.futures.Future[Any]"]
# Newer releases of PyTorch have an event that shows tensors' shapes.
_fast: Any = getattr(getattr(torch._C, "_profiler", None), "_RecordFunctionFast", None)


def profiled() -> bool:
    """Return whether a profiler is on for the calling thread."""
    return bool(torch._C._autograd._profiler_enabled())


def recorded(
    operator: str,
    name: str,
    tensors: Sequence[torch.Tensor],
    begin: Callable[[], _Begun],
    future_of: _FutureOf[_Begun],
) -> _Begun:
    """Call ``begin()`` with both events, and return its result.

    The event ``operator`` spans the call; the event ``bpsx:NAME`` ends with the result's future.
    ``tensors``: tensors whose shapes the event shows. Raises what ``begin`` raises. Call it only if
    :func:`profiled`.
    """
    with _event(operator, tensors), record_function(f"bpsx:{name}") as whole:
        begun = begin()
        whole._call_end_callbacks_on_future(future_of(begun))
        return begun


def followed(name: str, tensor: torch.Tensor, begin: Callable[[], Any]) -> Any:
    """Call ``begin()``, which returns the handle of push_pull ``name``, with both events.

    Call it only if :func:`profiled`.
    """
    return recorded("bpsx::push_pull", f"push_pull {name}", [tensor], begin, COMPLETER.future_of)


def followed_together(items: Sequence[Item], begin: Callable[[], None]) -> None:
    """Same as :func:`followed` for push_pulls that ``begin()`` starts together.

    There is one ``bpsx::push_pull``, and one ``bpsx:push_pull NAME`` for each.
    """
    with contextlib.ExitStack() as events:
        events.enter_context(_event("bpsx::push_pull", []))
        wholes = [
            events.enter_context(record_function(f"bpsx:push_pull {item.name}")) for item in items
        ]
        begin()
        for whole, item in zip(wholes, items, strict=True):
            if isinstance(item.begun, Handle):  # otherwise it is the error of a failed start
                whole._call_end_callbacks_on_future(COMPLETER.future_of(item.begun))


def _event(name: str, tensors: Sequence[torch.Tensor]) -> contextlib.AbstractContextManager[Any]:
    event: contextlib.AbstractContextManager[Any] = (
        record_function(name) if _fast is None else _fast(name, list(tensors))
    )
    return event
