# Values of asynchronous training that a worker keeps, for the case that their lane is lost.
# docs/internals/asynchronous.md describes the protocol.
#
# Only the driver calls these functions.
from libc.stdint cimport uint32_t, uint64_t
from libc.stdlib cimport malloc
from libc.string cimport memcpy

from bpsx.core.partition cimport Kept, Partition
from bpsx.core.state cimport Core
from bpsx.core.wire cimport Header


cdef inline bint keeps_values(Core *c) noexcept nogil:
    return c.settings.elastic and c.settings.asynchronous


cdef inline uint64_t applied_bytes(Core *c) noexcept nogil:
    """Bytes of the counts that say what a value contains."""
    return c.settings.senders * sizeof(uint32_t)


cdef inline int take_applied(Core *c, Header *h, const char *body) noexcept nogil:
    """Handle an APPLIED: it is about the next record of its message. -1: invalid."""
    if not keeps_values(c) or h.length != applied_bytes(c):
        return -1
    c.moving.applied = body
    return 0


cdef inline uint64_t pushes_in(Core *c, const char *applied) noexcept nogil:
    """Number of pushes that a value contains. Of two values, the newer one contains more."""
    cdef uint64_t pushes = 0
    cdef uint32_t sender, n = 0
    for sender in range(c.settings.senders):
        memcpy(&n, applied + sender * sizeof(uint32_t), sizeof(uint32_t))
        pushes += n
    return pushes


cdef inline bint is_newer(Core *c, Partition *p) noexcept nogil:
    """Whether the value that is being received is newer than the one that is kept.

    A transport may deliver small messages before large ones.
    """
    cdef Kept *kept = p.kept
    return kept == NULL or not kept.held or kept.applied == NULL or (
        pushes_in(c, c.moving.applied) > pushes_in(c, <const char *>kept.applied)
    )


cdef inline bint keep_applied(Core *c, Kept *kept) noexcept nogil:
    """Keep what the received value contains. False: no memory."""
    if kept.applied == NULL:
        kept.applied = <uint32_t *>malloc(max(applied_bytes(c), <uint64_t>1))
        if kept.applied == NULL:
            return False
    memcpy(kept.applied, c.moving.applied, applied_bytes(c))
    return True
