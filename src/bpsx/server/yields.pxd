# Slots that this lane yields to others while it lives. docs/internals/elastic-balance.md describes
# the protocol.
#
# When all living senders have asked for it (YIELD), the lane forgets the keys at once and sends
# LEFT. No sender has an outcome of the open rounds. So senders that have pushed push again, to the
# new lanes.
from libc.stdint cimport uint8_t, uint32_t, uint64_t
from libc.stdlib cimport calloc, free

from bpsx.core.wire cimport LEFT, MOST_CLASSES, Header
from bpsx.server.kept_values cimport is_away
from bpsx.server.lane cimport Lane, Yield
from bpsx.server.reply cimport tell_living
from bpsx.server.rounds cimport drop_pushes
from bpsx.server.store cimport KeyState, entry_free
from bpsx.server.takeover cimport end_takeover
from bpsx.system.arrays cimport make_room


cdef inline bint covers(Yield *y, uint32_t slot) noexcept nogil:
    return slot < y.limit and (y.classes >> (slot % y.n)) & 1


cdef inline bint has_left(Lane *lane, uint32_t slot) noexcept nogil:
    """Whether a slot is unknown because the lane has yielded it; the sender then gets LEFT."""
    cdef uint32_t i
    for i in range(lane.yields.n):
        if lane.yields.at[i].over and covers(&lane.yields.at[i], slot):
            return True
    return False


cdef inline Yield *yield_of(Lane *lane, Header *h) noexcept nogil:
    """Return the record of a YIELD's term. NULL: no memory, or another sender's YIELD differs."""
    cdef Yield *y
    cdef uint32_t i
    for i in range(lane.yields.n):
        y = &lane.yields.at[i]
        if y.term == h.term:
            return y if y.limit == h.slot and y.n == h.divisor and y.classes == h.key else NULL
    if not make_room(
        &lane.yields.at, &lane.yields.capacity, lane.yields.n + 1, sizeof(Yield)
    ):
        return NULL
    y = &lane.yields.at[lane.yields.n]
    y.term, y.limit, y.n, y.classes = h.term, h.slot, h.divisor, h.key
    y.over = False
    y.said = <uint8_t *>calloc(lane.settings.senders, 1)
    if y.said == NULL:
        return NULL
    lane.yields.n += 1
    return y


cdef inline void forget_key(Lane *lane, uint32_t slot) noexcept nogil:
    """Forget a key with its open round. Results on their way to senders are not part of it."""
    cdef KeyState *e = lane.keys.at[slot]
    lane.keys.at[slot] = NULL
    end_takeover(lane, e)
    drop_pushes(lane, e)
    e.memory.first = NULL
    entry_free(e)
    e.spare, lane.keys.spare = lane.keys.spare, e
    lane.counters.yielded += 1


cdef inline void leave_keys(Lane *lane, Yield *y) noexcept nogil:
    """Forget all keys that the lane yields, and tell the senders."""
    cdef uint32_t slot
    for slot in range(min(lane.keys.n, y.limit)):
        if covers(y, slot) and lane.keys.at[slot] != NULL:
            forget_key(lane, slot)
    y.over = True
    tell_living(lane, LEFT, y.term)


cdef inline void look_at_yield(Lane *lane, Yield *y) noexcept nogil:
    """Forget the keys if all living senders have asked for it."""
    cdef uint32_t sender
    if y.over:
        return
    for sender in range(lane.settings.senders):
        if not y.said[sender] and not is_away(lane, sender):
            return
    leave_keys(lane, y)


cdef inline void look_at_yields(Lane *lane) noexcept nogil:
    """After the loss of senders, forget keys if all others have asked for it."""
    cdef uint32_t i
    for i in range(lane.yields.n):
        look_at_yield(lane, &lane.yields.at[i])


cdef inline void free_yields(Lane *lane) noexcept nogil:
    cdef uint32_t i
    for i in range(lane.yields.n):
        free(lane.yields.at[i].said)
    free(lane.yields.at)


cdef inline int take_yield(Lane *lane, Header *h) noexcept nogil:
    """Handle a YIELD; after the last sender's, forget the keys. -1: malformed."""
    cdef Yield *y
    if h.divisor == 0 or h.divisor > MOST_CLASSES or h.term == 0:
        return -1
    y = yield_of(lane, h)
    if y == NULL or y.over or y.said[h.sender]:
        return -1
    y.said[h.sender] = True
    look_at_yield(lane, y)
    return 0
