"""Events of collectives and push_pulls for ``torch.profiler``, as PyTorch's backends have them.

Each has two events. The operator's (``c10d::allreduce_``, ``bpsx::push_pull``) spans the call.
``bpsx:all_reduce`` or ``bpsx:push_pull NAME`` spans the time from the call to the result, or to the
end of the profile if that comes first.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch.autograd import profiler
from torch.autograd.profiler import record_function

from bpsx.plugin.adapter import Handle, Item
from bpsx.torch.futures import COMPLETER

_Begun = TypeVar("_Begun")
_FutureOf = Callable[[_Begun], "torch.futures.Future[Any]"]
# Newer releases of PyTorch have an event that shows tensors' shapes.
_fast: Any = getattr(getattr(torch._C, "_profiler", None), "_RecordFunctionFast", None)


class OpenEvents:
    """Events that end on another thread than they began on, or with the profile. Thread-safe.

    A profile that stops frees its events, and PyTorch writes an event's end without looking whether
    the event still exists. So before a profiler stops, all events that are still open have to end.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        # An event ends when its future completes.
        self._open: dict[int, torch.futures.Future[None]] = {}

    def begin(self, name: str) -> int:
        """Begin an event on the calling thread; return its number for :meth:`end`."""
        with self._lock:
            event, end = record_function(name), torch.futures.Future[None]()
            event.__enter__()
            event._call_end_callbacks_on_future(end)
            self._open[id(end)] = end
            return id(end)

    def end(self, number: int) -> None:
        """End the event, unless the profile has ended it. Any thread may call it."""
        with self._lock:
            end = self._open.pop(number, None)
            if end is not None:
                end.set_result(None)

    def end_before(self, stop: Callable[..., Any]) -> Callable[..., Any]:
        """Return ``stop`` preceded by the end of all events. None begins or ends meanwhile."""

        @functools.wraps(stop)
        def end_all_and_stop(*args: Any, **more: Any) -> Any:
            with self._lock:
                while self._open:
                    self._open.popitem()[1].set_result(None)
                return stop(*args, **more)

        return end_all_and_stop


_EVENTS = OpenEvents()
# PyTorch has no callback for this. Its profilers call this function by its global name. A release
# without the function shows no events of bpsx.
_STOP = "_disable_profiler"
_ENDS_BEFORE_STOP = hasattr(profiler, _STOP)
if _ENDS_BEFORE_STOP:
    setattr(profiler, _STOP, _EVENTS.end_before(getattr(profiler, _STOP)))


def profiled() -> bool:
    """Return whether a profiler, for which events are recorded, is on for the calling thread."""
    return _ENDS_BEFORE_STOP and bool(torch._C._autograd._profiler_enabled())


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
    whole = _EVENTS.begin(f"bpsx:{name}")
    try:
        with _event(operator, tensors):
            begun = begin()
        _end_with(future_of(begun), whole)
    except BaseException:
        _EVENTS.end(whole)
        raise
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
    wholes = [_EVENTS.begin(f"bpsx:push_pull {item.name}") for item in items]
    try:
        with _event("bpsx::push_pull", []):
            begin()
        for whole, item in zip(wholes, items, strict=True):
            if isinstance(item.begun, Handle):
                _end_with(COMPLETER.future_of(item.begun), whole)
            else:  # the error of a failed start
                _EVENTS.end(whole)
    except BaseException:
        for whole in wholes:
            _EVENTS.end(whole)
        raise


def _end_with(future: torch.futures.Future[Any], whole: int) -> None:
    future.add_done_callback(lambda _: _EVENTS.end(whole))


def _event(name: str, tensors: Sequence[torch.Tensor]) -> contextlib.AbstractContextManager[Any]:
    event: contextlib.AbstractContextManager[Any] = (
        record_function(name) if _fast is None else _fast(name, list(tensors))
    )
    return event
