"""Delays frames between two network interfaces: ``python -m bench.relay SECONDS FROM TO``.

Linux's own delay (netem) is a module that many kernels lack. This process copies each frame that
arrives at the interface FROM to the interface TO after SECONDS. Order is kept and nothing is
changed; only what the kernel has no room for is lost. Frames come and go with their offload header,
so TCP hands down segments of 64 KiB as on any interface. The kernel's work of sending takes most of
the time, and limits the rate. So each direction of each link gets a process of its own.

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


def _open(interface: str, protocol: int) -> socket.socket:
    """Open ``interface`` for all frames that arrive there, or with protocol 0 only to send."""
    made = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 0)
    made.setsockopt(_SOL_PACKET, _VNET_HDR, 1)
    made.setsockopt(_SOL_PACKET, _IGNORE_OUTGOING, 1)
    made.setsockopt(socket.SOL_SOCKET, _RCVBUF_FORCE, _ROOM)
    made.bind((interface, protocol))
    return made


def _next(source: socket.socket) -> bytes:
    try:
        return source.recv(_FRAME, socket.MSG_DONTWAIT)
    except BlockingIOError:
        return b""


def _send(target: socket.socket, frame: bytes) -> None:
    try:
        target.send(frame)
    except OSError as error:
        if error.errno != errno.ENOBUFS:  # the receiver's queue is full, as on any network
            raise


def main(words: list[str]) -> None:
    """Run until standard input ends."""
    delay = float(words[0])
    source, target = _open(words[1], _ALL), _open(words[2], 0)
    waiting: deque[tuple[float, bytes]] = deque()
    print("ready", flush=True)
    while True:
        rest = max(0.0, waiting[0][0] - time.monotonic()) if waiting else None
        found, _, _ = select.select([sys.stdin, source], [], [], rest)
        if sys.stdin in found and not sys.stdin.read(1):
            return
        for _ in range(_TURN):
            frame, now = _next(source), time.monotonic()
            if frame:
                waiting.append((now + delay, frame))
            while waiting and waiting[0][0] <= now:
                _send(target, waiting.popleft()[1])
            if not frame:
                break


if __name__ == "__main__":
    main(sys.argv[1:])
