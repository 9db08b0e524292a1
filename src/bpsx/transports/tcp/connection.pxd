# A connection of the TCP transport, and an endpoint's lists of connections. See endpoint.pyx.
from libc.stdint cimport int64_t, uint32_t, uint64_t
from libc.stdlib cimport free
from posix.unistd cimport close as close_descriptor

from bpsx.system.sync cimport Monitor, atomic_load, atomic_store, lock, unlock
from bpsx.transports.abi cimport done_fn
from bpsx.transports.sockets.epoll cimport (
    EPOLL_CTL_ADD, EPOLL_CTL_DEL, EPOLLIN, epoll_set,
)
from bpsx.transports.sockets.peers cimport (
    Losses, Peers, add_loss, forget_loss, free_aligned, room_for_peer,
)

cdef extern from *:
    """
    #include <sys/socket.h>
    #include <sys/uio.h>
    """
    cdef struct iovec:
        void *iov_base
        size_t iov_len
    cdef struct msghdr:
        iovec *msg_iov
        size_t msg_iovlen
    enum:
        MSG_DONTWAIT
        MSG_NOSIGNAL
        SHUT_RDWR
        SOL_SOCKET
        SO_SNDBUF
    int shutdown(int fd, int how) nogil
    int setsockopt(int fd, int level, int name, const void *value, unsigned int size) nogil
    ssize_t sendmsg(int fd, msghdr *m, int flags) nogil
    ssize_t recvmsg(int fd, msghdr *m, int flags) nogil

cdef enum:
    # Bytes read ahead, beyond the body in progress: small messages arrive many at a time. What
    # belongs to a body is copied from there, so less is read ahead until some messages in a row
    # have had short bodies.
    BUFFER = 64 << 10
    BUFFER_AMONG_LONG = 1 << 10
    LONG = 16 << 10
    SHORT_IN_A_ROW = 4
    # Messages from ready connections before epoll is asked again: other connections may be readable
    # or writable by then.
    LOOK_EVERY = 16
    GATHERED = 8                # queued messages per sendmsg()
    MOST_HEAD = 1 << 20

# Header of each message on the wire.
cdef struct Prefix:
    uint32_t head_size
    uint32_t has_body
    uint64_t body_size

cdef struct Outgoing:           # a message that is not fully written; memory stays the caller's
    Outgoing *next
    Prefix prefix
    char *head
    char *body
    done_fn head_done
    done_fn body_done
    void *head_hint
    void *body_hint
    size_t sent                 # bytes written, of prefix, head and body together

cdef struct Connection:
    # in the list `EndpointState.all`, or in `EndpointState.new` before that
    Connection *next
    Connection *next_ready
    int fd
    uint32_t peer
    bint dead                   # broken or closed
    bint ready                  # in the list of connections that may have data to read
    bint drained                # the last read was short, so the socket is empty
    bint wants_out              # epoll reports when the socket is writable
    double holds                # seconds of the links that its send buffer holds if it is fitted
    Outgoing *first             # queue of messages not fully written
    Outgoing *last
    # Message being read: head, then body at a multiple of 64 bytes.
    char *block
    Prefix prefix
    size_t filled               # bytes read, of head and body together
    int shorts                  # messages with short bodies since the latest long one
    size_t begin                # bytes of `buffer` not yet used: from `begin` to `end`
    size_t end
    char buffer[BUFFER]

cdef struct EndpointState:
    Monitor monitor             # guards `new` and `rate`
    int epoll
    int wake_fd
    bint woken                  # wake was called, and no wait has ended since
    int since                   # messages received since the last epoll_wait()
    uint64_t most_bytes
    int64_t malformed
    int64_t n_new               # 0: take_new() has nothing to do
    double rate                 # bytes per second that send buffers are fitted to; 0: none
    double fitted               # ... those of the connections in `all`
    int64_t least_buffer        # bounds of fitted send buffers
    int64_t most_buffer
    Connection *new
    Connection *all
    Connection *ready_first
    Connection *ready_last
    Peers peers
    Losses losses


cdef inline void end_outgoing(Outgoing *o) noexcept nogil:
    """Run its done callbacks, which return the memory to its owner, and free it."""
    if o.head_done != NULL:
        o.head_done(o.head, o.head_hint)
    if o.body_done != NULL:
        o.body_done(o.body, o.body_hint)
    free(o)


