"""Completes a ``torch.futures.Future`` when a handle ends.

PyTorch's own reducer and ``Work.get_future`` need such futures.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from bpsx.api.staged import Handle
from bpsx.system.threads import NamedThread

#: Seconds that the interpreter's exit waits for threads whose session is not closed yet.
_LAST_SECONDS = 10.0
#: Threads beyond this number end instead of waiting for further handles.
_MOST_IDLE = 2


class _Item(NamedTuple):
    """A handle in flight and the future to complete when it has ended."""

    handle: Handle
    ended: torch.futures.Future[Any]
    result: Callable[[Any], Any]
    gpu: torch.device | None


class Completer:
    """Threads named ``bpsx-futures`` that wait for handles and complete their futures.

    They wait for handles in the order of submission, since the waiter for one of a step's futures
    waits for all. One thread at a time waits, and drives the core meanwhile. Completing a future
    runs its callbacks; before that, the thread lets another thread continue the waiting. So a
    callback may wait for any other future, to any depth, at the cost of one thread for each
    callback that waits. The callbacks of one future run one after the other, in the order of
    registration. Those of different futures may run at the same time, as with gloo. Threads start
    on demand. Thread-safe.
    """

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """Start afresh without threads, which a forked child does not have."""
        self._changed = threading.Condition()
        self._items: deque[_Item] = deque()
        self._threads: set[threading.Thread] = set()
        self._idle = 0
        self._waiting = self._ending = False

    def future_of(
        self,
        handle: Handle,
        result: Callable[[Any], Any] = lambda value: value,
        at_once: bool = False,
        device: torch.device | None = None,
    ) -> torch.futures.Future[Any]:
        """Return a future that completes when ``handle`` ends.

        Its value is ``result`` of the handle's value. Its error has the text of the handle's error,
        and is raised as a :class:`RuntimeError`, since PyTorch keeps no types.

        ``at_once``: the handle has ended, so the future completes before the return. ``device``:
        device of the result. On a GPU, waiting for the future makes the current stream wait for the
        result, as with PyTorch's own futures.
        """
        gpu = device if device is not None and device.type == "cuda" else None
        ended: torch.futures.Future[Any] = (
            torch.futures.Future(devices=[gpu]) if gpu is not None else torch.futures.Future()
        )
        item = _Item(handle, ended, result, gpu)
        # PyTorch's C++ side takes an exception that is set on the future for its value. It takes an
        # exception that a callback raises for an error.
        future: torch.futures.Future[Any] = ended.then(_unwrapped)
        if at_once:
            _complete(item)
            return future
        with self._changed:
            self._items.append(item)
            try:
                self._call_a_thread()
            except RuntimeError as e:
                if not self._threads:  # otherwise a running thread will handle it
                    self._items.remove(item)
                    raise RuntimeError(
                        f"bpsx: cannot start a thread that waits for collectives: {e}; raise the"
                        " limit on processes and threads (ulimit -u, or the container's)"
                    ) from e
        return future

    def _call_a_thread(self) -> None:
        """Have a thread wait for the next handle, unless one already does.

        The caller holds the lock.
        """
        if self._waiting or not self._items:
            return
        if self._idle:
            self._changed.notify()
            return
        # A daemon: the session ends operations in flight when the interpreter exits.
        thread = NamedThread(target=self._run, name="bpsx-futures", daemon=True)
        thread.start()
        self._threads.add(thread)

    def end(self) -> None:
        """Stop the threads.

        The interpreter's exit would otherwise kill them within PyTorch's C++ code, and the process
        with them.
        """
        deadline = time.monotonic() + _LAST_SECONDS
        with self._changed:
            self._ending = True
            self._changed.notify_all()
            threads = list(self._threads)
        for thread in threads:
            thread.join(max(0.0, deadline - time.monotonic()))

    def _run(self) -> None:
        while (item := self._next()) is not None:
            _complete(item, self._pass_on)
            del item  # or its tensors would live until the next item

    def _pass_on(self) -> None:
        """Let another thread wait for the next handle while this one runs callbacks."""
        with self._changed:
            self._waiting = False
            # No thread can be started: this one continues after the callbacks.
            with contextlib.suppress(RuntimeError):
                self._call_a_thread()

    def _next(self) -> _Item | None:
        """Wait for this thread's turn and return the next handle; None: end the thread."""
        with self._changed:
            while self._waiting or not self._items:
                if self._idle >= _MOST_IDLE or self._ending and not self._items:
                    self._threads.discard(threading.current_thread())
                    return None
                self._idle += 1
                try:
                    self._changed.wait()
                finally:
                    self._idle -= 1
            self._waiting = True
            return self._items.popleft()


def _complete(item: _Item, before_callbacks: Callable[[], None] = lambda: None) -> None:
    """Wait for the handle, call ``before_callbacks``, and complete the future."""
    value, failure = None, None
    # A stream of our own waits for the result, and the future makes other streams wait for it.
    with (
        torch.cuda.stream(torch.cuda.Stream(item.gpu))
        if item.gpu is not None
        else contextlib.nullcontext()
    ):
        try:
            value = item.result(item.handle.wait())
        except Exception as e:
            failure = e
        before_callbacks()
        # An exception in a user's callback must not affect other futures.
        with contextlib.suppress(Exception):
            item.ended.set_result((value, failure))


def _unwrapped(ended: torch.futures.Future[Any]) -> Any:
    value, failure = ended.value()
    if failure is not None:
        raise failure
    return value


#: The completer of the process. It serves one session after the other; a thread per session or
#: model would be one more to stop.
COMPLETER = Completer()
# Registered at import, so it runs after the session's own exit hook, when every handle has ended.
atexit.register(COMPLETER.end)
os.register_at_fork(after_in_child=COMPLETER.forget)
