"""Counts and reports the connections that the scheduler's socket refused."""

from __future__ import annotations

import contextlib
import logging
import socket
import time
from collections.abc import Mapping
from typing import Any

import zmq

from bpsx.scheduler.sockets import REFUSED

log = logging.getLogger("bpsx.scheduler")
#: ZeroMQ monitor events that :meth:`Refusals.event` has to see.
EVENTS = REFUSED | zmq.EVENT_ACCEPTED
EVERY_SECONDS = 10.0
_MOST_KEPT = 4096
_UNKNOWN = "an unknown address"
_PATIENCE = 3


class Refusals:
    """Counts failed handshakes and warns of them at most once in :data:`EVERY_SECONDS`.

    Not thread-safe.
    """

    def __init__(self, every: float = EVERY_SECONDS) -> None:
        self.count = 0
        self._last = _UNKNOWN
        self._every = every
        self._told = 0
        self._next = 0.0
        self._failed = False
        self._peers: dict[int, str] = {}  # descriptor -> peer address

    def event(self, event: Mapping[str, Any]) -> bool:
        """Handle a monitor event; returns True if it ends a connection that had been let in."""
        kind, value = event["event"], int(event["value"])
        if kind == zmq.EVENT_ACCEPTED:
            if len(self._peers) < _MOST_KEPT:
                self._peers[value] = _peer_of(value)
        elif kind & REFUSED:
            # The disconnect event of the same connection follows, with its descriptor.
            self._failed = True
        elif kind == zmq.EVENT_DISCONNECTED:
            who, failed, self._failed = self._peers.pop(value, _UNKNOWN), self._failed, False
            if failed:
                self._refused(who)
            return not failed
        return False

    def hint(self) -> str:
        """Text for nodes that wait in vain: a refused connection may be the missing node.

        Empty if none was refused.
        """
        if not self.count:
            return ""
        return (
            f" ({self.count} connection{'s' * (self.count > 1)} refused for not knowing the job"
            f" secret, the last from {self._last})"
        )

    def _refused(self, who: str) -> None:
        self.count += 1
        self._last = self._last if who == _UNKNOWN else who
        now = time.monotonic()
        # A peer that closes at once is gone before its address can be read. It usually connects
        # again, and a warning without an address does not help.
        if now < self._next or (who == _UNKNOWN and self.count - self._told < _PATIENCE):
            return
        more, told_before = self.count - self._told - 1, bool(self._told)
        self._next, self._told = now + self._every, self.count
        log.warning(
            "refused a connection from %s: it does not know the job secret (BPSX_SECRET) or speaks"
            " another protocol%s",
            who,
            (
                f"; {more} more"
                f" {'since the last such warning' if told_before else 'before this one'}"
                if more
                else ""
            ),
        )


def _peer_of(descriptor: int) -> str:
    """Peer address of a descriptor that ZeroMQ owns; the connection may be closed already."""
    with contextlib.suppress(OSError):
        borrowed = socket.socket(fileno=descriptor)
        try:
            host, port = borrowed.getpeername()[:2]
            return f"{host}:{port}"
        except (OSError, ValueError):
            pass
        finally:
            borrowed.detach()
    return _UNKNOWN
