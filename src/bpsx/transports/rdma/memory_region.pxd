# Memory regions that the adapter can reach: the endpoint's inboxes, and memory that callers lent to
# the endpoint, each registered once. Used by the driving thread only.
from libc.errno cimport errno
from libc.stdint cimport uint32_t, uint64_t
from libc.stdlib cimport free
from libc.string cimport memmove

from bpsx.system.arrays cimport make_room
from bpsx.transports.rdma.verbs cimport ibv_dereg_mr, ibv_mr, ibv_pd, register_to_be_written

cdef struct Range:
    uint64_t begin
    uint64_t end
    uint32_t lkey               # key for the local side of a transfer
    ibv_mr *lent                # region of lent memory; NULL: an inbox of the endpoint

cdef struct Registered:         # sorted, without overlaps
    Range *all
    uint32_t n
    uint32_t room
    ibv_pd *pd                  # NULL: no adapter is open
    # Bytes that could not be registered; if not 0, nothing more is, and bodies are copied.
    uint64_t refused
    int why                     # errno of that failure, until it is logged


cdef inline uint32_t first_behind(const Registered *r, uint64_t at) noexcept nogil:
    """Return the index of the first range that ends behind `at`, or `n` if there is none."""
    cdef uint32_t low = 0, high = r.n, middle
    while low < high:
        middle = (low + high) // 2
        if r.all[middle].end <= at:
            low = middle + 1
        else:
            high = middle
    return low


cdef inline Range *find_range(const Registered *r, uint64_t at, uint64_t n) noexcept nogil:
    """Return the range that contains these bytes. NULL: they are not registered."""
    cdef uint32_t i = first_behind(r, at)
    if i == r.n or r.all[i].begin > at or r.all[i].end - at < n:
        return NULL
    return &r.all[i]


cdef inline bint add_range(
    Registered *r, uint64_t begin, uint64_t n, uint32_t lkey, ibv_mr *lent
) noexcept nogil:
    """Add a range. False: no memory, or it overlaps another; bodies in it are then copied."""
    cdef uint32_t at = first_behind(r, begin)
    if at < r.n and r.all[at].begin < begin + n or not make_room(
        &r.all, &r.room, r.n + 1, sizeof(Range)
    ):
        return False
    memmove(&r.all[at + 1], &r.all[at], (r.n - at) * sizeof(Range))
    r.all[at].begin, r.all[at].end, r.all[at].lkey, r.all[at].lent = begin, begin + n, lkey, lent
    r.n += 1
    return True


cdef inline void remove_range(Registered *r, uint64_t begin) noexcept nogil:
    """Forget the range that begins at `begin`, if there is one."""
    cdef uint32_t at = first_behind(r, begin)
    if at < r.n and r.all[at].begin == begin:
        r.n -= 1
        memmove(&r.all[at], &r.all[at + 1], (r.n - at) * sizeof(Range))


cdef inline bint register_lent(Registered *r, char *at, uint64_t n) noexcept nogil:
    """Register the memory unless it is registered. False: refused, and should be logged."""
    cdef uint32_t known = first_behind(r, <uint64_t>at)
    cdef ibv_mr *mr
    if r.pd == NULL or r.refused or n == 0 or known < r.n and r.all[known].begin < <uint64_t>at + n:
        return True
    mr = register_to_be_written(r.pd, at, n)
    if mr == NULL:
        r.why, r.refused = errno, n
        return False
    if not add_range(r, <uint64_t>at, n, mr.lkey, mr):
        ibv_dereg_mr(mr)
    return True


cdef inline void forget_registered(Registered *r, bint ours) noexcept nogil:
    """Deregister all lent memory, once no queue pair is left.

    ``ours`` is false in a forked child, which has nothing of the adapter.
    """
    cdef uint32_t i
    for i in range(r.n if ours else 0):
        if r.all[i].lent != NULL:
            ibv_dereg_mr(r.all[i].lent)
    free(r.all)
    r.all, r.n, r.room, r.pd = NULL, 0, 0, NULL
