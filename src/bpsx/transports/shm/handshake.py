"""How a worker and the lanes of its own machine find each other, to share memory: at a Unix socket
in the abstract namespace, which has no file that could be left behind and reaches as far as the
network namespace does.

It is named after the lane's address.

The worker greets as it does over the network (``listener.py``) and hands over the descriptor that
ends its sleep; the lane answers with the segment, the worker's slot in it and its own descriptor;
the worker says whether it could map the segment. Both ends must be of one user.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import struct
from collections.abc import Callable, Iterator

from bpsx.transports.sockets import listener as gate

log = logging.getLogger("bpsx.connections")
_OFFER = struct.Struct("<8sI")
_MAGIC = b"bpsxshm1"
_UCRED = struct.Struct("3i")
_YES = b"y"


def _name(address: str) -> str:
    return f"\0bpsx-lane {address}"


def _is_ours(link: socket.socket) -> bool:
    """Whether the other end belongs to this user, or to root."""
    _, uid, _ = _UCRED.unpack(link.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size))
    return uid in (os.getuid(), 0)


def listen(
    address: str, key: bytes, take: Callable[[socket.socket, int], None]
) -> gate.Gate | None:
    """A gate for the workers that are on this machine; None where there can be none: they come
    through the network then.
    """
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        listener.bind(_name(address))
        listener.listen(gate.BACKLOG)
    except OSError as e:
        log.warning(
            "no shared memory for workers of this machine, since there is no socket at which they"
            " could find this server: %s",
            e,
        )
        listener.close()
        return None
    return gate.Gate(listener, key, take)


class Guest:
    """A worker that has greeted well, as the lane sees it."""

    def __init__(self, link: socket.socket, bell: int) -> None:
        self._link = link
        #: A descriptor that ends the worker's sleep; closed when the visit is over.
        self.bell = bell

    def takes(self, segment: int, slot: int, wake: int) -> bool:
        """Offer it memory, and whether it takes it. Raises OSError."""
        socket.send_fds(self._link, [_OFFER.pack(_MAGIC, slot)], [segment, wake])
        return self._link.recv(1) == _YES


@contextlib.contextmanager
def welcome(link: socket.socket) -> Iterator[Guest]:
    """A lane's part. Raises OSError: who has come is a stranger, or says nothing."""
    bells: list[int] = []
    try:
        link.settimeout(gate.PATIENCE)
        if not _is_ours(link):
            raise PermissionError("a process of another user")
        _, bells, _, _ = socket.recv_fds(link, 1, 1, socket.MSG_CMSG_CLOEXEC)
        if not bells:
            raise ConnectionError("it has left")
        yield Guest(link, bells[0])
    finally:
        _close(bells)
        link.close()


class Visit:
    """A lane of this machine, as the worker sees it."""

    def __init__(self, link: socket.socket, segment: int, bell: int, slot: int) -> None:
        self._link = link
        #: Descriptors: the memory, and what ends the lane's sleep; closed when the visit is over.
        self.segment, self.bell = segment, bell
        self.slot = slot

    def accept(self) -> None:
        """Use the memory from now on. Raises OSError."""
        self._link.sendall(_YES)


@contextlib.contextmanager
def visit(address: str, key: bytes, job: int, rank: int, wake: int) -> Iterator[Visit | None]:
    """A worker's part; None: the lane at ``address`` is on another machine, or offers no memory.

    ``wake``: what ends this process's sleep.
    """
    found: list[int] = []
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as link:
        # Before anything else: anybody may have bound this name, accept nobody, and so have a
        # blocking connect wait for ever.
        link.settimeout(gate.PATIENCE)
        try:
            link.connect(_name(address))
        except ConnectionRefusedError:  # no such socket on this machine
            yield None
            return
        except OSError as e:
            log.warning(
                "the socket at which the server at %s would offer its memory accepts nobody, so"
                " messages go through the network; another user may hold its name (ss -xlp | grep"
                " bpsx-lane): %s",
                address,
                e,
            )
            yield None
            return
        try:
            if not _is_ours(link):
                raise PermissionError("its socket belongs to another user")
            gate.greet(link, key, job, address, rank)
            socket.send_fds(link, [_YES], [wake])
            said, found, _, _ = socket.recv_fds(link, _OFFER.size, 2, socket.MSG_CMSG_CLOEXEC)
        except OSError as e:
            log.warning(
                "the server at %s is on this machine and does not offer its memory, so messages go"
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
