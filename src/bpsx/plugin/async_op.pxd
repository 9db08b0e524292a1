# One call of a framework's engine: its tensors, the caller's callbacks, and the queues in which it
# waits for the GIL.
from libc.stdint cimport int64_t, uint32_t
from libc.stdlib cimport calloc, free, malloc

from bpsx.plugin.adapter cimport EndCallback
from bpsx.system.sync cimport Monitor, atomic_add, lock, notify_all, unlock, wait

cdef enum:
    FEW_DIMS = 6
    TOLD = -1

cdef enum Why:                  # Abseil's status codes, which TensorFlow and XLA use
    INVALID_ARGUMENT = 3
    DEADLINE_EXCEEDED = 4
    RESOURCE_EXHAUSTED = 8
    FAILED_PRECONDITION = 9
    ABORTED = 10
    INTERNAL = 13

cdef struct CallPart:
    EndCallback at_end          # First field: the callback gets its address from the core.
    Call *call
    # Memory that is pushed; the result goes to ``target``, which may be the same memory.
    char *source
    char *target
    size_t n_bytes
    int dtype                   # In the caller's numbering.
    int n_dims
    const int64_t *dims
    int64_t few[FEW_DIMS]       # Storage of ``dims`` if they are few; see room_for_dims.
    void *given                 # The caller's reference to the source, if it is not the target.
    void *made                  # The caller's reference to the target.
    void *handle                # The Handle (owned); NULL until the part has begun.

# Callbacks of one kind of caller. They run without the GIL unless a comment says otherwise.
cdef struct Caller:
    object (*plan)(Call *call)                      # With the GIL: returns the call's Plan.
    void (*fail)(Call *call, int code, const char *text) noexcept nogil    # Called before `settle`.
    # The call is over: tensors and plan belong to the caller again, which has to call end_call.
    void (*settle)(Call *call) noexcept nogil
    # With the GIL, after a failure: has the handles keep memory that the transport may still read.
    void (*keep)(Call *call) noexcept
    void (*leave)(Call *call) noexcept nogil        # Leaks that memory, when Python ends.
    # The caller frees its tensors on failure, so inputs are copied and keep/leave are unused.
    bint goes_first

cdef struct Call:               # First field of the caller's own struct.
    const Caller *caller
    void *held                  # Python object (owned) needed as long as the call, or NULL.
    double rate
    int64_t left                # Parts under way, plus one for the thread that begins them.
    # TOLD: the caller knows the error. Otherwise the failed part, counted from 1, or 0 for none.
    int64_t failed
    void *step                  # Python Step (owned), unless `held` is a plan with one; or NULL.
    bint awaited                # `held` has a step, whose other calls wait until it is counted.
    bint counted                # Its step knows that it has begun, or never will.
    uint32_t n                  # Number of parts.
    CallPart *parts
    Call *next

# First field of a struct that holds a Python object and is freed by a thread with the GIL.
cdef struct Waste:
    void *held
    void (*free)(Waste *waste) noexcept nogil
    Waste *next

cdef struct Calls:
    Monitor monitor             # Guards all fields.
    Call *first                 # Calls to begin, oldest first.
    Call *last
    Call *failed                # Failed calls whose error is still to be reported.
    bint idle                   # The serving thread sleeps.
    int64_t ended               # Python ends; no thread begins calls.
    bint served                 # The serving thread runs.
    Call *over                  # Finished calls; only their Python objects remain.
    bint uncounted              # One of them has never begun, and its step may wait for it.
    Waste *waste


cdef inline Call *new_call(uint32_t n, const Caller *caller, size_t n_bytes) noexcept nogil:
    """Allocate a call as the first field of ``n_bytes`` of zeros. NULL: no memory."""
    cdef Call *call = <Call *>calloc(1, n_bytes)
    cdef uint32_t i
    if call == NULL:
        return NULL
    call.parts = <CallPart *>calloc(n + 1, sizeof(CallPart))
    if call.parts == NULL:
        free(call)
        return NULL
    call.caller, call.rate = caller, -1.0
    call.n, call.left = n, n + 1
    for i in range(n):
        call.parts[i].call = call
        call.parts[i].dims = call.parts[i].few
    return call


cdef inline int64_t *room_for_dims(CallPart *part) noexcept nogil:
    """Return storage for the part's ``n_dims`` dimensions, valid until :func:`drop_dims`.

    Without memory, return NULL and set ``n_dims`` to 0.
    """
    cdef int64_t *more = part.few
    if part.n_dims > FEW_DIMS:
        more = <int64_t *>malloc(part.n_dims * sizeof(int64_t))
        if more == NULL:
            part.n_dims = 0
            return NULL
        part.dims = more
    return more


cdef inline void drop_dims(CallPart *part) noexcept nogil:
    if part.dims != part.few:
        free(<void *>part.dims)
        part.dims = part.few


cdef inline void free_call(Call *call) noexcept nogil:
    free(call.parts)
    free(call)


cdef inline bint enqueue(Calls *calls, Call *call) noexcept nogil:
    """Queue a call to begin. False: Python ends, and the call will not begin."""
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
    """Record a failure; ``part`` as in Call.failed. Only the first failure counts."""
    lock(&calls.monitor)
    if call.failed == 0:
        call.failed = part
    unlock(&calls.monitor)


cdef inline bint put_failed(Calls *calls, Call *call) noexcept nogil:
    """Queue a failed call's error report. False: Python ends, and no thread can write the text."""
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
    """Sleep until there are calls to begin or failed calls to report, and take all of them.

    Returns False when Python ends.
    """
    cdef bint go_on
    lock(&calls.monitor)
    while (
        calls.first == NULL and calls.failed == NULL and not calls.uncounted and not calls.ended
    ):
        calls.idle = True
        wait(&calls.monitor)
        calls.idle = False
    first[0], failed[0] = calls.first, calls.failed
    calls.first = calls.last = calls.failed = NULL
    go_on = not calls.ended
    unlock(&calls.monitor)
    return go_on


cdef inline void put_over(Calls *calls, Call *call) noexcept nogil:
    """Queue a finished call, so that a thread with the GIL releases its Python objects."""
    lock(&calls.monitor)
    call.next = calls.over
    calls.over = call
    if call.awaited and not call.counted:
        calls.uncounted = True
        if calls.idle:
            notify_all(&calls.monitor)
    unlock(&calls.monitor)


cdef inline bint part_over(Call *call) noexcept nogil:
    """Count one part as ended. Returns whether it was the last."""
    return atomic_add(&call.left, -1) == 0
