# What a lane knows about its keys: who has pushed what in the open round. Pure: no sockets, no
# clock.
#
# A round of a key opens with its first push and closes when each worker has pushed once. The sum is
# built as pushes come, or, with fixed order, by rank: a push then waits, held, until all lower
# ranks have been added.
#
# Rounds are counted per worker: each push says the how many-th of its sender for this key it is.
# The counts part where somebody has taken part in fewer rounds (join) and where nobody waits for
# anybody (asynchronous training).
from libc.stdint cimport int64_t, uint8_t, uint32_t, uint64_t
from libc.stdlib cimport free, malloc
from libc.string cimport memcpy, memset

from bpsx.core.wire cimport ASYNC, BROADCAST, DISAGREED, PACKED, Header
from bpsx.core.codec.state cimport Packed, most_bytes, packed_free
from bpsx.core.slab cimport Slabs, take_record
from bpsx.core.status cimport E_JOINED, E_MISMATCH
from bpsx.kernels.abi cimport Kernels, accumulate, shift_for, wants_wide
from bpsx.transports.abi cimport Landing, Message

cdef enum Verdict:
    ACCEPTED = 0                # counted; the round is still open
    CLOSED = 1                  # counted, and it was the last one
    REPEATED = 2                # this worker has pushed in this round already: ignore
    MALFORMED = 3               # wrong round, length, dtype or key
    FAILED = 4                  # counted, but the round has failed: its body is not wanted

cdef struct Share:
    # One worker's part in the open round.
    # which of its rounds of this key the worker is in; outlives the open round
    uint32_t round
    bint pushed
    uint64_t cookie
    Message *message            # held until its turn in fixed order; NULL: nothing held
    char *body
    uint64_t length             # of a compressed one
    Landing landing             # where the answer shall lie

cdef struct Entry:
    uint64_t key
    uint64_t nbytes
    uint8_t dtype
    Kernels *kernels
    uint32_t pushed             # workers that have pushed in this round
    uint32_t added              # of which this many are in the sum
    uint32_t next_rank          # in fixed order: whose turn it is
    uint32_t divisor
    bint broadcast
    bint seeding                # the result becomes `value`
    uint32_t opener             # the rank that opened the round and so chose the operation
    int status                  # < 0: the round has failed
    uint32_t detail_a, detail_b
    bint named                  # the details are workers' ranks; else senders'
    Share *shares               # by rank
    Message *first              # the first large push: its body is the accumulator and the result
    # Memory of the open round. Freed at its end: a key may never be pushed again.
    char *small                 # a small key's accumulator and result, nbytes
    # accumulator of the wide type, for half and 8-bit types of three and more workers
    char *wide
    char *sum                   # where the result is: first.body or small
    # Of a compressed key, else NULL; see core/codec/state.pxd:
    Packed *packed
    Kernels *wide_kernels       # of the wide type
    char *acc                   # the sum, elements of the wide type; of the open round, too
    double rate                 # the learning rate of the open round
    uint64_t counter            # the largest that a push of the open round began with
    bint alike                  # ... and all did
    bint refused                # its compression is not known here: nothing is summed
    # what asynchronous pushes add to, nbytes; NULL: none yet, and so zeros
    char *value
    uint32_t rounds             # that have ended
    # For those who watch (server/trace.pxd):
    int64_t opened_ns           # the open round's first push
    int64_t latest_ns           # ... and its latest one, by this worker
    uint32_t latest
    int64_t closing_ns
    uint8_t recorded            # the recordings that the round belongs to


cdef inline Entry *entry_new(
    Slabs *slabs, uint64_t key, uint64_t nbytes, uint8_t dtype, Kernels *kernels, uint32_t workers,
) noexcept nogil:
    """Entry with its shares, which lives as long as `slabs`; NULL when there is no memory."""
    cdef Entry *e = <Entry *>take_record(slabs, sizeof(Entry) + workers * sizeof(Share))
    if e == NULL:
        return NULL
    e.shares = <Share *>(e + 1)
    e.key = key
    e.nbytes = nbytes
    e.dtype = dtype
    e.kernels = kernels
    return e


cdef inline void free_memory(char **where) noexcept nogil:
    free(where[0])
    where[0] = NULL


cdef inline void free_round(Entry *e) noexcept nogil:
    """Free what the open round has needed. Its result must have been handed over."""
    free_memory(&e.small)
    free_memory(&e.wide)
    free_memory(&e.acc)
    e.sum = NULL


cdef inline void entry_free(Entry *e) noexcept nogil:
    """Free all that the entry refers to. Its own memory is the slabs'."""
    free_round(e)
    free(e.value)
    packed_free(e.packed)


