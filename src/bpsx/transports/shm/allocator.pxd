# Allocator for a region of shared memory, used by the only process that writes to the region. It
# reuses the most recently freed block first, while it is still in the caches. Its state is in the
# private memory of that process, so a killed process leaves no lock and nothing half written.
from libc.stdint cimport uint64_t
from libc.stdlib cimport free, malloc

cdef enum:
    UNIT = 256                  # bytes
    CLASSES = 128               # size classes: 1 to 4 units, then four per doubling

cdef struct Block:
    uint64_t offset             # from the start of the region
    uint64_t size               # bytes
    int of_class                # size class
    Block *next                 # next free block of the same class
    Block *next_made            # next in the list of all blocks

cdef struct Arena:
    uint64_t room               # bytes of the region
    uint64_t top                # bytes that were ever allocated
    uint64_t used               # bytes allocated now
    Block *unused[CLASSES]      # free blocks by class
    Block *made                 # all blocks


cdef inline int class_of(uint64_t n, uint64_t *size) noexcept nogil:
    """Return the size class for ``n`` bytes, and set *size to the bytes of its blocks."""
    cdef uint64_t units = max((n + UNIT - 1) // UNIT, <uint64_t>1), quarters
    cdef int bits = 2
    if units <= 4:
        size[0] = units * UNIT
        return <int>units - 1
    while (units - 1) >> (bits + 1):
        bits += 1
    quarters = ((units - 1) >> (bits - 2)) + 1      # 5 to 8
    size[0] = (quarters << (bits - 2)) * UNIT
    return 4 * (bits - 1) + <int>quarters - 5


cdef inline void forget_blocks(Arena *a) noexcept nogil:
    cdef Block *b
    cdef int i
    while a.made != NULL:
        b, a.made = a.made, a.made.next_made
        free(b)
    for i in range(CLASSES):
        a.unused[i] = NULL
    a.top = 0


cdef inline Block *take_block(Arena *a, uint64_t n) noexcept nogil:
    """Allocate ``n`` bytes. NULL: there is no room."""
    cdef uint64_t size = 0
    cdef int wanted = class_of(n, &size), i
    cdef Block *b = NULL
    # A block of a larger class only if the region has no room for a new block.
    for i in range(wanted, CLASSES if size > a.room - a.top else wanted + 1):
        if a.unused[i] != NULL:
            b, a.unused[i] = a.unused[i], a.unused[i].next
            a.used += b.size
            return b
    if size > a.room - a.top and a.used == 0:
        forget_blocks(a)
    if size > a.room - a.top:
        return NULL
    b = <Block *>malloc(sizeof(Block))
    if b == NULL:
        return NULL
    b.offset, b.size, b.of_class = a.top, size, wanted
    b.next_made, a.made = a.made, b
    a.top += size
    a.used += size
    return b


cdef inline void give_block(Arena *a, Block *b) noexcept nogil:
    a.used -= b.size
    b.next, a.unused[b.of_class] = a.unused[b.of_class], b
