# Rebuilds the lane's state of a compressed key that has come from a lost lane: from the counter
# that workers have, or from a snapshot and the workers' logs.
# docs/internals/elastic-compression.md describes the protocol. takeover.pxd and terms.pxd call
# these functions.
from libc.stdint cimport uint32_t, uint64_t
from libc.stdlib cimport calloc, free
from libc.string cimport memcpy

from bpsx.core.codec.state cimport load_state, most_bytes, server_state_bytes
from bpsx.core.wire cimport (
    FETCH, HAS_STATE, STATE, SUMMED, WAS_SET, Coded, Header, LogHead, header_init, padded,
)
from bpsx.server.compressed cimport add_packed, encode_sum, forget_residual
from bpsx.server.lane cimport Lane
from bpsx.server.loading cimport cannot_rebuild, tell_reset
from bpsx.server.reply cimport let_go, put_record
from bpsx.server.snapshots cimport choose_holder, end_sending, save_at_once
from bpsx.server.store cimport (
    EMPTY, OPEN, Compressed, KeyState, Piece, Rebuild, Saving, SenderLog, Takeover, free_memory,
    memory_for, move_round,
)
from bpsx.transports.abi cimport Message

cdef enum:
    # Keys are rebuilt together while what is on its way for them has at most so many bytes.
    BYTES_UNDER_WAY = 64 << 20
    MOST_PARTS = 1 << 20


# ---- what the senders have

cdef inline bint note_coded(Lane *lane, KeyState *e, Header *h, const char *body) noexcept nogil:
    """Note the body of a HAVE. False: it is malformed, or there is no memory."""
    cdef Takeover *t = e.takeover
    if e.compressed == NULL or h.length == 0:
        return h.length == 0 or h.length == sizeof(Coded)
    if h.length != sizeof(Coded):
        return False
    if t.coded == NULL:
        t.coded = <Coded *>calloc(lane.settings.senders, sizeof(Coded))
        if t.coded == NULL:
            return False
    memcpy(&t.coded[h.sender], body, sizeof(Coded))
    return True


cdef inline int newest_state(Lane *lane, Takeover *t) noexcept nogil:
    """Return the sender that has the newest state; -1: none has any.

    Of two states after the same sum the one that was set is newer.
    """
    cdef uint32_t sender
    cdef int best = -1
    cdef Coded *coded
    for sender in range(lane.settings.senders):
        coded = &t.coded[sender]
        if coded.flags & HAS_STATE and (
            best < 0 or coded.state > t.coded[best].state
            or coded.state == t.coded[best].state and coded.flags & WAS_SET
        ):
            best = <int>sender
    return best


cdef inline bint is_in_sum(Lane *lane, Takeover *t, uint32_t most, uint32_t last) noexcept nogil:
    """Whether the unanswered pushes of late senders are part of the latest sum: the outcome that
    they lack is that sum, and no error.
    """
    cdef uint32_t sender
    for sender in range(lane.settings.senders):
        if (
            t.haves[sender].there and t.haves[sender].round == most
            and t.coded[sender].sum == last and t.coded[sender].flags & SUMMED
        ):
            return True
    return False


cdef inline void settle_state(Lane *lane, KeyState *e, uint32_t most) noexcept nogil:
    """Set a compressed key's state, or begin to rebuild it, after all senders have reported.

    `most`: rounds whose outcome some sender has. Without memory the lane ends.
    """
    cdef Takeover *t = e.takeover
    cdef uint32_t sender, last = 0, gap = 0, base = 0
    cdef uint64_t counter = 0
    cdef int newest = -1
    if t.coded != NULL:
        newest = newest_state(lane, t)
        for sender in range(lane.settings.senders):
            last = max(last, max(t.coded[sender].sum, t.coded[sender].state))
            gap, counter = max(gap, t.coded[sender].gap), max(counter, t.coded[sender].counter)
    if newest >= 0:
        base = t.coded[newest].state
    if e.compressed.packed.light and newest >= 0:
        counter = t.coded[newest].counter
    if e.compressed.whole and lacks_state_before(lane, e, last):
        give_up_state(lane, e)
    if e.compressed.whole:
        take_back(lane, e, last, counter)
    else:
        e.compressed.sum = last
        note_lacking(lane, e, most, last)
        if not e.compressed.packed.light and base >= gap and (last or newest >= 0):
            begin_rebuild(lane, e, newest)
            return
        e.compressed.whole = True
        if e.compressed.packed.light:
            e.compressed.packed.counter = counter
        elif base < gap:
            start_anew(lane, e, counter)
    if lane.settings.shrinks and not e.compressed.packed.light:
        note_snapshots(lane, e, newest, base)


