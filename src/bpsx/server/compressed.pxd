# Sums of compressed keys: a lane decodes pushes into an accumulator of the wide type, and encodes
# the sum for the workers. It keeps a residual of its own if the workers have one (two-way
# compression, arXiv 1905.10936). If the codec can do all that in one pass, the lane keeps the
# pushes as they are until the round's end.
from libc.stdint cimport uint8_t, uint32_t, uint64_t
from libc.stdlib cimport free, malloc
from libc.string cimport memcpy, memset

from bpsx.core.codec.packed cimport ALIKE, MOST_PUSHES, RATE_BYTES, SLACK, Packed
from bpsx.core.codec.state cimport (
    correction, grow_scratch, pack, save_state, server_state_bytes,
)
from bpsx.core.status cimport E_CODEC, E_MEMORY, E_MISMATCH
from bpsx.server.lane cimport Lane
from bpsx.server.store cimport Compressed, KeyState, Share, fail_sum, memory_for


cdef inline bint keeps_pushes(const Lane *lane, const Packed *p) noexcept nogil:
    """Whether the pushes of a key are kept until all are there, and then summed in one pass.

    Not if all pushes have more than twice the bytes of the accumulator that they replace: with
    onebit, those of 64 senders, or a few elements.
    """
    return (
        p.sum != NULL
        and lane.settings.senders <= MOST_PUSHES
        and lane.settings.senders * p.pushed <= 2 * p.n * p.wide_itemsize
    )


cdef inline uint64_t stride_of(const Packed *p) noexcept nogil:
    """Bytes from one kept push to the next."""
    return (p.pushed + SLACK + 63) & ~<uint64_t>63


cdef inline uint8_t *kept_push(const KeyState *e, uint64_t i) noexcept nogil:
    """Return the i-th kept push, or its place."""
    return <uint8_t *>e.compressed.acc + i * stride_of(e.compressed.packed)


cdef inline uint64_t sum_bytes(const Lane *lane, const Packed *p) noexcept nogil:
    """Bytes of the accumulator, or of the kept pushes."""
    if keeps_pushes(lane, p):
        return lane.settings.senders * stride_of(p)
    return max(p.n * p.wide_itemsize, <uint64_t>1)


cdef inline bint hold_packed(Share *share, char *body, uint64_t length) noexcept nogil:
    """Copy a push, to hold it until its turn. False: no memory."""
    share.body = <char *>malloc(max(length, <uint64_t>1))
    if share.body == NULL:
        return False
    memcpy(share.body, body, length)
    share.length = length
    return True


cdef inline bint compare_counters(KeyState *e, const char *body, uint64_t length) noexcept nogil:
    """Compare the counter with which a push begins. False: the push is too short for one."""
    cdef uint64_t counter = 0
    if length < sizeof(counter):
        return False
    memcpy(&counter, body, sizeof(counter))
    e.compressed.alike = (
        e.round.added == 0
        or e.compressed.alike and counter == e.compressed.counter
    )
    e.compressed.counter = max(counter, e.compressed.counter) if e.round.added else counter
    return True


cdef inline void add_packed(
    Lane *lane, KeyState *e, uint32_t sender, char *body, uint64_t length
) noexcept nogil:
    """Decode a push into the accumulator, or keep it.

    A malformed push fails the round on all workers, because the sum is spoilt.
    """
    cdef Packed *p = e.compressed.packed
    cdef uint8_t *kept
    cdef double rate = 0
    e.compressed.longest = max(e.compressed.longest, length)
    if e.compressed.acc == NULL:
        e.compressed.acc = <char *>malloc(sum_bytes(lane, p))
    if (
        e.compressed.acc == NULL
        or not grow_scratch(&lane.scratch.at, &lane.scratch.size, p.scratch)
    ):
        fail_sum(e, E_MEMORY, 0, 0)
        return
    if p.corrected:
        if length < RATE_BYTES:
            fail_sum(e, E_CODEC, sender, sender)
            return
        memcpy(&rate, body, sizeof(rate))
        body += RATE_BYTES
        length -= RATE_BYTES
        if e.round.added and rate != e.compressed.rate:
            fail_sum(e, E_MISMATCH, e.round.opener, sender)
            return
        e.compressed.rate = rate
    if p.counted and not compare_counters(e, body, length):
        fail_sum(e, E_CODEC, sender, sender)
        return
    if keeps_pushes(lane, p):
        if length != p.pushed or e.round.added >= lane.settings.senders:
            fail_sum(e, E_CODEC, sender, sender)
            return
        kept = kept_push(e, e.round.added)
        memcpy(kept, body, length)
        if p.check != NULL and p.check(kept, p.options, p.n) != 0:
            fail_sum(e, E_CODEC, sender, sender)
            return
        e.round.added += 1
        return
    # Copy: a decoder may read a little beyond the end, where the message's memory may end.
    memcpy(p.wire, body, length)
    if p.decode(
        p.wire, length, e.compressed.acc, <uint8_t *>lane.scratch.at + p.aside, p.options, p.n,
        e.round.added > 0
    ) != 0:
        fail_sum(e, E_CODEC, sender, sender)
        return
    e.round.added += 1


