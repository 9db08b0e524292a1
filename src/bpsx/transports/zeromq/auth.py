"""Access control of lanes over ZeroMQ (ZAP): accepts or refuses a connection before its messages.

A worker shows a token that can be computed only with the job secret, and that is valid for one job,
one lane and one worker's number (`pass_number`). ZeroMQ closes a connection without a valid token
during the handshake. A stranger therefore cannot make a lane read, keep or even count anything.
"""

from __future__ import annotations

import os
import threading
from typing import Any

import zmq

from bpsx import secret
from bpsx.system.threads import NamedThread
from bpsx.transports.refusals import Refusals

ENDPOINT = "inproc://zeromq.zap.01"
# ZAP request: version, request id, domain, address, routing id, mechanism; then the credentials.
_FRAMES = 6


def token(key: bytes, job: int, address: str, number: int) -> bytes:
    """Return the token that worker ``number`` shows to the lane at ``address``, in ASCII."""
    return (
        secret.derive(key, "data connection: worker's token", job, address, number).hex().encode()
    )


class Acceptor:
    """ZAP handler for the sockets of one ZeroMQ context.

    Create it before they listen; call :meth:`open` once the job's number is known.

    A data connection is made once and never again, so a token is accepted once, from the first peer
    that shows it. Without encryption, an eavesdropper on the network could be that peer. With CURVE
    (``encrypt``) the token is not needed: a peer can begin a handshake only if it knows the lane's
    public key, which is never published.
    """

    def __init__(self, context: zmq.Context[Any], key: bytes) -> None:
        self._key = key
        self._socket = context.socket(zmq.REP)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.bind(ENDPOINT)
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._thread: threading.Thread | None = None
        self._stopping = False
        self._inside: set[int] = set()  # numbers of workers
        self._refusals = Refusals()

    def open(self, job: int, address: str) -> None:
        """Start to answer requests on its own thread, which sleeps except while a peer connects."""
        self._job, self._address = job, address
        self._thread = NamedThread(target=self._run, name="bpsx-accept", daemon=True)
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
        number = int(shown[0])
        if number in self._inside or not secret.same(
            shown[1], token(self._key, self._job, self._address, number)
        ):
            return False
        self._inside.add(number)
        return True

    @property
    def refused(self) -> int:
        """Number of refused connections."""
        return self._refusals.count

    def close(self) -> None:
        """Stop answering requests. Idempotent; call it before the context ends."""
        if self._stopping:
            return
        self._stopping = True
        if self._thread is not None:
            os.eventfd_write(self._wake, 1)
            self._thread.join()
        self._socket.close(0)
        os.close(self._wake)
