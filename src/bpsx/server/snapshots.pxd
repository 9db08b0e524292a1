# Snapshots of the state of compressed keys: which worker holds them, and when they are taken.
# docs/internals/elastic-compression.md has the reasons.
from libc.stdint cimport uint32_t, uint64_t
from libc.stdlib cimport free, malloc

from bpsx.core.codec.state cimport save_state, server_state_bytes
from bpsx.core.wire cimport HEADER_BYTES, INLINE_BYTES, KEPT, SNAP, STATE, Header, header_init
from bpsx.server.lane cimport Lane
from bpsx.server.reply cimport Result, put_record, result_done, result_in
from bpsx.server.store cimport Have, KeyState, Saving
from bpsx.system.sync cimport atomic_load


cdef inline uint32_t spread(KeyState *e) noexcept nogil:
    """Return a number that differs among keys, most in its upper bits: Fibonacci hashing."""
    return <uint32_t>e.key * <uint32_t>2654435769


cdef inline void begin_saving(Lane *lane, KeyState *e) noexcept nogil:
    """Set when snapshots of a compressed key are due.

    The first one is due earlier, by a fraction that depends on the key, so that keys take turns.
    """
    cdef Saving *s = &e.compressed.saving
    s.holder = -1
    if lane.settings.log_ratio <= 0 or e.compressed.packed.light:
        return
    s.due = <uint64_t>(lane.settings.log_ratio * server_state_bytes(e.compressed.packed)) + 1
    s.logged = s.due // 64 * (spread(e) >> 26)


cdef inline bint may_hold(Lane *lane, KeyState *e, uint32_t sender, bint beside) noexcept nogil:
    """Whether a sender pushes, and is on the lane's machine if that is asked for.

    While the key is taken over, the sender must have the latest outcome instead, and may have
    joined.
    """
    cdef Have *have
    if beside and not lane.beside[sender] or lane.absent.lost[sender]:
        return False
    if e.takeover != NULL:
        have = &e.takeover.haves[sender]
        return have.there and have.round == e.takeover.most
    return not lane.absent.any_skipped or not atomic_load(&lane.absent.joined[sender])


cdef inline uint32_t count_holders(Lane *lane, KeyState *e, bint beside) noexcept nogil:
    cdef uint32_t sender, n = 0
    for sender in range(lane.settings.senders):
        n += may_hold(lane, e, sender, beside)
    return n


cdef inline int choose_holder(Lane *lane, KeyState *e) noexcept nogil:
    """Return the sender that is to hold the key's snapshot; -1: none pushes at present."""
    cdef uint32_t sender, n = count_holders(lane, e, True), left
    cdef bint beside = n != 0
    if not beside:
        n = count_holders(lane, e, False)
    left = (spread(e) >> 8) % n if n else 0
    for sender in range(lane.settings.senders):
        if may_hold(lane, e, sender, beside):
            if left == 0:
                return <int>sender
            left -= 1
    return -1


cdef inline void send_snapshot(
    Lane *lane, KeyState *e, uint32_t sender, uint64_t cookie
) noexcept nogil:
    """Send the key's state to a sender. `cookie`: that of its pushes.

    Without memory none is sent: a snapshot stays due.
    """
    cdef Header h
    cdef Result *r
    cdef uint64_t size = server_state_bytes(e.compressed.packed)
    cdef char *memory = <char *>malloc(size)
    if memory == NULL:
        return
    save_state(e.compressed.packed, memory)
    header_init(&h, SNAP, lane.settings.job, sender)
    h.dtype, h.key, h.round = e.dtype, e.key, e.compressed.sum
    h.cookie, h.length = cookie, size
    h.flags = STATE if e.compressed.restored else 0
    e.compressed.saving.sent, e.compressed.saving.holder = e.compressed.sum, <int>sender
    e.compressed.saving.unstored = e.compressed.saving.logged
    e.compressed.saving.logged = 0
    lane.counters.snapshots += 1
    if size <= INLINE_BYTES:
        put_record(lane, sender, &h, memory)
        free(memory)
        return
    r = result_in(lane, NULL, 1)
    if r == NULL:
        free(memory)
        return
    r.memory = memory
    lane.endpoint.send(
        lane.endpoint.self, sender, &h, HEADER_BYTES, NULL, NULL, memory, size, result_done, r,
        NULL
    )
    if lane.watch != NULL:
        lane.watch.server.sent += HEADER_BYTES + size
    lane.counters.messages_out += 1


cdef inline void end_sending(Saving *s, bint stored) noexcept nogil:
    """The snapshot under way has been stored, or is lost."""
    if stored:
        s.stored = s.sent
    else:
        s.logged += s.unstored
    s.unstored, s.holder, s.unasked = 0, -1, False


cdef inline void save_with(Lane *lane, KeyState *e, Header *push) noexcept nogil:
    """A counted push of a compressed key has come, and is not part of its sum yet.

    It may confirm a snapshot. If one is due and the push is the holder's, that shows that the
    holder has the outcome of the latest sum: the lane sends it the state. In a job that shrinks,
    `save_before_close` does so.
    """
    cdef Saving *s = &e.compressed.saving
    if s.holder == <int>push.sender and s.unasked and not push.flags & KEPT:
        s.unasked = False
    elif s.holder == <int>push.sender:
        end_sending(s, push.flags & KEPT != 0)
    elif s.holder >= 0 and not may_hold(lane, e, s.holder, False):
        end_sending(s, False)
    if (
        s.holder < 0 and s.logged >= s.due and not lane.settings.shrinks
        and choose_holder(lane, e) == <int>push.sender
    ):
        send_snapshot(lane, e, push.sender, push.cookie)


cdef inline void save_before_close(Lane *lane, KeyState *e) noexcept nogil:
    """All pushes of a round have come in a job that shrinks: send a snapshot that is due.

    All these workers have committed the latest sum. Otherwise, if the holder was lost after this
    lane, one of them would repeat that sum, and no process would have the state before it.
    """
    cdef Saving *s = &e.compressed.saving
    cdef int holder
    if s.holder >= 0 or s.logged < s.due:
        return
    holder = choose_holder(lane, e)
    if holder >= 0 and e.shares[holder].pushed:
        send_snapshot(lane, e, holder, e.shares[holder].cookie)


cdef inline void save_at_once(Lane *lane, KeyState *e) noexcept nogil:
    """Send a taken key's state to a sender that has the latest sum's outcome.

    The state cannot be rebuilt from older snapshots. Without such a sender, a snapshot is due.
    None may be under way.
    """
    cdef Saving *s = &e.compressed.saving
    cdef int holder = choose_holder(lane, e)
    if holder < 0:
        s.logged = max(s.logged, s.due)
        return
    s.unasked = True
    send_snapshot(
        lane, e, holder, <uint64_t>e.takeover.haves[holder].cookie | <uint64_t>e.term << 32
    )
