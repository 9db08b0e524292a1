# Registration of a key at a lane: kernels for its element type, and state for its compression.
from libc.stdint cimport int64_t, uint32_t, uint64_t

from bpsx.core.wire cimport MAX_CODEC_BYTES, MAX_NAME_BYTES, Header
from bpsx.kernels.abi cimport Kernels
from bpsx.server.drops cimport is_stale, renew
from bpsx.server.lane cimport MAX_PARTITION_BYTES, MAX_SLOTS, N_DTYPES, Lane
from bpsx.server.loading cimport load, make_packed
from bpsx.server.snapshots cimport begin_saving
from bpsx.server.takeover cimport MOST_TERMS, begin_takeover, is_gathered
from bpsx.server.trace cimport note_key
from bpsx.server.yields cimport has_left
from bpsx.server.store cimport REFUSED, KeyState, entry_new, move_round
from bpsx.system.arrays cimport make_room
from bpsx.system.sync cimport atomic_store


cdef inline KeyState *new_entry(Lane *lane, Header *h, Kernels *k) noexcept nogil:
    """Create the entry that a REGISTER describes, with its takeover if it needs one.

    NULL: no memory.
    """
    cdef KeyState *e
    if not make_room(&lane.keys.at, &lane.keys.n, h.slot + 1, sizeof(KeyState *)):
        return NULL
    e = entry_new(&lane.keys.slabs, &lane.keys.spare, h, k, lane.settings.senders)
    if e == NULL:
        return NULL
    if not is_gathered(lane, h.term):
        lane.counters.taken_over += 1
        if not begin_takeover(lane, e):
            return NULL
    return e


cdef inline int announce_again(Lane *lane, KeyState *e, Header *h) noexcept nogil:
    """Handle an announcement of a key that is known. -1: it is malformed, or there is no memory."""
    if e.key != h.key or e.nbytes != h.cookie or e.dtype != h.dtype:
        return -1
    if lane.settings.shrinks and h.term > e.term:
        # The sender knows of a lost worker, of which the scheduler has not told this lane yet.
        if renew(lane, e, h.term):
            return 0
        lane.counters.dropped += 1
        return -1
    return 0 if e.term == h.term else -1


cdef inline void note_numbers(Lane *lane, Header *h) noexcept nogil:
    """Note which numbers have been given out.

    A scheduler that is started again may have no other witness, if a worker has died.
    """
    atomic_store(&lane.keys.slots_named, max(lane.keys.slots_named, <int64_t>h.slot + 1))
    atomic_store(&lane.keys.keys_named, max(lane.keys.keys_named, <int64_t>h.key + 1))


cdef inline int register(Lane *lane, Header *h, const char *name) noexcept nogil:
    """Handle a worker's announcement of a key. -1 if it is malformed.

    All announcements of a slot must agree, which the scheduler has ensured.
    """
    cdef KeyState *e
    cdef Kernels *k
    cdef uint32_t codec_bytes = <uint32_t>h.priority
    if (
        h.slot >= MAX_SLOTS
        or h.term >= MOST_TERMS
        or h.dtype >= N_DTYPES
        or h.cookie > MAX_PARTITION_BYTES
        or codec_bytes > MAX_CODEC_BYTES
        or h.length < codec_bytes
        or h.length - codec_bytes > MAX_NAME_BYTES
    ):
        return -1
    h.length -= codec_bytes
    lane.beside[h.sender] = h.divisor == 1
    if is_stale(lane, h):
        return 0
    if h.slot < lane.keys.n and lane.keys.at[h.slot] != NULL:
        return announce_again(lane, lane.keys.at[h.slot], h)
    if has_left(lane, h.slot):
        lane.counters.stale += 1
        return 0                # it came behind the last YIELD
    k = &lane.kernels[h.dtype]
    if k.add == NULL and not load(lane, h.dtype):
        return -1
    if h.cookie % k.itemsize:
        return -1
    e = new_entry(lane, h, k)
    if e == NULL:
        # Without a moved key, nothing that moved in its term could be decided.
        lane.counters.dropped += h.term != 0
        return -1
    lane.keys.at[h.slot] = e
    note_numbers(lane, h)
    if codec_bytes and not make_packed(lane, lane.keys.at[h.slot], name, h.length, codec_bytes):
        move_round(lane.keys.at[h.slot], REFUSED)   # pushes of this key get an error reply
        return -1
    if e.compressed != NULL:
        e.compressed.whole = e.takeover == NULL
        begin_saving(lane, e)
    if lane.watch != NULL:
        note_key(lane.watch, h, name)
    return 0
