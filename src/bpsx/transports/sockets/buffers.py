"""Send buffers of connected sockets: small for near peers, tuned by the system for far ones."""

from __future__ import annotations

import socket
import struct

from bpsx.system.address import NETWORK_SEND_BUFFER, is_loopback, send_buffer_bytes

#: Round trip in seconds from which on a peer is far; 224 KiB in each are 0.9 Gbit/s. Where Linux
#: has only the milliseconds of TCP's timestamps, it says 1 ms for any near peer.
FAR = 0.002
#: Seconds of a slow link that a connection's buffer holds; and bytes of the smallest buffer, since
#: a smaller one may wait for delayed acknowledgements.
_HELD, _LEAST = 1e-3, 64 << 10
_UNKNOWN = 2**32 - 1
# Offsets in Linux's `struct tcp_info`: smoothed round trip, and the shortest (Linux 4.6 on).
_SMOOTHED, _SHORTEST = 68, 148


def size_send_buffer(made: socket.socket, given: int | None) -> bool:
    """Set the send buffer of a connected socket.

    ``given``: its bytes; 0: the system tunes it while data flow; None: a default for near peers,
    and the system's tuning for far ones, because a fixed size bounds the rate to size / round trip.

    Returns whether it is the default for near peers on a network: then :func:`fitted` says which
    size is better, as soon as the links' rate is known.
    """
    host = made.getsockname()[0]
    loopback = is_loopback(host)
    if given is None and not loopback and round_trip(made) >= FAR:
        return False
    if size := send_buffer_bytes(host, given):
        made.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, size)
    return given is None and not loopback


def fitted(rate: float) -> int:
    """Return the send buffer in bytes of a connection to a near peer.

    ``rate``: bytes of tensors per second that the links carry. A worker has a connection to each
    lane. On a slow link what all their buffers hold is long ahead of an urgent tensor, and longer
    on some links than on others.
    """
    return min(NETWORK_SEND_BUFFER, max(_LEAST, int(rate * _HELD)))


def round_trip(made: socket.socket) -> float:
    """Return the shortest round trip of a connected socket so far, in seconds; 0: not known."""
    info = made.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _SHORTEST + 4)
    at = _SHORTEST if len(info) == _SHORTEST + 4 else _SMOOTHED
    (microseconds,) = struct.unpack_from("I", info, at)
    return 0.0 if microseconds == _UNKNOWN else float(microseconds / 1e6)
