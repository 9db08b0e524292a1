"""Closes a session's connections in forked children.

A connection ends only when its last holder closes it. A child that outlives its parent, such as a
data loader's worker after a kill -9, would hide the death from all other nodes until the heartbeats
time out.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterable

#: Peers of this process's connections: (host, port) as the kernel writes them. Only forked children
#: read it.
_peers: set[tuple[str, int]] = set()
_hooked = False


def keep_from_children(addresses: Iterable[str]) -> None:
    """Make future children of ``os.fork`` close inherited connections to ``addresses``.

    ``addresses``: each ``host:port``; they replace those of an earlier session, as a process has
    one session at a time. Not thread-safe against a fork. Children that run another program never
    inherit these connections.
    """
    global _hooked, _peers
    _peers = _resolved(addresses)
    if not _hooked:
        _hooked = True
        os.register_at_fork(after_in_child=_close_inherited)


def keep_also_from_children(addresses: Iterable[str]) -> None:
    """Add ``addresses`` to those of :func:`keep_from_children`."""
    global _peers
    _peers = _peers | _resolved(addresses)


def _resolved(addresses: Iterable[str]) -> set[tuple[str, int]]:
    pairs = [address.rpartition(":")[::2] for address in addresses]
    return {
        (str(info[4][0]), int(port))
        for host, port in pairs
        for info in socket.getaddrinfo(host.strip("[]"), int(port))
    }


def _close_inherited() -> None:
    """Replace each inherited connection with the null device.

    The descriptor numbers stay taken, as the child's copies of ZeroMQ's objects still refer to
    them.
    """
    if not _peers:
        return
    null = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
    for entry in os.listdir("/proc/self/fd"):
        if _peer(int(entry)) in _peers:
            os.dup2(null, int(entry), inheritable=False)
    os.close(null)


def _peer(descriptor: int) -> tuple[str, int] | None:
    """The peer of a descriptor; None if it is no TCP connection."""
    try:
        found = socket.socket(fileno=descriptor)
    except OSError:
        return None
    try:
        name = found.getpeername()
    except OSError:
        return None
    finally:
        found.detach()
    if not isinstance(name, tuple) or len(name) < 2 or not isinstance(name[1], int):
        return None
    return str(name[0]).removeprefix("::ffff:"), name[1]
