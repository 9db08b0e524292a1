# From the lanes' queues to the transport.
#
# Two bounds keep what is urgent from standing behind what is not, in bytes that are handed over and
# not written out: a credit per lane, and what a server's link takes in a short time, at least one
# partition. Were there more, its partitions would share the link and be complete at once, and late.
# The second is the same for all servers, by the slowest: who had more of a link could fill more
# connections there and would get more of it, again and again, until each worker is far ahead at
# another server, and sums wait for the last worker of all.
#
# What stays in the machine would always have room. But it goes in its turn: a server that has its
# own machine's pushes before their time has sums to send while that machine has still to push, on
# the same link. Who is late would be held up the most, and all wait for him.
from libc.stdint cimport int32_t, int64_t, uint32_t, uint64_t
from libc.stdlib cimport free, malloc
from libc.string cimport memcpy, memset

from bpsx.core.wire cimport (
    ASYNC, BATCH_BYTES, BATCH_RECORDS, BROADCAST, DISAGREED, HEADER_BYTES, INLINE, INLINE_BYTES,
    NONCE_BYTES, PACKED, PING, PUSH as K_PUSH, REGISTER, STATE, Header, header_init, padded,
)
from bpsx.core.codec.state cimport most_bytes, server_state_bytes
from bpsx.core.partition cimport Lane, Partition, Server, Task, wire_of
from bpsx.core.queue cimport before, heap_pop
from bpsx.core.stage cimport advance, give_up
from bpsx.core.state cimport Core
from bpsx.core.status cimport DONE, E_MEMORY
from bpsx.system.sync cimport atomic_add, atomic_load, atomic_store, now_ns
from bpsx.core.trace.recorder cimport watched
from bpsx.core.trace.worker cimport spoke
from bpsx.transports.abi cimport Landing

# What is on its way through the transport: returned by its done callback, on whatever thread that
# runs.
cdef struct Wire:
    Core *core
    Lane *lane
    Task *task                  # whose input the transport reads; NULL for a copied batch
    int64_t bytes
    int64_t handed_ns           # when it was handed over,
    # ... and what its server had to take then: its bytes, and those before it
    int64_t ahead

cdef enum:
    MIB = 1 << 20
    TELLING = 1 << 18           # bytes from which on the time that they take says something


