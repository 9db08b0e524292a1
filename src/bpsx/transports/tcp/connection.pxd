# A connection of the transport over plain sockets, and an endpoint's lists of them. See
# endpoint.pyx.
from libc.stdint cimport int64_t, uint32_t, uint64_t
from libc.stdlib cimport free
from posix.unistd cimport close as close_descriptor

from bpsx.system.sync cimport Monitor, atomic_load, atomic_store, lock, unlock
from bpsx.transports.abi cimport done_fn
from bpsx.transports.sockets.peers cimport Losses, Peers, add_loss, free_aligned, room_for_peer

cdef extern from *:
    """
    #include <sys/epoll.h>
    #include <sys/eventfd.h>
    #include <sys/socket.h>
    #include <sys/uio.h>
    #include <stdlib.h>
    #include <unistd.h>
    static inline int bpsx_epoll_set(int epoll, int how, int fd, uint32_t events, void *what) {
        struct epoll_event e = { .events = events, .data = { .ptr = what } };
        return epoll_ctl(epoll, how, fd, &e);
    }
    """
    cdef struct iovec:
        void *iov_base
        size_t iov_len
    cdef struct msghdr:
        iovec *msg_iov
        size_t msg_iovlen
    ctypedef union epoll_data_t:
        void *ptr
    cdef struct epoll_event:
        uint32_t events
        epoll_data_t data
    enum:
        EPOLL_CLOEXEC
        EPOLL_CTL_ADD
        EPOLL_CTL_MOD
        EPOLL_CTL_DEL
        EPOLLIN
        EPOLLOUT
        EFD_CLOEXEC
        EFD_NONBLOCK
        MSG_DONTWAIT
        MSG_NOSIGNAL
    int epoll_create1(int flags) nogil
    int epoll_wait(int epoll, epoll_event *events, int most, int timeout_ms) nogil
    int epoll_set "bpsx_epoll_set"(int epoll, int how, int fd, uint32_t events, void *what) nogil
    int eventfd(unsigned int initval, int flags) nogil
    ssize_t sendmsg(int fd, msghdr *m, int flags) nogil
    ssize_t recvmsg(int fd, msghdr *m, int flags) nogil

cdef enum:
    # what is read beyond the body that is awaited; small messages come many at a time
    BUFFER = 64 << 10
    EVENTS = 64
    # messages, while there are always more: others may have something, or have room
    LOOK_EVERY = 16
    GATHERED = 8                # messages that are written at once, of those that wait
    MOST_HEAD = 1 << 20

# What goes before each message on the wire.
cdef struct Prefix:
    uint32_t head_size
    uint32_t has_body
    uint64_t body_size

cdef struct Outgoing:           # a message that is not written out
    Outgoing *next
    Prefix prefix
    char *head
    char *body
    done_fn head_done
    done_fn body_done
    void *head_hint
    void *body_hint
    size_t sent                 # bytes of prefix, head and body together

cdef struct Connection:
    Connection *next            # of all, or of those that the data plane has not seen yet
    Connection *next_ready
    int fd
    uint32_t peer
    bint dead
    bint ready                  # is in the list of those that may have something to read
    bint drained                # the last read was short: there was nothing more
    bint wants_out              # epoll tells when it can be written to
    Outgoing *first
    Outgoing *last
    # the message that is being read: head, then body at a multiple of 64
    char *block
    Prefix prefix
    size_t filled               # bytes of head and body together
    size_t begin                # what is in `buffer` and not used
    size_t end
    char buffer[BUFFER]

cdef struct State:
    Monitor monitor             # guards `new`
    int epoll
    int wake_fd
    bint woken                  # somebody has written there, and no wait has ended for it
    int since                   # messages since the last look at all connections
    uint64_t most_bytes
    int64_t malformed
    int64_t n_new
    Connection *new
    Connection *all
    Connection *ready_first
    Connection *ready_last
    Peers peers
    Losses losses


cdef inline void end_outgoing(Outgoing *o) noexcept nogil:
    """Its memory is its owner's again."""
    if o.head_done != NULL:
        o.head_done(o.head, o.head_hint)
    if o.body_done != NULL:
        o.body_done(o.body, o.body_hint)
    free(o)


cdef inline void let_go(Connection *c) noexcept nogil:
    """Close it, run the done callbacks of what waits to be written, free what was being read."""
    cdef Outgoing *o
    if c.fd >= 0:
        close_descriptor(c.fd)      # which takes it out of the epoll
    c.fd = -1
    while c.first != NULL:
        o, c.first = c.first, c.first.next
        end_outgoing(o)
    c.last = NULL
    free_aligned(c.block)
    c.block = NULL


cdef inline void take_new(State *s) noexcept nogil:
    """Those that were made since the last look, on another thread."""
    cdef Connection *c
    cdef Connection *following
    if atomic_load(&s.n_new) == 0:
        return
    lock(&s.monitor)
    c, s.new = s.new, NULL
    atomic_store(&s.n_new, 0)
    unlock(&s.monitor)
    while c != NULL:
        following = c.next
        c.next, s.all = s.all, c
        if (
            room_for_peer(&s.peers, c.peer)
            and s.peers.at[c.peer] == NULL
            and epoll_set(s.epoll, EPOLL_CTL_ADD, c.fd, EPOLLIN, c) == 0
        ):
            s.peers.at[c.peer] = c
        else:
            c.dead = True
            let_go(c)
        c = following


cdef inline void lose(State *s, Connection *c) noexcept nogil:
    """It is broken: say so, and give back what it had."""
    if not c.dead:
        c.dead = True
        let_go(c)
        add_loss(&s.losses, c.peer)


cdef inline void make_ready(State *s, Connection *c) noexcept nogil:
    if c.ready or c.dead:
        return
    c.ready, c.next_ready = True, NULL
    if s.ready_last == NULL:
        s.ready_first = c
    else:
        s.ready_last.next_ready = c
    s.ready_last = c


cdef inline Connection *next_ready(State *s) noexcept nogil:
    cdef Connection *c = s.ready_first
    if c != NULL:
        s.ready_first = c.next_ready
        if s.ready_first == NULL:
            s.ready_last = NULL
        c.ready = False
    return c
