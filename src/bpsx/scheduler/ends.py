"""Tells connections that a node has ended from connections that ended because it was silent."""

from __future__ import annotations

import os
import socket

#: States of a connection whose end the peer has sent (Linux, include/net/tcp_states.h), and of one
#: that it has reset, or that this side's kernel has given up.
_ENDED, _CLOSED = {8, 9, 11}, 7


class Ends:
    """The sockets of nodes' connections, which ZeroMQ owns.

    ZeroMQ closes a connection whose peer is silent, and reports that as any other end. So this
    object holds a duplicate of each descriptor, whose state tells them apart. Only for the thread
    of the hub.
    """

    def __init__(self) -> None:
        self._idents: dict[int, bytes] = {}
        self._sockets: dict[int, socket.socket] = {}

    def note(self, descriptor: int, ident: bytes) -> None:
        """A node has introduced itself on ZeroMQ's ``descriptor``."""
        self._idents[descriptor] = ident
        old = self._sockets.pop(descriptor, None)
        if old is not None:
            old.close()
        try:
            own = os.dup(descriptor)
        except OSError:  # it has ended meanwhile, or this process has no descriptor left
            return
        try:
            self._sockets[descriptor] = socket.socket(fileno=own)
        except OSError:  # it has ended meanwhile, and its number is that of something else
            os.close(own)

    def ended(self, descriptor: int) -> tuple[bytes, bool] | None:
        """Return the node of a connection that has ended, and whether it was silent.

        None: no node has introduced itself there.
        """
        ident = self._idents.pop(descriptor, None)
        held = self._sockets.pop(descriptor, None)
        if held is None:
            return None if ident is None else (ident, False)
        with held:
            info = held.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 3)
        return None if ident is None else (ident, _was_silent(info[0], info[2]))

    def close(self) -> None:
        """Release all descriptors."""
        for held in self._sockets.values():
            held.close()
        self._sockets.clear()


def _was_silent(state: int, retransmits: int) -> bool:
    """Whether the peer was silent. Arguments: from TCP_INFO.

    The kernel gives a connection up after several retransmissions without an answer.
    """
    return state not in _ENDED and not (state == _CLOSED and retransmits == 0)
