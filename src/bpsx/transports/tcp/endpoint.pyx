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

from libc.stddef cimport size_t
from libc.stdint cimport int64_t, uint32_t, uint64_t
from libc.stdlib cimport calloc, free

from bpsx.system.sync cimport atomic_store, lock, unlock
from bpsx.transports.abi cimport Landing, Message, done_fn
from bpsx.transports.tcp.connection cimport (
    LOOK_EVERY, Connection, Outgoing, Prefix, EndpointState, end, iovec, let_go, lose, make_ready,
    next_ready, take_new,
)
from bpsx.transports.sockets.endpoint cimport ListeningEndpoint
from bpsx.transports.sockets.epoll cimport EPOLLOUT, EVENTS, epoll_event, epoll_wait
from bpsx.transports.tcp.receive cimport next_message
from bpsx.transports.sockets.peers cimport (
    add_loss, forget_loss, forget_peers, free_aligned, read, write,
)
from bpsx.transports.tcp.send cimport (
    flush, keep, put_rest, send_pieces, size_of, tell_when_writable,
)

from bpsx.errors import TransportError
from bpsx.transports.base import ALONE
from bpsx.transports.sockets import listener
from bpsx.system.address import NETWORK_SEND_BUFFER
from bpsx.transports.sockets.buffers import LEAST, size_send_buffer
from bpsx.transports.sockets.congestion import check_congestion, choose_congestion

log = logging.getLogger("bpsx.connections")


cdef int tcp_send(
    void *self, uint32_t peer, void *head, size_t head_size, done_fn head_done, void *head_hint,
    void *body, size_t body_size, done_fn body_done, void *body_hint, const Landing *landing,
) noexcept nogil:
    cdef EndpointState *s = <EndpointState *>self
    cdef Connection *c
    cdef Prefix prefix
    cdef iovec pieces[3]
    cdef ssize_t sent = -1
    cdef Outgoing *o = NULL
    take_new(s)
    c = <Connection *>s.peers.at[peer] if peer < s.peers.capacity else NULL
    prefix.head_size, prefix.has_body, prefix.body_size = (
        <uint32_t>head_size, body != NULL, body_size
        if body != NULL
        else 0
    )
    if c != NULL and not c.dead:
        sent = (
            0
            if c.first != NULL
            else send_pieces(c, pieces, put_rest(pieces, &prefix, <char *>head, <char *>body, 0))
        )
    if sent >= 0 and <size_t>sent < size_of(&prefix):
        o = keep(&prefix, head, head_done, head_hint, body, body_done, body_hint, sent)
        if o != NULL:
            if c.first == NULL:
                c.first = o
            else:
                c.last.next = o
            c.last = o
            tell_when_writable(s, c, True)
            return 0
        sent = -1
    if head_done != NULL:
        head_done(head, head_hint)
    if body_done != NULL:
        body_done(body, body_hint)
    if sent < 0 and c != NULL:
        lose(s, c)
    return 0 if sent >= 0 else -1


cdef bint poll(EndpointState *s, int timeout_ms) noexcept nogil:
    """Handle what epoll reports readable or writable. Return whether there was an event."""
    cdef epoll_event events[EVENTS]
    cdef uint64_t drained = 0
    cdef Connection *c
    cdef int i, n
    take_new(s)
    s.since = 0
    n = epoll_wait(s.epoll, events, EVENTS, timeout_ms)
    for i in range(n):
        c = <Connection *>events[i].data.ptr
        if c == NULL:
            read(s.wake_fd, &drained, sizeof(drained))
            s.woken = True      # the next wait returns at once
            continue
        if events[i].events & EPOLLOUT and not c.dead and flush(s, c) != 0:
            lose(s, c)
        if events[i].events & ~<uint32_t>EPOLLOUT:
            c.drained = False
            make_ready(s, c)
    return n > 0


cdef int tcp_receive(void *self, Message *m) noexcept nogil:
    cdef EndpointState *s = <EndpointState *>self
    cdef Connection *c
    cdef int got
    cdef bint looked = False
    s.since += 1
    if s.since >= LOOK_EVERY:
        poll(s, 0)
    while True:
        c = next_ready(s)
        if c == NULL:
            if looked or not poll(s, 0):
                return 0
            looked = True
            continue
        if c.dead:
            continue
        got = next_message(s, c, m)
        if got > 0:
            make_ready(s, c)        # at the end of the list: it may have more messages
            return 1
        if got < 0:
            lose(s, c)


cdef void tcp_release(void *self, Message *m) noexcept nogil:
    free_aligned(<void *>m.opaque[0])


cdef void tcp_wait(void *self, int timeout_ms) noexcept nogil:
    cdef EndpointState *s = <EndpointState *>self
    poll(s, timeout_ms if s.ready_first == NULL and not s.woken else 0)
    s.woken = False


cdef void tcp_wake(void *self) noexcept nogil:
    cdef uint64_t one = 1
    write((<EndpointState *>self).wake_fd, &one, sizeof(one))


cdef void tcp_drop(void *self, uint32_t peer) noexcept nogil:
    cdef EndpointState *s = <EndpointState *>self
    cdef Connection *c
    take_new(s)
    c = <Connection *>s.peers.at[peer] if peer < s.peers.capacity else NULL
    if c != NULL:
        end(s, c)
    forget_loss(&s.losses, peer)


cdef class TcpEndpoint(ListeningEndpoint):
    """Endpoint with one TCP connection per peer.

    See :mod:`bpsx.transports.base` for the interface. Not thread-safe, except :meth:`wake`,
    :meth:`lost`, :meth:`fit_buffers`, and :meth:`close` after the driving thread has stopped.
    ``io_threads`` is unused; ZeroMQ's endpoint has the same argument.
    """
    cdef EndpointState state
    cdef object send_buffer
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
        self.congestion = congestion
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
