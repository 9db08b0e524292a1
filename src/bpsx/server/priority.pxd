# Priority queue of received messages, for BYTEPS_SERVER_ENABLE_SCHEDULE.
from libc.stddef cimport size_t
from libc.stdint cimport int64_t, uint32_t

from bpsx.core.wire cimport PING, PUSH, Header, next_record
from bpsx.system.arrays cimport make_room
from bpsx.system.sync cimport now_ns
from bpsx.server.lane cimport Lane, Pending
from bpsx.transports.abi cimport Message


cdef inline bint more_urgent(Pending *a, Pending *b) noexcept nogil:
    return a.urgency > b.urgency or (a.urgency == b.urgency and a.order < b.order)


cdef inline int64_t urgency_of(Message *m) noexcept nogil:
    """Return the highest priority in a message; control records go first."""
    cdef Header h
    cdef char *body = NULL
    cdef size_t at = 0
    cdef int64_t best = -(<int64_t>1 << 40)
    while next_record(m.head, m.head_size, m.body, m.body_size, m.has_body, &at, &h, &body) > 0:
        if h.kind == PING:
            return <int64_t>1 << 40
        if h.kind == PUSH:
            best = max(best, <int64_t>h.priority)
    return best if best > -(<int64_t>1 << 40) else <int64_t>1 << 40


cdef inline bint keep_pending(Lane *lane, Message *m) noexcept nogil:
    cdef uint32_t i
    cdef Pending item
    if not make_room(
        &lane.pending.items, &lane.pending.capacity, lane.pending.n + 1, sizeof(Pending)
    ):
        return False
    item.message = m
    item.urgency = urgency_of(m)
    item.order = lane.pending.arrivals
    item.arrived = now_ns()
    lane.pending.arrivals += 1
    i = lane.pending.n
    lane.pending.n += 1
    # Sorted, the most urgent last. Messages arrive mostly in order of urgency, so few are moved.
    while i > 0 and more_urgent(&lane.pending.items[i - 1], &item):
        lane.pending.items[i] = lane.pending.items[i - 1]
        i -= 1
    lane.pending.items[i] = item
    return True
