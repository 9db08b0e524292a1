# Sums of compressed keys: a lane decodes pushes into an accumulator of the wide type, and encodes
# the sum for the workers. It keeps a residual of its own if the workers have one (two-way
# compression, arXiv 1905.10936).
from libc.stdint cimport uint8_t, uint32_t, uint64_t
from libc.stdlib cimport free, malloc
from libc.string cimport memcpy

from bpsx.core.codec.state cimport ALIKE, RATE_BYTES, SLACK, Packed, grow_scratch, pack
from bpsx.core.status cimport E_CODEC, E_MEMORY, E_MISMATCH
from bpsx.server.lane cimport Lane
from bpsx.server.store cimport KeyState, Share


cdef inline bint hold_packed(Share *share, char *body, uint64_t length) noexcept nogil:
    """Copy a push, to hold it until its turn. False: no memory."""
    share.body = <char *>malloc(max(length, <uint64_t>1))
    if share.body == NULL:
        return False
    memcpy(share.body, body, length)
    share.length = length
    return True


cdef inline void fail_for(KeyState *e, int status, uint32_t sender, uint32_t other) noexcept nogil:
    e.status = status
    e.detail_a = sender
    e.detail_b = other


cdef inline bint compare_counters(KeyState *e, const char *body, uint64_t length) noexcept nogil:
    """Compare the counter with which a push begins. False: the push is too short for one."""
    cdef uint64_t counter = 0
    if length < sizeof(counter):
        return False
    memcpy(&counter, body, sizeof(counter))
    e.alike = e.added == 0 or e.alike and counter == e.counter
    e.counter = max(counter, e.counter) if e.added else counter
    return True


cdef inline void add_packed(
    Lane *lane, KeyState *e, uint32_t sender, char *body, uint64_t length
) noexcept nogil:
    """Decode a push into the accumulator.

    A malformed push fails the round on all workers, because the sum is spoilt.
    """
    cdef Packed *p = e.packed
    cdef double rate = 0
    if e.acc == NULL:
        e.acc = <char *>malloc(max(p.n * p.wide_itemsize, <uint64_t>1))
    if e.acc == NULL or not grow_scratch(&lane.scratch, &lane.scratch_bytes, p.scratch):
        e.status = E_MEMORY
        return
    if p.corrected:
        if length < RATE_BYTES:
            fail_for(e, E_CODEC, sender, sender)
            return
        memcpy(&rate, body, sizeof(rate))
        body += RATE_BYTES
        length -= RATE_BYTES
        if e.added and rate != e.rate:
            fail_for(e, E_MISMATCH, e.opener, sender)
            return
        e.rate = rate
    if p.counted and not compare_counters(e, body, length):
        fail_for(e, E_CODEC, sender, sender)
        return
    # Copy: a decoder may read a little beyond the end, where the message's memory may end.
    memcpy(p.wire, body, length)
    if p.decode(
        p.wire, length, e.acc, <uint8_t *>lane.scratch + p.aside, p.options, p.n, e.added > 0
    ) != 0:
        fail_for(e, E_CODEC, sender, sender)
        return
    e.added += 1


cdef inline char *encode_sum(Lane *lane, KeyState *e) noexcept nogil:
    """Divide the sum and encode it.

    Return memory of `e.packed.size` bytes and SLACK, which the caller frees. NULL: no memory.
    """
    cdef Packed *p = e.packed
    cdef uint8_t *wire = <uint8_t *>malloc(p.capacity + SLACK)
    if wire == NULL:
        return NULL
    if e.divisor > 1:
        e.wide_kernels.divide(e.acc, p.n, e.divisor)
    if p.counted:
        # The reply has the pushes' counter; `pack` increments it.
        p.counter = e.counter - 1
        p.options[ALIKE] = p.sparse and e.alike
    pack(p, e.acc, wire, lane.scratch, e.rate, False)
    return <char *>wire
