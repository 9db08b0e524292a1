"""Handles whose end becomes known to a ``torch.futures.Future``: what PyTorch's own reducer and ``Work.get_future`` ask for."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import Any

import torch

from bpsx.torch.ops import Handle

_Item = tuple[Handle, "torch.futures.Future[Any]", Callable[[Any], Any]]


class Completer:
    """One thread, ``bpsx-futures``, that waits for handles in the order in which they came, and drives the core while it waits.

    In order, since whoever waits for one of a step's futures waits for all. Started at the first handle; thread-safe.
    """

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[_Item] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    def future_of(self, handle: Handle, result: Callable[[Any], Any] = lambda value: value) -> torch.futures.Future[Any]:
        """A future that ends as ``handle`` does: with ``result`` of its value, or with what it raises."""
        future: torch.futures.Future[Any] = torch.futures.Future()
        with self._lock:
            if self._thread is None:
                # A daemon: what is under way when the interpreter ends is ended by the session.
                self._thread = threading.Thread(target=self._run, name="bpsx-futures", daemon=True)
                self._thread.start()
        self._queue.put((handle, future, result))
        return future

    def _run(self) -> None:
        while True:
            handle, future, result = self._queue.get()
            try:
                value = result(handle.wait())
            except Exception as e:
                future.set_exception(e)
            else:
                future.set_result(value)
            del handle, future, result      # or the last one's tensors would live until the next comes
