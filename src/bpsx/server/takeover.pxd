# Takes over keys of lost lanes: gathers the senders' reports (HAVE, HAVES), and sends late senders
# the outcome that others have already. docs/internals/elastic.md describes the protocol.
#
# `begin_takeover` makes a key's takeover when it is announced. terms.pxd calls the rest, and sums
# the pushes that were held once a key has been taken.
from libc.stdint cimport uint32_t, uint64_t
from libc.stdlib cimport calloc, free, malloc
from libc.string cimport memcpy

from bpsx.core.status cimport E_COMPRESSOR, E_PROTOCOL
from bpsx.core.codec.state cimport most_bytes
from bpsx.core.wire cimport (
    ANSWER, INLINE_BYTES, KEPT, LOAD, TOOK, WAITS, WANT, Header, header_init,
)
from bpsx.server.kept_values cimport (
    is_away, note_applied, send_value, settle_value, take_value,
)
from bpsx.server.lane cimport Gathered, Lane, Said
from bpsx.server.rebuild cimport (
    end_rebuild, free_rebuild, leave_rebuilds, note_coded, settle_state, take_load, take_log,
)
from bpsx.server.reply cimport (
    let_go, put_record, reply_header, send_copy, send_error, tell_living,
)
from bpsx.server.store cimport (
    ASKING, GATHERING, TAKEN, Have, HeldPush, KeyState, Takeover, memory_for,
)
from bpsx.system.arrays cimport make_room
from bpsx.system.sync cimport atomic_store
from bpsx.transports.abi cimport Message

cdef enum:
    MOST_TERMS = 1 << 16


cdef inline bint is_gathered(Lane *lane, uint32_t term) noexcept nogil:
    """Whether all senders have reported the keys that came in a term."""
    return term <= lane.terms.born or term < lane.terms.n and lane.terms.at[term].over


cdef inline Gathered *gathering_of(Lane *lane, uint32_t term) noexcept nogil:
    """Return the record of all reports in a term. NULL: no memory, or an invalid term."""
    if term == 0 or term >= MOST_TERMS or not make_room(
        &lane.terms.at, &lane.terms.n, term + 1, sizeof(Gathered)
    ):
        return NULL
    if term > lane.terms.latest:
        atomic_store(&lane.terms.latest, term)
    return &lane.terms.at[term]


cdef inline bint begin_takeover(Lane *lane, KeyState *e) noexcept nogil:
    """Make the takeover of a key that is announced with a new term. False: no memory."""
    cdef uint32_t n = lane.settings.senders
    cdef Takeover *t = <Takeover *>calloc(1, sizeof(Takeover) + n * sizeof(Have))
    if t == NULL or gathering_of(lane, e.term) == NULL:
        free(t)
        return False
    t.haves = <Have *>(t + 1)
    e.takeover = t
    return True


cdef inline void end_takeover(Lane *lane, KeyState *e) noexcept nogil:
    """Free the takeover of a key, and the pushes that it still holds."""
    cdef Takeover *t = e.takeover
    cdef uint32_t sender
    if t == NULL:
        return
    for sender in range(lane.settings.senders):
        free(t.haves[sender].applied)
        if t.held != NULL and t.held[sender].there:
            drop_held_push(lane, &t.held[sender])
    free(t.held)
    if t.rebuild != NULL:
        leave_rebuilds(lane, e)
    free_rebuild(lane, t)
    if t.message != NULL:
        let_go(lane, t.message)
    else:
        free(t.body)
    free(t)
    e.takeover = NULL


cdef inline void drop_held_push(Lane *lane, HeldPush *held) noexcept nogil:
    if held.message != NULL:
        let_go(lane, held.message)
    else:
        free(held.body)
    held.there, held.message, held.body = False, NULL, NULL


cdef inline Said *said_by(Lane *lane, uint32_t term, uint32_t sender) noexcept nogil:
    """Return the record of a sender's reports in a term. NULL: no memory, or a decided term."""
    cdef Gathered *gathered = gathering_of(lane, term)
    if gathered == NULL or gathered.over:
        return NULL
    if gathered.by == NULL:
        gathered.by = <Said *>calloc(lane.settings.senders, sizeof(Said))
    return &gathered.by[sender] if gathered.by != NULL else NULL


cdef inline int take_have(
    Lane *lane, KeyState *e, Header *h, const char *body
) noexcept nogil:
    """Handle a HAVE. -1: malformed.

    A dropped HAVE would leave the term undecided. But without memory for the key the lane ends.
    """
    cdef Have *have
    cdef Said *said = said_by(lane, h.term, h.sender)
    if (
        said == NULL or e == NULL or e.takeover == NULL
        or e.key != h.key or e.term != h.term or e.takeover.haves[h.sender].there
    ):
        return -1
    have = &e.takeover.haves[h.sender]
    if not (
        note_applied(lane, h, body, have) if lane.settings.asynchronous
        else note_coded(lane, e, h, body)
    ):
        return -1
    have.there, have.round, have.joins = 1, h.round, h.divisor
    have.cookie = <uint32_t>h.cookie
    have.waits = h.flags & WAITS != 0
    have.keeps = h.flags & KEPT != 0
    said.came += 1
    return 0


