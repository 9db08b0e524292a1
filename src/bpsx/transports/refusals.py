"""Refused connections of lanes, counted and logged in the same way by all transports."""

from __future__ import annotations

import logging
import time

log = logging.getLogger("bpsx.server")
#: Milliseconds after which a connection without a token is closed. A worker may connect before the
#: lane knows the job's number.
HANDSHAKE_MS = 10_000
#: Seconds between two warnings of refused connections.
EVERY_SECONDS = 10.0


class Refusals:
    """Counter of refused connections, which logs a line now and then."""

    def __init__(self) -> None:
        self.count = 0
        self._told, self._next = 0, 0.0

    def add(self, who: str) -> None:
        """Count a refused connection from the address ``who``."""
        self.count += 1
        now = time.monotonic()
        if now >= self._next:
            more = self.count - self._told - 1
            self._next, self._told = now + EVERY_SECONDS, self.count
            log.warning(
                "refused a connection from %s: it does not know the job secret, or its token has"
                " been used before%s",
                who,
                f"; {more} more since the last such warning" if more else "",
            )
