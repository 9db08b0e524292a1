"""Send buffers of connected sockets: small for near peers, tuned by the system for far ones."""

from __future__ import annotations

import socket
import struct

from bpsx.system.address import is_loopback, send_buffer_bytes

#: Round trip in seconds from which on a peer is far; 224 KiB in each are 0.9 Gbit/s. Where Linux
#: has only the milliseconds of TCP's timestamps, it says 1 ms for any near peer.
FAR = 0.002
#: Bytes of the smallest buffer: a smaller one may wait for delayed acknowledgements.
LEAST = 64 << 10
#: Seconds of the links that a fitted buffer holds, and as a multiple of the round trip.
_HELD, _TRIPS = 1e-3, 2
_UNKNOWN = 2**32 - 1
# Offsets in Linux's `struct tcp_info`: smoothed round trip, and the shortest (Linux 4.6 on).
_SMOOTHED, _SHORTEST = 68, 148


def size_send_buffer(made: socket.socket, given: int | None) -> float:
    """Set the send buffer of a connected socket.

    ``given``: its bytes; 0: the system tunes it while data flow; None: a default for near peers,
    and the system's tuning for far ones, because a fixed size bounds the rate to size / round trip.

    Returns how many seconds of the links the buffer should hold, as soon as their rate is known: a
    worker has a connection to each lane, and on a slow link what all their buffers hold is long
    ahead of an urgent tensor. 0: the size stays, as it was given, or the peer is far or on this
    machine.
    """
    host = made.getsockname()[0]
    on_network = not is_loopback(host)
    trip = round_trip(made) if given is None and on_network else 0.0
    if trip >= FAR:
        return 0.0
    if size := send_buffer_bytes(host, given):
        made.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, size)
    if given is not None or not on_network or made.getpeername()[0] == host:
        return 0.0
    return max(_HELD, _TRIPS * trip)


def round_trip(made: socket.socket) -> float:
    """Return the shortest round trip of a connected socket so far, in seconds; 0: not known."""
    info = made.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _SHORTEST + 4)
    at = _SHORTEST if len(info) == _SHORTEST + 4 else _SMOOTHED
    (microseconds,) = struct.unpack_from("I", info, at)
    return 0.0 if microseconds == _UNKNOWN else float(microseconds / 1e6)
