"""Send buffers of connected sockets, by the distance of the peer."""

from __future__ import annotations

import contextlib
import socket
import struct
from collections.abc import Iterator

import pytest

from bpsx.system import address
from bpsx.transports.sockets import buffers

_NEAR, _FAR = 0.0009, 0.001


@contextlib.contextmanager
def _connected() -> Iterator[socket.socket]:
    with (
        socket.create_server(("127.0.0.1", 0)) as listener,
        socket.create_connection(listener.getsockname()) as made,
    ):
        yield made


def _size(given: int | None) -> int | None:
    """Return the bytes that the socket's send buffer is set to; None: the system decides."""
    with _connected() as made, _connected() as other:
        before = made.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF)
        buffers.size_send_buffer(made, given)
        after = made.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF)
        for size in (224 << 10, 448 << 10, 100_000):
            other.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, size)
            if other.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF) == after:
                return size
        assert after == before
        return None


@pytest.mark.parametrize(
    ("given", "seconds", "size"),
    [
        (None, _NEAR, 224 << 10),
        (None, _FAR, None),
        (0, _NEAR, None),
        (0, _FAR, None),
        (100_000, _NEAR, 100_000),
        (100_000, _FAR, 100_000),
    ],
)
def test_only_a_near_peer_has_a_fixed_size_by_default(monkeypatch, given, seconds, size):
    for module in (address, buffers):
        monkeypatch.setattr(module, "is_loopback", lambda host: False)
    monkeypatch.setattr(buffers, "round_trip", lambda made: seconds)
    assert _size(given) == size


def test_a_peer_on_loopback_is_near_however_busy_the_machine_is(monkeypatch):
    monkeypatch.setattr(buffers, "round_trip", lambda made: _FAR)
    with _connected() as made:
        buffers.size_send_buffer(made, None)
        # The system bounds what a process may set, and doubles it.
        assert made.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF) >= 2 * (200 << 10)


def test_the_round_trip_is_the_shortest_that_linux_has_seen():
    with _connected() as made:
        info = made.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
        if len(info) >= 152:
            assert buffers.round_trip(made) == struct.unpack_from("I", info, 148)[0] / 1e6
        assert 0 < buffers.round_trip(made) < 60
