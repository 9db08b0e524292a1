# Replies of a closed round. All workers share the buffer of a large result; small results are
# batched per worker.
from libc.stddef cimport size_t
from libc.stdint cimport int64_t, uint8_t, uint32_t, uint64_t
from libc.stdlib cimport free, malloc
from libc.string cimport memcpy, memset

from bpsx.core.wire cimport (
    ANSWER, APPLIED, BATCH_BYTES, ERROR, HEADER_BYTES, INLINE, INLINE_BYTES, LEAST_ACKNOWLEDGED,
    PONG, PROMPT_BYTES, PROOF_BYTES, SETTLED, Header, Settlement, header_init, padded, set_counter,
)
from bpsx.core.status cimport E_CODEC, E_JOINED, E_MEMORY, E_MISMATCH, E_PEER_LOST
from bpsx.system.arrays cimport make_room
from bpsx.system.sync cimport atomic_add
from bpsx.server.lane cimport Lane, Out
from bpsx.server.trace cimport note_closed, note_closing
from bpsx.server.compressed cimport encode_sum
from bpsx.server.store cimport (
    EMPTY, OPEN, KeyState, end_round, fail_sum, finish_sum, memory_for,
)
from bpsx.transports.abi cimport Landing, Message

cdef enum:
    MOST_SETTLED = 256          # results in one record
    MOST_SETTLED_BYTES = HEADER_BYTES + MOST_SETTLED * 8

# A result on its way to several workers. Its memory is released with the last of them.
cdef struct Result:
    Lane *lane
    Message *message            # message that holds the result, or NULL
    char *memory                # else memory that holds it, to be freed
    int64_t references


cdef inline void let_go(Lane *lane, Message *m) noexcept nogil:
    if m != NULL:
        lane.endpoint.release(lane.endpoint.self, m)
        free(m)


cdef inline void result_done(void *data, void *hint) noexcept nogil:
    cdef Result *r = <Result *>hint
    if atomic_add(&r.references, -1) == 0:
        let_go(r.lane, r.message)
        free(r.memory)
        free(r)


cdef inline void frame_done(void *data, void *hint) noexcept nogil:
    free(data)


cdef inline void flush(Lane *lane, uint32_t sender) noexcept nogil:
    """Send the batch of a worker."""
    cdef Out *out = &lane.outs[sender]
    if out.frame == NULL:
        return
    lane.endpoint.send(
        lane.endpoint.self, sender, out.frame, out.size, frame_done, NULL, NULL, 0, NULL, NULL, NULL
    )
    if lane.watch != NULL:
        lane.watch.server.sent += out.size
    out.frame = NULL
    out.size = 0
    lane.counters.messages_out += 1


cdef inline void flush_all(Lane *lane) noexcept nogil:
    cdef uint32_t sender
    for sender in range(lane.settings.senders):
        flush(lane, sender)


cdef inline char *put_settled(Lane *lane, uint32_t sender, char *at) noexcept nogil:
    """Write a record with the results that all have got at `at`, if there are any.

    Returns the address for the next record; at most MOST_SETTLED_BYTES further.
    """
    cdef Header h
    cdef Out *out = &lane.outs[sender]
    if out.n_settled == 0:
        return at
    header_init(&h, SETTLED, lane.settings.job, sender)
    h.flags = INLINE
    h.length = out.n_settled * sizeof(Settlement)
    memcpy(at, &h, HEADER_BYTES)
    memcpy(at + HEADER_BYTES, out.settled, h.length)
    out.n_settled, out.settled_bytes = 0, 0
    return at + HEADER_BYTES + h.length


cdef inline void send_settled(Lane *lane, uint32_t sender) noexcept nogil:
    """Tell a sender which results all have got, in a message of its own."""
    cdef char frame[MOST_SETTLED_BYTES]
    cdef char *end = put_settled(lane, sender, frame)
    lane.endpoint.send(
        lane.endpoint.self, sender, frame, end - frame, NULL, NULL, NULL, 0, NULL, NULL, NULL
    )
    if lane.watch != NULL:
        lane.watch.server.sent += end - frame
    lane.counters.messages_out += 1


cdef inline void note_settled(Lane *lane, KeyState *e, uint32_t sender) noexcept nogil:
    """Remember to tell a sender that all have got the latest result of its key.

    Without memory the sender keeps the result until the next one.
    """
    cdef Out *out = &lane.outs[sender]
    if out.n_settled == MOST_SETTLED or not make_room(
        &out.settled, &out.settled_capacity, out.n_settled + 1, sizeof(Settlement)
    ):
        return
    out.settled[out.n_settled].which = <uint32_t>e.shares[sender].cookie
    out.settled[out.n_settled].round = e.shares[sender].round - 1
    out.n_settled += 1
    out.settled_bytes += e.nbytes
    if out.settled_bytes >= PROMPT_BYTES:
        send_settled(lane, sender)