cdef inline void keep_pace(Wire *w) noexcept nogil:
    """Learn from what has been written out how fast that goes.

    Of two that do so at once one may be forgotten.
    """
    cdef int64_t known = atomic_load(&w.lane.server.pace), found
    if w.ahead < TELLING:
        return
    found = max((now_ns() - w.handed_ns) * MIB // w.ahead, 1)
    atomic_store(&w.lane.server.pace, found if known == 0 else max(known + (found - known) // 4, 1))


cdef inline void give_back(Wire *w) noexcept nogil:
    cdef Core *c = w.core
    cdef Server *server = w.lane.server
    keep_pace(w)
    atomic_add(&w.lane.in_flight, -w.bytes)
    atomic_add(&server.in_flight, -w.bytes)
    if w.task != NULL:
        atomic_add(&w.task.wire, -1)        # the last touch: with 0 its owner may free it
    if atomic_load(&w.lane.starved) or atomic_load(&server.starved):
        atomic_store(&w.lane.starved, 0)
        atomic_store(&server.starved, 0)
        c.endpoint.wake(c.endpoint.self)
    free(w)


cdef inline void body_done(void *data, void *hint) noexcept nogil:
    give_back(<Wire *>hint)


cdef inline void batch_done(void *data, void *hint) noexcept nogil:
    free(data)
    give_back(<Wire *>hint)


cdef inline Wire *take_credit(Core *c, Lane *lane, Task *task, int64_t bytes) noexcept nogil:
    cdef Wire *w = <Wire *>malloc(sizeof(Wire))
    if w == NULL:
        return NULL
    w.core = c
    w.lane = lane
    w.task = task
    w.bytes = bytes
    atomic_add(&lane.in_flight, bytes)
    atomic_add(&lane.server.in_flight, bytes)
    w.ahead = atomic_load(&lane.server.in_flight)
    w.handed_ns = now_ns()
    if task != NULL:
        atomic_add(&task.wire, 1)
    c.counters.sent += bytes
    c.counters.messages_out += 1
    return w


cdef inline bint has_room(
    int64_t *in_flight, int64_t bound, int64_t bytes, int64_t *starved
) noexcept nogil:
    """Whether `bytes` more may be handed over.

    If not, whoever returns some will wake the driver.
    """
    cdef int64_t now = atomic_load(in_flight)
    if now == 0 or now + bytes <= bound:
        return True
    atomic_store(starved, 1)
    # They may have come back between the look and the flag: then nobody would wake us.
    now = atomic_load(in_flight)
    if now == 0 or now + bytes <= bound:
        atomic_store(starved, 0)
        return True
    return False


cdef inline bint has_credit(Core *c, Lane *lane, uint64_t bytes) noexcept nogil:
    """The same by the lane's credit, half of it on this machine: no link has to be kept busy
    there, and caches keep what is less.
    """
    return (
        c.credit == 0
        or has_room(
            &lane.in_flight, c.credit // 2 if lane.server.beside else c.credit, bytes, &lane.starved
        )
    )


cdef inline int64_t slowest(Core *c) noexcept nogil:
    """The pace of the slowest server to which something is under way; 0: none is known."""
    cdef int64_t found = 0
    cdef uint32_t i
    for i in range(c.n_servers):
        if atomic_load(&c.servers[i].in_flight):
            found = max(found, atomic_load(&c.servers[i].pace))
    return found


cdef inline bint takes_more(Core *c, Server *server, int64_t pace, uint64_t bytes) noexcept nogil:
    """The same by what a link of that pace takes in time.

    So much always that there is something to learn from.
    """
    cdef double bound
    if c.credit == 0 or c.ahead_ns == 0 or pace == 0:
        return True
    bound = max(<double>c.ahead_ns / pace * MIB, 2.0 * TELLING)
    return has_room(&server.in_flight, <int64_t>min(bound, 1e18), bytes, &server.starved)


cdef inline uint64_t push_bytes(Partition *p) noexcept nogil:
    if p.keeps:
        return server_state_bytes(p.packed) if p.source != NULL else 0
    if p.packed != NULL:
        return p.packed.size
    return p.length if p.source != NULL else 0


cdef inline char *push_body(Partition *p) noexcept nogil:
    return <char *>wire_of(p) if p.packed != NULL and not p.keeps else p.source


cdef inline uint64_t register_size(Partition *p) noexcept nogil:
    return 0 if p.registered else HEADER_BYTES + padded(p.tensor.name_bytes + p.tensor.codec_bytes)


cdef inline char *put_register(Core *c, Partition *p, char *at) noexcept nogil:
    """Write the REGISTER record at `at`, once in a partition's life; returns where the next
    record goes.
    """
    cdef Header h
    if p.registered:
        return at
    header_init(&h, REGISTER, c.job, c.rank)
    h.flags = INLINE
    h.dtype = p.tensor.dtype
    h.key = p.key
    h.slot = p.slot
    h.epoch = c.epoch
    h.cookie = p.length
    h.priority = p.tensor.codec_bytes
    h.length = p.tensor.name_bytes + p.tensor.codec_bytes
    memcpy(at, &h, HEADER_BYTES)
    at += HEADER_BYTES
    memset(at, 0, padded(h.length))
    memcpy(at, p.tensor.name, p.tensor.name_bytes)
    memcpy(at + p.tensor.name_bytes, p.tensor.codec, p.tensor.codec_bytes)
    p.registered = True
    return at + padded(h.length)


cdef inline char *put_push(Core *c, Partition *p, char *at, bint with_body) noexcept nogil:
    cdef Header h
    cdef Task *task = p.tensor.current
    header_init(&h, K_PUSH, c.job, c.rank)
    h.flags = (INLINE if with_body else 0) | (BROADCAST if task.broadcast else 0) | (
        ASYNC if task.asynchronous else 0
    ) | (STATE if p.keeps else PACKED if p.packed != NULL else 0)
    h.dtype = p.tensor.dtype
    h.key = p.key
    h.slot = p.slot
    h.epoch = c.epoch
    h.round = p.round
    h.divisor = p.divisor
    h.priority = task.priority
    if p.share_status:
        h.flags |= DISAGREED
        h.divisor = p.share_a
        h.priority = <int32_t>p.share_b
    h.cookie = p.index
    h.length = push_bytes(p)
    if watched(c.watch):
        spoke(c, b"sent PUSH", &h, p.lane)
    memcpy(at, &h, HEADER_BYTES)
    at += HEADER_BYTES
    if with_body and h.length:
        memcpy(at, push_body(p), h.length)
        memset(at + h.length, 0, padded(h.length) - h.length)
        at += padded(h.length)
    return at


cdef inline bint lend_to(Core *c, Partition *p, Landing *landing) noexcept nogil:
    """Where the answer is wanted, if that is memory of the core's own, which stays; the transport
    may prepare it.

    A tensor of the user's on the host may be freed and made anew from step to step, at the same
    address: nobody would hear of it.
    """
    cdef Task *task = p.tensor.current
    cdef bint packed = p.packed != NULL
    if c.endpoint.lend == NULL or p.keeps or p.target == NULL:
        return False
    if not packed and task.output != NULL and p.target == task.output + p.offset:
        return False
    landing.at = <uint64_t>(wire_of(p) if packed else p.target)
    landing.room = most_bytes(p.packed) if packed else p.length
    landing.key, landing.remote = 0, False
    c.endpoint.lend(c.endpoint.self, p.lane, <void *>landing.at, landing.room)
    return True


cdef inline void send_large(Core *c, Lane *lane, Partition *p) noexcept nogil:
    """Header, and the tensor's own memory behind it."""
    cdef uint64_t head_size = register_size(p) + HEADER_BYTES
    cdef Task *task = p.tensor.current
    cdef char *head = <char *>malloc(head_size)
    # A stand-in's memory belongs to the machine, and it is gone when the round is over.
    cdef Wire *w = take_credit(
        c, lane, task if task.handle != NULL else NULL, push_bytes(p)
    ) if head != NULL else NULL
    cdef Landing landing
    cdef int rc
    if w == NULL:
        free(head)
        give_up(c, E_MEMORY)
        return
    c.counters.sent += head_size
    put_push(c, p, put_register(c, p, head), False)
    rc = c.endpoint.send(
        c.endpoint.self, p.lane, head, head_size, NULL, NULL, push_body(p), push_bytes(p),
        body_done, w, &landing if lend_to(c, p, &landing) else NULL
    )
    free(head)
    if rc != 0:
        atomic_store(&c.mute, p.lane + 1)
    else:
        advance(c, p)


cdef inline void send_batch(Core *c, Lane *lane, uint32_t peer) noexcept nogil:
    """As many small partitions as are queued and fit, most urgent first, copied into one frame."""
    cdef char *frame = <char *>malloc(BATCH_BYTES + 2 * HEADER_BYTES + 2 * INLINE_BYTES)
    cdef char *at = frame
    cdef Partition *picked[BATCH_RECORDS]
    cdef Partition *p
    cdef uint32_t n = 0, i
    cdef Wire *w
    if frame == NULL:
        heap_pop(lane)
        give_up(c, E_MEMORY)
        return
    while lane.size and at - frame < BATCH_BYTES:
        p = lane.heap[0]
        if p.tensor.status == DONE:
            if push_bytes(p) > INLINE_BYTES:
                break
            at = put_push(c, p, put_register(c, p, at), True)
            picked[n] = p
            n += 1
        heap_pop(lane)
    w = take_credit(c, lane, NULL, at - frame) if n else NULL
    if w == NULL:
        free(frame)
        if n:
            give_up(c, E_MEMORY)
        return
    if c.endpoint.send(
        c.endpoint.self, peer, frame, at - frame, batch_done, w, NULL, 0, NULL, NULL, NULL
    ) != 0:
        atomic_store(&c.mute, peer + 1)
        return
    for i in range(n):
        advance(c, picked[i])


cdef inline bint is_far_ahead(Core *c, Partition *p, Partition *leaving) noexcept nogil:
    """Whether more lies between it and the most urgent than a partition for each server: then it
    waits until that has room.

    Where servers have unequal shares, those with little would have all of theirs long before the
    others, whose links would then be all that is used.
    """
    return leaving != NULL and p.position - leaving.position > c.n_servers * c.longest


cdef inline int next_lane(Core *c) noexcept nogil:
    """The lane with the most urgent partition that may be handed over; -1: there is none."""
    cdef int best = -1
    cdef int64_t pace = slowest(c)
    cdef uint32_t i
    cdef Lane *lane
    cdef Partition *leaving = NULL          # the most urgent that leaves the machine
    for i in range(c.n_lanes):
        c.lanes[i].server.first = -1
    for i in range(c.n_lanes):
        lane = &c.lanes[i]
        while lane.size and lane.heap[0].tensor.status != DONE:
            heap_pop(lane)                  # its tasks have been failed
        if (
            lane.size
            and not lane.server.beside
            and (leaving == NULL or before(lane.heap[0], leaving))
        ):
            leaving = lane.heap[0]
        if (
            lane.size
            and (lane.server.first < 0 or before(lane.heap[0], c.lanes[lane.server.first].heap[0]))
            and has_credit(c, lane, push_bytes(lane.heap[0]))
        ):
            lane.server.first = i
    # a server that has no room for its first has none for what is less urgent and smaller: it would
    # go on for ever
    for i in range(c.n_lanes):
        lane = &c.lanes[i]
        if (
            lane.server.first == <int>i
            and (best < 0 or before(lane.heap[0], c.lanes[best].heap[0]))
            and not (lane.server.beside and leaving != NULL and before(leaving, lane.heap[0]))
            and not is_far_ahead(c, lane.heap[0], leaving)
            and takes_more(c, lane.server, pace, push_bytes(lane.heap[0]))
        ):
            best = i
    return best


cdef inline int pump_out(Core *c) noexcept nogil:
    """Send what credit allows, most urgent first. Returns how many messages went."""
    cdef int sent = 0
    cdef int at = next_lane(c)
    cdef Lane *lane
    while at >= 0 and not c.failed and not c.mute:
        lane = &c.lanes[at]
        if push_bytes(lane.heap[0]) <= INLINE_BYTES:
            send_batch(c, lane, at)
        else:
            send_large(c, lane, heap_pop(lane))
        sent += 1
        at = next_lane(c)
    return sent


cdef inline int send_ping(Core *c, uint32_t peer, const char *nonce) noexcept nogil:
    cdef char frame[HEADER_BYTES + NONCE_BYTES]
    cdef Header h
    header_init(&h, PING, c.job, c.rank)
    h.epoch = c.epoch
    h.flags = INLINE
    h.length = NONCE_BYTES
    memcpy(frame, &h, HEADER_BYTES)
    memcpy(frame + HEADER_BYTES, nonce, NONCE_BYTES)
    return c.endpoint.send(
        c.endpoint.self, peer, frame, HEADER_BYTES + NONCE_BYTES, NULL, NULL, NULL, 0, NULL, NULL,
        NULL
    )
