# Outcomes that a worker keeps for workers that may lack them when a server is lost, and the
# acknowledgements that end this. docs/internals/elastic.md has the reasons.
#
# A result is kept until the lane says that all senders have got it (SETTLED), at the latest until
# the next outcome of the same partition: a round closes only when all have pushed, so by then all
# have got the one before. Acknowledgements travel with the next frame to their lane.
from libc.stdint cimport uint32_t, uint64_t
from libc.stdlib cimport calloc, free, malloc
from libc.string cimport memcpy

from bpsx.core.partition cimport COPY, Kept, Lane, Partition
from bpsx.core.state cimport Core
from bpsx.core.status cimport DONE, E_LEFT, E_PROTOCOL
from bpsx.core.values cimport is_newer, keep_applied
from bpsx.core.wire cimport (
    ACK, HEADER_BYTES, INLINE, LEAST_ACKNOWLEDGED, PROMPT_BYTES, Header, Settlement,
    header_init,
)
from bpsx.system.arrays cimport make_room
from bpsx.transports.abi cimport Message

cdef enum:
    MOST_ACKS = 256             # in one record


cdef inline void forget_kept(Core *c, Partition *p) noexcept nogil:
    """Free the partition's kept outcome, if there is one; not the room for copies."""
    cdef Kept *kept = p.kept
    if kept == NULL or not kept.held:
        return
    kept.held = False
    c.counters.kept -= kept.length
    if kept.in_message:
        kept.in_message = False
        c.endpoint.release(c.endpoint.self, &kept.message)
    elif kept.length > LEAST_ACKNOWLEDGED:
        free(kept.memory)
        kept.memory = NULL


cdef inline Kept *begin_keeping(Core *c, Partition *p) noexcept nogil:
    """Replace the partition's kept outcome by an empty one. NULL: no memory."""
    if p.kept == NULL:
        p.kept = <Kept *>calloc(1, sizeof(Kept))
        if p.kept == NULL:
            return NULL
    forget_kept(c, p)
    p.kept.held = True
    p.kept.outcome.status, p.kept.outcome.a, p.kept.outcome.b = DONE, 0, 0
    p.kept.round = p.round - p.joined_at
    p.kept.length, p.kept.body = 0, NULL
    p.kept.uncopied = p.kept.settled = False
    return p.kept


cdef inline bint closes_round(int status) noexcept nogil:
    """Whether an error is the outcome of a round. The others answer a single push: not all have
    pushed.
    """
    return status != E_LEFT and status != E_PROTOCOL


cdef inline bint keep_error(
    Core *c, Partition *p, int status, uint32_t a, uint32_t b
) noexcept nogil:
    """Keep the error of a round that all have pushed. False: no memory."""
    cdef Kept *kept
    if not c.settings.elastic or c.settings.asynchronous or not closes_round(status):
        return True             # the outcome of the round before, or the value, may be needed
    kept = begin_keeping(c, p)
    if kept == NULL:
        return False
    kept.outcome.status, kept.outcome.a, kept.outcome.b = status, a, b
    return True


cdef inline uint64_t room_for_small(Partition *p) noexcept nogil:
    """Bytes of the longest result of a partition that is not acknowledged; at least 1."""
    return max(
        min(p.length, <uint64_t>LEAST_ACKNOWLEDGED) if p.packed == NULL else LEAST_ACKNOWLEDGED,
        <uint64_t>1
    )


cdef inline bint acknowledges_at_once(Core *c) noexcept nogil:
    """Whether results are acknowledged when they arrive.

    A job that shrinks acknowledges a result at its commit: it may be summed again until then. A
    value of an asynchronous job is kept until a newer one comes.
    """
    return not c.settings.shrinks and not c.settings.asynchronous


cdef inline bint pool_copies(Core *c, Partition *p, Message *m, const char *body) noexcept nogil:
    """Whether a thread of the pool copies an answer: the message stays until then."""
    return (
        0 < c.settings.copies_from <= p.length and p.packed == NULL and body != p.target
        and c.endpoint.keeps and m.has_body and body == m.body
    )


cdef inline bint is_uncopied(Partition *p) noexcept nogil:
    """Whether the kept answer still has to be copied."""
    return p.kept != NULL and p.kept.held and p.kept.uncopied


cdef inline bint end_copy(Core *c, Partition *p) noexcept nogil:
    """End an answer's copy, done or cancelled: acknowledge the answer, or forget it if not needed.

    False: no memory.
    """
    cdef Kept *kept = p.kept
    cdef uint32_t peer = kept.message.peer
    kept.uncopied = False
    # All workers may have joined meanwhile.
    if not c.settings.elastic or kept.settled or kept.round != p.round - p.joined_at:
        forget_kept(c, p)
    elif p.lane == peer and not c.lanes.at[peer].lost:
        if not note_arrival(&c.lanes.at[peer], p):
            return False
        send_acks(c, peer)
    return True


