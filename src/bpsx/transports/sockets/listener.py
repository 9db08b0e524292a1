"""Access control of lanes over plain sockets: a greeting that proves knowledge of the job secret.

A connection reaches the data plane, and the lane's memory, only after its greeting was checked.
``auth.py`` does the same for ZeroMQ.
"""

from __future__ import annotations

import contextlib
import os
import resource
import selectors
import socket
import struct
import threading
import time
from collections.abc import Callable, Sequence

from bpsx import secret
from bpsx.errors import TransportError
from bpsx.system.address import is_ipv6, resolve
from bpsx.system.threads import NamedThread
from bpsx.transports.base import rank_of
from bpsx.transports.ports import bind_one
from bpsx.transports.reach import explain
from bpsx.transports.refusals import HANDSHAKE_MS, Refusals

#: Greeting: magic with version, the worker's number (`pass_number`), its token.
_GREETING = struct.Struct("<8sI64s")
_MAGIC = b"bpsxtcp2"
#: Size of the nonce that a lane sends first. Each nonce is used once, so an overheard greeting is
#: useless on another connection.
_NONCE_BYTES = 32
BACKLOG = 4096
#: Bounds on the connections that have not greeted yet; the acceptor closes the oldest above it. The
#: bound is a share of the process's descriptors, because a process has several acceptors and needs
#: descriptors for other things.
_MOST_WAITING, _LEAST_WAITING, _SHARE = 4096, 64, 16
#: One address may hold at most this fraction (1/4) of them.
_ADDRESS_SHARE = 4
# Linux's bounds for keepalive probes: seconds between probes, and number of probes.
_MOST_SECONDS, _MOST_PROBES = 32767, 127
#: Seconds to make a connection, and seconds to greet.
PATIENCE = HANDSHAKE_MS / 1000
#: Seconds that a lane may take to send its nonce: a busy process may not have accepted yet.
_NONCE_PATIENCE = 30.0


class Unreachable(TransportError):
    """A connection to a lane cannot be made, and the lane is not known to have exited."""

    def __init__(self, text: str, why: str = "") -> None:
        """``text`` is the whole message; copies of an error are made from it alone."""
        super().__init__(text)
        self.why = why


def unreachable(address: str, why: str) -> Unreachable:
    """Return the error for the lane at ``address``, which ``why`` makes unreachable."""
    return Unreachable(f"cannot connect to {address}: {why}", why)


def require_presence(address: str, error: OSError) -> None:
    """Raise :class:`Unreachable` unless ``error`` means that the lane at ``address`` may have died.

    The scheduler reports deaths, because it knows best which process has died.
    """
    if isinstance(error, TimeoutError):
        raise unreachable(address, "no reply; a firewall may drop the connection") from error
    if not isinstance(error, ConnectionError):
        raise unreachable(address, explain(error.errno) if error.errno else str(error)) from error


def _token(key: bytes, job: int, address: str, number: int, nonce: bytes) -> bytes:
    return (
        secret.derive(key, "data connection: worker's answer", job, address, number, nonce)
        .hex()
        .encode()
    )


def greet(
    made: socket.socket, key: bytes, job: int, address: str, number: int, more: bytes = b""
) -> None:
    """Read the lane's nonce from a new connection, then send worker ``number``'s greeting.

    ``address`` is the lane's. ``more`` is sent right after the greeting. Raises OSError.
    """
    nonce = b""
    while len(nonce) < _NONCE_BYTES:
        said = made.recv(_NONCE_BYTES - len(nonce))
        if not said:
            raise ConnectionResetError("the lane has closed the connection before the greeting")
        nonce += said
    made.sendall(_GREETING.pack(_MAGIC, number, _token(key, job, address, number, nonce)) + more)


