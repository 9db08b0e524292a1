"""What a forked child must not keep.

A connection ends when its last holder closes it: a child that outlives its parent, such as a data
loader's worker after a kill -9, would hide the death from everybody else until the heartbeats miss
it.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterable

#: Peers of this process: (host, port) as the kernel writes them. Read in forked children only.
_peers: set[tuple[str, int]] = set()
_hooked = False


def keep_from_children(addresses: Iterable[str]) -> None:
    """From now on a child made by ``os.fork`` closes what it inherits of connections to
    ``addresses``, each ``host:port``.

    For the process's one session; the next one's addresses take the place of these. Not thread-safe
    against a fork. Children that run another program have never had these connections.
    """
    global _hooked, _peers
    pairs = [address.rpartition(":")[::2] for address in addresses]
    _peers = {
        (str(info[4][0]), int(port))
        for host, port in pairs
        for info in socket.getaddrinfo(host.strip("[]"), int(port))
    }
    if not _hooked:
        _hooked = True
        os.register_at_fork(after_in_child=_close_inherited)


def _close_inherited() -> None:
    """Put the null device in the place of each such connection: the numbers stay taken, since
    ZeroMQ's objects in the child know them.
    """
    if not _peers:
        return
    null = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
    for entry in os.listdir("/proc/self/fd"):
        if _peer(int(entry)) in _peers:
            os.dup2(null, int(entry), inheritable=False)
    os.close(null)


def _peer(descriptor: int) -> tuple[str, int] | None:
    """Whom a descriptor is connected to; None if it is no TCP connection."""
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