cdef inline bint keep_before(Compressed *c) noexcept nogil:
    """Keep a copy of the state, as the next sum may be taken back. False: no memory."""
    if not memory_for(&c.before, server_state_bytes(c.packed)):
        return False
    save_state(c.packed, c.before)
    c.before_sum, c.before_restored = c.sum, c.restored
    return True


cdef inline void forget_residual(Packed *p) noexcept nogil:
    """Let error feedback start from zero."""
    p.rate = 0
    memset(p.state, 0, sizeof(p.state))
    if p.residual != NULL:
        memset(p.residual, 0, p.n * p.wide_itemsize)


cdef inline bint encode_one_by_one(Lane *lane, KeyState *e, uint8_t *wire) noexcept nogil:
    """Encode the sum of kept pushes that begin with unlike counters. False: no memory."""
    cdef Packed *p = e.compressed.packed
    cdef uint64_t acc_bytes = (p.n * p.wide_itemsize + 63) & ~<uint64_t>63
    cdef char *acc
    cdef char *scratch
    cdef uint32_t i
    if not grow_scratch(&lane.scratch.at, &lane.scratch.size, acc_bytes + p.scratch):
        return False
    acc, scratch = lane.scratch.at, lane.scratch.at + acc_bytes
    for i in range(e.round.added):
        p.decode(
            kept_push(e, i), p.pushed, acc, <uint8_t *>scratch + p.aside, p.options, p.n, i > 0
        )
    if e.operation.divisor > 1:
        e.compressed.wide_kernels.divide(acc, p.n, e.operation.divisor)
    pack(p, acc, wire, scratch, e.compressed.rate, False)
    return True


cdef inline char *encode_sum(Lane *lane, KeyState *e) noexcept nogil:
    """Divide the sum and encode it; or sum the kept pushes in the same pass.

    Return memory of `packed.size` bytes and SLACK, which the caller frees. NULL: no memory.
    """
    cdef Packed *p = e.compressed.packed
    cdef uint8_t *wire = <uint8_t *>malloc(p.capacity + SLACK)
    if (
        wire == NULL
        or not grow_scratch(&lane.scratch.at, &lane.scratch.size, p.scratch)
        or lane.settings.shrinks and not keep_before(e.compressed)
    ):
        free(wire)
        return NULL
    if p.counted:
        # The reply has the pushes' counter; encoding increments it.
        p.counter = e.compressed.counter - 1
        p.options[ALIKE] = p.sparse and e.compressed.alike
    if keeps_pushes(lane, p) and p.counted and not e.compressed.alike:
        if not encode_one_by_one(lane, e, wire):
            free(wire)
            return NULL
    elif keeps_pushes(lane, p):
        p.counter += 1
        p.size = p.sum(
            kept_push(e, 0), stride_of(p), e.round.added,
            max(e.operation.divisor, <uint32_t>1),
            p.residual, wire, <uint8_t *>lane.scratch.at + p.aside, p.state, p.options, p.n,
            p.counter, correction(p, e.compressed.rate)
        )
    else:
        if e.operation.divisor > 1:
            e.compressed.wide_kernels.divide(e.compressed.acc, p.n, e.operation.divisor)
        pack(p, e.compressed.acc, wire, lane.scratch.at, e.compressed.rate, False)
    e.compressed.sum += 1
    e.compressed.restored = False
    e.compressed.saving.logged += e.compressed.longest
    e.compressed.longest = 0
    return <char *>wire
