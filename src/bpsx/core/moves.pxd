# Terms: the partitions of a lost lane, or those that a lane yields, move to the lanes that take
# their slots, and rounds under way are pushed again. docs/internals/elastic.md and
# elastic-balance.md describe the protocol.
#
# Only the driver calls these functions.
from libc.stdint cimport uint8_t, uint32_t, uint64_t
from libc.stdlib cimport calloc, free, malloc
from libc.string cimport memcpy

from bpsx.core.busy cimport count_work
from bpsx.core.commit cimport withdraw
from bpsx.core.keep cimport forget_kept
from bpsx.core.late cimport count_living, end_lane
from bpsx.core.logs cimport describe, divisor_of, has_backup, note_lost_worker
from bpsx.core.partition cimport (
    COPY, END, PULL, PUSH, Kept, Lane, LogEntry, Move, Partition, Snapshot, Term, wire_of,
)
from bpsx.core.queue cimport heap_push
from bpsx.core.send cimport push_bytes, put_register, register_size
from bpsx.core.stage cimport enter, fail_core
from bpsx.core.state cimport Core
from bpsx.core.status cimport DONE, E_MEMORY, E_PROTOCOL
from bpsx.core.targets cimport attach, count_have, resolve, target_of, term_under_way
from bpsx.core.wire cimport (
    FETCH, GIVE, HAVE, HAVES, HEADER_BYTES, INLINE, KEPT, LOAD, LOG, STATE, WAITS, YIELD, Coded,
    Header, LogHead, header_init, padded,
)
from bpsx.core.values cimport applied_bytes
from bpsx.system.sync cimport lock, unlock

cdef extern from "<unistd.h>" nogil:
    ssize_t write(int descriptor, const void *data, size_t n)

cdef enum:
    PART_BYTES = 1 << 20        # a part of a log ends after so many bytes


cdef inline int place_of_push(Partition *p) noexcept nogil:
    """Index of PUSH in the list of stages; -1: the list has none."""
    cdef int i = 0
    while p.tensor.stages[i] != END:
        if p.tensor.stages[i] == PUSH:
            return i
        i += 1
    return -1


cdef inline bint is_answered(Partition *p) noexcept nogil:
    """Whether the round under way has its outcome from the lane already."""
    return p.stage != END and p.stage_index > place_of_push(p) + 1


cdef inline uint32_t received(Partition *p) noexcept nogil:
    """Rounds whose outcome has arrived, as messages count them."""
    return p.round - p.joined_at + <uint32_t>is_answered(p)


cdef inline void send_frame(Core *c, uint32_t peer, char *frame, char *end) noexcept nogil:
    """Send a frame that the transport copies."""
    c.counters.sent += end - frame
    c.counters.messages_out += 1
    if c.endpoint.send(
        c.endpoint.self, peer, frame, end - frame, NULL, NULL, NULL, 0, NULL, NULL, NULL
    ) != 0:
        c.lanes.at[peer].mute = True


cdef inline void moved_header(Core *c, Partition *p, Header *h, int kind) noexcept nogil:
    header_init(h, kind, c.settings.job, c.settings.rank)
    h.flags = INLINE
    h.dtype = p.tensor.dtype
    h.key, h.slot, h.term = p.key, p.slot, p.term
    h.cookie = p.index


cdef inline void send_have(Core *c, Partition *p, bint waits) noexcept nogil:
    """Announce a moved partition to its new lane, and report this worker's rounds of it (HAVE)."""
    cdef Header h
    cdef Coded coded
    cdef const char *body = NULL
    cdef char *frame
    cdef char *at
    moved_header(c, p, &h, HAVE)
    h.round, h.divisor = received(p), c.moving.joins
    if waits:
        h.flags |= WAITS
    if p.kept != NULL and p.kept.held and (
        c.settings.asynchronous or p.kept.round + 1 == h.round
    ):
        h.flags |= KEPT
    if p.packed != NULL:
        describe(p, &coded)
        body, h.length = <const char *>&coded, sizeof(Coded)
    elif c.settings.asynchronous and h.flags & KEPT:
        body, h.length = <const char *>p.kept.applied, applied_bytes(c)
    frame = <char *>calloc(1, register_size(p) + HEADER_BYTES + padded(h.length))
    if frame == NULL:
        fail_core(c, E_MEMORY)
        return
    at = put_register(c, p, frame)
    # Announced again with the next push, which may arrive first.
    p.registered = False
    memcpy(at, &h, HEADER_BYTES)
    at += HEADER_BYTES
    if h.length:
        memcpy(at, body, h.length)
    at += padded(h.length)
    send_frame(c, p.lane, frame, at)
    free(frame)


