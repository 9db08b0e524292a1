"""``join()`` on a worker that has run out of data.

The worker waits until all others have joined. Meanwhile rounds close without it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from bpsx.errors import JoinedError, PeerLeftError
from bpsx.session.states import OVER, SESSION, Event, Life, Lifetime


class Joining:
    """``join()`` on this worker.

    Thread-safe: the control thread calls :meth:`hear`, the user's threads call the rest.
    """

    def __init__(self, life: Lifetime) -> None:
        self._life = life
        self.thread = 0  # identifier of the thread that is in join(); 0: none
        self._gatherings = 0  # number of joins that all workers have completed
        self._last = -1  # rank that came last to the latest of them
        self._left = ""  # error text if a worker has left instead of joining

    def raise_halted(self, what: str) -> None:
        """Raise :class:`JoinedError`: nothing may begin now, as servers do not count on it."""
        if self._life.state is Life.DEPARTED:
            raise JoinedError(f"{what}: this worker has left the job, as it was asked to")
        if self._life.state is Life.STOPPED:
            raise JoinedError(
                f"{what}: this worker waits in commit(), as all others do, until a new one has"
                " entered the job; use bpsx from the thread that calls commit()"
            )
        raise JoinedError(
            f"{what}: this worker has called join() and cannot exchange anything until all"
            " workers have joined"
        )

    def run(
        self,
        unfinished: Callable[[], int],
        settle: Callable[[float], None],
        send: Callable[[str], None],
    ) -> int:
        """Join, and wait for all other workers.

        ``unfinished`` returns the number of push_pulls in progress. They end first, in ``settle``,
        with the help of the other workers: a lane that learns of the join before it has this
        worker's last push would close that round without it. ``send`` sends a message to the
        scheduler. Returns the rank that joined last, or -1 if the job has ended meanwhile. Raises
        :class:`PeerLeftError` if a worker has left without joining.
        """
        self.thread = threading.get_ident()
        try:
            return self._run(unfinished, settle, send)
        finally:
            self.thread = 0

    def _run(
        self,
        unfinished: Callable[[], int],
        settle: Callable[[float], None],
        send: Callable[[str], None],
    ) -> int:
        life = self._life
        if life.state in (Life.STOPPED, Life.DEPARTED):
            self.raise_halted("join()")
        with life.lock:
            before = self._gatherings
            life.move(Event.JOIN_CALLED)
        try:
            while unfinished() and life.state not in OVER:
                settle(0.05)
        except BaseException:
            life.move(Event.JOIN_INTERRUPTED)
            raise
        with life.changed:
            if life.state is Life.JOINING:
                life.move(Event.JOIN_SENT)
                send("JOIN")
            life.changed.wait_for(
                lambda: self._gatherings != before or self._left or life.state in OVER
            )
            if self._gatherings != before:
                return self._last
            if life.state in OVER:
                return -1
            raise PeerLeftError(self._left)

    def check_expected(self) -> None:
        """Raise :class:`InternalError` if ALL_JOINED cannot come now."""
        with self._life.lock:  # a session in the making holds it
            SESSION.after(self._life.state, Event.ALL_JOINED)

    def hear(self, message: dict[str, Any]) -> None:
        """Handle a message of the scheduler: ALL_JOINED with the rank ``last``, or UNJOINED with a
        ``text``.
        """
        with self._life.changed:
            if message["type"] == "ALL_JOINED":
                self._life.move(Event.ALL_JOINED)
                self._last = message["last"]
                self._gatherings += 1
            else:
                self._left = message["text"]
                self._life.changed.notify_all()
