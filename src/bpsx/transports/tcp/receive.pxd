# Receive path of a TCP connection: each message gets memory of its own, and its body is read
# straight into that memory.
from libc.errno cimport EAGAIN, EINTR, errno
from libc.stddef cimport size_t
from libc.stdint cimport uint32_t, uint64_t
from libc.string cimport memcpy, memmove, memset

from bpsx.system.sync cimport atomic_add
from bpsx.transports.abi cimport Message
from bpsx.transports.tcp.connection cimport (
    BUFFER, BUFFER_AMONG_LONG, LONG, LOOK_EVERY, MOST_HEAD, MSG_DONTWAIT, SHORT_IN_A_ROW,
    Connection, Prefix, EndpointState, iovec, lose, make_ready, msghdr, next_ready, recvmsg,
    take_new,
)
from bpsx.transports.sockets.epoll cimport EPOLLOUT, EVENTS, epoll_event, epoll_wait
from bpsx.transports.sockets.peers cimport aligned, free_aligned, read, write
from bpsx.transports.tcp.send cimport flush


cdef inline size_t body_at(Prefix *p) noexcept nogil:
    """Offset of the body in a message's block; aligned, because sums are computed in place."""
    return (p.head_size + 63) & ~<size_t>63


cdef inline ssize_t receive_pieces(Connection *c, iovec *pieces, int n) noexcept nogil:
    """Return the bytes read; 0: none available; -1: the connection is broken or closed."""
    cdef msghdr m
    cdef ssize_t got
    cdef size_t asked = 0
    cdef int i
    if c.drained:
        c.drained = False
        return 0
    memset(&m, 0, sizeof(m))
    m.msg_iov, m.msg_iovlen = pieces, n
    for i in range(n):
        asked += pieces[i].iov_len
    while True:
        got = recvmsg(c.fd, &m, MSG_DONTWAIT)
        if got > 0:
            c.drained = <size_t>got < asked
            return got
        if got < 0 and errno == EINTR:
            continue
        return 0 if got < 0 and errno == EAGAIN else -1


cdef inline int begin_message(EndpointState *s, Connection *c) noexcept nogil:
    """Parse the prefix in the buffer and allocate the message. -1: the prefix is malformed."""
    memcpy(&c.prefix, c.buffer + c.begin, sizeof(Prefix))
    if (
        c.prefix.head_size > MOST_HEAD
        or c.prefix.has_body > 1
        or c.prefix.body_size > s.most_bytes
        or (c.prefix.body_size and not c.prefix.has_body)
    ):
        atomic_add(&s.malformed, 1)
        return -1
    c.block = <char *>aligned(max(<size_t>64, body_at(&c.prefix) + c.prefix.body_size))
    if c.block == NULL:
        return -1
    c.begin += sizeof(Prefix)
    c.filled = 0
    c.shorts = 0 if c.prefix.body_size >= LONG else min(c.shorts + 1, <int>SHORT_IN_A_ROW)
    return 0


cdef inline void take_buffered(Connection *c) noexcept nogil:
    """Copy bytes of the current message from the buffer to its block."""
    cdef size_t n
    if c.filled < c.prefix.head_size:
        n = min(c.prefix.head_size - c.filled, c.end - c.begin)
        memcpy(c.block + c.filled, c.buffer + c.begin, n)
        c.filled += n
        c.begin += n
    if c.filled >= c.prefix.head_size:
        n = min(c.prefix.head_size + c.prefix.body_size - c.filled, c.end - c.begin)
        memcpy(c.block + body_at(&c.prefix) + c.filled - c.prefix.head_size, c.buffer + c.begin, n)
        c.filled += n
        c.begin += n


cdef inline int read_more(Connection *c) noexcept nogil:
    """Read the rest of the current message into its block, and what follows into the buffer.

    Return 1, 0 if nothing was available, or -1 if the connection is broken.
    """
    cdef iovec pieces[3]
    cdef int n = 0
    cdef size_t rest = 0
    cdef size_t room = BUFFER if c.shorts == SHORT_IN_A_ROW else BUFFER_AMONG_LONG
    cdef ssize_t got
    if c.block != NULL:
        if c.filled < c.prefix.head_size:
            pieces[n].iov_base, pieces[n].iov_len = (
                c.block + c.filled, c.prefix.head_size - c.filled
            )
            n += 1
        rest = c.prefix.head_size + c.prefix.body_size - c.filled
        if c.prefix.body_size:
            pieces[n].iov_base = c.block + body_at(&c.prefix) + (
                c.filled - c.prefix.head_size if c.filled > c.prefix.head_size else 0
            )
            pieces[n].iov_len = rest - (pieces[0].iov_len if n else 0)
            n += 1
    if c.begin == c.end:
        c.begin = c.end = 0
    elif c.begin:
        memmove(c.buffer, c.buffer + c.begin, c.end - c.begin)
        c.end -= c.begin
        c.begin = 0
    # Less than a prefix is left over there.
    pieces[n].iov_base, pieces[n].iov_len = c.buffer + c.end, room - c.end
    got = receive_pieces(c, pieces, n + 1)
    if got <= 0:
        return <int>got
    if <size_t>got > rest:
        c.end += got - rest
        got = rest
    c.filled += got
    return 1


cdef inline int next_message(EndpointState *s, Connection *c, Message *m) noexcept nogil:
    """Return 1 if *m is filled, 0 if no message is complete, -1 if the connection is broken."""
    cdef int more
    while True:
        if c.block == NULL and c.end - c.begin >= sizeof(Prefix) and begin_message(s, c) != 0:
            return -1
        if c.block != NULL:
            take_buffered(c)
            if c.filled == c.prefix.head_size + c.prefix.body_size:
                m.peer, m.head, m.head_size = c.peer, c.block, c.prefix.head_size
                m.has_body = c.prefix.has_body
                m.body = c.block + body_at(&c.prefix) if m.has_body else NULL
                m.body_size = c.prefix.body_size
                m.opaque[0] = <uint64_t>c.block
                c.block = NULL
                return 1
        more = read_more(c)
        if more <= 0:
            return more


cdef inline bint poll(EndpointState *s, int timeout_ms) noexcept nogil:
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


cdef inline int tcp_receive(void *self, Message *m) noexcept nogil:
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


cdef inline void tcp_release(void *self, Message *m) noexcept nogil:
    free_aligned(<void *>m.opaque[0])


cdef inline void tcp_wait(void *self, int timeout_ms) noexcept nogil:
    cdef EndpointState *s = <EndpointState *>self
    poll(s, timeout_ms if s.ready_first == NULL and not s.woken else 0)
    s.woken = False


cdef inline void tcp_wake(void *self) noexcept nogil:
    cdef uint64_t one = 1
    write((<EndpointState *>self).wake_fd, &one, sizeof(one))
