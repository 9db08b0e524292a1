# First-fit allocator in units of 4 KiB. It reuses the lowest free units, which are still in the
# caches, and adjacent free units form one run.
from libc.stdint cimport int64_t, uint8_t, uint32_t, uint64_t
from libc.stdlib cimport calloc, free
from libc.string cimport memchr, memset

cdef enum:
    UNIT = 4096

cdef struct Units:
    uint8_t *taken              # by unit: 1 if allocated, else 0
    uint32_t n
    uint32_t used


cdef inline bint units_init(Units *u, uint64_t nbytes) noexcept nogil:
    u.n, u.used = <uint32_t>(nbytes // UNIT), 0
    u.taken = <uint8_t *>calloc(max(u.n, 1u), 1)
    return u.taken != NULL


cdef inline void units_free(Units *u) noexcept nogil:
    free(u.taken)
    u.taken = NULL


cdef inline uint32_t units_for(uint64_t nbytes) noexcept nogil:
    return <uint32_t>((nbytes + UNIT - 1) // UNIT)


cdef inline uint32_t run_at(Units *u, uint32_t *at) noexcept nogil:
    """Find the first run of free units from *at on; return its length, or 0 if there is none."""
    cdef uint8_t *begin
    cdef uint8_t *end
    if at[0] >= u.n:
        return 0
    begin = <uint8_t *>memchr(u.taken + at[0], 0, u.n - at[0])
    if begin == NULL:
        return 0
    at[0] = <uint32_t>(begin - u.taken)
    end = <uint8_t *>memchr(begin, 1, u.n - at[0])
    return <uint32_t>((end if end != NULL else u.taken + u.n) - begin)


cdef inline int64_t take_units(Units *u, uint32_t wanted) noexcept nogil:
    """Allocate a run of ``wanted`` units. Return the first unit, or -1 if there is no such run."""
    cdef uint32_t at = 0, found = run_at(u, &at)
    while found and found < wanted:
        at += found
        found = run_at(u, &at)
    if found == 0:
        return -1
    memset(u.taken + at, 1, wanted)
    u.used += wanted
    return at


cdef inline uint32_t longest_run(Units *u) noexcept nogil:
    cdef uint32_t at = 0, longest = 0, found = run_at(u, &at)
    while found:
        longest = max(longest, found)
        at += found
        found = run_at(u, &at)
    return longest


cdef inline void give_units(Units *u, uint32_t first, uint32_t n) noexcept nogil:
    memset(u.taken + first, 0, n)
    u.used -= n