cdef inline int take_acks(
    Lane *lane, uint32_t sender, Header *h, const char *body
) noexcept nogil:
    """Handle an ACK: note the results that a sender has got. -1: malformed.

    Items of earlier rounds mean nothing any more.
    """
    cdef Settlement item
    cdef KeyState *e
    cdef uint32_t other
    cdef uint64_t at = 0
    if body == NULL or h.length % sizeof(Settlement):
        return -1
    while at < h.length:
        memcpy(&item, body + at, sizeof(Settlement))
        at += sizeof(Settlement)
        e = lane.keys.at[item.which] if item.which < lane.keys.n else NULL
        if e == NULL and lane.yields.n and item.which < lane.keys.n:
            continue            # the lane has yielded the key
        if e == NULL:
            return -1
        if (
            not e.shares[sender].unacknowledged
            or e.shares[sender].round != item.round + 1
        ):
            continue
        e.shares[sender].unacknowledged = False
        e.unacknowledged -= 1
        for other in range(lane.settings.senders if e.unacknowledged == 0 else 0):
            if e.shares[other].settles:
                e.shares[other].settles = False
                note_settled(lane, e, other)
    return 0


cdef inline void await_acks(Lane *lane, KeyState *e) noexcept nogil:
    """Note that the senders of the open round, which is being closed, get a result.

    In an asynchronous job senders acknowledge nothing: they keep each result until the next one.
    """
    cdef uint32_t sender
    if lane.settings.asynchronous:
        return
    for sender in range(lane.settings.senders):
        e.shares[sender].unacknowledged = e.shares[sender].settles = e.shares[sender].pushed
    e.unacknowledged = e.round.pushed


cdef inline bint has_room(Lane *lane, uint32_t sender, size_t size) noexcept nogil:
    """Make room for `size` bytes of records in a worker's batch. False: no memory.

    Without memory the records are lost and counted, which ends the lane and so the job.
    """
    cdef Out *out = &lane.outs[sender]
    if out.frame != NULL and out.size + size > BATCH_BYTES:
        flush(lane, sender)
    if out.frame == NULL:
        out.frame = <char *>malloc(max(<size_t>BATCH_BYTES, size) + MOST_SETTLED_BYTES)
        if out.frame == NULL:
            lane.counters.dropped += 1
            return False
        out.size = put_settled(lane, sender, out.frame) - out.frame
    return True


cdef inline char *write_record(char *at, Header *h, const char *body) noexcept nogil:
    """Write a record with its body at `at`. Returns the address for the next record."""
    h.flags |= INLINE
    memcpy(at, h, HEADER_BYTES)
    at += HEADER_BYTES
    if h.length and body != NULL:
        memcpy(at, body, h.length)
        memset(at + h.length, 0, padded(h.length) - h.length)
    return at + padded(h.length)


cdef inline void put_record(Lane *lane, uint32_t sender, Header *h, char *body) noexcept nogil:
    """Add a record to a worker's batch."""
    cdef Out *out = &lane.outs[sender]
    if has_room(lane, sender, HEADER_BYTES + padded(h.length)):
        out.size = write_record(out.frame + out.size, h, body) - out.frame


# ---- what the values of an asynchronous job contain

cdef inline void count_applied(Lane *lane, KeyState *e, bint closes) noexcept nogil:
    """Note how many pushes of each sender are in what the next answers about a key bring.

    `closes`: its open round counts, which is being closed.
    """
    cdef uint32_t sender
    for sender in range(lane.settings.senders if lane.applied != NULL else 0):
        lane.applied[sender] = e.shares[sender].round + (closes and e.shares[sender].pushed)
        if e.takeover != NULL and e.takeover.haves[sender].late:
            lane.applied[sender] += 1


cdef inline size_t applied_size(Lane *lane) noexcept nogil:
    """Bytes of the record that put_applied() writes."""
    if lane.applied == NULL:
        return 0
    return HEADER_BYTES + padded(lane.settings.senders * sizeof(uint32_t))


cdef inline char *put_applied(Lane *lane, uint32_t sender, char *at) noexcept nogil:
    """Write what `count_applied` has noted at `at`, if the job wants it.

    Returns the address for the next record.
    """
    cdef Header h
    if lane.applied == NULL:
        return at
    header_init(&h, APPLIED, lane.settings.job, sender)
    h.length = lane.settings.senders * sizeof(uint32_t)
    return write_record(at, &h, <const char *>lane.applied)