cdef inline int take_haves(Lane *lane, Header *h) noexcept nogil:
    """Handle a HAVES. -1: malformed."""
    cdef Said *said = said_by(lane, h.term, h.sender)
    if said == NULL or said.all:
        return -1
    said.due, said.all = <uint32_t>h.cookie, True
    return 0


cdef inline bint completes(Lane *lane, uint32_t term) noexcept nogil:
    """Return True once, when all senders have reported a term's keys.

    A term before the latest drop is never decided: a sender that has reported may be lost.
    """
    cdef Gathered *gathered = gathering_of(lane, term)
    cdef uint32_t sender
    if gathered == NULL or gathered.over or gathered.by == NULL or term < lane.terms.era:
        return False
    for sender in range(lane.settings.senders):
        if not is_away(lane, sender) and (
            not gathered.by[sender].all or gathered.by[sender].came < gathered.by[sender].due
        ):
            return False
    gathered.over = True
    return True


cdef inline uint32_t settle_counts(Lane *lane, KeyState *e) noexcept nogil:
    """Set each sender's round. Returns the largest.

    Reports from before the latest join count as zero: every sender then had every outcome.
    """
    cdef uint32_t sender, most = 0, joins = lane.terms.joins
    cdef Have *have
    for sender in range(lane.settings.senders):
        joins = max(joins, e.takeover.haves[sender].joins)
    for sender in range(lane.settings.senders):
        have = &e.takeover.haves[sender]
        if have.joins < joins:
            have.round, have.waits, have.keeps = 0, 0, 0
        e.shares[sender].round = have.round
        most = max(most, have.round)
    return most


cdef inline int settle_outcome(Lane *lane, KeyState *e) noexcept nogil:
    """Find the late senders of a key, after all senders have reported.

    Returns a sender that keeps the latest outcome, or -1 if no sender waits for it.
    """
    cdef Takeover *t = e.takeover
    cdef uint32_t most = settle_counts(lane, e), sender
    cdef int holder = -1
    for sender in range(lane.settings.senders):
        if t.haves[sender].waits and t.haves[sender].round < most:
            t.haves[sender].late = 1 if t.haves[sender].round + 1 == most else 2
            t.late += 1
        if t.haves[sender].keeps and t.haves[sender].round == most:
            holder = <int>sender
    t.most = most
    if e.compressed != NULL:
        settle_state(lane, e, most)
    if t.late and holder < 0:
        # Cannot happen as long as workers keep what they have to: late senders get an error.
        t.status = E_PROTOCOL
    return holder if t.late else -1


cdef inline void decide(Lane *lane, KeyState *e) noexcept nogil:
    """Take a key over after all senders have reported, or first ask for the data that it lacks.

    These are an outcome or a value, and the state of the key's compression.
    """
    cdef Takeover *t = e.takeover
    cdef int holder = (
        settle_value(lane, e) if lane.settings.asynchronous else settle_outcome(lane, e)
    )
    if holder >= 0:
        t.asked, t.holder = True, holder
        t.awaited += 1
        send_want(lane, e, holder, t.haves[holder].round - 1)
    t.state = ASKING if t.awaited else TAKEN
    if t.awaited:
        lane.terms.at[e.term].asking += 1
    else:
        answer_late(lane, e)


cdef inline void ask_another(Lane *lane, KeyState *e) noexcept nogil:
    """Decide a key anew: the sender that was asked for its value is away, or has none."""
    free(e.takeover.haves[e.takeover.holder].applied)
    e.takeover.haves[e.takeover.holder].applied = NULL
    e.takeover.asked = False
    e.takeover.awaited = 0
    e.takeover.state = GATHERING
    lane.terms.at[e.term].asking -= 1
    decide(lane, e)


cdef inline void note_arrival(Lane *lane, KeyState *e) noexcept nogil:
    """After the last awaited outcome or state, answer the late senders that have pushed."""
    if e.takeover.awaited == 0:
        e.takeover.state = TAKEN
        lane.terms.at[e.term].asking -= 1
        answer_late(lane, e)


cdef inline void send_want(
    Lane *lane, KeyState *e, uint32_t holder, uint32_t round_
) noexcept nogil:
    """Ask a sender for the outcome of a round."""
    cdef Header h
    header_init(&h, WANT, lane.settings.job, holder)
    h.dtype, h.key, h.term, h.round = e.dtype, e.key, e.term, round_
    h.cookie = e.takeover.haves[holder].cookie
    put_record(lane, holder, &h, NULL)


cdef inline bint may_be_result(KeyState *e, uint64_t length) noexcept nogil:
    return length == e.nbytes or (
        e.compressed != NULL and length <= most_bytes(e.compressed.packed)
    )


