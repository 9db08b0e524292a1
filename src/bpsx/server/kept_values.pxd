# Values of asynchronous training survive their lane: each sender keeps the latest value that it has
# received, and the numbers of pushes in it (APPLIED). The newest of these values contains all
# others. docs/internals/asynchronous.md describes the protocol.
from libc.stdint cimport uint32_t, uint64_t
from libc.stdlib cimport malloc
from libc.string cimport memcpy

from bpsx.core.wire cimport INLINE_BYTES, VALUE, Header
from bpsx.server.lane cimport Lane
from bpsx.server.reply cimport count_applied, put_answer, reply_header, send_copy
from bpsx.server.store cimport TAKEN, Have, KeyState, Takeover, memory_for


cdef inline bint is_away(Lane *lane, uint32_t sender) noexcept nogil:
    """Whether a sender is lost or has left, so that the lane awaits nothing from it.

    A synchronous job cannot go on without a worker that has left, unless it has dropped it.
    """
    return lane.absent.lost[sender] or lane.absent.departed[sender]


cdef inline bint note_applied(Lane *lane, Header *h, const char *body, Have *have) noexcept nogil:
    """Note what a sender says of the value that it keeps. False: malformed, or no memory."""
    cdef uint64_t size = lane.settings.senders * sizeof(uint32_t)
    if h.length == 0:
        return True
    if h.length != size:
        return False
    have.applied = <uint32_t *>malloc(size)
    if have.applied == NULL:
        return False
    memcpy(have.applied, body, size)
    return True


cdef inline int holder_of_newest(Lane *lane, Takeover *t) noexcept nogil:
    """Return the sender that keeps the newest value; -1: none keeps any.

    Of two values, the newer one has all pushes of the older one, and more.
    """
    cdef uint32_t sender, other
    cdef uint64_t pushes, most = 0
    cdef int best = -1
    for sender in range(lane.settings.senders):
        if t.haves[sender].applied == NULL or is_away(lane, sender):
            continue
        pushes = 0
        for other in range(lane.settings.senders):
            pushes += t.haves[sender].applied[other]
        if best < 0 or pushes > most:
            best, most = <int>sender, pushes
    return best


cdef inline int settle_value(Lane *lane, KeyState *e) noexcept nogil:
    """Find a key's newest value, and its late senders, after all senders have reported.

    A sender is late if the value contains its unanswered push. Returns the sender that keeps the
    value; -1: no sender has any, so the value begins as zeros.
    """
    cdef Takeover *t = e.takeover
    cdef Have *have
    cdef uint32_t sender, applied
    cdef int holder = holder_of_newest(lane, t)
    t.late = 0
    for sender in range(lane.settings.senders):
        have = &t.haves[sender]
        have.late = 0
        e.shares[sender].round = have.round
        e.shares[sender].cookie = <uint64_t>have.cookie | <uint64_t>e.term << 32
        applied = t.haves[holder].applied[sender] if holder >= 0 else 0
        if is_away(lane, sender):
            e.shares[sender].round = applied
        elif applied > have.round and have.waits:
            have.late = 1
            t.late += 1
    return holder


cdef inline bint take_value(Lane *lane, KeyState *e, const char *body) noexcept nogil:
    """Continue with the value that a sender has given. False: no memory."""
    if not memory_for(&e.value, e.nbytes):
        return False
    if e.nbytes:
        memcpy(e.value, body, e.nbytes)
    e.holder = e.takeover.holder
    return True


cdef inline void send_value(
    Lane *lane, KeyState *e, uint32_t sender, int kind, uint64_t cookie
) noexcept nogil:
    """Send a sender the value as it is now. `kind`: ANSWER or VALUE."""
    cdef Header h
    count_applied(lane, e, False)
    e.holder = sender
    if e.nbytes > INLINE_BYTES:
        send_copy(lane, e, sender, kind, cookie, e.value, e.nbytes)
        return
    reply_header(lane, &h, kind, sender, e, cookie)
    h.length = e.nbytes
    put_answer(lane, sender, &h, e.value)


cdef inline void hand_over(Lane *lane, KeyState *e) noexcept nogil:
    """Let a living sender keep the value, if the one that has the newest is away."""
    cdef uint32_t sender
    if (
        e.value == NULL or e.holder < 0 or not is_away(lane, e.holder)
        or e.takeover != NULL and e.takeover.state != TAKEN
    ):
        return
    for sender in range(lane.settings.senders):
        # Only the cookie of a sender that has pushed is known.
        if e.shares[sender].round and not is_away(lane, sender):
            send_value(lane, e, sender, VALUE, e.shares[sender].cookie)
            return


cdef inline void forget_late(KeyState *e, uint32_t sender) noexcept nogil:
    """Count a late sender that is away as answered: the value contains its push."""
    if e.takeover == NULL or not e.takeover.haves[sender].late:
        return
    e.takeover.haves[sender].late = 0
    e.takeover.late -= 1
    e.shares[sender].round += 1