cdef inline void take_back(
    Lane *lane, KeyState *e, uint32_t last, uint64_t counter
) noexcept nogil:
    """Take a key's latest sum back after a loss of workers, unless a survivor has committed it.

    `last`: number of the latest sum that a survivor has. `counter`: the lane's counter after it.
    Earlier sums stay, even if only lost workers took part in them, as the others had joined. So
    does the latest one if the lane took the key over with it, and no survivor repeats it. If no
    survivor has used the key, none can hold a snapshot: the key begins anew, without those sums.
    """
    cdef Compressed *c = e.compressed
    if c.sum <= last:
        return
    if c.before != NULL and c.sum > c.before_sum:
        lane.counters.undone += 1
        load_state(c.packed, c.before)
        c.sum, c.restored = c.before_sum, c.before_restored
    elif c.before == NULL and c.packed.light:
        lane.counters.undone += 1
        c.packed.counter, c.sum = counter, last
    if c.sum > last and choose_holder(lane, e) < 0:
        forget_residual(c.packed)
        c.packed.counter, c.sum, c.restored = counter, last, False


cdef inline void note_lacking(
    Lane *lane, KeyState *e, uint32_t most, uint32_t last
) noexcept nogil:
    """Note which senders lack the latest sum of a key that has come without its state."""
    cdef Takeover *t = e.takeover
    cdef uint32_t sender
    cdef bint part = t.coded != NULL and is_in_sum(lane, t, most, last)
    for sender in range(lane.settings.senders):
        e.shares[sender].lacked = part and t.haves[sender].late == 1


cdef inline void give_up_state(Lane *lane, KeyState *e) noexcept nogil:
    """Forget a key's state: survivors may have the one that is needed, as if the lane were lost."""
    lane.counters.undone += 1
    forget_residual(e.compressed.packed)
    e.compressed.packed.counter = 0
    e.compressed.whole = e.compressed.restored = False
    end_sending(&e.compressed.saving, False)
    e.compressed.saving.stored = 0


cdef inline bint lacks_state_before(Lane *lane, KeyState *e, uint32_t last) noexcept nogil:
    """Whether the latest sum has to be taken back, and the lane has no copy of the state before.

    The lane then took the key over with that sum, and a survivor lacked it (`note_lacking`).
    """
    cdef uint32_t sender
    if e.compressed.sum <= last or e.compressed.before != NULL or e.compressed.packed.light:
        return False
    for sender in range(lane.settings.senders):
        if e.shares[sender].lacked and not lane.absent.lost[sender]:
            return True
    return False


cdef inline void note_snapshots(Lane *lane, KeyState *e, int newest, uint32_t base) noexcept nogil:
    """Make sure that a survivor has a snapshot of this state: logs of lost workers are gone."""
    cdef Saving *s = &e.compressed.saving
    end_sending(s, False)
    s.stored = 0                # it may follow a sum that only a lost worker had
    if newest >= 0 and base == e.compressed.sum and (
        not e.compressed.restored or e.takeover.coded[newest].flags & WAS_SET
    ):
        s.stored, s.logged = base, 0
    elif e.compressed.sum or e.compressed.restored:
        save_at_once(lane, e)


cdef inline void start_anew(Lane *lane, KeyState *e, uint64_t counter) noexcept nogil:
    """Start with a residual of zero: the lane is lost, and so is a worker with part of the log."""
    forget_residual(e.compressed.packed)
    e.compressed.packed.counter = counter
    lane.counters.reset += 1
    if lane.terms.reset != e.term:
        lane.terms.reset = e.term
        tell_reset(lane, e.term)


cdef inline void begin_rebuild(Lane *lane, KeyState *e, int newest) noexcept nogil:
    """Queue a key to be rebuilt from the snapshot of sender `newest` and all logs."""
    cdef Takeover *t = e.takeover
    cdef uint32_t sender, last = e.compressed.sum
    cdef Rebuild *r
    r = <Rebuild *>calloc(1, sizeof(Rebuild) + lane.settings.senders * sizeof(SenderLog))
    if r == NULL:
        lane.counters.dropped += 1
        return
    r.logs = <SenderLog *>(r + 1)
    r.last, r.holder = last, newest
    r.base = t.coded[newest].state if newest >= 0 else 0
    r.bytes = server_state_bytes(e.compressed.packed) if newest >= 0 else 0
    for sender in range(lane.settings.senders):
        r.logs[sender].unanswered = e.shares[sender].lacked
        r.bytes += t.coded[sender].logged
    t.rebuild = r
    t.awaited += 1
    if lane.rebuilds.first == NULL:
        lane.rebuilds.first = e
    else:
        lane.rebuilds.last.takeover.rebuild.next = e
    lane.rebuilds.last = e


