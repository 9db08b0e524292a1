"""Departure of a worker from its running job, after SIGTERM or a call of the script.

docs/internals/elastic-departures-workers.md has the protocol beneath.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

from bpsx.api.lifecycle import initialised, session
from bpsx.errors import ConfigError
from bpsx.system.threads import NamedThread

#: Seconds in which a second SIGTERM counts as the first: a batch system sends it to all processes,
#: and bpsx-run passes it on.
_SAME = 1.0
#: Seconds that the main thread has to handle the signal that ends it, once the time is over.
_LAST = 5.0


class Departed(SystemExit):  # noqa: N818 - no error
    """This worker has left the job, in which the others go on; it ends with status 0."""

    def __init__(self) -> None:
        super().__init__(0)


def leave(why: str = "its script has asked for it") -> None:
    """Leave the job at the next ``commit()`` or ``check_host_updates()``, and end.

    Returns at once. There, that call raises :class:`Departed` on this worker, and the others go on
    without it. ``why``: for the log. Thread-safe, also for signal handlers.

    Raises :class:`~bpsx.errors.ConfigError` if the job does not go on without workers, and
    :class:`~bpsx.errors.NotInitializedError`.
    """
    if not session().leave(why):
        raise ConfigError(
            "elastic.leave: the job does not go on without this worker, as it has ended, or"
            " BPSX_ELASTIC is neither shrink nor replace; call shutdown() on all workers instead"
        )


class Notice:
    """SIGTERM of this process as the wish to leave the job; only for the main thread.

    The handler takes no lock, as it may interrupt a thread that holds it. So the thread that ends
    the process in time runs from the beginning, and waits on a descriptor.
    """

    def __init__(self, grace: float) -> None:
        """``grace``: seconds from the signal to the end of a process that has not left."""
        self._grace, self._pid = grace, os.getpid()
        self._first = 0.0  # time of the first signal; 0: none has come
        self._over = False
        self._news = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._before: Any = signal.signal(signal.SIGTERM, self._at)
        self._thread = NamedThread(target=self._wait, name="bpsx-notice", daemon=True)
        self._thread.start()

    def _at(self, number: int, frame: FrameType | None) -> None:
        """Handle SIGTERM."""
        now = time.monotonic()
        if self._first and now - self._first < min(_SAME, self._grace):
            return
        # A forked child inherits the handler, but is not in the job.
        ours = os.getpid() == self._pid and initialised()
        if self._first or not ours or not session().leave("SIGTERM"):
            self.restore()
            os.kill(os.getpid(), number)
            return
        self._first = now
        os.eventfd_write(self._news, 1)
        line = (
            f"bpsx worker {session().number}: got SIGTERM: it leaves the job at its next commit();"
            f" it ends after {self._grace:g} s (BPSX_TERM_GRACE), or with a second SIGTERM\n"
        )
        os.write(2, line.encode())  # not through the log, which this handler may have interrupted

    def _wait(self) -> None:
        """Wait for the signal, and end the process when its time is over."""
        self._await_news(None)
        if not self._over:
            self._await_news(self._grace)
        if not self._over:
            os.kill(self._pid, signal.SIGTERM)
            self._await_news(_LAST)
        if not self._over:  # the main thread is in code that handles no signals
            os._exit(128 + signal.SIGTERM)
        os.close(self._news)

    def _await_news(self, seconds: float | None) -> None:
        poller = select.poll()
        poller.register(self._news, select.POLLIN)
        poller.poll(None if seconds is None else int(seconds * 1000) + 1)
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._news)

    def restore(self) -> None:
        """Put the handler back that was there before; this process has all the time it needs."""
        if signal.getsignal(signal.SIGTERM) == self._at:
            signal.signal(signal.SIGTERM, self._before)
        if os.getpid() == self._pid and not self._over:
            self._over = True
            os.eventfd_write(self._news, 1)

    def end(self) -> None:
        """Stop heeding the signal."""
        self.restore()
        self._thread.join()


_notice: Notice | None = None


@contextlib.contextmanager
def heeding_sigterm() -> Iterator[None]:
    """Leave the job in good order after SIGTERM, while this context lasts.

    Does nothing outside the main thread, if the script has a handler of its own, or if the job does
    not go on without workers.
    """
    global _notice
    ours = session()
    there = signal.getsignal(signal.SIGTERM)  # None: a handler that is not Python's
    free = there is not None and there in (signal.SIG_DFL, ours.reporter.on_sigterm)
    main = threading.current_thread() is threading.main_thread()
    if not (main and free and ours.may_leave and ours.config.term_grace):
        yield
        return
    _notice = notice = Notice(ours.config.term_grace)
    try:
        yield
    finally:
        notice.end()
        _notice = None


def depart(callbacks: list[Callable[[], None]], shutdown: Callable[[], None]) -> None:
    """End this worker, which is in the job no more. Raises :class:`Departed`."""
    if _notice is not None and threading.current_thread() is threading.main_thread():
        _notice.restore()
    for callback in callbacks:
        callback()
    shutdown()
    raise Departed