cdef inline void send_haves(Core *c, uint32_t term, uint32_t peer, uint32_t haves) noexcept nogil:
    """Say that all HAVEs of a term have been sent to a lane."""
    cdef Header h
    header_init(&h, HAVES, c.settings.job, c.settings.rank)
    h.flags = INLINE
    h.term, h.cookie = term, haves
    send_frame(c, peer, <char *>&h, <char *>&h + HEADER_BYTES)


cdef inline void tell_haves(Core *c) noexcept nogil:
    """Send HAVES of all terms, once every lane has yielded what it had to.

    Before, partitions may still come from such a lane, in any of these terms.
    """
    cdef Term *term = c.moving.terms
    cdef uint32_t i, peer
    while c.moving.yielding == 0 and term != NULL:
        for i in range(0 if term.said else term.n_told):
            peer = term.told[i].lane
            if not c.lanes.at[peer].lost:
                c.lanes.at[peer].untaken += not term.missed
                c.moving.untaken += not term.missed
                send_haves(c, term.number, peer, term.told[i].haves)
        term.said = True
        term = term.next


cdef inline void announce(Core *c, Partition *p) noexcept nogil:
    """A lane takes a partition over: push its round again if it has not been answered."""
    cdef bint unanswered = p.stage == PUSH or p.stage == PULL
    cdef Term *term = term_under_way(c, p.term)
    withdraw(c, p)
    p.registered = False
    if not unanswered and received(p) == 0 and not has_backup(p):
        return                  # no other worker can have more of it, and this one needs nothing
    # A transfer of compression state is no round, and changes nothing if it happens twice.
    send_have(c, p, unanswered and not p.is_codec_state)
    if term != NULL:
        count_have(term, p.lane)
        term.partitions += 1
        term.again += HEADER_BYTES + push_bytes(p) if unanswered else 0
    if unanswered:
        p.stage_index = <uint8_t>place_of_push(p)
        enter(c, p)


cdef inline void follow_moves(Core *c) noexcept nogil:
    """Let all partitions go where their slots have gone."""
    cdef uint32_t i
    for i in range(c.table.n):
        if resolve(c, c.table.at[i]):
            announce(c, c.table.at[i])


# ---- lanes that yield slots

cdef inline void send_yield(Core *c, Move *move) noexcept nogil:
    """Ask a lane to yield slots; it does so when all workers have."""
    cdef Header h
    cdef uint32_t i
    header_init(&h, YIELD, c.settings.job, c.settings.rank)
    h.flags = INLINE
    h.term, h.slot, h.divisor = move.term, move.limit, move.n
    for i in range(move.n):
        h.key |= <uint64_t>(move.targets[i].lane != move.lane) << i
    send_frame(c, move.lane, <char *>&h, <char *>&h + HEADER_BYTES)


cdef inline void begin_yield(Core *c, Move *move) noexcept nogil:
    attach(&c.lanes.at[move.lane], move)
    if c.lanes.at[move.lane].lost:
        move.done = True
        return
    c.lanes.at[move.lane].yielding = move
    c.moving.yielding += 1
    send_yield(c, move)


cdef inline void end_yield(Core *c, uint32_t peer) noexcept nogil:
    """A lane has yielded its slots, or is lost; follow_moves() has to follow.

    Partitions that go leave the lane's queue.
    """
    cdef Lane *lane = &c.lanes.at[peer]
    cdef Move *move = lane.yielding
    cdef Partition *p
    cdef uint32_t i, n = lane.queue.size
    if move == NULL:
        return
    lane.yielding = NULL
    c.moving.yielding -= 1
    move.done = True
    lane.queue.size = 0
    for i in range(n):
        p = lane.queue.items[i]
        if target_of(move, p.slot) == NULL:
            heap_push(&lane.queue, p)       # there was room for all of them


cdef inline int note_left(Core *c, uint32_t peer, Header *h) noexcept nogil:
    """Handle a LEFT: the lane knows nothing more of the slots that it had to yield. -1: invalid."""
    if c.lanes.at[peer].yielding == NULL or c.lanes.at[peer].yielding.term != h.term:
        return -1
    end_yield(c, peer)
    follow_moves(c)
    tell_haves(c)
    end_moving(c)
    return 0


# ---- terms

cdef inline void lose_lane(Core *c, Move *move) noexcept nogil:
    end_yield(c, move.lane)
    attach(&c.lanes.at[move.lane], move)
    move.done = True
    c.lanes.at[move.lane].queue.size = 0
    end_lane(c, move.lane)


cdef inline bint will_yield(Core *c, Partition *p) noexcept nogil:
    """Whether a partition's lane has yet to yield its slot."""
    cdef Move *move = c.lanes.at[p.lane].yielding
    return move != NULL and target_of(move, p.slot) != NULL