cdef inline void put_answer(Lane *lane, uint32_t sender, Header *h, char *body) noexcept nogil:
    """Add a result to a worker's batch, and what it contains."""
    cdef Out *out = &lane.outs[sender]
    cdef char *at
    if has_room(lane, sender, applied_size(lane) + HEADER_BYTES + padded(h.length)):
        at = put_applied(lane, sender, out.frame + out.size)
        out.size = write_record(at, h, body) - out.frame


cdef inline void reply_header(
    Lane *lane, Header *h, uint8_t kind, uint32_t sender, KeyState *e, uint64_t cookie
) noexcept nogil:
    header_init(h, kind, lane.settings.job, sender)
    h.dtype = e.dtype
    h.key = e.key
    h.round = e.shares[sender].round
    h.cookie = cookie
    if e.compressed != NULL:
        h.slot, h.divisor = e.compressed.sum, e.compressed.saving.stored
        set_counter(h, e.compressed.packed.counter)


cdef inline void send_error(
    Lane *lane, uint32_t sender, uint64_t key, uint32_t round_, uint64_t cookie, int status,
    uint32_t a, uint32_t b
) noexcept nogil:
    cdef Header h
    header_init(&h, ERROR, lane.settings.job, sender)
    h.key = key
    h.round = round_
    h.cookie = cookie
    h.divisor = -status
    h.slot = a
    h.term = b
    put_record(lane, sender, &h, NULL)


cdef inline void tell_living(Lane *lane, int kind, uint32_t term) noexcept nogil:
    """Send a record without a body about a term to all senders that are there."""
    cdef Header h
    cdef uint32_t sender
    for sender in range(lane.settings.senders):
        if not lane.absent.lost[sender] and not lane.absent.departed[sender]:
            header_init(&h, kind, lane.settings.job, sender)
            h.term = term
            put_record(lane, sender, &h, NULL)


cdef inline void send_pong(Lane *lane, uint32_t sender, char *proof) noexcept nogil:
    cdef Header h
    header_init(&h, PONG, lane.settings.job, sender)
    h.length = PROOF_BYTES
    put_record(lane, sender, &h, proof)


cdef inline Result *result_in(Lane *lane, Message *m, uint32_t receivers) noexcept nogil:
    """Create a result that is in message `m`.

    Without memory the result is lost and counted, which ends the lane and so the job.
    """
    cdef Result *r = <Result *>malloc(sizeof(Result))
    if r == NULL:
        lane.counters.dropped += 1
        let_go(lane, m)
        return NULL
    r.lane = lane
    r.message = m
    r.memory = NULL
    r.references = receivers
    return r


cdef inline size_t head_bytes(Lane *lane) noexcept nogil:
    """Most bytes of the records before a large body."""
    return MOST_SETTLED_BYTES + applied_size(lane) + HEADER_BYTES


cdef inline void send_large(
    Lane *lane, uint32_t sender, Header *h, Result *r, char *body, const Landing *landing
) noexcept nogil:
    """Send a result as two frames. `landing`: that of the push it replies to, or NULL."""
    cdef char *at = put_applied(lane, sender, put_settled(lane, sender, lane.head))
    memcpy(at, h, HEADER_BYTES)
    at += HEADER_BYTES
    lane.endpoint.send(
        lane.endpoint.self, sender, lane.head, at - lane.head, NULL, NULL, body, h.length,
        result_done, r, landing
    )
    if lane.watch != NULL:
        lane.watch.server.sent += at - lane.head + h.length
    lane.counters.messages_out += 1


cdef inline void send_result(
    Lane *lane, KeyState *e, uint32_t sender, uint64_t cookie, Result *r, char *body,
    uint64_t length, const Landing *landing
) noexcept nogil:
    """Send the large result of a push. `landing`: that of the push, or NULL."""
    cdef Header h
    reply_header(lane, &h, ANSWER, sender, e, cookie)
    h.length = length
    send_large(lane, sender, &h, r, body, landing)


cdef inline void send_copy(
    Lane *lane, KeyState *e, uint32_t sender, int kind, uint64_t cookie, const char *body,
    uint64_t length
) noexcept nogil:
    """Send a copy of a large result. `kind`: ANSWER or VALUE.

    Without memory the result is lost and counted, which ends the lane and so the job.
    """
    cdef Header h
    cdef Result *r = result_in(lane, NULL, 1)
    if r == NULL:
        return
    r.memory = <char *>malloc(length)
    if r.memory == NULL:
        free(r)
        lane.counters.dropped += 1
        return
    memcpy(r.memory, body, length)
    reply_header(lane, &h, kind, sender, e, cookie)
    h.length = length
    send_large(lane, sender, &h, r, r.memory, NULL)