cdef inline void stop_watching(EndpointState *s, Connection *c) noexcept nogil:
    """End the events of a connection: its close alone does not if a forked child has it, too.

    Not for a forked child, which shares the epoll with its parent.
    """
    if c.fd >= 0:
        epoll_set(s.epoll, EPOLL_CTL_DEL, c.fd, 0, NULL)


cdef inline void let_go(Connection *c) noexcept nogil:
    """Close the connection, run the done callbacks of its queue, free the message being read."""
    cdef Outgoing *o
    if c.fd >= 0:
        close_descriptor(c.fd)
    c.fd = -1
    while c.first != NULL:
        o, c.first = c.first, c.first.next
        end_outgoing(o)
    c.last = NULL
    free_aligned(c.block)
    c.block = NULL


cdef inline void lose(EndpointState *s, Connection *c) noexcept nogil:
    """Mark the connection as broken, release what it holds, report the loss."""
    if not c.dead:
        c.dead = True
        stop_watching(s, c)
        let_go(c)
        add_loss(&s.losses, c.peer)


cdef inline void make_ready(EndpointState *s, Connection *c) noexcept nogil:
    if c.ready or c.dead:
        return
    c.ready, c.next_ready = True, NULL
    if s.ready_last == NULL:
        s.ready_first = c
    else:
        s.ready_last.next_ready = c
    s.ready_last = c


cdef inline Connection *next_ready(EndpointState *s) noexcept nogil:
    cdef Connection *c = s.ready_first
    if c != NULL:
        s.ready_first = c.next_ready
        if s.ready_first == NULL:
            s.ready_last = NULL
        c.ready = False
    return c


cdef inline void take_out(EndpointState *s, Connection *c) noexcept nogil:
    """Remove a connection from all lists, so that it can be freed."""
    cdef Connection **at = &s.all
    while at[0] != c:
        at = &at[0].next
    at[0] = c.next
    if c.ready:
        at, s.ready_last = &s.ready_first, NULL
        while at[0] != NULL:
            if at[0] == c:
                at[0] = c.next_ready
            else:
                s.ready_last = at[0]
                at = &at[0].next_ready
    s.peers.at[c.peer] = NULL


cdef inline void end(EndpointState *s, Connection *c) noexcept nogil:
    """End a connection and free it."""
    take_out(s, c)
    stop_watching(s, c)
    if c.fd >= 0:
        # A forked child may have the connection, too.
        shutdown(c.fd, SHUT_RDWR)
    let_go(c)
    free(c)


cdef inline void fit(EndpointState *s, Connection *c, double rate) noexcept nogil:
    """Give the connection a send buffer that fits links of ``rate`` bytes per second."""
    cdef double wanted = rate * c.holds
    cdef int size = <int>min(max(wanted, <double>s.least_buffer), <double>s.most_buffer)
    if wanted > 0 and not c.dead:
        setsockopt(c.fd, SOL_SOCKET, SO_SNDBUF, &size, sizeof(size))


cdef inline void take_new(EndpointState *s) noexcept nogil:
    """Take over what other threads have left since the last call: connections, fitted buffers."""
    cdef Connection *c
    cdef Connection *following
    cdef double rate
    if atomic_load(&s.n_new) == 0:
        return
    lock(&s.monitor)
    c, s.new = s.new, NULL
    rate = s.rate
    atomic_store(&s.n_new, 0)
    unlock(&s.monitor)
    if s.fitted != rate:
        s.fitted, following = rate, s.all
        while following != NULL:
            fit(s, following, rate)
            following = following.next
    while c != NULL:
        following = c.next
        c.next, s.all = s.all, c
        if room_for_peer(&s.peers, c.peer) and s.peers.at[c.peer] != NULL:
            # Another worker of this rank, or the same once more: each has shown a new number.
            end(s, <Connection *>s.peers.at[c.peer])
        if (
            c.peer < s.peers.capacity
            and epoll_set(s.epoll, EPOLL_CTL_ADD, c.fd, EPOLLIN, c) == 0
        ):
            s.peers.at[c.peer] = c
            fit(s, c, rate)
        else:
            c.dead = True
            let_go(c)
        c = following


cdef inline void tcp_drop(void *self, uint32_t peer) noexcept nogil:
    cdef EndpointState *s = <EndpointState *>self
    cdef Connection *c
    take_new(s)
    c = <Connection *>s.peers.at[peer] if peer < s.peers.capacity else NULL
    if c != NULL:
        end(s, c)
    forget_loss(&s.losses, peer)
