"""Send buffers of connected sockets, by the distance of the peer."""

from __future__ import annotations

import contextlib
import socket
import struct
from collections.abc import Iterator
from pathlib import Path

import pytest

from bpsx.system import address
from bpsx.transports.sockets import buffers

_NEAR, _FAR = 0.0019, 0.002


@contextlib.contextmanager
def connected() -> Iterator[socket.socket]:
    """A socket of loopback that is connected."""
    with (
        socket.create_server(("127.0.0.1", 0)) as listener,
        socket.create_connection(listener.getsockname()) as made,
    ):
        yield made


class _Noted:
    """A socket, and the sizes to which its send buffer is set."""

    def __init__(self, made: socket.socket, asked: list[int]) -> None:
        self._made, self._asked = made, asked
        self.getsockname, self.getpeername = made.getsockname, made.getpeername
        self.getsockopt = made.getsockopt

    def setsockopt(self, level: int, option: int, value: int) -> None:
        assert (level, option) == (socket.SOL_SOCKET, socket.SO_SNDBUF)
        self._asked.append(value)
        self._made.setsockopt(level, option, value)


def _size(given: int | None) -> int | None:
    """Return the bytes that the socket's send buffer is set to; None: the system decides."""
    asked = []
    with connected() as made:
        before = made.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF)
        buffers.size_send_buffer(_Noted(made, asked), given)
        after = made.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF)
    most = int(Path("/proc/sys/net/core/wmem_max").read_text())
    # The kernel doubles the requested size.
    assert after == (2 * min(asked[0], most) if asked else before)
    return asked[0] if asked else None


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


@pytest.mark.parametrize(
    ("given", "seconds", "host", "holds"),
    [
        (None, 0.0, "10.0.0.2", 1e-3),
        (None, 0.0004, "10.0.0.2", 1e-3),
        (None, 0.0015, "10.0.0.2", 3e-3),
        (None, 0.0, "10.0.0.1", 0),
        (None, _FAR, "10.0.0.2", 0),
        (100_000, 0.0, "10.0.0.2", 0),
        (0, 0.0, "10.0.0.2", 0),
    ],
)
def test_only_default_sizes_for_near_machines_may_be_fitted(
    monkeypatch, given, seconds, host, holds
):
    class Made:
        def getsockname(self):
            return "10.0.0.1", 1

        def getpeername(self):
            return host, 2

        def setsockopt(self, *_):
            pass

    monkeypatch.setattr(buffers, "round_trip", lambda made: seconds)
    assert buffers.size_send_buffer(Made(), given) == holds


def test_nothing_is_fitted_on_loopback():
    with connected() as made:
        assert buffers.size_send_buffer(made, None) == 0


def test_a_peer_on_loopback_is_near_however_busy_the_machine_is(monkeypatch):
    monkeypatch.setattr(buffers, "round_trip", lambda made: _FAR)
    assert _size(None) == 448 << 10


def test_an_unknown_round_trip_is_that_of_a_near_peer():
    class Unknown:
        def getsockopt(self, *_):
            return b"\xff" * 152

    assert buffers.round_trip(Unknown()) == 0


def test_the_round_trip_is_the_shortest_that_linux_has_seen():
    with connected() as made:
        info = made.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
        if len(info) >= 152:
            assert buffers.round_trip(made) == struct.unpack_from("I", info, 148)[0] / 1e6
        assert 0 <= buffers.round_trip(made) < 60