cdef inline bint keep_result(
    Core *c, Partition *p, Message *m, char *body, uint64_t length, bint uncopied, bint *taken
) noexcept nogil:
    """Keep a result. *taken: the message `m` now belongs to the partition. False: no memory.

    ``uncopied``: a thread of the pool is to copy it from there, and then it is acknowledged.
    """
    cdef Kept *kept
    if not uncopied and (
        not c.settings.elastic or c.settings.asynchronous and not is_newer(c, p)
    ):
        return True
    kept = begin_keeping(c, p)
    if kept == NULL or c.settings.asynchronous and not keep_applied(c, kept):
        return False
    kept.length = length
    c.counters.kept += length
    kept.uncopied = uncopied
    if (
        length > LEAST_ACKNOWLEDGED and acknowledges_at_once(c) and not uncopied
        and not note_arrival(&c.lanes.at[p.lane], p)
    ):
        return False
    if c.endpoint.keeps and m.has_body and body == m.body and length:
        kept.message, kept.in_message, kept.body = m[0], True, body
        taken[0] = True
        return True
    if length > LEAST_ACKNOWLEDGED or kept.memory == NULL:
        free(kept.memory)
        kept.memory = <char *>malloc(max(length, room_for_small(p)))
        if kept.memory == NULL:
            return False
    kept.body = kept.memory
    if length:
        memcpy(kept.memory, body, length)
    return True


cdef inline bint note_arrival(Lane *lane, Partition *p) noexcept nogil:
    """Remember to acknowledge the result of the partition's present round. False: no memory."""
    if not make_room(&lane.acks, &lane.acks_capacity, lane.n_acks + 1, sizeof(Settlement)):
        return False
    lane.acks[lane.n_acks].which = p.slot
    lane.acks[lane.n_acks].round = p.round - p.joined_at
    lane.n_acks += 1
    lane.acks_bytes += p.length
    return True


cdef inline uint64_t acks_size(Lane *lane) noexcept nogil:
    """Bytes of the record that put_acks() would write."""
    if lane.n_acks == 0:
        return 0
    return HEADER_BYTES + min(lane.n_acks, <uint32_t>MOST_ACKS) * sizeof(Settlement)


cdef inline char *put_acks(Core *c, Lane *lane, char *at) noexcept nogil:
    """Write a record with the latest of the lane's acknowledgements at `at`, if there are any.

    Returns the address for the next record.
    """
    cdef Header h
    cdef uint32_t n = min(lane.n_acks, <uint32_t>MOST_ACKS)
    if n == 0:
        return at
    header_init(&h, ACK, c.settings.job, c.settings.rank)
    h.flags = INLINE
    h.length = n * sizeof(Settlement)
    lane.n_acks -= n
    lane.acks_bytes = 0
    memcpy(at, &h, HEADER_BYTES)
    memcpy(at + HEADER_BYTES, lane.acks + lane.n_acks, h.length)
    return at + HEADER_BYTES + h.length


cdef inline void acknowledge_all(Core *c) noexcept nogil:
    """Acknowledge results that many lanes have sent, as after the commit of a group."""
    cdef uint32_t i
    for i in range(c.lanes.n_living):
        send_acks(c, c.lanes.living[i])


cdef inline void send_acks(Core *c, uint32_t peer) noexcept nogil:
    """Acknowledge a lane's results in a message of its own if they have many bytes."""
    cdef char frame[HEADER_BYTES + MOST_ACKS * 8]
    cdef Lane *lane = &c.lanes.at[peer]
    cdef char *end
    if lane.acks_bytes < PROMPT_BYTES or lane.mute:
        return
    end = put_acks(c, lane, frame)
    c.counters.sent += end - frame
    c.counters.messages_out += 1
    if c.endpoint.send(
        c.endpoint.self, peer, frame, end - frame, NULL, NULL, NULL, 0, NULL, NULL, NULL
    ) != 0:
        lane.mute = True


cdef inline int take_settled(
    Core *c, uint32_t peer, Header *h, const char *body
) noexcept nogil:
    """Free the kept results that all senders have got. Returns 0, or -1 if the record is invalid.
    """
    cdef Settlement item
    cdef Partition *p
    cdef uint64_t at = 0
    if h.length == 0 or h.length % sizeof(Settlement):
        return -1
    while at < h.length:
        memcpy(&item, body + at, sizeof(Settlement))
        at += sizeof(Settlement)
        if item.which >= c.table.n:
            return -1
        p = c.table.at[item.which]
        # A later round's outcome may have replaced it.
        if p.lane == peer and p.kept != NULL and p.kept.round == item.round:
            if p.stage == COPY:
                p.kept.settled = True
            else:
                forget_kept(c, p)
    return 0
