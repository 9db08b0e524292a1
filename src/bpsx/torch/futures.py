"""Handles whose end becomes known to a ``torch.futures.Future``: what PyTorch's own reducer and ``Work.get_future`` ask for."""

from __future__ import annotations

import atexit
import contextlib
import os
import queue
import threading
import time
from collections.abc import Callable
from typing import Any

import torch

from bpsx.torch.ops import Handle

_Item = tuple[Handle, "torch.futures.Future[Any]", Callable[[Any], Any], float | None, "torch.device | None"]
#: How long the interpreter's end waits for a thread whose session has not been closed yet.
_LAST_SECONDS = 10.0


class Completer:
    """One thread, ``bpsx-futures``, that waits for handles in the order in which they came, and drives the core while it waits.

    In order, since whoever waits for one of a step's futures waits for all. Started at the first handle; thread-safe.
    """

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """Begin anew without the thread, which a forked child does not have."""
        self._queue: queue.SimpleQueue[_Item | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    def future_of(
        self, handle: Handle, result: Callable[[Any], Any] = lambda value: value, timeout: float | None = None,
        at_once: bool = False, device: torch.device | None = None,
    ) -> torch.futures.Future[Any]:
        """A future that ends as ``handle`` does: with ``result`` of its value, or with an error that has the text of what it raises (a
        :class:`RuntimeError` for who waits: PyTorch keeps no types). ``timeout``: seconds from now, after which it ends with the handle's
        :class:`TimeoutError`. ``at_once``: the handle has ended, and so shall the future. ``device``: of the result; on a GPU, whoever waits for
        the future has its current stream wait for the result, as with PyTorch's own."""
        gpu = device if device is not None and device.type == "cuda" else None
        ended: torch.futures.Future[Any] = torch.futures.Future(devices=[gpu]) if gpu is not None else torch.futures.Future()
        if at_once:
            self._complete((handle, ended, result, None, gpu))
            return ended.then(_unwrapped)
        with self._lock:
            if self._thread is None:
                # A daemon: what is under way when the interpreter ends is ended by the session.
                self._thread = threading.Thread(target=self._run, name="bpsx-futures", daemon=True)
                self._thread.start()
        # Set as an exception, PyTorch's C++ side would take the exception for the value. What a callback raises it knows for an error.
        future: torch.futures.Future[Any] = ended.then(_unwrapped)
        self._queue.put((handle, ended, result, None if timeout is None else time.monotonic() + timeout, gpu))
        return future

    def end(self) -> None:
        """Let the thread end: in the middle of PyTorch's C++ the interpreter's end would tear it down, and the process with it."""
        with self._lock:
            thread = self._thread
        if thread is not None and thread.is_alive():
            self._queue.put(None)
            thread.join(_LAST_SECONDS)

    def _run(self) -> None:
        while (item := self._queue.get()) is not None:
            self._complete(item)
            del item        # or the last one's tensors would live until the next comes

    @staticmethod
    def _complete(item: _Item) -> None:
        handle, ended, result, end, gpu = item
        value, failure = None, None
        # A stream of our own: it waits for the result, and the future tells others to wait for it.
        with torch.cuda.stream(torch.cuda.Stream(gpu)) if gpu is not None else contextlib.nullcontext():
            try:
                value = result(handle.wait(None if end is None else max(0.0, end - time.monotonic())))
            except Exception as e:
                failure = e
            with contextlib.suppress(Exception):    # a user's callback that raises does not concern the others
                ended.set_result((value, failure))


def _unwrapped(ended: torch.futures.Future[Any]) -> Any:
    value, failure = ended.value()
    if failure is not None:
        raise failure
    return value


#: The one of the process. It knows no session, so it serves one after the other; a thread per session or model would be one more to end.
COMPLETER = Completer()
# Registered here, at import, and so run after the session's own: by then every handle has ended.
atexit.register(COMPLETER.end)
os.register_at_fork(after_in_child=COMPLETER.forget)