# ---- asking for it

cdef inline void send_fetch(Lane *lane, KeyState *e, uint32_t sender) noexcept nogil:
    """Ask a sender for its log and, if it is the holder, for the snapshot."""
    cdef Rebuild *r = e.takeover.rebuild
    cdef Header h
    header_init(&h, FETCH, lane.settings.job, sender)
    h.dtype, h.key, h.term, h.round = e.dtype, e.key, e.term, r.base
    h.cookie = e.takeover.haves[sender].cookie
    if r.logs[sender].unanswered:
        h.divisor = r.last
    r.logs[sender].asked = True
    r.awaited += 1
    if r.holder == <int>sender:
        h.flags = STATE
        r.awaited += 1
    put_record(lane, sender, &h, NULL)


cdef inline void start_rebuilds(Lane *lane) noexcept nogil:
    """Ask for the logs of the next keys that wait, as far as the bound allows."""
    cdef KeyState *e
    cdef Rebuild *r
    cdef uint32_t sender
    while lane.rebuilds.first != NULL:
        e = lane.rebuilds.first
        r = e.takeover.rebuild
        if lane.rebuilds.under_way and lane.rebuilds.under_way + r.bytes > BYTES_UNDER_WAY:
            return
        lane.rebuilds.first = r.next
        r.started = True
        lane.rebuilds.under_way += max(r.bytes, <uint64_t>1)
        for sender in range(lane.settings.senders):
            if (
                r.holder == <int>sender or r.logs[sender].unanswered
                or e.takeover.coded[sender].logged
            ):
                send_fetch(lane, e, sender)
        if r.awaited == 0:
            cannot_rebuild(lane, e.key)


# ---- getting it

cdef inline void free_piece(Lane *lane, Piece *piece) noexcept nogil:
    if piece.message != NULL:
        let_go(lane, piece.message)
    else:
        free(piece.body)
    piece.message, piece.body = NULL, NULL


cdef inline void free_rebuild(Lane *lane, Takeover *t) noexcept nogil:
    cdef Rebuild *r = t.rebuild
    cdef uint32_t sender, i
    free(t.coded)
    t.coded = NULL
    if r == NULL:
        return
    free_piece(lane, &r.snapshot)
    for sender in range(lane.settings.senders):
        for i in range(r.logs[sender].n_parts):
            free_piece(lane, &r.logs[sender].parts[i])
        free(r.logs[sender].parts)
    free(r)
    t.rebuild = NULL


cdef inline void leave_rebuilds(Lane *lane, KeyState *e) noexcept nogil:
    """Cancel a key's rebuild, because the key is taken over anew."""
    cdef Rebuild *r = e.takeover.rebuild
    cdef KeyState *before = NULL
    cdef KeyState *one = lane.rebuilds.first
    if r.started:
        lane.rebuilds.under_way -= max(r.bytes, <uint64_t>1)
        return
    while one != e:
        before, one = one, one.takeover.rebuild.next
    if before == NULL:
        lane.rebuilds.first = r.next
    else:
        before.takeover.rebuild.next = r.next
    if lane.rebuilds.last == e:
        lane.rebuilds.last = before


cdef inline bint hold_piece(
    Lane *lane, Piece *piece, Header *h, Message *m, char *body, bint *kept
) noexcept nogil:
    """Hold a record's body. `m` and *kept: as for `take_given`. False: no memory, the lane ends."""
    piece.there, piece.length = True, h.length
    if m != NULL and body == m.body:
        piece.message, piece.body = m, body
        kept[0] = True
    elif h.length:
        if not memory_for(&piece.body, h.length):
            lane.counters.dropped += 1
            return False
        memcpy(piece.body, body, h.length)
    return True


cdef inline int take_load(
    Lane *lane, KeyState *e, Header *h, Message *m, char *body, bint *kept
) noexcept nogil:
    """Handle a LOAD. -1: malformed. `m` and *kept: as for `take_given`."""
    cdef Rebuild *r = e.takeover.rebuild
    if (
        r.holder != <int>h.sender or r.snapshot.there or h.round != r.base
        or h.length != server_state_bytes(e.compressed.packed)
    ):
        return -1
    if hold_piece(lane, &r.snapshot, h, m, body, kept):
        r.awaited -= 1
    return 0


