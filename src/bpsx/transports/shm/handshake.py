"""Handshake by which a worker and a lane of the same machine agree to share memory.

The lane listens on a Unix socket in the abstract namespace, named after the lane's address. Such a
socket leaves no file behind, and is visible within one network namespace.

The worker greets as over the network (``listener.py``) and passes the descriptor that wakes it.
The lane replies with the segment, the worker's slot in it and the descriptor that wakes the lane.
The worker then confirms that it has mapped the segment. Both processes must be of the same user.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import struct
from collections.abc import Callable, Iterator

from bpsx.transports.sockets import listener

log = logging.getLogger("bpsx.connections")
_OFFER = struct.Struct("<8sI")
_MAGIC = b"bpsxshm1"
_UCRED = struct.Struct("3i")
_YES = b"y"


def _name(address: str) -> str:
    return f"\0bpsx-lane {address}"


def _is_ours(link: socket.socket) -> bool:
    """Whether the peer's process belongs to this user, or to root."""
    _, uid, _ = _UCRED.unpack(link.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size))
    return uid in (os.getuid(), 0)


def listen(
    address: str, key: bytes, take: Callable[[socket.socket, int], None]
) -> listener.Acceptor | None:
    """Return the acceptor of the workers of this machine.

    None if the lane cannot listen; the workers then use the network.
    """
    bound = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        bound.bind(_name(address))
        bound.listen(listener.BACKLOG)
    except OSError as e:
        log.warning(
            "this server offers no shared memory to workers of its machine, because its Unix"
            " socket cannot be created: %s",
            e,
        )
        bound.close()
        return None
    return listener.Acceptor(bound, key, take)


class Guest:
    """A worker whose greeting was valid, seen from the lane."""

    def __init__(self, link: socket.socket, bell: int) -> None:
        self._link = link
        #: Descriptor that wakes the worker; closed at the end of :func:`welcome`.
        self.bell = bell

    def takes(self, segment: int, slot: int, wake: int) -> bool:
        """Offer memory to the worker; return whether it accepts. Raises OSError."""
        socket.send_fds(self._link, [_OFFER.pack(_MAGIC, slot)], [segment, wake])
        return self._link.recv(1) == _YES


@contextlib.contextmanager
def welcome(link: socket.socket) -> Iterator[Guest]:
    """Run the lane's side of the handshake.

    Raises OSError if the peer is another user's process or does not answer.
    """
    bells: list[int] = []
    try:
        link.settimeout(listener.PATIENCE)
        if not _is_ours(link):
            raise PermissionError("the peer is a process of another user")
        _, bells, _, _ = socket.recv_fds(link, 1, 1, socket.MSG_CMSG_CLOEXEC)
        if not bells:
            raise ConnectionError("the worker has closed the connection")
        yield Guest(link, bells[0])
    finally:
        _close(bells)
        link.close()


class Visit:
    """A lane of this machine, seen from the worker."""

    def __init__(self, link: socket.socket, segment: int, bell: int, slot: int) -> None:
        self._link = link
        #: Descriptors of the memory and of the lane's wake-up; closed at the end of :func:`visit`.
        self.segment, self.bell = segment, bell
        self.slot = slot

    def accept(self) -> None:
        """Tell the lane that this worker uses the memory from now on. Raises OSError."""
        self._link.sendall(_YES)


@contextlib.contextmanager
def visit(address: str, key: bytes, job: int, number: int, wake: int) -> Iterator[Visit | None]:
    """Run the worker's side of the handshake with the lane at ``address``.

    Yields None if the lane is on another machine, or offers no memory. ``wake``: descriptor that
    wakes this process.
    """
    found: list[int] = []
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as link:
        # Before connect: any process may have bound this name without ever accepting, and a
        # blocking connect would then wait for ever.
        link.settimeout(listener.PATIENCE)
        try:
            link.connect(_name(address))
        except ConnectionRefusedError:  # no such socket on this machine
            yield None
            return
        except OSError as e:
            log.warning(
                "the Unix socket of the server at %s accepts no connections, so messages go"
                " through the network, not through shared memory; another user may hold the"
                " socket's name (ss -xlp | grep bpsx-lane): %s",
                address,
                e,
            )
            yield None
            return
        try:
            if not _is_ours(link):
                raise PermissionError("the server's socket belongs to another user")
            listener.greet(link, key, job, address, number)
            socket.send_fds(link, [_YES], [wake])
            said, found, _, _ = socket.recv_fds(link, _OFFER.size, 2, socket.MSG_CMSG_CLOEXEC)
        except OSError as e:
            log.warning(
                "the server at %s is on this machine but offers no shared memory, so messages go"
                " through the network: %s",
                address,
                e,
            )
            yield None
            return
        try:
            magic, slot = (
                _OFFER.unpack(said) if len(said) == _OFFER.size and len(found) == 2 else (b"", 0)
            )
            yield Visit(link, found[0], found[1], slot) if magic == _MAGIC else None
        finally:
            _close(found)


def _close(descriptors: list[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)
