"""Who may connect to a lane: ZeroMQ's question about every new connection (ZAP), answered before
its first message.

A worker shows a token that only who knows the job secret can compute, for this job, this lane and
this rank alone. A connection without it is closed in its handshake, so a stranger cannot make a
lane read, keep or even count anything.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from typing import Any

import zmq

from bpsx import secret

log = logging.getLogger("bpsx.server")
ENDPOINT = "inproc://zeromq.zap.01"
#: A connection that has not shown its token after this long is closed. A worker may be here before
#: we know the job's number.
HANDSHAKE_MS = 10_000
EVERY_SECONDS = 10.0
# version, request, domain, address, routing id, mechanism; then what the mechanism shows
_FRAMES = 6


def token(key: bytes, job: int, address: str, rank: int) -> bytes:
    """What worker ``rank`` shows to the lane at ``address``: ASCII."""
    return secret.derive(key, "data connection: worker's token", job, address, rank).hex().encode()


class Refusals:
    """Connections that were turned away: counted, and told of now and then."""

    def __init__(self) -> None:
        self.count = 0
        self._told, self._next = 0, 0.0

    def add(self, who: str) -> None:
        """One more, from the address ``who``."""
        self.count += 1
        now = time.monotonic()
        if now >= self._next:
            more = self.count - self._told - 1
            self._next, self._told = now + EVERY_SECONDS, self.count
            log.warning(
                "refused a connection from %s: it does not know the job secret, or comes twice%s",
                who,
                f"; {more} more since the last such line" if more else "",
            )


class Door:
    """Answers for the sockets of one ZeroMQ context.

    Made before they listen; :meth:`open` once the job's number is known.

    Data connections are made once and never again, so a token is good for one connection: of
    whoever shows it first. Only encryption keeps one who reads the network from being that. With
    CURVE (``encrypt``) whoever could begin a handshake knows the lane's public key, which nobody
    tells: that is proof enough.
    """

    def __init__(self, context: zmq.Context[Any], key: bytes) -> None:
        self._key = key
        self._socket = context.socket(zmq.REP)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.bind(ENDPOINT)
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._thread: threading.Thread | None = None
        self._stopping = False
        self._inside: set[int] = set()  # ranks
        self._refusals = Refusals()

    def open(self, job: int, address: str) -> None:
        """Begin to answer, on a thread of its own. It sleeps except when somebody connects."""
        self._job, self._address = job, address
        self._thread = threading.Thread(target=self._run, name="bpsx-door", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(self._wake, zmq.POLLIN)
        while not self._stopping:
            poller.poll()
            while not self._stopping and self._socket.poll(0):
                self._answer(self._socket.recv_multipart())

    def _answer(self, frames: list[bytes]) -> None:
        good = len(frames) >= _FRAMES and self._knows(frames[5], frames[_FRAMES:])
        if not good:
            self._refusals.add(
                frames[3].decode("utf-8", "replace") if len(frames) > 3 else "an unknown address"
            )
        self._socket.send_multipart(
            [
                b"1.0",
                frames[1] if len(frames) > 1 else b"",
                b"200" if good else b"400",
                b"",
                b"",
                b"",
            ]
        )

    def _knows(self, mechanism: bytes, shown: list[bytes]) -> bool:
        if mechanism == b"CURVE":
            return True
        if mechanism != b"PLAIN" or len(shown) != 2 or not shown[0].isdigit() or len(shown[0]) > 10:
            return False
        rank = int(shown[0])
        if rank in self._inside or not secret.same(
            shown[1], token(self._key, self._job, self._address, rank)
        ):
            return False
        self._inside.add(rank)
        return True

    @property
    def refused(self) -> int:
        """How many connections were turned away."""
        return self._refusals.count

    def close(self) -> None:
        """Stop answering. Idempotent; before the context ends."""
        if self._stopping:
            return
        self._stopping = True
        if self._thread is not None:
            os.eventfd_write(self._wake, 1)
            self._thread.join()
        self._socket.close(0)
        os.close(self._wake)
