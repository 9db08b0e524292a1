# cython: language_level=3, boundscheck=False, wraparound=False, initializedcheck=False
"""TCP transport over plain sockets: one epoll per endpoint, and no thread for sending or receiving.

The thread that drives the endpoint (the core's driver, a lane's thread) reads and writes the
sockets itself. A message thus passes from the caller's memory to the kernel, and from the kernel to
memory that the receiver keeps, without another thread in between. The endpoint queues by reference
what the kernel does not accept at once, and writes it when the socket has room.

A connection begins with a greeting that ``listener.py`` checks. A message consists of 16 bytes (the
head's size, whether there is a body, the body's size), the head and the body.
"""
import logging

from libc.stdint cimport int64_t, uint32_t, uint64_t
from libc.stdlib cimport calloc, free

from bpsx.system.sync cimport atomic_store, lock, unlock
from bpsx.transports.tcp.connection cimport Connection, EndpointState, let_go, take_new, tcp_drop
from bpsx.transports.sockets.endpoint cimport ListeningEndpoint
from bpsx.transports.sockets.peers cimport add_loss, forget_peers
from bpsx.transports.tcp.receive cimport tcp_receive, tcp_release, tcp_wait, tcp_wake
from bpsx.transports.tcp.send cimport tcp_send

from bpsx.errors import TransportError
from bpsx.transports.base import ALONE
from bpsx.transports.sockets import listener
from bpsx.system.address import NETWORK_SEND_BUFFER
from bpsx.transports.sockets.buffers import LEAST, round_trip, size_send_buffer
from bpsx.transports.sockets.congestion import check_congestion, choose_congestion

log = logging.getLogger("bpsx.connections")


cdef class TcpEndpoint(ListeningEndpoint):
    """Endpoint with one TCP connection per peer.

    See :mod:`bpsx.transports.base` for the interface. Not thread-safe, except :meth:`wake`,
    :meth:`lost`, :meth:`fit_buffers`, and :meth:`close` after the driving thread has stopped.
    ``io_threads`` is unused; ZeroMQ's endpoint has the same argument.
    """
    cdef EndpointState state
    cdef object send_buffer
    cdef dict trips                 # seconds of a connection's shortest round trip, by peer
    cdef str congestion

    def __cinit__(
        self, *, object send_buffer, double heartbeat_interval, double heartbeat_timeout,
        bytes secret=b"", bint encrypt=False, int64_t most_bytes=-1, int io_threads=0,
        str congestion="auto"
    ):
        """Create an endpoint that neither listens nor is connected.

        ``send_buffer``: bytes of each connection's send buffer; 0: the system tunes it; None: a
        size for loopback or for a network, by the peer's address; far peers as with 0.
        ``heartbeat_interval``, ``heartbeat_timeout``: seconds; interval 0 means no heartbeat.
        ``secret``: the job secret, the same on both ends.
        ``encrypt``: refused if true.
        ``most_bytes``: largest body accepted, in bytes; -1: no bound.
        ``io_threads``: unused; ZeroMQ's endpoint has the same argument.
        ``congestion``: see :func:`bpsx.transports.sockets.congestion.choose_congestion`.

        Raises :class:`~bpsx.errors.TransportError`.
        """
        check_congestion(congestion)
        self.secret, self.send_buffer, self.interval, self.timeout = (
            secret, send_buffer, heartbeat_interval, heartbeat_timeout
        )
        self.congestion, self.trips = congestion, {}
        self._set_up(
            &self.state.epoll, &self.state.wake_fd, &self.state.losses, &self.state.malformed,
            &self.state.monitor, encrypt
        )
        self.state.most_bytes = <uint64_t>most_bytes        # -1: any
        self.state.least_buffer, self.state.most_buffer = LEAST, NETWORK_SEND_BUFFER
        self.table.self = &self.state
        self.table.send, self.table.recv, self.table.release = tcp_send, tcp_receive, tcp_release
        self.table.wait, self.table.wake = tcp_wait, tcp_wake
        self.table.drop, self.table.keeps = tcp_drop, True

    def connect(self, peer: int, address: str, undriven=ALONE) -> None:
        """Connect to the lane at ``host:port``, which becomes peer ``peer``.

        The data plane takes the connection over by a lock, so it may be driven all the time.
        """
        try:
            made = listener.dial(address, self.secret, self.job, self.number)
            self.trips[peer] = round_trip(made)
        except TransportError:
            raise
        # The lane existed before, so the thread that watches for losses knows which lane it was and
        # that it has died.
        except OSError as e:
            listener.require_presence(address, e)
            log.warning("cannot connect to %s: %s", address, e)
            add_loss(&self.state.losses, peer)
            return
        self._take(made, peer)

    def _take(self, object made, uint32_t peer):
        """Hand a connected socket to the data plane. Any thread may call it."""
        cdef Connection *c = <Connection *>calloc(1, sizeof(Connection))
        if c == NULL:
            made.close()
            raise MemoryError("no memory for a connection")
        listener.prepare(made, self.interval, self.timeout)
        c.holds = size_send_buffer(made, self.send_buffer)
        choose_congestion(made, self.congestion)
        c.peer, c.fd = peer, made.detach()
        lock(&self.state.monitor)
        c.next, self.state.new = self.state.new, c
        atomic_store(&self.state.n_new, 1)
        unlock(&self.state.monitor)
        tcp_wake(&self.state)

    def round_trip(self, peer: int) -> float:
        """Return the shortest round trip until the connection was made, in seconds; 0: none."""
        return self.trips.get(peer, 0.0)

    def fit_buffers(self, rate: float) -> None:
        """Give connections to near peers send buffers that fit links of ``rate`` bytes per second.

        Those of a size that was given stay. Any thread may call it.
        """
        lock(&self.state.monitor)
        self.state.rate = rate
        atomic_store(&self.state.n_new, 1)
        unlock(&self.state.monitor)
        tcp_wake(&self.state)

    def close(self) -> None:
        """Drop unsent messages, run every outstanding done callback, free all. Idempotent."""
        cdef Connection *c
        if self.closed:
            return
        self.closed = True
        if self.acceptor is not None:
            self.acceptor.close()
        take_new(&self.state)
        while self.state.all != NULL:
            c, self.state.all = self.state.all, self.state.all.next
            let_go(c)
            free(c)
        forget_peers(&self.state.peers)
        self.state.ready_first = self.state.ready_last = NULL
