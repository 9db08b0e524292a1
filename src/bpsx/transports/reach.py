"""Reachability probe for a TCP port: connects, sends nothing, and closes.

This module does not use ZeroMQ.
"""

from __future__ import annotations

import errno
import os
import select
import socket
import time
from collections.abc import Iterable

from bpsx.system.address import is_ipv6, resolve

#: Seconds without a reply after which a port counts as unreachable.
PATIENCE = 10.0
_ROUTE = (errno.EHOSTUNREACH, errno.ENETUNREACH, errno.ENETDOWN, errno.EHOSTDOWN)


def explain(code: int) -> str:
    """Describe a failed connection's ``errno`` to the user."""
    if code == errno.ECONNREFUSED:
        return "refused: no process listens there, or a firewall rejects the connection"
    if code in (errno.ETIMEDOUT, errno.EAGAIN):
        return "no reply; a firewall may drop the connection"
    if code in _ROUTE:
        return f"{os.strerror(code)}: there is no route to it, or a firewall rejects the connection"
    return os.strerror(code)


class Probe:
    """One attempt to connect to ``host:port`` without blocking. For one thread."""

    def __init__(self, address: str, patience: float = PATIENCE) -> None:
        self.address = address
        self._until = time.monotonic() + patience
        self._why = ""
        self._socket: socket.socket | None = None
        host, _, port = address.rpartition(":")
        try:
            numeric = resolve(host, int(port))
            self._socket = socket.socket(
                socket.AF_INET6 if is_ipv6(numeric) else socket.AF_INET,
                socket.SOCK_STREAM | socket.SOCK_NONBLOCK,
            )
            self._end(self._socket.connect_ex((numeric, int(port))))
        except OSError as e:
            self._why = str(e)
            self.close()

    def _end(self, code: int) -> None:
        if code != errno.EINPROGRESS:
            self._why = explain(code) if code else ""
            self.close()

    @property
    def pending(self) -> bool:
        """Whether the attempt still has no result; polls the socket."""
        if self._socket is None:
            return False
        poll = select.poll()
        poll.register(self._socket, select.POLLOUT)
        if poll.poll(0):
            self._end(self._socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR))
        elif time.monotonic() >= self._until:
            self._end(errno.ETIMEDOUT)
        return self._socket is not None

    def why_not(self) -> str:
        """Return why the port cannot be reached, as text for the user.

        Empty if the port can be reached, or while there is no result.
        """
        return "" if self.pending else self._why

    def fileno(self) -> int:
        """Descriptor that becomes writable with the result; -1 once the result is known."""
        return -1 if self._socket is None else self._socket.fileno()

    def close(self) -> None:
        """Give up the attempt. Idempotent."""
        if self._socket is not None:
            self._socket.close()
        self._socket = None


def unreachable(addresses: Iterable[str], patience: float = PATIENCE) -> dict[str, str]:
    """Return the addresses that cannot be reached, each with its reason.

    All are probed at the same time, for ``patience`` seconds.
    """
    probes = [Probe(address, patience) for address in addresses]
    end = time.monotonic() + patience
    try:
        while left := [p for p in probes if p.pending]:
            poll = select.poll()
            for probe in left:
                poll.register(probe, select.POLLOUT)
            poll.poll(max(0, int((end - time.monotonic()) * 1000)) + 1)
        return {p.address: why for p in probes if (why := p.why_not())}
    finally:
        for probe in probes:
            probe.close()
