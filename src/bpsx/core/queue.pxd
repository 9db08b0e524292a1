# Priority queue of a lane: a binary heap of partitions, by priority, then age.
from libc.stdint cimport uint32_t
from libc.stdlib cimport realloc

from bpsx.core.partition cimport Lane, Partition


cdef inline bint before(const Partition *a, const Partition *b) noexcept nogil:
    return a.priority > b.priority or (a.priority == b.priority and a.order < b.order)


cdef inline int heap_push(Lane *q, Partition *p) noexcept nogil:
    """Insert a partition. Returns 0, or -1 when out of memory."""
    cdef uint32_t i, parent, wanted
    cdef Partition **grown
    if q.size == q.capacity:
        wanted = q.capacity * 2 if q.capacity else 64
        grown = <Partition **>realloc(q.heap, wanted * sizeof(Partition *))
        if grown == NULL:
            return -1
        q.heap = grown
        q.capacity = wanted
    i = q.size
    q.size += 1
    while i > 0:
        parent = (i - 1) // 2
        if not before(p, q.heap[parent]):
            break
        q.heap[i] = q.heap[parent]
        i = parent
    q.heap[i] = p
    return 0


cdef inline Partition *heap_pop(Lane *q) noexcept nogil:
    """Remove and return the most urgent partition. The queue must not be empty."""
    cdef Partition *top = q.heap[0]
    cdef Partition *last
    cdef uint32_t i = 0, child
    q.size -= 1
    if q.size == 0:
        return top
    last = q.heap[q.size]
    while True:
        child = 2 * i + 1
        if child >= q.size:
            break
        if child + 1 < q.size and before(q.heap[child + 1], q.heap[child]):
            child += 1
        if not before(q.heap[child], last):
            break
        q.heap[i] = q.heap[child]
        i = child
    q.heap[i] = last
    return top