cdef inline void renew(Core *c, Term *term, Partition *p) noexcept nogil:
    """Give a partition to its own lane anew; push what has not been committed again.

    That of a lane which is lost, or has yet to yield it, waits until it moves.
    """
    withdraw(c, p)
    note_lost_worker(c, p)
    p.term, p.registered = term.number, False
    if not c.lanes.at[p.lane].lost and not will_yield(c, p):
        announce(c, p)


cdef inline void drop_workers(Core *c, Term *term) noexcept nogil:
    """Begin a term without lost workers: their pushes count if a survivor has committed them.

    The takeovers of earlier terms begin anew.
    """
    cdef uint32_t i
    cdef Lane *lane
    cdef Term *earlier = term.next
    c.moving.era, c.moving.living = term.number, term.living
    c.moving.untaken = 0
    while earlier != NULL:
        earlier.said = True
        earlier = earlier.next
    for i in range(c.lanes.n):
        lane = &c.lanes.at[i]
        lane.untaken = 0
        if not lane.lost:
            lane.queue.size = 0
    term.n_told = min(c.lanes.n_living, term.room)
    for i in range(term.n_told):
        term.told[i].lane, term.told[i].haves = c.lanes.living[i], 0
    for i in range(c.table.n):
        renew(c, term, c.table.at[i])


cdef inline void count_on_more(Core *c, Term *term) noexcept nogil:
    """Workers enter. Nothing is under way, and all have all outcomes."""
    cdef uint32_t i
    c.moving.era, c.moving.living = term.number, term.living
    for i in range(c.table.n):
        c.table.at[i].term = term.number


cdef inline void begin_term(Core *c, Term *term) noexcept nogil:
    """Carry a term out. From here on the lanes refer to its moves.

    A thread drives until all of its keys have been taken, as a lane may ask for an outcome.
    """
    cdef uint32_t i
    if c.moving.terms == NULL:
        lock(&c.monitor)
        count_work(c, True)
        unlock(&c.monitor)
    term.next = c.moving.terms
    c.moving.terms = term
    for i in range(term.n):
        if term.moves[i].yields:
            begin_yield(c, &term.moves[i])
        else:
            lose_lane(c, &term.moves[i])
    count_living(c)
    if term.enters:
        count_on_more(c, term)
    elif term.living:
        drop_workers(c, term)
    follow_moves(c)
    tell_haves(c)
    end_moving(c)


cdef inline void end_moving(Core *c) noexcept nogil:
    """Report the terms under way to Python, once all keys have been taken."""
    cdef Term *term
    cdef uint64_t one = 1
    if (c.moving.untaken or c.moving.yielding) and not c.failed or c.moving.terms == NULL:
        return
    lock(&c.monitor)
    # Both lists have the latest first.
    term = c.moving.terms
    while term.next != NULL:
        term = term.next
    term.next = c.moving.over
    c.moving.over = c.moving.terms
    c.moving.terms = NULL
    count_work(c, False)
    unlock(&c.monitor)
    write(c.moving.told, &one, sizeof(one))


cdef inline void end_lanes(Core *c, const uint32_t *lanes, uint32_t n) noexcept nogil:
    """End the connections to lanes, whose keys do not move, or not yet."""
    cdef uint32_t i
    for i in range(n):
        end_yield(c, lanes[i])
        end_lane(c, lanes[i])
    count_living(c)
    follow_moves(c)
    tell_haves(c)
    end_moving(c)


cdef inline int note_taken(Core *c, uint32_t peer, uint32_t term) noexcept nogil:
    """Handle a TOOK. -1: none is awaited."""
    if term < c.moving.era:
        return 0
    if c.lanes.at[peer].untaken == 0:
        return -1
    c.lanes.at[peer].untaken -= 1
    c.moving.untaken -= 1
    end_moving(c)
    return 0


cdef inline void forget_rounds(Core *c) noexcept nogil:
    """Count rounds from zero after all workers have joined; every worker then has all outcomes.

    An asynchronous job goes on counting: a value is described by the numbers of its pushes.
    """
    cdef uint32_t i
    for i in range(c.table.n if not c.settings.asynchronous else 0):
        # A root may still hand a result to its machine's other processes.
        c.table.at[i].joined_at += received(c.table.at[i])
        if c.table.at[i].stage != COPY:
            forget_kept(c, c.table.at[i])
    for i in range(c.lanes.n):
        c.lanes.at[i].n_acks, c.lanes.at[i].acks_bytes = 0, 0


cdef inline void frame_freed(void *data, void *hint) noexcept nogil:
    free(data)


