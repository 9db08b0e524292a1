# Threads that encode, decode and copy partitions. The driver gives them partitions, most urgent
# first, and takes those back. All of this runs without the GIL.
from libc.stdint cimport int64_t, uint32_t, uint64_t
from libc.stdlib cimport calloc, free

from bpsx.core.codec.low_rank cimport work_on_matrix
from bpsx.core.codec.packed cimport Packed
from bpsx.core.codec.state cimport pack, unpack
from bpsx.core.partition cimport COPY, Partition, Tensor
from bpsx.core.queue cimport heap_pop, heap_push
from bpsx.core.state cimport MAX_THREADS, Pool
from bpsx.core.status cimport DONE
from bpsx.core.stream_copy cimport copy_nontemporal
from bpsx.system.sync cimport (
    atomic_add, atomic_load, atomic_store, lock, monitor_destroy, monitor_init, notify_all,
    unlock, wait,
)


cdef inline Pool *pool_new(int threads) noexcept nogil:
    """Allocate a pool for `threads` threads. NULL when out of memory."""
    cdef Pool *pool = <Pool *>calloc(1, sizeof(Pool))
    if pool == NULL or monitor_init(&pool.monitor) != 0:
        free(pool)
        return NULL
    pool.n_threads = max(1, min(threads, MAX_THREADS))
    return pool


cdef inline void pool_stop(Pool *pool) noexcept nogil:
    """Make the threads end."""
    lock(&pool.monitor)
    pool.stopping = True
    notify_all(&pool.monitor)
    unlock(&pool.monitor)


cdef inline void pool_free(Pool *pool) noexcept nogil:
    if pool != NULL:
        free(pool.todo.items)
        monitor_destroy(&pool.monitor)
        free(pool)


cdef inline int pool_give(Pool *pool, Partition *p) noexcept nogil:
    """Queue a partition (driver). Returns 0, or -1 when out of memory."""
    cdef int rc
    lock(&pool.monitor)
    rc = heap_push(&pool.todo, p)
    notify_all(&pool.monitor)
    unlock(&pool.monitor)
    return rc


cdef inline Partition *pool_take(Pool *pool) noexcept nogil:
    """Return the finished partitions (driver): a list by `coding.next`."""
    cdef Partition *found
    if atomic_load(&pool.ready) == 0:
        return NULL
    lock(&pool.monitor)
    found = pool.done
    pool.done = NULL
    atomic_store(&pool.ready, 0)
    unlock(&pool.monitor)
    return found


cdef inline void pool_forget(Pool *pool, Tensor *tensor) noexcept nogil:
    """Wait until no thread works on `tensor`, which the driver has failed.

    From then on no pool thread reads or writes the memory of its tasks.
    """
    cdef uint32_t i
    cdef bint busy = True
    lock(&pool.monitor)
    while busy:
        busy = False
        for i in range(pool.n_threads):
            busy = busy or pool.at_work[i] != NULL and pool.at_work[i].tensor == tensor
        if busy:
            wait(&pool.monitor)
    unlock(&pool.monitor)


cdef inline Partition *pool_next(Pool *pool, uint32_t me) noexcept nogil:
    """Wait for the next partition (pool thread). NULL: the thread is to end."""
    cdef Partition *p = NULL
    lock(&pool.monitor)
    while p == NULL and not pool.stopping:
        if pool.todo.size == 0:
            wait(&pool.monitor)
            continue
        p = heap_pop(&pool.todo)
        if p.tensor.outcome.status != DONE:
            p = NULL                        # its tasks have failed
    pool.at_work[me] = p
    unlock(&pool.monitor)
    return p


cdef inline void pool_finish(Pool *pool, uint32_t me, Partition *p) noexcept nogil:
    """Return a partition that has been worked on (pool thread)."""
    lock(&pool.monitor)
    pool.at_work[me] = NULL
    p.coding.next = pool.done
    pool.done = p
    atomic_add(&pool.ready, 1)
    notify_all(&pool.monitor)               # a driver in pool_forget may wait for this
    unlock(&pool.monitor)


cdef inline uint64_t scratch_of(const Partition *p) noexcept nogil:
    """Bytes of scratch memory that work_on() needs."""
    if p.stage == COPY:
        return 0
    return p.tensor.matrix.scratch if p.tensor.matrix != NULL else p.packed.scratch


cdef inline void work_on(Partition *p, char *scratch) noexcept nogil:
    cdef Packed *packed = p.packed
    p.coding.status = 0
    if p.stage == COPY:
        copy_nontemporal(p.target, p.kept.body, p.length)
    elif p.tensor.matrix != NULL:
        work_on_matrix(p, scratch)
    elif p.encodes:
        pack(packed, p.source, packed.wire, scratch, p.tensor.current.rate, True)
    else:
        p.coding.status = unpack(packed, packed.wire, packed.size, p.target, scratch)
