# Progress of an RDMA endpoint, besides sending: kernel events, arrived messages, and messages that
# wait for room. Runs on the driving thread.
from libc.stdint cimport uint64_t

from bpsx.system.sync cimport atomic_load, atomic_store, lock, unlock
from bpsx.transports.abi cimport Message
from bpsx.transports.rdma.receive cimport next_message, take_waiting
from bpsx.transports.sockets.epoll cimport (
    EPOLL_CTL_ADD, EPOLL_CTL_DEL, EPOLLIN, EVENTS, epoll_event, epoll_set, epoll_wait,
)
from bpsx.transports.sockets.peers cimport read, room_for_peer
from bpsx.transports.rdma.connection cimport POLLED, Connection, EndpointState, let_go, lose
from bpsx.transports.rdma.ended cimport end, free_ended
from bpsx.transports.rdma.memory_region cimport add_range
from bpsx.transports.rdma.verbs cimport (
    ibv_ack_cq_events, ibv_cq, ibv_get_cq_event, ibv_poll_cq, ibv_req_notify_cq,
)
from bpsx.transports.rdma.send cimport can_send_returns, flush, has_returns, send_returns


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


cdef inline void look(EndpointState *s, int timeout_ms) noexcept nogil:
    """Wait for kernel events and handle them: wake-ups, completions, and peers that have gone."""
    cdef epoll_event events[EVENTS]
    cdef uint64_t drained = 0
    cdef ibv_cq *cq = NULL
    cdef void *context = NULL
    cdef Connection *c
    cdef int i, n
    s.since = 0
    n = epoll_wait(s.epoll, events, EVENTS, timeout_ms)
    for i in range(n):
        if events[i].data.ptr == NULL:
            read(s.wake_fd, &drained, sizeof(drained))
            s.woken = True      # the next wait returns at once
        elif events[i].data.ptr == s:
            while ibv_get_cq_event(s.channel, &cq, &context) == 0:
                ibv_ack_cq_events(cq, 1)
                c = s.all
                while c != NULL:
                    if c.cq == cq:
                        c.completions.armed = False
                    c = c.next
        else:
            c = <Connection *>events[i].data.ptr
            c.ends = True       # what the peer wrote before has arrived already
            epoll_set(s.epoll, EPOLL_CTL_DEL, c.fd, 0, NULL)


cdef inline int from_one(EndpointState *s, Connection *c, Message *m) noexcept nogil:
    """Receive from one connection. Return 1 if *m is filled, else 0.

    Also posts messages that wait for room, where there is some.
    """
    cdef int got = 1 if take_waiting(c, m) else 0 if c.dead else next_message(s, c, m)
    if (
        not c.dead
        and (
            got < 0
            or flush(s, c) < 0
            or (has_returns(c, False) and send_returns(s, c, False) < 0)
        )
    ):
        lose(s, c)              # a received message stays valid as long as the endpoint
    return max(got, 0)


cdef inline bint is_busy(EndpointState *s, Connection *c) noexcept nogil:
    """Whether the connection has work; if not, its next completion raises an event."""
    if c.dead:
        return c.inbound.first_waiting != NULL
    if (
        c.completions.at < c.completions.n
        or c.inbound.first_waiting != NULL
        or (atomic_load(&c.tokens.n) and can_send_returns(c))
    ):
        return True
    if not c.completions.armed:
        c.completions.armed = ibv_req_notify_cq(c.cq, 0) == 0
        # Completions from before the request raise no event, so poll once more.
        c.completions.at, c.completions.n = 0, ibv_poll_cq(c.cq, POLLED, c.completions.found)
        c.completions.n = max(c.completions.n, 0)       # a failed poll will fail again
        return c.completions.n > 0
    return False


cdef inline bint see_to(EndpointState *s, Connection *c) noexcept nogil:
    """Post what there is room for, and return tokens.

    True: the connection has been lost, so others may use its room in the outbox.
    """
    if c.dead or (flush(s, c) >= 0 and send_returns(s, c, True) >= 0):
        return False
    lose(s, c)
    return True
