"""Processes that measure upper bounds of this machine: a bare ZeroMQ echo, a plain socket, a memory
copy.
"""

from __future__ import annotations

import ctypes
import socket
import time
from typing import Any

import numpy as np
import zmq

from bench.child import serve

_STOP = b"stop"
_CHUNK = 1 << 20
_state: dict[str, Any] = {}


def _keep_large_blocks() -> None:
    """Let malloc keep large blocks, as bpsx does.

    With fresh pages for each message the measured bound would be lower than what it bounds.
    """
    # M_MMAP_THRESHOLD (at most 32 MiB), M_TRIM_THRESHOLD, M_ARENA_MAX of glibc's malloc.h
    for option, value in ((-3, 32 << 20), (-1, 256 << 20), (-8, 1)):
        ctypes.CDLL(None).mallopt(option, value)


def _dealer() -> Any:
    dealer: Any = zmq.Context.instance().socket(zmq.DEALER)
    dealer.linger = 0
    return dealer


def echo_bind() -> int:
    """Listen on a free port and return it."""
    _state["echo"] = _dealer()
    return int(_state["echo"].bind_to_random_port("tcp://127.0.0.1"))


def echo() -> None:
    """Send back every message without a copy, until told to stop."""
    with _state.pop("echo") as dealer:
        while True:
            frame = dealer.recv(copy=False)
            if len(frame) == len(_STOP) and frame.bytes == _STOP:
                return
            dealer.send(frame, copy=False)


def echo_client(port: int, size: int, flight: int, count: int) -> list[float]:
    """Return the seconds between one reply and the next, including the time to send the next
    message.

    The first ``flight`` replies are not counted.
    """
    # Small messages are cheaper copied than tracked.
    copy, message = size <= 65536, np.ones(size, np.uint8)
    with _dealer() as dealer:
        dealer.connect(f"tcp://127.0.0.1:{port}")
        for _ in range(flight):
            dealer.send(message, copy=copy)
        times = []
        for _ in range(flight + count):
            dealer.recv(copy=copy)
            times.append(time.perf_counter())
            dealer.send(message, copy=copy)
        for _ in range(flight):
            dealer.recv(copy=copy)
        dealer.linger = -1
        dealer.send(_STOP)
    return [after - before for before, after in zip(times[flight - 1 :], times[flight:])]


def tcp_bind() -> int:
    """Listen on a free port and return it."""
    _state["tcp"] = socket.create_server(("127.0.0.1", 0))
    return int(_state["tcp"].getsockname()[1])


def tcp_receive() -> float:
    """Receive from one connection until it closes. Returns bytes per second."""
    buffer, total = bytearray(_CHUNK), 0
    with _state.pop("tcp") as listener:
        connection, _ = listener.accept()
    with connection:
        before = time.perf_counter()
        while count := connection.recv_into(buffer):
            total += count
        return total / (time.perf_counter() - before)


def tcp_send(port: int, seconds: float) -> None:
    """Send for ``seconds`` seconds."""
    block = bytes(_CHUNK)
    with socket.create_connection(("127.0.0.1", port)) as connection:
        end = time.perf_counter() + seconds
        while time.perf_counter() < end:
            connection.sendall(block)


def memcpy(size: int, count: int) -> float:
    """Return the bytes per second of copying over 32 pairs of buffers in turn.

    The case "rate" has as many buffers.
    """
    pairs = [(np.ones(size, np.uint8), np.ones(size, np.uint8)) for _ in range(32)]
    before = time.perf_counter()
    for i in range(count):
        target, source = pairs[i % len(pairs)]
        np.copyto(target, source)
    return size * count / (time.perf_counter() - before)


if __name__ == "__main__":
    _keep_large_blocks()
    serve(
        {
            f.__name__: f
            for f in (echo_bind, echo, echo_client, tcp_bind, tcp_receive, tcp_send, memcpy)
        }
    )
