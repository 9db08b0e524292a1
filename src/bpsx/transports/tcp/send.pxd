# Send path of a TCP connection: write what the kernel accepts, queue the rest.
from libc.errno cimport EAGAIN, EINTR, errno
from libc.stddef cimport size_t
from libc.stdint cimport uint32_t
from libc.stdlib cimport malloc
from libc.string cimport memcpy, memset

from bpsx.transports.abi cimport Landing, done_fn
from bpsx.transports.tcp.connection cimport (
    GATHERED, MSG_DONTWAIT, MSG_NOSIGNAL, Connection, Outgoing, Prefix, EndpointState, end_outgoing,
    iovec, lose, msghdr, sendmsg, take_new,
)
from bpsx.transports.sockets.epoll cimport EPOLL_CTL_MOD, EPOLLIN, EPOLLOUT, epoll_set


cdef inline size_t size_of(Prefix *p) noexcept nogil:
    return sizeof(Prefix) + p.head_size + p.body_size


cdef inline int put_rest(
    iovec *to, Prefix *prefix, char *head, char *body, size_t sent
) noexcept nogil:
    """Fill ``to`` with what remains of a message after its first ``sent`` bytes.

    Return the number of pieces, at most 3.
    """
    cdef char *starts[3]
    cdef size_t sizes[3]
    cdef int i, n = 0
    starts[0], starts[1], starts[2] = <char *>prefix, head, body
    sizes[0], sizes[1], sizes[2] = sizeof(Prefix), prefix.head_size, prefix.body_size
    for i in range(3):
        if sent >= sizes[i]:
            sent -= sizes[i]
            continue
        to[n].iov_base, to[n].iov_len = starts[i] + sent, sizes[i] - sent
        sent = 0
        n += 1
    return n


cdef inline ssize_t send_pieces(Connection *c, iovec *pieces, int n) noexcept nogil:
    """Return the bytes that the kernel accepted; 0: no room; -1: the connection is broken."""
    cdef msghdr m
    cdef ssize_t sent
    memset(&m, 0, sizeof(m))
    m.msg_iov, m.msg_iovlen = pieces, n
    while True:
        sent = sendmsg(c.fd, &m, MSG_DONTWAIT | MSG_NOSIGNAL)
        if sent >= 0:
            return sent
        if errno == EINTR:
            continue
        return 0 if errno == EAGAIN else -1


cdef inline void tell_when_writable(EndpointState *s, Connection *c, bint wanted) noexcept nogil:
    if c.wants_out != wanted:
        c.wants_out = wanted
        epoll_set(s.epoll, EPOLL_CTL_MOD, c.fd, EPOLLIN | EPOLLOUT if wanted else EPOLLIN, c)


cdef inline int flush(EndpointState *s, Connection *c) noexcept nogil:
    """Write queued messages as far as the socket has room. -1: the connection is broken."""
    cdef iovec pieces[3 * GATHERED]
    cdef Outgoing *o
    cdef ssize_t sent
    cdef size_t left, gathered
    cdef int n
    while c.first != NULL:
        n, gathered, o = 0, 0, c.first
        while o != NULL and n <= 3 * (GATHERED - 1):
            n += put_rest(&pieces[n], &o.prefix, o.head, o.body, o.sent)
            gathered += size_of(&o.prefix) - o.sent
            o = o.next
        sent = send_pieces(c, pieces, n)
        if sent < 0:
            return -1
        gathered -= sent
        while sent > 0:
            o = c.first
            left = size_of(&o.prefix) - o.sent
            if <size_t>sent < left:
                o.sent += sent
                break
            sent -= left
            c.first = o.next
            if c.first == NULL:
                c.last = NULL
            end_outgoing(o)
        if gathered:
            break
    tell_when_writable(s, c, c.first != NULL)
    return 0


cdef inline Outgoing *keep(
    Prefix *prefix, void *head, done_fn head_done, void *head_hint, void *body, done_fn body_done,
    void *body_hint, size_t sent
) noexcept nogil:
    """Queue a message. A head without a done callback is copied."""
    cdef Outgoing *o = <Outgoing *>malloc(
        sizeof(Outgoing) + (prefix.head_size if head_done == NULL else 0)
    )
    if o == NULL:
        return NULL
    o.next, o.prefix, o.sent = NULL, prefix[0], sent
    o.head, o.body = <char *>head, <char *>body
    o.head_done, o.body_done, o.head_hint, o.body_hint = head_done, body_done, head_hint, body_hint
    if head_done == NULL:
        o.head = <char *>(o + 1)
        memcpy(o.head, head, prefix.head_size)
    return o


cdef inline int tcp_send(
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