def prepare(made: socket.socket, interval: float, timeout: float) -> None:
    """Set the options of a connected socket for the data plane.

    ``timeout``: seconds of silence after which the connection breaks. ``interval``: seconds between
    keepalive probes; 0: none.
    """
    made.setblocking(False)
    made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if interval > 0:
        probe = min(max(1, round(interval)), _MOST_SECONDS)
        made.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        made.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, probe)
        made.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, probe)
        made.setsockopt(
            socket.IPPROTO_TCP,
            socket.TCP_KEEPCNT,
            min(max(1, round(timeout / probe)), _MOST_PROBES),
        )
        made.setsockopt(
            socket.IPPROTO_TCP,
            socket.TCP_USER_TIMEOUT,
            min(max(1, round(timeout * 1000)), 2**31 - 1),
        )


def dial(address: str, key: bytes, job: int, number: int, more: bytes = b"") -> socket.socket:
    """Connect worker ``number`` to the lane at ``address``, and greet.

    ``more`` is sent right after the greeting. Returns the connected socket.

    Raises :class:`~bpsx.errors.TransportError` for an invalid address, and OSError if the lane
    cannot be reached now.
    """
    host, _, port = address.rpartition(":")
    try:
        numeric = resolve(host, int(port))
        made = socket.socket(
            socket.AF_INET6 if is_ipv6(numeric) else socket.AF_INET, socket.SOCK_STREAM
        )
    except OSError as e:
        raise TransportError(f"cannot connect to {address}: {e}") from e
    try:
        made.settimeout(PATIENCE)
        made.connect((numeric, int(port)))
        made.settimeout(_NONCE_PATIENCE)
        greet(made, key, job, address, number, more)
        made.settimeout(PATIENCE)
    except OSError:
        made.close()
        raise
    return made


def listen(host: str, ports: Sequence[int] = ()) -> socket.socket:
    """Listen on ``host`` at the first free port of ``ports``, or at any free port if empty.

    Raises :class:`~bpsx.errors.TransportError`.
    """
    bare = host.strip("[]")
    family = socket.AF_INET6 if is_ipv6(bare) else socket.AF_INET
    try:
        return bind_one(
            ports, lambda port: socket.create_server((bare, port), family=family, backlog=BACKLOG)
        )
    except TransportError:
        raise
    except OSError as e:
        raise TransportError(
            f"cannot listen on {host}: {e}; set another address with DMLC_NODE_HOST"
        ) from e


