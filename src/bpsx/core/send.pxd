# Sends partitions from the lanes' queues to the transport.
#
# Bounds on the bytes that are handed over and not written out keep urgent partitions from queueing
# behind others. `next_lane` has them all; two need an explanation:
#
# * Credit, per lane.
# * What a server's link takes in a short time, at least one partition. With more, the partitions
#   would share the link, and all would be complete at once, and late. This bound is the same for
#   all servers, by the slowest. With a bound per server, a worker with more of a link could fill
#   more connections there and would get still more of it. In the end each worker would be far ahead
#   at another server, and every sum would wait for its last worker. Two exceptions keep lanes busy
#   where a link would seem slower with few of them, and then get still less:
#   - Where there is only one server on other machines, workers cannot drift apart, and the bound is
#     twice as large. The server's answers to others leave by the same link as this worker's pushes,
#     on all lanes at once, and pushes on few lanes would get a small share of it. So as many
#     messages as the server has lanes may be in flight in any case.
#   - As many, too, while those in flight take the server fewer than TRIPS round trips: that may be
#     because each connection carries no more than its send buffer in a round trip.
#
# A server on this machine would always have room, but its partitions wait for their turn. A
# server that gets its own machine's pushes early has sums to send while its machine still has to
# push on the same link. That would delay the latest worker the most, and all wait for that worker.
from libc.stdint cimport int32_t, int64_t, uint32_t, uint64_t
from libc.stdlib cimport free, malloc
from libc.string cimport memcpy, memset

from bpsx.core.wire cimport (
    ASYNC, BATCH_BYTES, BATCH_RECORDS, BROADCAST, DISAGREED, HEADER_BYTES, INLINE, INLINE_BYTES,
    KEPT, NONCE_BYTES, PACKED, PING, PUSH as PUSH_RECORD, REGISTER, STATE, Header, header_init,
    padded,
)
from bpsx.core.codec.state cimport most_bytes, server_state_bytes
from bpsx.core.partition cimport (
    PUSH, Heap, Lane, Partition, Server, Task, cookie_of, wire_of,
)
from bpsx.core.keep cimport acks_size, put_acks
from bpsx.core.logs cimport confirm, divisor_of
from bpsx.core.queue cimport before, heap_pop
from bpsx.core.stage cimport advance, fail_core
from bpsx.core.state cimport Core
from bpsx.core.status cimport E_MEMORY
from bpsx.system.sync cimport atomic_add, atomic_load, atomic_store, now_ns
from bpsx.core.trace.recorder cimport watched
from bpsx.core.trace.worker cimport print_message
from bpsx.transports.abi cimport Landing

# Bytes on their way through the transport. The transport's done callback returns their credit, on
# any thread.
cdef struct InFlight:
    Core *core
    Lane *lane
    # task whose input the transport reads; NULL for a batch, which is a copy
    Task *task
    int64_t bytes
    int64_t handed_ns           # time of the hand-over
    # bytes in flight to the server at that time, these included
    int64_t ahead

cdef struct Room:               # the bound in time and its exceptions, in bytes: see fits()
    int64_t bytes               # most in flight to a server; -1: any number
    double rate                 # of the slowest server's link, in bytes per nanosecond
    bint one_away               # only one server is on another machine

cdef enum:
    MIB = 1 << 20
    MEASURABLE = 1 << 18        # fewer bytes in flight are too few to measure the pace
    MOST_VISITS = 16            # partitions of a queue that are looked at
    # More than one connection needs for a partition of 2 MiB, with its send buffer of 224 KiB. So a
    # second lane gets a partition, too, and shows whether the link carries more.
    TRIPS = 20


