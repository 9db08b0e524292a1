"""Delays what network interfaces of a namespace send: ``python -m bench.relay SECONDS IN:OUT ...``.

Linux's own delay (netem) is a module that many kernels lack. This process copies each frame that
arrives at the interface IN to OUT after SECONDS, and each frame from OUT to IN at once. Order is
kept and nothing is changed; only what the kernel has no room for is lost. Frames come and go with
their offload header, so TCP hands down segments of 64 KiB as on any interface, and a Python loop
keeps up with 1 Gbit/s and more.

It says "ready" on standard output, and ends when its standard input does. Needs root.
"""

from __future__ import annotations

import errno
import select
import socket
import sys
import time
from collections import deque

# Of Linux' headers; the socket module lacks them.
_SOL_PACKET, _VNET_HDR, _IGNORE_OUTGOING, _ALL, _RCVBUF_FORCE = 263, 15, 23, 0x0003, 33
#: Bytes of the largest frame with headers; frames read in a turn; bytes that may wait in a socket.
_FRAME, _TURN, _ROOM = 70_000, 64, 64 << 20


def _open(interface: str) -> socket.socket:
    """Open ``interface`` for all frames that arrive there, with their offload headers."""
    made = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 0)
    made.setsockopt(_SOL_PACKET, _VNET_HDR, 1)
    made.setsockopt(_SOL_PACKET, _IGNORE_OUTGOING, 1)
    made.setsockopt(socket.SOL_SOCKET, _RCVBUF_FORCE, _ROOM)
    made.bind((interface, _ALL))
    return made


class _Pair:
    """Two interfaces; frames from the first wait for their time."""

    def __init__(self, first: str, second: str) -> None:
        self.first, self.second = _open(first), _open(second)
        self.waiting: deque[tuple[float, bytes]] = deque()

    def read(self, delay: float) -> None:
        """Take what has arrived; pass on what comes from the second interface."""
        for _ in range(_TURN):
            frame = _next(self.first)
            if not frame:
                break
            self.waiting.append((time.monotonic() + delay, frame))
        for _ in range(_TURN):
            frame = _next(self.second)
            if not frame:
                break
            _send(self.first, frame)

    def pass_on(self, now: float) -> None:
        """Send the frames whose time has come."""
        while self.waiting and self.waiting[0][0] <= now:
            _send(self.second, self.waiting.popleft()[1])


def _send(target: socket.socket, frame: bytes) -> None:
    try:
        target.send(frame)
    except OSError as error:
        if error.errno != errno.ENOBUFS:  # the receiver's queue is full, as on any network
            raise


def _next(source: socket.socket) -> bytes:
    try:
        return source.recv(_FRAME, socket.MSG_DONTWAIT)
    except BlockingIOError:
        return b""


def main(words: list[str]) -> None:
    """Run until standard input ends."""
    delay = float(words[0])
    pairs = [_Pair(*word.split(":")) for word in words[1:]]
    sources = [s for pair in pairs for s in (pair.first, pair.second)]
    print("ready", flush=True)
    while True:
        due = min((pair.waiting[0][0] for pair in pairs if pair.waiting), default=None)
        rest = None if due is None else max(0.0, due - time.monotonic())
        found, _, _ = select.select([sys.stdin, *sources], [], [], rest)
        if sys.stdin in found and not sys.stdin.read(1):
            return
        for pair in pairs:
            pair.read(delay)
            pair.pass_on(time.monotonic())


if __name__ == "__main__":
    main(sys.argv[1:])
