# Receives messages from the transport and moves their partitions on.
from libc.stddef cimport size_t
from libc.stdint cimport int64_t, uint32_t
from libc.string cimport memcmp, memcpy

from bpsx.core.stream_copy cimport copy_nontemporal
from bpsx.core.wire cimport (
    ANSWER, APPLIED, ERROR, FETCH, LEFT, PONG, PROOF_BYTES, SETTLED, SNAP, TOOK, VALUE, WANT,
    Header, next_record,
)
from bpsx.core.codec.state cimport most_bytes, server_state_bytes
from bpsx.core.commit cimport commit, hold_answer, use_packed
from bpsx.core.keep cimport (
    closes_round, keep_error, keep_result, pool_copies, send_acks, take_settled,
)
from bpsx.core.late cimport note_ready
from bpsx.core.logs cimport note_no_sum, note_set, numbers_in, take_snapshot
from bpsx.core.moves cimport give, give_state, note_left, note_taken
from bpsx.core.partition cimport PULL, Partition, SumNumbers, Tensor, cookie_of
from bpsx.core.peak cimport note_received
from bpsx.core.stage cimport advance, end_partition, fail_core, fail_partition
from bpsx.core.state cimport Core
from bpsx.core.status cimport E_COMPRESSOR, E_JOINED, E_MEMORY, E_PROTOCOL
from bpsx.core.trace.recorder cimport watched
from bpsx.core.trace.worker cimport print_message
from bpsx.core.values cimport keeps_values, take_applied
from bpsx.transports.abi cimport Message

cdef enum:
    MESSAGES_AT_ONCE = 32       # after that many messages the send queues get a turn,
    BYTES_AT_ONCE = 1 << 20     # ... and after copying that many bytes, before the links run idle


cdef inline Partition *named(Core *c, Header *h) noexcept nogil:
    """The partition of this worker that a record's cookie and key name; NULL: there is none."""
    cdef uint32_t index = <uint32_t>h.cookie
    return c.table.at[index] if index < c.table.n and c.table.at[index].key == h.key else NULL


cdef inline int take_error(Core *c, Partition *p, Header *h) noexcept nogil:
    """Handle an ERROR: `divisor` is -status, `slot` and `term` are ranks. Returns 0."""
    cdef Tensor *tensor = p.tensor
    # E_COMPRESSOR is the lowest status that a lane sends.
    cdef int status = -<int>h.divisor if E_COMPRESSOR <= -<int>h.divisor <= -1 else E_PROTOCOL
    if not keep_error(c, p, status, h.slot, h.term):
        fail_core(c, E_MEMORY)
        return 0
    if closes_round(status) and not c.settings.shrinks:
        note_no_sum(p)
    if c.settings.shrinks and closes_round(status):
        hold_answer(c, p)
        return 0
    if status == E_JOINED:
        # Report the rank of the broadcast's root: the server may know only machines.
        h.slot = tensor.current.divisor
    fail_partition(c, p, status, h.slot, h.term)
    if c.settings.shrinks:
        commit(c, tensor)
    return 0


cdef inline bint is_stale(Core *c, Header *h) noexcept nogil:
    """Whether a record is about a push of an earlier term, which was made again.

    Transports may let LEFT overtake an answer. Then another lane will have the same outcome.
    """
    cdef Partition *p
    if h.kind != ANSWER and h.kind != ERROR and h.kind != SNAP and h.kind != VALUE:
        return False
    p = named(c, h)
    return p != NULL and h.cookie >> 32 < p.term


cdef inline int take_value(
    Core *c, Message *m, Header *h, char *body, bint *taken
) noexcept nogil:
    """Handle a VALUE: keep it. Arguments and result as for take_record()."""
    cdef Partition *p = named(c, h)
    if c.moving.applied == NULL or p == NULL or p.lane != m.peer or h.length != p.length:
        return -1
    if not keep_result(c, p, m, body, h.length, False, taken):
        fail_core(c, E_MEMORY)
    return 0


cdef inline int take_elastic(
    Core *c, Message *m, Header *h, char *body, bint *taken
) noexcept nogil:
    """Handle a record of a kind that only elastic jobs have; arguments as for take_record()."""
    if h.kind == SETTLED:
        return take_settled(c, m.peer, h, body)
    if h.kind == SNAP:
        return take_snapshot(c, m, h, body, taken)
    if h.kind == WANT or h.kind == FETCH:
        if h.term < c.moving.era:
            c.counters.stale += 1
            return 0
        return give(c, h) if h.kind == WANT else give_state(c, h)
    if h.kind == TOOK:
        return note_taken(c, m.peer, h.term)
    if h.kind == LEFT:
        return note_left(c, m.peer, h)
    if h.kind == APPLIED:
        return take_applied(c, h, body)
    if h.kind == VALUE:
        return take_value(c, m, h, body, taken)
    return -1


