"""``join()`` on a worker: out of data, it waits until all others are, while rounds close without
it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from bpsx.errors import JoinedError, PeerLeftError


class Joining:
    """Where this worker stands.

    Thread-safe; the control thread calls :meth:`hear` and :meth:`stop`, the user's threads the
    rest.
    """

    def __init__(self) -> None:
        self.active = False  # this worker has called join(), and not all have
        self.thread = 0  # ... and waits in it
        self._changed = threading.Condition()
        self._gatherings = 0  # how many have been completed
        self._last = -1  # who came last to the latest
        self._left = ""  # who has left instead of joining
        self._stopped = False  # the job has failed, or bpsx was shut down
        self._said = False

    def check(self, name: str) -> None:
        """Raise :class:`JoinedError` if servers do not count on this worker now."""
        if self.active:
            raise JoinedError(
                f"{name!r}: this worker has called join() and takes part in nothing until all"
                " workers have"
            )

    def run(
        self,
        unfinished: Callable[[], int],
        settle: Callable[[float], None],
        send: Callable[[str], None],
    ) -> int:
        """Join and wait. Returns the rank that joined last, or -1 if the job has ended meanwhile.

        ``unfinished``: how many push_pulls are under way; they end first, in ``settle``, with the
        others' help: a lane that knows of the join before it has this worker's last push would
        close that round without it. ``send``: to the scheduler. Raises :class:`PeerLeftError` if a
        worker has left without joining.
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
            # else what is asked next would be refused for the join, and the failure never told
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
        """What the scheduler says: ALL_JOINED with the ``last`` rank, or UNJOINED with a
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
        """The job is over, well or not."""
        with self._changed:
            self._stopped = True
            self.active = False
            self._changed.notify_all()
