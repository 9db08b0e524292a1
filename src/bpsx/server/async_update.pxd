# Asynchronous training: the lane adds a push to its value of the key, and replies with the value to
# the push's sender alone.
#
# No worker waits for another, so there are no rounds. Each worker's count of its pushes detects
# repeats. A large reply is sent from the memory of the push.
from libc.stdint cimport int64_t, uint64_t
from libc.stdlib cimport calloc
from libc.string cimport memcpy

from bpsx.core.wire cimport ANSWER, INLINE_BYTES, Header
from bpsx.core.status cimport E_MEMORY, E_PROTOCOL
from bpsx.kernels.abi cimport Kernels
from bpsx.server.reply cimport (
    Result, count_applied, put_answer, reply_header, result_in, send_error, send_result,
)
from bpsx.server.lane cimport Lane
from bpsx.server.store cimport (
    ACCEPTED, MALFORMED, REPEATED, KeyState, Share, Verdict, free_memory, memory_for, note_landing,
)
from bpsx.transports.abi cimport Message


cdef inline Verdict count_delta(KeyState *e, Header *h) noexcept nogil:
    cdef Share *share = &e.shares[h.sender]
    if h.key != e.key or h.dtype != e.dtype or h.length != e.nbytes or h.divisor == 0:
        return MALFORMED
    if h.round != share.round:
        return REPEATED if h.round + 1 == share.round else MALFORMED
    # If share.pushed is set, the worker waits in a broadcast of this key.
    return REPEATED if share.pushed else ACCEPTED


cdef inline bint add_delta(KeyState *e, char *body, bint writable, uint64_t divisor) noexcept nogil:
    """Add `body`, divided by `divisor`, to the value; half types in float32, rounded once.

    False: no memory.
    """
    cdef Kernels *k = e.kernels
    cdef int64_t n = e.nbytes // k.itemsize
    # Memory of its own: the key's may hold the body of a broadcast that is open.
    cdef char *divided = NULL
    if e.value == NULL:
        e.value = <char *>calloc(1, e.nbytes)
        if e.value == NULL:
            return False
    if divisor > 1:
        if not writable:
            if not memory_for(&divided, e.nbytes):
                return False
            memcpy(divided, body, e.nbytes)
            body = divided
        k.divide(body, n, divisor)
    k.pair(e.value, body, n, 1)
    free_memory(&divided)
    return True


cdef inline int push_delta(
    Lane *lane, KeyState *e, Header *h, Message *m, char *body, bint *kept
) noexcept nogil:
    """Handle an asynchronous push. -1: malformed.

    `m`: its message, if the body is the message's own.
    """
    cdef Header reply
    cdef Result *r
    cdef bint large = m != NULL and e.nbytes > INLINE_BYTES
    cdef Verdict verdict = count_delta(e, h) if lane.settings.asynchronous else MALFORMED
    if verdict == MALFORMED:
        send_error(lane, h.sender, h.key, h.round, h.cookie, E_PROTOCOL, 0, 0)
        return -1
    if verdict == REPEATED:
        lane.counters.repeated += 1
        return 0
    note_landing(e, h.sender, m)
    e.shares[h.sender].cookie = h.cookie
    e.holder = h.sender
    count_applied(lane, e, False)
    if lane.applied != NULL:
        lane.applied[h.sender] += 1
    if e.nbytes and not add_delta(e, body, m != NULL, h.divisor):
        send_error(lane, h.sender, h.key, h.round, h.cookie, E_MEMORY, 0, 0)
    elif large:
        memcpy(body, e.value, e.nbytes)
        kept[0] = True
        r = result_in(lane, m, 1)
        if r != NULL:
            send_result(lane, e, h.sender, h.cookie, r, body, e.nbytes, &e.shares[h.sender].landing)
    else:
        reply_header(lane, &reply, ANSWER, h.sender, e, h.cookie)
        reply.length = e.nbytes
        put_answer(lane, h.sender, &reply, e.value)
    e.shares[h.sender].round += 1
    e.rounds += 1
    lane.counters.rounds += 1
    lane.counters.bytes += e.nbytes
    return 0