cdef inline int take_record(
    Core *c, Message *m, Header *h, char *body, bint *taken
) noexcept nogil:
    """Handle one record. Returns 0, or -1 if it is invalid.

    *taken: the message now belongs to its partition, which keeps the result.
    """
    cdef Partition *p
    cdef SumNumbers numbers
    cdef bint uncopied = False
    if h.job != c.settings.job or h.sender != c.settings.rank:
        return -1
    if h.kind == PONG:
        if h.length != PROOF_BYTES or memcmp(body, c.lanes.at[m.peer].proof, PROOF_BYTES) != 0:
            # Wrong proof: the lane stays not ready, so greet() reports it and init() fails.
            return -1
        if not c.lanes.at[m.peer].ready:
            note_ready(c, m.peer)
        return 0
    if c.settings.elastic and is_stale(c, h):
        c.counters.stale += 1
        return 0
    if c.settings.elastic and h.kind != ANSWER and h.kind != ERROR:
        return take_elastic(c, m, h, body, taken)
    p = named(c, h) if h.kind == ANSWER or h.kind == ERROR else NULL
    if (
        p == NULL or p.lane != m.peer or p.round - p.joined_at != h.round
        or h.cookie != cookie_of(p)
        or h.kind == ANSWER and c.moving.applied == NULL and keeps_values(c)
    ):
        return -1
    if watched(c.watch):
        print_message(c, b"received ANSWER" if h.kind == ANSWER else b"received ERROR", h, m.peer)
    if p.stage != PULL or p.answered:
        # its round has failed meanwhile: the reply is late, not invalid
        return 0
    if h.kind == ERROR:
        return take_error(c, p, h)
    if p.is_codec_state:
        if h.length != server_state_bytes(p.packed):
            return -1
        memcpy(p.target, body, h.length)
        if not note_set(c, p, h, body):
            fail_core(c, E_MEMORY)
        end_partition(c, p)
        return 0
    if p.packed != NULL:
        if h.length > most_bytes(p.packed):
            return -1
        numbers = numbers_in(h)
        if not c.settings.shrinks:
            use_packed(c, p, &numbers, body, h.length)
    elif h.length != p.length:
        return -1
    elif not c.settings.shrinks:
        uncopied = pool_copies(c, p, m, body)
        if p.length and body != p.target and not uncopied:
            copy_nontemporal(p.target, body, p.length)
    if not keep_result(c, p, m, body, h.length, uncopied, taken):
        fail_core(c, E_MEMORY)
        if c.settings.shrinks or uncopied:
            return 0            # the result is nowhere; the core's failure ends the task
    elif c.settings.shrinks:
        if p.packed != NULL:
            p.kept.numbers = numbers
        hold_answer(c, p)
        return 0
    advance(c, p)
    return 0


cdef inline int pump_in(Core *c) noexcept nogil:
    """Handle messages that have arrived, up to a bound. Returns their number."""
    cdef Message m
    cdef Header h
    cdef char *body = NULL
    cdef size_t at
    cdef int n = 0, more
    cdef bint taken
    cdef int64_t enough = c.counters.received + BYTES_AT_ONCE
    while (
        n < MESSAGES_AT_ONCE
        and c.counters.received < enough
        and c.endpoint.recv(c.endpoint.self, &m) == 1
    ):
        n += 1
        # counted before any thread can see that a push_pull has ended
        c.counters.messages_in += 1
        c.counters.received += m.head_size + m.body_size
        at = 0
        taken = False
        c.moving.applied = NULL
        more = -1 if m.peer >= c.lanes.n else 1
        if more > 0 and not c.lanes.at[m.peer].server.beside:
            c.counters.peak.received += m.head_size + m.body_size
        if more > 0 and c.lanes.at[m.peer].lost:
            # Its partitions move: what it still sends comes too late.
            c.counters.stale += 1
            more = 0
        # The first invalid record discards the rest of the message.
        while more > 0:
            more = next_record(m.head, m.head_size, m.body, m.body_size, m.has_body, &at, &h, &body)
            if more > 0 and take_record(c, &m, &h, body, &taken) != 0:
                more = -1
            if more > 0 and h.kind != APPLIED:
                c.moving.applied = NULL
        if more < 0:
            c.counters.malformed += 1
        if not taken:
            c.endpoint.release(c.endpoint.self, &m)
        if m.peer < c.lanes.n:
            send_acks(c, m.peer)
    if n:
        note_received(c)
    return n
