# Handles a push, and the pushes that were held until their key had been taken over.
from libc.stdint cimport int64_t, uint32_t

from bpsx.core.status cimport E_COMPRESSOR, E_LEFT, E_PROTOCOL
from bpsx.core.trace.recorder cimport watched
from bpsx.core.wire cimport ASYNC, BROADCAST, STATE, Header
from bpsx.server.async_update cimport push_delta
from bpsx.server.checkpoint cimport push_state
from bpsx.server.drops cimport is_stale
from bpsx.server.lane cimport Lane
from bpsx.server.reply cimport send_error
from bpsx.server.rounds cimport (
    abandon, complete, contribute, finish_round, misses_departed_worker, turn_away,
)
from bpsx.server.snapshots cimport save_with
from bpsx.server.store cimport (
    ABANDONED, FAILED, MALFORMED, REFUSED, REPEATED, TAKEN, HeldPush, KeyState, Takeover, Verdict,
    count_push, note_landing,
)
from bpsx.server.takeover cimport drop_held_push, end_takeover, holds
from bpsx.server.trace cimport note_delta, note_push, note_sum
from bpsx.server.yields cimport has_left
from bpsx.system.sync cimport now_ns
from bpsx.transports.abi cimport Message


cdef inline int push(Lane *lane, Header *h, Message *m, char *body, bint *kept) noexcept nogil:
    """Handle a PUSH. Returns 0, or -1 if it is malformed.

    `m`: its message if the body is the message's own, else NULL. Sets *kept if the lane now owns
    `m`; otherwise the caller releases it.
    """
    cdef KeyState *e = lane.keys.at[h.slot] if h.slot < lane.keys.n else NULL
    cdef Verdict verdict
    cdef uint32_t worker = 0
    cdef int64_t begin = 0
    cdef int rc
    if lane.counters.dropped:
        return -1               # the lane is ending; the scheduler will report why
    if is_stale(lane, h):
        return 0
    if e == NULL and has_left(lane, h.slot):
        lane.counters.stale += 1
        return 0
    if e == NULL or h.term != e.term:
        send_error(lane, h.sender, h.key, h.round, h.cookie, E_PROTOCOL, 0, 0)
        return -1
    if e.takeover != NULL and holds(lane, e, h, m, body, kept):
        if e.takeover.state == TAKEN and e.takeover.late == 0:
            end_takeover(lane, e)
        return 0
    if h.flags & STATE:
        return push_state(lane, e, h, body)
    if e.state == REFUSED:
        return turn_away(lane, e, h, E_COMPRESSOR)
    if h.flags & ASYNC and not h.flags & BROADCAST:
        begin = now_ns() if lane.watch != NULL and watched(lane.watch) else 0
        rc = push_delta(lane, e, h, m, body, kept)
        if begin and rc == 0:
            note_delta(lane, e, h, begin)
        return rc
    if e.state == ABANDONED and h.key == e.key:
        return turn_away(lane, e, h, E_LEFT)
    verdict = count_push(e, h, lane.settings.senders)
    if verdict == MALFORMED:
        send_error(lane, h.sender, h.key, h.round, h.cookie, E_PROTOCOL, 0, 0)
        return -1
    if verdict == REPEATED:
        lane.counters.repeated += 1
        return 0
    if e.compressed != NULL and e.compressed.saving.due:
        save_with(lane, e, h)
    note_landing(e, h.sender, m)
    if lane.watch != NULL:
        begin = note_push(lane, e, h, body)
    if verdict != FAILED:
        contribute(lane, e, h, m, body, kept)
        if lane.watch != NULL:
            note_sum(lane, e, h, begin)
    if lane.absent.any_gone and misses_departed_worker(lane, e, &worker):
        abandon(lane, e, worker)
    elif complete(lane, e):
        finish_round(lane, e)
    return 0


cdef inline void sum_held(Lane *lane, KeyState *e) noexcept nogil:
    """Sum the pushes that were held until their key had been taken."""
    cdef Takeover *t = e.takeover
    cdef HeldPush held
    cdef uint32_t sender
    cdef bint kept
    if t.state != TAKEN or t.held == NULL:
        return
    for sender in range(lane.settings.senders):
        held = t.held[sender]
        if not held.there:
            continue
        t.held[sender].there, t.held[sender].message, t.held[sender].body = False, NULL, NULL
        kept = False
        if push(lane, &held.header, held.message, held.body, &kept) != 0:
            lane.counters.malformed += 1
        if not kept:
            drop_held_push(lane, &held)


cdef inline void finish_takeover(Lane *lane, KeyState *e) noexcept nogil:
    """Sum what was held, and free the takeover unless late senders still have to push."""
    sum_held(lane, e)
    if e.takeover.state == TAKEN and e.takeover.late == 0:
        end_takeover(lane, e)
