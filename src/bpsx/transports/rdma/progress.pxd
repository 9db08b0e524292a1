# Progress of an RDMA endpoint, besides sending and receiving: kernel events, and messages that wait
# for room. Runs on the driving thread.
from libc.stdint cimport uint64_t

from bpsx.system.sync cimport atomic_load
from bpsx.transports.sockets.epoll cimport (
    EPOLL_CTL_DEL, EVENTS, epoll_event, epoll_set, epoll_wait,
)
from bpsx.transports.sockets.peers cimport read
from bpsx.transports.rdma.connection cimport POLLED, Connection, EndpointState, lose
from bpsx.transports.rdma.verbs cimport (
    ibv_ack_cq_events, ibv_cq, ibv_get_cq_event, ibv_poll_cq, ibv_req_notify_cq,
)
from bpsx.transports.rdma.send cimport can_send_returns, flush, send_returns


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