cdef inline int take_given(
    Lane *lane, KeyState *e, Header *h, Message *m, char *body, bint *kept
) noexcept nogil:
    """Handle a GIVE: answer the late senders that have pushed. -1: malformed.

    `m`: its message if the body is the message's own, else NULL. *kept: the message now belongs to
    the takeover. Without memory the outcome is lost and counted, which ends the lane.
    """
    cdef Takeover *t = e.takeover if e != NULL else NULL
    cdef int status = -<int>h.divisor
    if t == NULL or not t.asked or e.key != h.key or e.term != h.term:
        return -1
    if not may_be_result(e, h.length) if status == 0 else not E_COMPRESSOR <= status <= -1:
        status = E_PROTOCOL
    if lane.settings.asynchronous:
        return take_given_value(lane, e, h.sender, status, body)
    t.status, t.a, t.b = status, <uint32_t>h.priority, <uint32_t>h.cookie
    t.length = h.length if status == 0 else 0
    if t.length and m != NULL and body == m.body:
        t.message, t.body = m, body
        kept[0] = True
    elif t.length:
        if not memory_for(&t.body, t.length):
            lane.counters.dropped += 1
            return 0
        memcpy(t.body, body, t.length)
    t.asked = False
    t.awaited -= 1
    note_arrival(lane, e)
    return 0


cdef inline int take_given_value(
    Lane *lane, KeyState *e, uint32_t sender, int status, const char *body
) noexcept nogil:
    """Handle the GIVE of an asynchronous job. Arguments and result as for `take_given`."""
    if sender != e.takeover.holder:
        return -1
    if status:
        ask_another(lane, e)
        return 0
    if not take_value(lane, e, body):
        lane.counters.dropped += 1
        return 0
    e.takeover.asked = False
    e.takeover.awaited -= 1
    note_arrival(lane, e)
    return 0


cdef inline int take_state(
    Lane *lane, KeyState *e, Header *h, Message *m, char *body, bint *kept
) noexcept nogil:
    """Handle a LOAD or a LOG. Arguments and result as for `take_given`."""
    cdef Takeover *t = e.takeover if e != NULL else NULL
    if t == NULL or t.rebuild == NULL or e.key != h.key or e.term != h.term:
        return -1
    if (
        take_load(lane, e, h, m, body, kept) if h.kind == LOAD
        else take_log(lane, e, h, m, body, kept)
    ) != 0:
        return -1
    if end_rebuild(lane, e):
        note_arrival(lane, e)
    return 0


cdef inline void tell_taken(Lane *lane, uint32_t term) noexcept nogil:
    """Tell all senders once no outcome of a term is awaited any more."""
    if not lane.terms.at[term].asking:
        tell_living(lane, TOOK, term)


cdef inline void answer_late(Lane *lane, KeyState *e) noexcept nogil:
    """Answer the late senders whose pushes have been held."""
    cdef uint32_t sender
    for sender in range(lane.settings.senders):
        if e.takeover.held == NULL:
            return
        if e.takeover.haves[sender].late and e.takeover.held[sender].there:
            answer_one(lane, e, &e.takeover.held[sender].header)
            drop_held_push(lane, &e.takeover.held[sender])


cdef inline void answer_one(Lane *lane, KeyState *e, Header *push) noexcept nogil:
    """Answer a late sender's push with the outcome that others have got from the lost lane."""
    cdef Takeover *t = e.takeover
    cdef Header h
    cdef uint32_t sender = push.sender
    cdef int status = t.status if t.haves[sender].late == 1 else E_PROTOCOL
    if status:
        send_error(lane, sender, e.key, e.shares[sender].round, push.cookie, status, t.a, t.b)
    elif lane.settings.asynchronous:
        send_value(lane, e, sender, ANSWER, push.cookie)
    elif t.length > INLINE_BYTES:
        send_copy(lane, e, sender, ANSWER, push.cookie, t.body, t.length)
    else:
        reply_header(lane, &h, ANSWER, sender, e, push.cookie)
        h.length = t.length
        put_record(lane, sender, &h, t.body)
    e.shares[sender].round += 1
    t.haves[sender].late = 0
    t.late -= 1


cdef inline bint holds(
    Lane *lane, KeyState *e, Header *h, Message *m, char *body, bint *kept
) noexcept nogil:
    """Deal with a push of a key that has a takeover. False: it is to be summed.

    `m` and *kept: as for `take_given`.
    """
    cdef Takeover *t = e.takeover
    cdef HeldPush *held
    if t.state == TAKEN:
        if not t.haves[h.sender].late:
            return False
        answer_one(lane, e, h)
        return True
    if t.held == NULL:
        t.held = <HeldPush *>calloc(lane.settings.senders, sizeof(HeldPush))
        if t.held == NULL:
            lane.counters.dropped += 1
            return True
    held = &t.held[h.sender]
    if held.there:
        lane.counters.repeated += 1
        return True
    held.there, held.header = True, h[0]
    if m != NULL:
        held.message, held.body = m, body
        kept[0] = True
    elif h.length and body != NULL:
        if not memory_for(&held.body, h.length):
            lane.counters.dropped += 1
            return True
        memcpy(held.body, body, h.length)
    return True
