# One call of a framework's engine: its tensors, who is to be told, and the queues in which it waits
# for the GIL.
from libc.stdint cimport int64_t, uint32_t
from libc.stdlib cimport calloc, free, malloc

from bpsx.plugin.adapter cimport Tell
from bpsx.system.sync cimport Monitor, atomic_add, lock, notify_all, unlock, wait

cdef enum:
    FEW_DIMS = 6
    TOLD = -1

cdef enum Why:                  # a call has failed: Abseil's codes, which TensorFlow and XLA have
    INVALID_ARGUMENT = 3
    DEADLINE_EXCEEDED = 4
    RESOURCE_EXHAUSTED = 8
    FAILED_PRECONDITION = 9
    ABORTED = 10
    INTERNAL = 13

cdef struct Part:
    Tell tell                   # first: what the core calls knows its part by it
    Call *call
    char *source                # memory: what is pushed, and where the result goes; may be the same
    char *target
    size_t n_bytes
    int dtype                   # as the caller numbers them
    int n_dims
    const int64_t *dims
    int64_t few[FEW_DIMS]       # ... where they are, if they are few; see also room_for_dims
    void *given                 # what the caller holds of the source, if it is not the target's
    void *made                  # ... and of the target
    void *handle                # the Handle; NULL: has not begun

# A kind of callers. Without the GIL, but for those that say so.
cdef struct Caller:
    object (*plan)(Call *call)                      # with the GIL: the Plan of what is asked for
    void (*fail)(Call *call, int code, const char *text) noexcept nogil    # before `settle`
    # it is over: tensors and plan are the caller's again, who ends the call
    void (*settle)(Call *call) noexcept nogil
    # with the GIL: it has failed; handles shall keep what the transport may still read
    void (*keep)(Call *call) noexcept
    void (*leave)(Call *call) noexcept nogil        # the same when Python ends: for ever
    # there are no such two: what is pushed has to be a copy
    bint goes_first

cdef struct Call:               # first in what a caller has of its own
    const Caller *caller
    void *held                  # an object that is needed as long as the call; or NULL
    double rate
    int64_t left                # parts under way, and one for who begins them
    # TOLD: its caller knows; else the part that has failed, counted from 1; 0: none
    int64_t failed
    uint32_t n                  # parts
    Part *parts
    Call *next

# first in what is to be freed when there is the GIL: it holds an object
cdef struct Waste:
    void *held
    void (*free)(Waste *waste) noexcept nogil
    Waste *next

cdef struct Calls:
    Monitor monitor             # guards all of this
    Call *first                 # to be begun, the oldest first
    Call *last
    Call *failed                # to be told so, in words
    bint idle                   # who begins them sleeps
    int64_t ended               # Python ends, and nobody begins them
    bint served                 # somebody does
    Call *over                  # of which only the handles are left
    Waste *waste


cdef inline Call *new_call(uint32_t n, const Caller *caller, size_t n_bytes) noexcept nogil:
    """At the beginning of ``n_bytes`` of zeros, the caller's. NULL: no memory."""
    cdef Call *call = <Call *>calloc(1, n_bytes)
    cdef uint32_t i
    if call == NULL:
        return NULL
    call.parts = <Part *>calloc(n + 1, sizeof(Part))
    if call.parts == NULL:
        free(call)
        return NULL
    call.caller, call.rate = caller, -1.0
    call.n, call.left = n, n + 1
    for i in range(n):
        call.parts[i].call = call
        call.parts[i].dims = call.parts[i].few
    return call


cdef inline int64_t *room_for_dims(Part *part) noexcept nogil:
    """Where its ``n_dims`` dimensions can be put, until :func:`drop_dims`.

    NULL, and it has none: no memory.
    """
    cdef int64_t *more = part.few
    if part.n_dims > FEW_DIMS:
        more = <int64_t *>malloc(part.n_dims * sizeof(int64_t))
        if more == NULL:
            part.n_dims = 0
            return NULL
        part.dims = more
    return more


cdef inline void drop_dims(Part *part) noexcept nogil:
    if part.dims != part.few:
        free(<void *>part.dims)
        part.dims = part.few


cdef inline void free_call(Call *call) noexcept nogil:
    free(call.parts)
    free(call)


cdef inline bint enqueue(Calls *calls, Call *call) noexcept nogil:
    """Let it be begun. False if Python ends, and it will not be."""
    cdef bint taken
    lock(&calls.monitor)
    taken = not calls.ended
    if taken:
        if calls.last != NULL:
            calls.last.next = call
        else:
            calls.first = call
        calls.last = call
        if calls.idle:
            notify_all(&calls.monitor)
    unlock(&calls.monitor)
    return taken


cdef inline void mark_failed(Calls *calls, Call *call, int64_t part) noexcept nogil:
    """``part`` as Call.failed has it. The first counts."""
    lock(&calls.monitor)
    if call.failed == 0:
        call.failed = part
    unlock(&calls.monitor)


cdef inline bint put_failed(Calls *calls, Call *call) noexcept nogil:
    """Let its caller be told. False if Python ends, and nobody has words for it."""
    cdef bint taken
    lock(&calls.monitor)
    taken = not calls.ended
    if taken:
        call.next = calls.failed
        calls.failed = call
        if calls.idle:
            notify_all(&calls.monitor)
    unlock(&calls.monitor)
    return taken


cdef inline bint wait_for_calls(Calls *calls, Call **first, Call **failed) noexcept nogil:
    """Sleep until there are calls to be begun, or some that have failed, and take them.

    False when Python ends.
    """
    cdef bint go_on
    lock(&calls.monitor)
    while calls.first == NULL and calls.failed == NULL and not calls.ended:
        calls.idle = True
        wait(&calls.monitor)
        calls.idle = False
    first[0], failed[0] = calls.first, calls.failed
    calls.first = calls.last = calls.failed = NULL
    go_on = not calls.ended
    unlock(&calls.monitor)
    return go_on


cdef inline void put_over(Calls *calls, Call *call) noexcept nogil:
    """It is over, and what is left of it is for who has the GIL."""
    lock(&calls.monitor)
    call.next = calls.over
    calls.over = call
    unlock(&calls.monitor)


cdef inline bint part_over(Call *call) noexcept nogil:
    """Whether it was the last."""
    return atomic_add(&call.left, -1) == 0