cdef inline int give(Core *c, Header *asked) noexcept nogil:
    """Handle a WANT: send a kept outcome, or an error if it is not kept.

    Returns 0, or -1 if the record is invalid.
    """
    cdef Header h
    cdef Partition *p
    cdef Kept *kept
    if asked.cookie >= c.table.n:
        return -1
    p = c.table.at[asked.cookie]
    kept = p.kept
    if p.key != asked.key or p.term != asked.term:
        return -1
    moved_header(c, p, &h, GIVE)
    h.round = asked.round
    h.divisor = 0
    if kept == NULL or not kept.held or (
        kept.round != asked.round and not c.settings.asynchronous
    ):
        h.divisor = <uint32_t>-E_PROTOCOL
    elif kept.outcome.status != DONE:
        h.divisor = <uint32_t>-kept.outcome.status
        h.priority, h.cookie = <int>kept.outcome.a, kept.outcome.b
    else:
        h.length = kept.length
    send_given(c, p, &h, kept.body if kept != NULL else NULL)
    return 0


cdef inline void send_given(Core *c, Partition *p, Header *h, const char *body) noexcept nogil:
    """Send a record, with a copy of its body: the transport may hold that for longer."""
    cdef char *copy = NULL
    if h.length:
        copy = <char *>malloc(h.length)
        if copy == NULL:
            fail_core(c, E_MEMORY)
            return
        memcpy(copy, body, h.length)
    send_own(c, p, h, copy)


cdef inline void send_own(Core *c, Partition *p, Header *h, char *body) noexcept nogil:
    """Send a record whose body is freed afterwards."""
    if h.length:
        h.flags &= ~<uint8_t>INLINE
    c.counters.sent += HEADER_BYTES + h.length
    c.counters.messages_out += 1
    if c.endpoint.send(
        c.endpoint.self, p.lane, h, HEADER_BYTES, NULL, NULL, body, h.length,
        frame_freed, NULL, NULL
    ) != 0:
        c.lanes.at[p.lane].mute = True


cdef inline int give_state(Core *c, Header *asked) noexcept nogil:
    """Handle a FETCH: send the log and, if it is asked for, the snapshot. -1: invalid."""
    cdef Header h
    cdef Partition *p
    cdef Snapshot *snapshot
    if asked.cookie >= c.table.n:
        return -1
    p = c.table.at[asked.cookie]
    if p.key != asked.key or p.term != asked.term or p.packed == NULL:
        return -1
    if asked.flags & STATE:
        if p.backup == NULL or p.backup.snapshot.body == NULL:
            return -1
        snapshot = &p.backup.snapshot
        moved_header(c, p, &h, LOAD)
        h.round, h.length = snapshot.sum, snapshot.length
        send_given(c, p, &h, snapshot.body)
    give_log(c, p, asked.round, asked.divisor)
    return 0


cdef inline uint64_t part_of_log(
    Core *c, Partition *p, uint32_t *next_entry, uint32_t unanswered, char *at
) noexcept nogil:
    """Write entries of the log from *next_entry on at `at`, about PART_BYTES; advance it.

    `unanswered`: number of the sum that the unanswered push is part of, 0: of none. It counts as
    the last entry. NULL at `at`: write nothing. Returns the bytes.
    """
    cdef LogEntry entry
    cdef LogHead head
    cdef uint64_t size = 0
    cdef uint32_t n = p.backup.n_entries if p.backup != NULL else 0
    while size < PART_BYTES and next_entry[0] < n + (1 if unanswered else 0):
        if next_entry[0] < n:
            entry = p.backup.entries[next_entry[0]]
        else:
            entry.sum, entry.divisor = unanswered, divisor_of(c, p)
            entry.length, entry.body = p.packed.size, <char *>wire_of(p)
        next_entry[0] += 1
        if at != NULL:
            head.sum, head.divisor, head.length = entry.sum, entry.divisor, entry.length
            memcpy(at + size, &head, sizeof(LogHead))
            memcpy(at + size + sizeof(LogHead), entry.body, entry.length)
        size += sizeof(LogHead) + padded(entry.length)
    return size


cdef inline void give_log(
    Core *c, Partition *p, uint32_t after, uint32_t unanswered
) noexcept nogil:
    """Send what the log has after sum `after`, in parts; at least one, which may be empty."""
    cdef Header h
    cdef uint32_t first = 0, entry, parts = 0, part
    cdef char *body
    while p.backup != NULL and first < p.backup.n_entries and p.backup.entries[first].sum <= after:
        first += 1
    entry = first
    while part_of_log(c, p, &entry, unanswered, NULL):
        parts += 1
    for part in range(max(parts, <uint32_t>1)):
        moved_header(c, p, &h, LOG)
        h.round, h.divisor = part, max(parts, <uint32_t>1)
        entry = first
        h.length = part_of_log(c, p, &entry, unanswered, NULL)
        body = NULL
        if h.length:
            body = <char *>calloc(1, h.length)
            if body == NULL:
                fail_core(c, E_MEMORY)
                return
            part_of_log(c, p, &first, unanswered, body)
        send_own(c, p, &h, body)
