# Messages between processes of one machine: fixed-size posts in rings of shared memory, one ring
# per pair and direction.
#
# A ring has one writer and one reader, the drivers of the two processes. So it needs no lock that a
# killed process could hold.
from libc.stdint cimport int32_t, int64_t, uint32_t, uint64_t

from bpsx.system.sync cimport atomic_load, atomic_store

cdef enum:
    RING_POSTS = 4096
    NOTICE_BYTES = 4096 - 16

cdef enum PostFlag:
    HAS_BODY = 1                # the sender's share is at `offset`
    IS_BROADCAST = 2            # `divisor` is the rank of the worker whose data all get
    IS_RESULT = 4               # from the root: the result, or an error in `status`
    IS_SHARE = 8                # to the root: the sender's share
    # For tensors on GPUs, see gpu/collectives.pxd:
    ON_GPU = 16                 # the share is on a GPU; `offset` is unused
    IS_LAUNCH = 32              # from the root: queue this collective next
    MORE = 64                   # ... the next LAUNCH belongs to its group
    GATHERS = 128               # ... it distributes the result; otherwise it reduces shares
    STANDS_IN = 256             # ... the receiver takes part without a tensor
    IS_COPIED = 512             # to the root: the sender's part of the sum is on the host
    IS_LOADED = 1024            # to the root: the sender's part of the result is on its GPU

cdef struct Post:
    uint64_t key
    uint64_t offset             # bytes from the start of `owner`'s segment to the data
    uint32_t owner              # local rank of the process whose segment holds the data
    uint32_t round
    uint32_t flags
    uint32_t divisor
    # of a result: 0, or the error of the round and the ranks that it concerns
    int32_t status
    uint32_t detail_a
    uint32_t detail_b
    # set by the reader: shares received for this partition from this sender
    uint32_t count
    # For tensors on GPUs:
    uint64_t nbytes             # bytes that an order covers
    # part of `owner`'s segment that contains `offset`; see pinned_pool.pxd
    uint64_t slab, slab_bytes
    uint32_t dtype, group_owner, reduction
    bint participates           # set by the reader: the sender takes part in this round

cdef struct Ring:
    int64_t taken               # posts read; written only by the reader
    int64_t apart[7]            # each counter has its own cache line
    int64_t put                 # posts written; written only by the writer
    int64_t apart_too[7]
    Post posts[RING_POSTS]

# Notice board: a page that a process writes and that the others read at any time.
cdef struct Board:
    int64_t version             # incremented before and after each change
    int64_t length
    char text[4096 - 16]

# Start of a process's shared memory. Its notice board and its shares follow from the next page on.
cdef struct Segment:
    int64_t parked              # its driver sleeps: a process that puts a post must wake it
    int64_t apart[7]
    Ring rings[1]               # by the sender's local rank; one for each process


cdef inline bint ring_put(Ring *r, const Post *post) noexcept nogil:
    """Append a post. False if the ring is full."""
    cdef int64_t at = r.put
    if at - atomic_load(&r.taken) == RING_POSTS:
        return False
    r.posts[at % RING_POSTS] = post[0]
    atomic_store(&r.put, at + 1)
    return True


cdef inline bint ring_take(Ring *r, Post *post) noexcept nogil:
    """Take the oldest post. False if the ring is empty."""
    cdef int64_t at = r.taken
    if at == atomic_load(&r.put):
        return False
    post[0] = r.posts[at % RING_POSTS]
    atomic_store(&r.taken, at + 1)
    return True


cdef inline bint ring_empty(Ring *r) noexcept nogil:
    return r.taken == atomic_load(&r.put)
