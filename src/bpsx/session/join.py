"""``join()`` on a worker that has run out of data.

The worker waits until all others have joined. Meanwhile rounds close without it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from bpsx.errors import JoinedError, PeerLeftError


class Joining:
    """State of ``join()`` on this worker.

    Thread-safe: the control thread calls :meth:`hear` and :meth:`stop`, the user's threads call the
    rest.
    """

    def __init__(self) -> None:
        self.active = False  # this worker has called join(), and some others have not
        self.thread = 0  # identifier of the thread that is in join(); 0: none
        self._changed = threading.Condition()
        self._gatherings = 0  # number of joins that all workers have completed
        self._last = -1  # rank that came last to the latest of them
        self._left = ""  # error text if a worker has left instead of joining
        self._stopped = False  # the job has failed, or bpsx was shut down
        self._said = False  # JOIN has been sent, and ALL_JOINED has not come

    def check(self, name: str) -> None:
        """Raise :class:`JoinedError` if this worker has joined: servers do not count on it then."""
        if self.active:
            raise JoinedError(
                f"{name!r}: this worker has called join() and cannot exchange anything until all"
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
        with self._changed:
            # After a failure stay inactive: otherwise the next call would be refused for the join,
            # and the script would never see the failure.
            self.active = not self._stopped
        try:
            while unfinished() and not self._stopped:
                settle(0.05)
        except BaseException:
            self.active = self._said
            raise
        with self._changed:
            before = self._gatherings
            if not self._said:
                self._said = True
                send("JOIN")
            self._changed.wait_for(
                lambda: self._gatherings != before or self._left or self._stopped
            )
            if self._gatherings != before:
                return self._last
            if self._stopped:
                return -1
            raise PeerLeftError(self._left)

    def hear(self, message: dict[str, Any]) -> None:
        """Handle a message of the scheduler: ALL_JOINED with the rank ``last``, or UNJOINED with a
        ``text``.
        """
        with self._changed:
            if message["type"] == "ALL_JOINED":
                self.active = self._said = False
                self._last = message["last"]
                self._gatherings += 1
            else:
                self._left = message["text"]
            self._changed.notify_all()

    def stop(self) -> None:
        """End all waits: the job has failed, or bpsx is being shut down."""
        with self._changed:
            self._stopped = True
            self.active = False
            self._changed.notify_all()
