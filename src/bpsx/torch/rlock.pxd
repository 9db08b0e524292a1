# A reentrant lock like threading.RLock, which costs 150 ns per use, for code that takes it hundreds
# of times in a step. Callers hold the GIL; it is released while waiting for another thread.
from cpython.pythread cimport (
    NOWAIT_LOCK, WAIT_LOCK, PyThread_acquire_lock, PyThread_allocate_lock, PyThread_free_lock,
    PyThread_get_thread_ident, PyThread_release_lock, PyThread_type_lock,
)

cdef struct RLock:
    PyThread_type_lock lock
    unsigned long owner         # valid while depth > 0
    int depth


cdef inline int new_turn(RLock *turn) except -1:
    turn.lock = PyThread_allocate_lock()
    if turn.lock == NULL:
        raise MemoryError("no memory for a lock")
    turn.depth = 0
    return 0


cdef inline void drop_turn(RLock *turn) noexcept:
    if turn.lock != NULL:
        PyThread_free_lock(turn.lock)


cdef inline void take_turn(RLock *turn) noexcept:
    cdef unsigned long me = <unsigned long>PyThread_get_thread_ident()
    if turn.depth == 0 or turn.owner != me:
        if PyThread_acquire_lock(turn.lock, NOWAIT_LOCK) == 0:
            with nogil:
                PyThread_acquire_lock(turn.lock, WAIT_LOCK)
        turn.owner = me
    turn.depth += 1


cdef inline void end_turn(RLock *turn) noexcept:
    turn.depth -= 1
    if turn.depth == 0:
        PyThread_release_lock(turn.lock)