cdef inline void open_next_round(Entry *e, uint32_t workers) noexcept nogil:
    """Forget the round that has been answered: who pushed is one round further.

    Messages must have been taken out before.
    """
    cdef uint32_t rank
    for rank in range(workers):
        if e.shares[rank].pushed:
            e.shares[rank].round += 1
            e.shares[rank].pushed = False
    e.rounds += 1
    e.pushed = 0
    e.added = 0
    e.next_rank = 0
    e.status = 0
    e.named = False
    e.first = NULL
    free_round(e)


cdef inline Verdict count_push(Entry *e, Header *h, uint32_t workers) noexcept nogil:
    """Check a push against its key and count it. Looks at the header only."""
    cdef Share *share = &e.shares[h.sender]
    cdef bint broadcast = (h.flags & BROADCAST) != 0
    cdef bint seeding = (h.flags & ASYNC) != 0
    cdef uint64_t expected = e.nbytes
    cdef bint disagreed = (h.flags & DISAGREED) != 0
    if disagreed or broadcast and h.divisor != h.sender:
        expected = 0
    elif e.packed != NULL and not broadcast:
        if not h.flags & PACKED or h.length > most_bytes(e.packed):
            return MALFORMED
        expected = h.length
    if (
        h.key != e.key
        or h.dtype != e.dtype
        or h.length != expected
        or h.divisor == 0 and not (broadcast or disagreed)
    ):
        return MALFORMED
    if broadcast and not disagreed and h.divisor >= workers:
        return MALFORMED
    if h.round != share.round:
        return REPEATED if h.round + 1 == share.round else MALFORMED
    if share.pushed:
        return REPEATED
    share.pushed = True
    share.cookie = h.cookie
    e.pushed += 1
    if e.pushed == 1:
        e.divisor = h.divisor
        e.broadcast = broadcast
        e.seeding = seeding
        e.opener = h.sender
    if disagreed and e.status == 0:
        e.status = E_MISMATCH if h.divisor != <uint32_t>h.priority else E_JOINED
        e.detail_a = h.divisor
        e.detail_b = <uint32_t>h.priority
        e.named = True
    elif (
        e.pushed > 1
        and e.status == 0
        and (e.divisor != h.divisor or e.broadcast != broadcast or e.seeding != seeding)
    ):
        e.status = E_MISMATCH
        e.detail_a = e.opener
        e.detail_b = h.sender
    if e.status != 0:
        return FAILED
    return CLOSED if e.pushed == workers else ACCEPTED


cdef inline void note_landing(Entry *e, uint32_t rank, const Message *m) noexcept nogil:
    """Of a push that counts. `m`: its message, if the body is the message's own."""
    e.shares[rank].landing.at = 0
    if m != NULL:
        e.shares[rank].landing = m.landing


cdef inline bint memory_for(char **where, uint64_t nbytes) noexcept nogil:
    if where[0] == NULL:
        where[0] = <char *>malloc(max(nbytes, 1))
    return where[0] != NULL


cdef inline int add(Entry *e, Message *m, char *body, uint32_t workers, bint *kept) noexcept nogil:
    """Add one push to the sum; *kept says that the message now belongs to the entry.

    0, or -1 when there is no memory.

    The first large push becomes the accumulator as it is.
    """
    cdef Kernels *k = e.kernels
    cdef int64_t n = e.nbytes // k.itemsize
    kept[0] = False
    e.added += 1
    if e.added == 1:
        if m != NULL and body == m.body:
            e.first = m
            e.sum = body
            kept[0] = True
        else:
            if not memory_for(&e.small, e.nbytes):
                return -1
            memcpy(e.small, body, e.nbytes)
            e.sum = e.small
        if workers == 1 and e.divisor > 1:
            k.divide(e.sum, n, e.divisor)
        return 0
    if wants_wide(k, workers) and not memory_for(&e.wide, n * k.wide_itemsize):
        return -1
    accumulate(k, e.sum, e.wide, body, e.added - 1, workers, n, e.divisor)
    return 0


cdef inline void finish_sum(Entry *e, uint32_t workers) noexcept nogil:
    """Do what `add` does with the last worker's push where that never comes: the others were
    joined, and count as zeros.
    """
    cdef Kernels *k = e.kernels
    cdef int64_t n = e.nbytes // k.itemsize
    if e.added == 0 or e.added >= workers or e.nbytes == 0 or e.packed != NULL:
        return
    if e.added > 1 and wants_wide(k, workers):
        memset(e.sum, 0, e.nbytes)
        k.finish(e.sum, e.wide, e.sum, n, e.divisor, shift_for(workers, e.divisor))
    elif e.divisor > 1:
        k.divide(e.sum, n, e.divisor)
    e.added = workers