cdef inline int take_log(
    Lane *lane, KeyState *e, Header *h, Message *m, char *body, bint *kept
) noexcept nogil:
    """Handle a LOG. -1: malformed. `m` and *kept: as for `take_given`."""
    cdef SenderLog *log = &e.takeover.rebuild.logs[h.sender]
    if not log.asked or h.divisor == 0 or h.divisor > MOST_PARTS or h.round >= h.divisor:
        return -1
    if log.parts == NULL:
        log.parts = <Piece *>calloc(h.divisor, sizeof(Piece))
        if log.parts == NULL:
            lane.counters.dropped += 1
            return 0
        log.n_parts = h.divisor
    if h.divisor != log.n_parts or log.parts[h.round].there:
        return -1
    if hold_piece(lane, &log.parts[h.round], h, m, body, kept):
        log.came += 1
        if log.came == log.n_parts:
            e.takeover.rebuild.awaited -= 1
    return 0


# ---- replay

cdef inline bint find_push(
    SenderLog *log, uint32_t sum_, LogHead *head, char **body
) noexcept nogil:
    """Find the log's push that is part of a sum, behind those found before. False: there is none.
    """
    cdef Piece *part
    while log.part < log.n_parts:
        part = &log.parts[log.part]
        if log.at + sizeof(LogHead) > part.length:
            log.part += 1
            log.at = 0
            continue
        memcpy(head, part.body + log.at, sizeof(LogHead))
        if head.sum > sum_ or head.length > part.length - log.at - sizeof(LogHead):
            return False
        body[0] = part.body + log.at + sizeof(LogHead)
        log.at += sizeof(LogHead) + padded(head.length)
        if head.sum == sum_:
            return True
    return False


cdef inline bint repeat_sum(Lane *lane, KeyState *e) noexcept nogil:
    """Sum and encode the logged pushes of the next sum, as the lost lane did. False: impossible."""
    cdef Rebuild *r = e.takeover.rebuild
    cdef uint32_t sender
    cdef LogHead head
    cdef char *body = NULL
    cdef char *wire = NULL
    move_round(e, OPEN)
    for sender in range(lane.settings.senders):
        if (
            e.state == OPEN and find_push(&r.logs[sender], e.compressed.sum + 1, &head, &body)
            and head.length <= most_bytes(e.compressed.packed)
        ):
            e.operation.divisor = head.divisor
            add_packed(lane, e, sender, body, head.length)
    if e.state == OPEN and e.round.added:
        wire = encode_sum(lane, e)
    e.round.added = 0
    move_round(e, EMPTY)
    free(wire)
    lane.counters.replayed += 1
    return wire != NULL


cdef inline void replay(Lane *lane, KeyState *e) noexcept nogil:
    """Set the key's state to that of the lost lane, now that all that was asked for is there.

    In a job that shrinks, the logs lack sums of which no survivor knows (`take_back`), if the
    snapshot after them has not arrived.
    """
    cdef Rebuild *r = e.takeover.rebuild
    cdef uint64_t counter = 0
    cdef uint32_t sender
    cdef bint possible = True
    if r.holder >= 0:
        load_state(e.compressed.packed, r.snapshot.body)
        e.compressed.saving.stored = r.base
        e.compressed.restored = e.takeover.coded[r.holder].flags & WAS_SET != 0
    e.compressed.sum = r.base
    while possible and e.compressed.sum < r.last:
        possible = repeat_sum(lane, e)
    free_memory(&e.compressed.acc)
    if not possible and lane.settings.shrinks:
        for sender in range(lane.settings.senders):
            counter = max(counter, e.takeover.coded[sender].counter)
        e.compressed.sum = r.last
        start_anew(lane, e, counter)
    elif not possible:
        cannot_rebuild(lane, e.key)


cdef inline bint end_rebuild(Lane *lane, KeyState *e) noexcept nogil:
    """Replay, once all is there. Returns whether it is."""
    cdef Takeover *t = e.takeover
    if t.rebuild.awaited:
        return False
    replay(lane, e)
    lane.rebuilds.under_way -= max(t.rebuild.bytes, <uint64_t>1)
    free_rebuild(lane, t)
    t.awaited -= 1
    e.compressed.whole = True
    start_rebuilds(lane)
    return True
