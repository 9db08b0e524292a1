# Priority queue: a binary heap of partitions, by priority, then age.
from libc.stdint cimport uint32_t

from bpsx.core.partition cimport Heap, Partition
from bpsx.system.arrays cimport make_room


cdef inline bint before(const Partition *a, const Partition *b) noexcept nogil:
    return a.priority > b.priority or (a.priority == b.priority and a.order < b.order)


cdef inline int heap_push(Heap *q, Partition *p) noexcept nogil:
    """Insert a partition. Returns 0, or -1 when out of memory."""
    cdef uint32_t i, parent
    if not make_room(&q.items, &q.capacity, q.size + 1, sizeof(Partition *)):
        return -1
    i = q.size
    q.size += 1
    while i > 0:
        parent = (i - 1) // 2
        if not before(p, q.items[parent]):
            break
        q.items[i] = q.items[parent]
        i = parent
    q.items[i] = p
    return 0


cdef inline Partition *heap_pop(Heap *q) noexcept nogil:
    """Remove and return the most urgent partition. The queue must not be empty."""
    cdef Partition *top = q.items[0]
    cdef Partition *last
    cdef uint32_t i = 0, child
    q.size -= 1
    if q.size == 0:
        return top
    last = q.items[q.size]
    while True:
        child = 2 * i + 1
        if child >= q.size:
            break
        if child + 1 < q.size and before(q.items[child + 1], q.items[child]):
            child += 1
        if not before(q.items[child], last):
            break
        q.items[i] = q.items[child]
        i = child
    q.items[i] = last
    return top