def most_waiting() -> int:
    """Return how many connections of one acceptor may be waiting to greet.

    The bound follows from the process's limit of descriptors.
    """
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return (
        _MOST_WAITING
        if limit == resource.RLIM_INFINITY
        else max(_LEAST_WAITING, min(_MOST_WAITING, limit // _SHARE))
    )


class _Newcomer:
    """A connection that has not greeted yet."""

    def __init__(self, made: socket.socket, who: str) -> None:
        self.made, self.who, self.said, self.nonce = made, who, b"", os.urandom(_NONCE_BYTES)
        self.until = time.monotonic() + PATIENCE


class Acceptor:
    """Listener of one lane, which accepts each worker's number once.

    Its thread calls ``take`` with the socket and the rank of each worker whose greeting is valid. A
    greeting answers the nonce of its own connection, so an eavesdropper cannot reuse it.
    """

    def __init__(
        self, listener: socket.socket, key: bytes, take: Callable[[socket.socket, int], None]
    ) -> None:
        self._key, self._take, self._listener = key, take, listener
        self._listener.setblocking(False)
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._thread: threading.Thread | None = None
        self._stopping = False
        self._refusals = Refusals()
        self._inside: set[int] = set()  # numbers of workers
        self._waiting: dict[int, _Newcomer] = {}  # by descriptor, oldest first
        # Descriptors of `_waiting` by peer address, oldest first.
        self._by_address: dict[str, dict[int, None]] = {}
        self._most = most_waiting()

    def open(self, job: int, address: str) -> None:
        """Start to accept workers, on the acceptor's own thread.

        The thread sleeps except while a peer connects.
        """
        self._job, self._address = job, address
        self._thread = NamedThread(target=self._run, name="bpsx-accept", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        with selectors.DefaultSelector() as self._selector:
            self._selector.register(self._wake, selectors.EVENT_READ)
            self._selector.register(self._listener, selectors.EVENT_READ)
            while not self._stopping:
                first = next(iter(self._waiting.values()), None)
                for key, _ in self._selector.select(
                    None if first is None else max(0.0, first.until - time.monotonic())
                ):
                    if key.fileobj is self._listener:
                        self._accept()
                    elif key.fd in self._waiting:
                        self._hear(self._waiting[key.fd])
                now = time.monotonic()
                for late in [n for n in self._waiting.values() if n.until <= now]:
                    self._refuse(late)

    def _accept(self) -> None:
        try:
            made, peer = self._listener.accept()
        # The peer has gone, or the process has no descriptors left. Pause before the next attempt.
        except OSError:
            time.sleep(0.01)
            return
        made.setblocking(False)
        newcomer = _Newcomer(made, str(peer[0]) if peer else "this machine")
        theirs = self._by_address.setdefault(newcomer.who, {})
        if len(theirs) >= max(1, self._most // _ADDRESS_SHARE):
            self._refuse(self._waiting[next(iter(theirs))])
        elif len(self._waiting) >= self._most:
            self._refuse(next(iter(self._waiting.values())))
        self._waiting[made.fileno()] = newcomer
        self._by_address.setdefault(newcomer.who, {})[made.fileno()] = None
        self._selector.register(made, selectors.EVENT_READ)
        try:
            made.send(newcomer.nonce)  # the send buffer is empty, so the nonce fits
        except OSError:  # it has left
            self._let_go(newcomer)

    def _hear(self, newcomer: _Newcomer) -> None:
        try:
            # Read no more than the greeting: what follows it is for the data plane.
            said = newcomer.made.recv(_GREETING.size - len(newcomer.said))
        except BlockingIOError:
            return
        except OSError:
            said = b""
        newcomer.said += said
        if not newcomer.said:  # a probe of the port, as of a worker that waits for a reply
            self._let_go(newcomer)
            return
        if (
            said
            and len(newcomer.said) < _GREETING.size
            and _MAGIC.startswith(newcomer.said[: len(_MAGIC)])
        ):
            return
        number = self._number_in(newcomer.said, newcomer.nonce)
        if number < 0:
            self._refuse(newcomer)
            return
        self._inside.add(number)
        self._forget(newcomer)
        self._take(newcomer.made, rank_of(number))

    def _number_in(self, said: bytes, nonce: bytes) -> int:
        """Return the number in a valid greeting, else -1."""
        if len(said) != _GREETING.size:
            return -1
        magic, number, shown = _GREETING.unpack(said)
        new = magic == _MAGIC and number not in self._inside
        wanted = _token(self._key, self._job, self._address, number, nonce)
        return int(number) if new and secret.same(shown, wanted) else -1

    def _forget(self, newcomer: _Newcomer) -> None:
        self._selector.unregister(newcomer.made)
        del self._waiting[newcomer.made.fileno()]
        theirs = self._by_address[newcomer.who]
        del theirs[newcomer.made.fileno()]
        if not theirs:
            del self._by_address[newcomer.who]

    def _let_go(self, newcomer: _Newcomer) -> None:
        self._forget(newcomer)
        newcomer.made.close()

    def _refuse(self, newcomer: _Newcomer) -> None:
        self._let_go(newcomer)
        self._refusals.add(newcomer.who)

    @property
    def refused(self) -> int:
        """Number of refused connections."""
        return self._refusals.count

    def close(self) -> None:
        """Stop listening. Idempotent."""
        if self._stopping:
            return
        self._stopping = True
        if self._thread is not None:
            os.eventfd_write(self._wake, 1)
            self._thread.join()
        for newcomer in self._waiting.values():
            with contextlib.suppress(OSError):
                newcomer.made.close()
        self._listener.close()
        os.close(self._wake)
        # `_take` refers to the endpoint, which refers to this acceptor; the cycle would keep
        # descriptors open until the next garbage collection.
        del self._take