cdef inline void answer_large(Lane *lane, KeyState *e) noexcept nogil:
    cdef uint32_t sender
    cdef Result *r = result_in(lane, e.memory.first, e.round.pushed)
    if r == NULL:
        return
    await_acks(lane, e)
    for sender in range(lane.settings.senders):
        if e.shares[sender].pushed:
            send_result(
                lane, e, sender, e.shares[sender].cookie, r, e.memory.sum, e.nbytes,
                &e.shares[sender].landing
            )


cdef inline void answer_small(Lane *lane, KeyState *e, char *body, uint64_t length) noexcept nogil:
    cdef Header h
    cdef uint32_t sender
    if length > LEAST_ACKNOWLEDGED:
        await_acks(lane, e)
    for sender in range(lane.settings.senders):
        if e.shares[sender].pushed:
            reply_header(lane, &h, ANSWER, sender, e, e.shares[sender].cookie)
            h.length = length
            put_answer(lane, sender, &h, body)


cdef inline void answer_packed(Lane *lane, KeyState *e) noexcept nogil:
    """Encode the sum once, and send it to all workers of the round.

    Without memory the result is lost and counted, which ends the lane and so the job.
    """
    cdef uint32_t sender
    cdef char *wire = encode_sum(lane, e)
    cdef Result *r = NULL
    if wire == NULL:
        lane.counters.dropped += 1
        return
    if e.compressed.packed.size <= INLINE_BYTES:
        answer_small(lane, e, wire, e.compressed.packed.size)
        free(wire)
        return
    r = result_in(lane, NULL, e.round.pushed)
    if r == NULL:
        free(wire)
        return
    r.memory = wire
    await_acks(lane, e)
    for sender in range(lane.settings.senders):
        if e.shares[sender].pushed:
            send_result(
                lane, e, sender, e.shares[sender].cookie, r, wire, e.compressed.packed.size,
                &e.shares[sender].landing
            )


cdef inline void fail_round(Lane *lane, KeyState *e) noexcept nogil:
    """Reply with an error to each worker that has pushed in the open round.

    Call it when the round is complete, or when it never will be. Earlier, the workers' counts of
    rounds would diverge.
    """
    cdef uint32_t sender
    if (e.failure.status == E_MISMATCH or e.failure.status == E_CODEC) and not e.failure.named:
        # The sender of a machine is its last worker.
        e.failure.a = (e.failure.a + 1) * lane.settings.processes - 1
        e.failure.b = (e.failure.b + 1) * lane.settings.processes - 1
        e.failure.named = True
    for sender in range(lane.settings.senders):
        if e.shares[sender].pushed:
            send_error(
                lane, sender, e.key, e.shares[sender].round, e.shares[sender].cookie,
                e.failure.status, e.failure.a, e.failure.b
            )


cdef inline void end_broadcast(Lane *lane, KeyState *e) noexcept nogil:
    """Finish a broadcast: fail if its root has joined or is lost, else store a seeding value in the
    lane.
    """
    cdef uint32_t root = e.operation.divisor
    if e.state == OPEN and not e.shares[root].pushed:
        fail_sum(e, E_PEER_LOST if lane.absent.lost[root] else E_JOINED, root, 0)
    elif e.state == OPEN and e.operation.seeding and e.nbytes:
        if memory_for(&e.value, e.nbytes):
            memcpy(e.value, e.memory.sum, e.nbytes)
            e.holder = -1       # all senders get it
        else:
            fail_sum(e, E_MEMORY, 0, 0)


cdef inline void close_round(Lane *lane, KeyState *e) noexcept nogil:
    """Reply to the workers of a complete round, and open the next round."""
    if e.operation.broadcast:
        end_broadcast(lane, e)
    elif e.state == OPEN:
        finish_sum(e, lane.absent.living)
    if lane.watch != NULL:
        note_closing(lane, e)
    if e.state == OPEN:
        count_applied(lane, e, True)
        if e.compressed != NULL and not e.operation.broadcast:
            answer_packed(lane, e)
        elif e.memory.first != NULL and e.nbytes > INLINE_BYTES:
            answer_large(lane, e)
        else:
            answer_small(lane, e, e.memory.sum, e.nbytes)
            let_go(lane, e.memory.first)
        lane.counters.rounds += 1
        lane.counters.bytes += e.nbytes
    else:
        fail_round(lane, e)
        let_go(lane, e.memory.first)
    if lane.watch != NULL:
        note_closed(lane, e)
    end_round(e, lane.settings.senders, EMPTY)
