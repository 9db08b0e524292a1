# The end of a connection to a peer that has been dropped, or replaced by a new connection. Runs on
# the driving thread.
#
# The queue pair goes at once: from then on the adapter writes nothing of that peer anywhere. The
# inbox stays registered until the last message in it has been released. Until then the
# lane reads it, or the adapter sends it to other peers.
#
# New connections are taken over here, because one that a worker has made again ends the older one.
from libc.stdint cimport uint32_t, uint64_t
from libc.stdlib cimport free
from posix.mman cimport munmap
from posix.unistd cimport close as close_descriptor

from bpsx.system.sync cimport atomic_load, atomic_store, lock, monitor_destroy, unlock
from bpsx.transports.abi cimport Message
from bpsx.transports.rdma.allocator cimport units_free
from bpsx.transports.rdma.connection cimport (
    Connection, EndpointState, let_go, release_message, take_waiting,
)
from bpsx.transports.rdma.memory_region cimport add_range, remove_range
from bpsx.transports.rdma.verbs cimport ibv_dereg_mr, ibv_destroy_cq, ibv_destroy_qp
from bpsx.transports.sockets.epoll cimport EPOLL_CTL_ADD, EPOLL_CTL_DEL, EPOLLIN, epoll_set
from bpsx.transports.sockets.peers cimport forget_loss, room_for_peer


cdef inline void free_connection(Connection *c) noexcept nogil:
    """Free its memory, but nothing of the adapter."""
    cdef Message unread
    while take_waiting(c, &unread):
        release_message(&unread)
    if c.fd >= 0:
        close_descriptor(c.fd)
    free(c.outbound.lent)
    units_free(&c.outbound.inbox_units)
    monitor_destroy(&c.tokens.monitor)
    free(c)


cdef inline void free_inbox(Connection *c) noexcept nogil:
    if c.mr != NULL:
        ibv_dereg_mr(c.mr)
        munmap(c.inbound.inbox, c.mapped)
    c.mr, c.inbound.inbox = NULL, NULL


cdef inline void close_pair(EndpointState *s, Connection *c) noexcept nogil:
    """Destroy the queue pair, close the TCP connection, and return no more tokens."""
    if not c.dead:
        let_go(c)
    if c.qp != NULL:
        ibv_destroy_qp(c.qp)
        ibv_destroy_cq(c.cq)
    c.qp, c.cq = NULL, NULL
    if c.fd >= 0:
        # A forked child may have the connection, too, so its close alone does not end the events.
        epoll_set(s.epoll, EPOLL_CTL_DEL, c.fd, 0, NULL)
        close_descriptor(c.fd)
        c.fd = -1
    lock(&c.tokens.monitor)
    c.tokens.open = False
    atomic_store(&c.tokens.n, 0)
    unlock(&c.tokens.monitor)


cdef inline void free_all(EndpointState *s, Connection *c, bint ours) noexcept nogil:
    """Free a list of connections without running callbacks.

    ``ours`` is false in a forked child, which has nothing of the adapter.
    """
    cdef Connection *following
    while c != NULL:
        following = c.next
        if ours:
            c.dead = True
            close_pair(s, c)
            free_inbox(c)
        free_connection(c)
        c = following


cdef inline void free_ended(EndpointState *s) noexcept nogil:
    """Free the ended connections of which all messages have been released."""
    cdef Connection **at = &s.ended
    cdef Connection *c
    cdef bint unused
    atomic_store(&s.n_released, 0)
    while at[0] != NULL:
        c = at[0]
        lock(&c.tokens.monitor)
        unused = c.tokens.released == c.inbound.held
        unlock(&c.tokens.monitor)
        if unused:
            at[0] = c.next
            remove_range(&s.memory, <uint64_t>c.inbound.inbox)
            free_inbox(c)
            free_connection(c)
        else:
            at = &c.next


cdef inline void end(EndpointState *s, Connection *c) noexcept nogil:
    """End a connection for ever. What it has received and recv has not returned is dropped."""
    cdef Connection **at = &s.all
    cdef Message unread
    while at[0] != c:
        at = &at[0].next
    lock(&s.monitor)
    at[0] = c.next
    unlock(&s.monitor)
    if s.next_to_read == c:
        s.next_to_read = c.next
    if c.peer < s.peers.capacity and s.peers.at[c.peer] == c:
        s.peers.at[c.peer] = NULL
    close_pair(s, c)
    while take_waiting(c, &unread):
        release_message(&unread)
    c.next, s.ended = s.ended, c
    free_ended(s)


cdef inline void take_new(EndpointState *s) noexcept nogil:
    """Add the connections that other threads made since the last call."""
    cdef Connection *c
    cdef Connection *following
    if atomic_load(&s.n_released):
        free_ended(s)
    if atomic_load(&s.n_new) == 0:
        return
    lock(&s.monitor)
    c, s.new = s.new, NULL
    atomic_store(&s.n_new, 0)
    unlock(&s.monitor)
    while c != NULL:
        following = c.next
        c.next, s.all = s.all, c
        add_range(
            &s.memory, <uint64_t>c.inbound.inbox, c.inbound.inbox_bytes, c.inbound.small_lkey, NULL
        )
        if room_for_peer(&s.peers, c.peer) and s.peers.at[c.peer] != NULL:
            # Another worker of this rank, or the same once more: each has shown a new number.
            end(s, <Connection *>s.peers.at[c.peer])
        if (
            c.peer < s.peers.capacity
            and epoll_set(s.epoll, EPOLL_CTL_ADD, c.fd, EPOLLIN, c) == 0
        ):
            s.peers.at[c.peer] = c
        else:
            let_go(c)
        c = following


cdef inline void rdma_drop(void *self, uint32_t peer) noexcept nogil:
    cdef EndpointState *s = <EndpointState *>self
    cdef Connection *c
    take_new(s)
    c = <Connection *>s.peers.at[peer] if peer < s.peers.capacity else NULL
    if c != NULL:
        end(s, c)
    forget_loss(&s.losses, peer)
