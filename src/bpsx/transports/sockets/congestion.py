"""The congestion control of plain sockets: another one than BBR between near peers.

Every ten seconds BBR sends next to nothing for 200 ms on each connection, to measure the shortest
round trip, and a sum waits for the slowest connection (docs/decisions/0016, 0028). Between far
peers, where BBR helps against losses, it stays.
"""

from __future__ import annotations

import socket
from pathlib import Path

from bpsx.config import AUTO
from bpsx.errors import TransportError
from bpsx.transports.sockets.buffers import FAR, round_trip

#: The value of BPSX_CONGESTION with which the system's default stays; with AUTO bpsx chooses.
SYSTEM = "system"
_PAUSES = b"bbr"
#: Replacements for BBR, in order of preference.
_STEADY = (b"cubic", b"reno")
_ALLOWED = Path("/proc/sys/net/ipv4/tcp_allowed_congestion_control")


def choose_congestion(made: socket.socket, given: str) -> None:
    """Set the congestion control of a connected socket.

    ``given``: a name that :func:`check_congestion` has accepted, or AUTO or SYSTEM. AUTO leaves
    what the system has chosen if this process may not use anything better.
    """
    if given not in (AUTO, SYSTEM):
        _set(made, given.encode())
    elif given == AUTO and _name(made) == _PAUSES and round_trip(made) < FAR:
        for name in _STEADY:
            if _set(made, name):
                return


def check_congestion(given: str) -> None:
    """Raise :class:`~bpsx.errors.TransportError` if this process may not use ``given``."""
    if given in (AUTO, SYSTEM):
        return
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as tried:
        if not _set(tried, given.encode()):
            allowed = ", ".join(_ALLOWED.read_text().split()) if _ALLOWED.exists() else "?"
            raise TransportError(
                f"BPSX_CONGESTION={given}: this process may not use that congestion control;"
                f" expected {AUTO}, {SYSTEM} or one of those allowed here: {allowed}"
            )


def _name(made: socket.socket) -> bytes:
    return made.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16).rstrip(b"\0")


def _set(made: socket.socket, name: bytes) -> bool:
    """Return whether the system accepts this congestion control."""
    try:
        made.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, name)
    except OSError:  # unknown to the system, or not allowed for this user
        return False
    return True
