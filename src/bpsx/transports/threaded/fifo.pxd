# Queue of structs that begin with an Item, in the order in which they were appended. It allocates
# nothing. A lock of its users guards it; `n` may be read without the lock.
from libc.stdint cimport int64_t

from bpsx.system.sync cimport atomic_store

cdef struct Item:
    Item *next

cdef struct Fifo:
    Item *first
    Item *last                  # valid unless `first` is NULL
    int64_t n


cdef inline void append(Fifo *queue, Item *item) noexcept nogil:
    item.next = NULL
    if queue.first == NULL:
        queue.first = item
    else:
        queue.last.next = item
    queue.last = item
    atomic_store(&queue.n, queue.n + 1)


cdef inline Item *take_all(Fifo *queue) noexcept nogil:
    """Empty the queue. Returns the oldest item, from which `next` leads to the others, or NULL."""
    cdef Item *found = queue.first
    queue.first = NULL
    atomic_store(&queue.n, 0)
    return found