cdef inline void update_pace(InFlight *f) noexcept nogil:
    """Update the server's measured pace from bytes that have been written out.

    If two threads update it at once, one of the measurements may be lost.
    """
    cdef int64_t known = atomic_load(&f.lane.server.pace), found
    if f.ahead < MEASURABLE:
        return
    found = max((now_ns() - f.handed_ns) * MIB // f.ahead, 1)
    atomic_store(&f.lane.server.pace, found if known == 0 else max(known + (found - known) // 4, 1))


cdef inline void return_credit(InFlight *f) noexcept nogil:
    cdef Core *c = f.core
    cdef Server *server = f.lane.server
    update_pace(f)
    atomic_add(&f.lane.in_flight, -f.bytes)
    atomic_add(&server.in_flight, -f.bytes)
    atomic_add(&server.messages, -1)
    if f.task != NULL:
        # the last access: with 0 the task's owner may free it
        atomic_add(&f.task.bodies_in_flight, -1)
    if atomic_load(&f.lane.starved) or atomic_load(&server.starved):
        atomic_store(&f.lane.starved, 0)
        atomic_store(&server.starved, 0)
        c.endpoint.wake(c.endpoint.self)
    free(f)


cdef inline void body_done(void *data, void *hint) noexcept nogil:
    return_credit(<InFlight *>hint)


cdef inline void batch_done(void *data, void *hint) noexcept nogil:
    free(data)
    return_credit(<InFlight *>hint)


cdef inline InFlight *take_credit(Core *c, Lane *lane, Task *task, int64_t bytes) noexcept nogil:
    cdef InFlight *f = <InFlight *>malloc(sizeof(InFlight))
    if f == NULL:
        return NULL
    f.core = c
    f.lane = lane
    f.task = task
    f.bytes = bytes
    atomic_add(&lane.in_flight, bytes)
    atomic_add(&lane.server.in_flight, bytes)
    atomic_add(&lane.server.messages, 1)
    f.ahead = atomic_load(&lane.server.in_flight)
    f.handed_ns = now_ns()
    if task != NULL:
        atomic_add(&task.bodies_in_flight, 1)
    c.counters.sent += bytes
    c.counters.messages_out += 1
    return f


cdef inline bint has_room(
    int64_t *in_flight, int64_t bound, int64_t bytes, int64_t *starved
) noexcept nogil:
    """Whether `bytes` more may be handed over.

    If not, the thread that returns bytes wakes the driver.
    """
    cdef int64_t now = atomic_load(in_flight)
    if now == 0 or now + bytes <= bound:
        return True
    atomic_store(starved, 1)
    # Bytes may have been returned before the flag was set; that thread has not woken the driver.
    now = atomic_load(in_flight)
    if now == 0 or now + bytes <= bound:
        atomic_store(starved, 0)
        return True
    return False


cdef inline bint has_credit(Core *c, Lane *lane, uint64_t bytes) noexcept nogil:
    """Whether the lane's credit has room.

    A server on this machine gets half: no link has to be kept busy there, and fewer bytes stay in
    the caches.
    """
    return (
        c.settings.credit == 0
        or has_room(
            &lane.in_flight, c.settings.credit // 2 if lane.server.beside else c.settings.credit,
            bytes, &lane.starved
        )
    )


cdef inline int64_t slowest(Core *c) noexcept nogil:
    """Pace of the slowest server with bytes in flight; 0: none is known."""
    cdef int64_t found = 0
    cdef uint32_t i
    cdef Server *server
    # Not of lost servers: what is in flight to them says nothing about a link.
    for i in range(c.lanes.n_living):
        server = c.lanes.at[c.lanes.living[i]].server
        if atomic_load(&server.in_flight):
            found = max(found, atomic_load(&server.pace))
    return found


cdef inline bint one_is_away(const Core *c) noexcept nogil:
    """Whether there is one living server on other machines, no more."""
    cdef const Server *found = NULL
    cdef const Server *server
    cdef uint32_t i
    for i in range(c.lanes.n_living):
        server = c.lanes.at[c.lanes.living[i]].server
        if server.beside or server == found:
            continue
        if found != NULL:
            return False
        found = server
    return found != NULL


cdef inline Room room(Core *c) noexcept nogil:
    """Turn the bound in time into bytes, by the slowest server's link.

    They are at least twice MEASURABLE, so that the pace can be measured.
    """
    cdef Room found
    cdef int64_t pace = slowest(c)
    cdef double bytes
    found.bytes, found.rate, found.one_away = -1, 0, False
    if c.settings.credit == 0 or c.settings.ahead_ns == 0 or pace == 0:
        return found
    found.rate, found.one_away = <double>MIB / pace, one_is_away(c)
    bytes = found.rate * c.settings.ahead_ns * (2 if found.one_away else 1)
    found.bytes = <int64_t>min(max(bytes, 2.0 * MEASURABLE), 1e18)
    return found


cdef inline bint fits(const Room *r, Server *server, uint64_t bytes) noexcept nogil:
    """Whether a message may be handed over to the server; if not, see has_room().

    It may beyond `bytes` while the server has fewer messages in flight than lanes, in the cases
    that the head of this file explains.
    """
    return (
        r.bytes < 0
        or has_room(&server.in_flight, r.bytes, bytes, &server.starved)
        or (
            atomic_load(&server.messages) < server.n_lanes
            and (
                r.one_away
                or atomic_load(&server.in_flight) <= r.rate * TRIPS * server.trip_ns
            )
        )
    )


cdef inline uint64_t push_bytes(Partition *p) noexcept nogil:
    if p.is_codec_state:
        return server_state_bytes(p.packed) if p.source != NULL else 0
    if p.packed != NULL:
        return p.packed.size
    return p.length if p.source != NULL else 0


cdef inline char *push_body(Partition *p) noexcept nogil:
    return <char *>wire_of(p) if p.packed != NULL and not p.is_codec_state else p.source


cdef inline uint64_t register_size(Partition *p) noexcept nogil:
    return 0 if p.registered else HEADER_BYTES + padded(p.tensor.name.size + p.tensor.codec.size)


cdef inline char *put_register(Core *c, Partition *p, char *at) noexcept nogil:
    """Write the REGISTER record at `at`, once in a partition's life.

    Returns the address for the next record.
    """
    cdef Header h
    if p.registered:
        return at
    header_init(&h, REGISTER, c.settings.job, c.settings.rank)
    h.flags = INLINE
    h.dtype = p.tensor.dtype
    h.key = p.key
    h.slot = p.slot
    h.term = p.term
    h.cookie = p.length
    h.divisor = 1 if c.lanes.at[p.lane].server.beside else 0
    h.priority = p.tensor.codec.size
    h.length = p.tensor.name.size + p.tensor.codec.size
    memcpy(at, &h, HEADER_BYTES)
    at += HEADER_BYTES
    memset(at, 0, padded(h.length))
    memcpy(at, p.tensor.name.at, p.tensor.name.size)
    memcpy(at + p.tensor.name.size, p.tensor.codec.at, p.tensor.codec.size)
    p.registered = True
    return at + padded(h.length)


cdef inline char *put_push(Core *c, Partition *p, char *at, bint with_body) noexcept nogil:
    cdef Header h
    cdef Task *task = p.tensor.current
    header_init(&h, PUSH_RECORD, c.settings.job, c.settings.rank)
    h.flags = (INLINE if with_body else 0) | (BROADCAST if task.broadcast else 0) | (
        ASYNC if task.asynchronous else 0
    ) | (STATE if p.is_codec_state else PACKED if p.packed != NULL else 0) | (
        KEPT if confirm(p) else 0
    )
    h.dtype = p.tensor.dtype
    h.key = p.key
    h.slot = p.slot
    h.term = p.term
    h.round = p.round - p.joined_at
    h.divisor = divisor_of(c, p)
    h.priority = task.priority
    if p.local != NULL and p.local.disagreement.status:
        h.flags |= DISAGREED
        h.divisor = p.local.disagreement.a
        h.priority = <int32_t>p.local.disagreement.b
    h.cookie = cookie_of(p)
    h.length = push_bytes(p)
    if watched(c.watch):
        print_message(c, b"sent PUSH", &h, p.lane)
    memcpy(at, &h, HEADER_BYTES)
    at += HEADER_BYTES
    if with_body and h.length:
        memcpy(at, push_body(p), h.length)
        memset(at + h.length, 0, padded(h.length) - h.length)
        at += padded(h.length)
    return at


cdef inline bint lend_to(Core *c, Partition *p, Landing *landing) noexcept nogil:
    """Lend the transport what is pushed, if that is the core's own memory; false: it is not.

    The reply's body is wanted there, too. But in a job that survives deaths the push may have to be
    sent again, so the reply goes into memory of the transport (docs/internals/rdma.md).

    Such memory stays, so the transport may prepare it. A user's tensor on the host may be freed and
    allocated again at the same address from step to step, without notice to bpsx.
    """
    cdef Task *task = p.tensor.current
    cdef bint packed = p.packed != NULL
    if c.endpoint.lend == NULL or p.is_codec_state or p.target == NULL:
        return False
    if not packed and task.output != NULL and p.target == task.output + p.offset:
        return False
    if c.settings.elastic:
        if packed or p.source == p.target:
            c.endpoint.lend(
                c.endpoint.self, p.lane, push_body(p), most_bytes(p.packed) if packed else p.length
            )
        return False
    landing.at = <uint64_t>(wire_of(p) if packed else p.target)
    landing.room = most_bytes(p.packed) if packed else p.length
    landing.key, landing.remote = 0, False
    c.endpoint.lend(c.endpoint.self, p.lane, <void *>landing.at, landing.room)
    return True


cdef inline void send_large(Core *c, Lane *lane, Partition *p) noexcept nogil:
    """Send a partition as two frames: the header, and the tensor's own memory."""
    cdef uint64_t head_size = acks_size(lane) + register_size(p) + HEADER_BYTES
    cdef Task *task = p.tensor.current
    cdef char *head = <char *>malloc(head_size)
    # A stand-in's memory belongs to the machine, and the task is freed when its round ends.
    cdef InFlight *f = take_credit(
        c, lane, task if task.handle != NULL else NULL, push_bytes(p)
    ) if head != NULL else NULL
    cdef Landing landing
    cdef int rc
    if f == NULL:
        free(head)
        fail_core(c, E_MEMORY)
        return
    c.counters.sent += head_size
    put_push(c, p, put_register(c, p, put_acks(c, lane, head)), False)
    rc = c.endpoint.send(
        c.endpoint.self, p.lane, head, head_size, NULL, NULL, push_body(p), push_bytes(p),
        body_done, f, &landing if lend_to(c, p, &landing) else NULL
    )
    free(head)
    if rc != 0:
        lane.mute = True
    else:
        advance(c, p)


cdef inline void send_batch(Core *c, Lane *lane, uint32_t peer) noexcept nogil:
    """Copy the most urgent small partitions that are queued and fit into one frame; send it."""
    cdef char *frame = <char *>malloc(
        acks_size(lane) + BATCH_BYTES + 2 * HEADER_BYTES + 2 * INLINE_BYTES
    )
    cdef char *at = frame
    cdef Partition *picked[BATCH_RECORDS]
    cdef Partition *p
    cdef uint32_t n = 0, i
    cdef InFlight *f
    if frame == NULL:
        heap_pop(&lane.queue)
        fail_core(c, E_MEMORY)
        return
    at = put_acks(c, lane, at)
    while lane.queue.size and at - frame < BATCH_BYTES:
        p = lane.queue.items[0]
        if p.stage == PUSH:
            if push_bytes(p) > INLINE_BYTES:
                break
            at = put_push(c, p, put_register(c, p, at), True)
            picked[n] = p
            n += 1
        heap_pop(&lane.queue)
    f = take_credit(c, lane, NULL, at - frame) if n else NULL
    if f == NULL:
        free(frame)
        if n:
            fail_core(c, E_MEMORY)
        return
    if c.endpoint.send(
        c.endpoint.self, peer, frame, at - frame, batch_done, f, NULL, 0, NULL, NULL, NULL
    ) != 0:
        lane.mute = True
        return
    for i in range(n):
        advance(c, picked[i])


cdef inline int64_t more_urgent(
    const Heap *q, uint32_t at, const Partition *p, int *visits
) noexcept nogil:
    """Bytes of the partitions from `at` down in a queue that are more urgent than `p`.

    Those of some are enough to know that they are many.
    """
    if at >= q.size or not before(q.items[at], p) or visits[0] > MOST_VISITS:
        return 0
    visits[0] += 1
    return (
        <int64_t>q.items[at].length
        + more_urgent(q, 2 * at + 1, p, visits)
        + more_urgent(q, 2 * at + 2, p, visits)
    )


cdef inline bint is_far_ahead(Core *c, Partition *p, Partition *leaving) noexcept nogil:
    """Whether a partition must wait until the most urgent one has room: behind that, its server
    has others to get that are more urgent than `p`.

    With unequal shares, a server with a small share would otherwise get all of it early, and then
    only the links of the other servers would be in use.
    """
    cdef Server *server
    cdef Lane *lane
    cdef uint32_t i
    cdef int64_t found = 0
    cdef int visits = 0
    if leaving == NULL or p == leaving:
        return False
    server = c.lanes.at[leaving.lane].server
    if c.lanes.at[p.lane].server == server:
        return False
    for i in range(c.lanes.n_living):
        lane = &c.lanes.at[c.lanes.living[i]]
        if lane.server == server:
            found += more_urgent(&lane.queue, 0, p, &visits)
            if 2 * (found - <int64_t>leaving.length) > c.queued.longest or visits > MOST_VISITS:
                return True
    return False


cdef inline int next_lane(Core *c) noexcept nogil:
    """Lane whose most urgent partition is next to be handed over; -1: none may be."""
    cdef int best = -1
    cdef Room most = room(c)
    cdef uint32_t i
    cdef Lane *lane
    cdef Partition *leaving = NULL          # the most urgent one for a server on another machine
    for i in range(c.lanes.n_living):
        c.lanes.at[c.lanes.living[i]].server.first = -1
    for i in range(c.lanes.n_living):
        lane = &c.lanes.at[c.lanes.living[i]]
        if lane.mute:
            continue                        # the scheduler will soon report the dead process
        while lane.queue.size and lane.queue.items[0].stage != PUSH:
            heap_pop(&lane.queue)                  # its task has failed
        if (
            lane.queue.size
            and not lane.server.beside
            and (leaving == NULL or before(lane.queue.items[0], leaving))
        ):
            leaving = lane.queue.items[0]
        if (
            lane.queue.size
            and (
                lane.server.first < 0
                or before(lane.queue.items[0], c.lanes.at[lane.server.first].queue.items[0])
            )
            and has_credit(c, lane, push_bytes(lane.queue.items[0]))
        ):
            lane.server.first = c.lanes.living[i]
    # A server without room for its most urgent partition gets no smaller, less urgent one either:
    # that would delay the first for ever.
    for i in range(c.lanes.n_living):
        lane = &c.lanes.at[c.lanes.living[i]]
        if (
            lane.server.first == <int>c.lanes.living[i]
            and (best < 0 or before(lane.queue.items[0], c.lanes.at[best].queue.items[0]))
            and not (
                lane.server.beside and leaving != NULL and before(leaving, lane.queue.items[0])
            )
            and not is_far_ahead(c, lane.queue.items[0], leaving)
            and fits(&most, lane.server, push_bytes(lane.queue.items[0]))
        ):
            best = c.lanes.living[i]
    return best


cdef inline int pump_out(Core *c) noexcept nogil:
    """Send what credit allows, most urgent first. Returns the number of messages."""
    cdef int sent = 0
    cdef int at = next_lane(c)
    cdef Lane *lane
    while at >= 0 and not c.failed:
        lane = &c.lanes.at[at]
        if push_bytes(lane.queue.items[0]) <= INLINE_BYTES:
            send_batch(c, lane, at)
        else:
            send_large(c, lane, heap_pop(&lane.queue))
        sent += 1
        at = next_lane(c)
    return sent


cdef inline int send_ping(Core *c, uint32_t peer, const char *nonce) noexcept nogil:
    cdef char frame[HEADER_BYTES + NONCE_BYTES]
    cdef Header h
    header_init(&h, PING, c.settings.job, c.settings.rank)
    h.flags = INLINE
    h.length = NONCE_BYTES
    memcpy(frame, &h, HEADER_BYTES)
    memcpy(frame + HEADER_BYTES, nonce, NONCE_BYTES)
    return c.endpoint.send(
        c.endpoint.self, peer, frame, HEADER_BYTES + NONCE_BYTES, NULL, NULL, NULL, 0, NULL, NULL,
        NULL
    )
