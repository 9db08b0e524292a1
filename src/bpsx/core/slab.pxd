# Allocator for small records that live as long as their owner, apart from malloc's memory.
#
# Every new name or shape leaves a record, while messages are allocated and freed around it. Records
# from malloc would lie between the blocks of messages and keep freed blocks from joining. Then each
# new shape could cost the size of a message instead of a record.
from libc.stddef cimport size_t
from libc.stdint cimport uint64_t

cdef extern from *:
    """
    #include <stddef.h>
    #include <sys/mman.h>
    static inline void *bpsx_pages(size_t n) {
        void *got = mmap(NULL, n, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        return got == MAP_FAILED ? NULL : got;
    }
    static inline void bpsx_drop_pages(void *at, size_t n) { munmap(at, n); }
    """
    void *pages "bpsx_pages"(size_t n) nogil                    # zeroed, or NULL
    void drop_pages "bpsx_drop_pages"(void *at, size_t n) nogil

cdef enum:
    # Address space; memory is committed page by page, as records are written.
    SLAB_BYTES = 256 << 10

cdef struct Slab:
    Slab *older
    uint64_t size               # bytes of the slab, including this header
    uint64_t used               # bytes given out so far, including this header

cdef struct Slabs:              # zero-initialized: no slabs yet
    Slab *newest


cdef inline void *take_record(Slabs *s, size_t n) noexcept nogil:
    """Return ``n`` zeroed bytes, aligned to 16; NULL when out of memory."""
    cdef Slab *slab = s.newest
    cdef uint64_t wanted = (n + 15) & ~<uint64_t>15, head = (sizeof(Slab) + 15) & ~<uint64_t>15
    if slab == NULL or wanted > slab.size - slab.used:
        slab = <Slab *>pages(max(<uint64_t>SLAB_BYTES, head + wanted))
        if slab == NULL:
            return NULL
        slab.size, slab.used = max(<uint64_t>SLAB_BYTES, head + wanted), head
        slab.older, s.newest = s.newest, slab
    slab.used += wanted
    return <char *>slab + slab.used - wanted


cdef inline void drop_records(Slabs *s) noexcept nogil:
    """Free all records."""
    cdef Slab *slab
    while s.newest != NULL:
        slab, s.newest = s.newest, s.newest.older
        drop_pages(slab, slab.size)
