# What processes of one machine tell each other: fixed-size posts in rings of shared memory, one
# ring per pair and direction.
#
# A ring has one writer and one reader, each the driver of its process, so it needs no lock that a
# killed process could hold.
from libc.stdint cimport int32_t, int64_t, uint32_t, uint64_t

from bpsx.system.sync cimport atomic_load, atomic_store

cdef enum:
    RING_POSTS = 4096
    NOTICE_BYTES = 4096 - 16

cdef enum PostFlag:
    HAS_BODY = 1                # the sender's share lies at `offset`
    IS_BROADCAST = 2            # `divisor` is the rank of the worker whose data everybody gets
    IS_RESULT = 4               # from the root: the result, or `status`
    IS_SHARE = 8                # to the root
    # About tensors on GPUs, see collectives.pxd:
    ON_GPU = 16                 # a share is there, and nothing lies at `offset`
    IS_ORDER = 32               # from the root: the next collective is this one
    MORE = 64                   # ... and the next ORDER belongs to its group
    GATHERS = 128               # ... which is about the result; else about shares
    STANDS_IN = 256             # ... and the receiver takes part without a tensor
    IS_COPIED = 512             # to the root: the sender's part of the sum is on the host
    IS_LOADED = 1024            # ... its part of the result on the GPU

cdef struct Post:
    uint64_t key
    uint64_t offset             # of the partition's bytes from the start of `owner`'s segment
    uint32_t owner              # local rank whose segment holds them
    uint32_t round
    uint32_t flags
    uint32_t divisor
    # of a result: 0, or why the round failed, with the ranks that this is about
    int32_t status
    uint32_t detail_a
    uint32_t detail_b
    # the reader's: how many it has had for this partition from this sender
    uint32_t count
    # About tensors on GPUs:
    uint64_t nbytes             # of an order
    uint64_t slab, slab_bytes   # of `owner`'s segment, in which `offset` is; see pinned_pool.pxd
    uint32_t dtype, group_owner, reduction
    bint takes_part             # the reader's: whether who sent it does, in this round

cdef struct Ring:
    int64_t taken               # by the reader; written by it alone
    int64_t apart[7]            # each counter has its own cache line
    int64_t put                 # by the writer; written by it alone
    int64_t apart_too[7]
    Post posts[RING_POSTS]

# A page on which a process writes for the others to read, whenever they look.
cdef struct Board:
    int64_t version             # goes up before and after each change
    int64_t length
    char text[4096 - 16]

# The beginning of a process's shared memory. Behind it, from the next page on, lie its notice board
# and its shares.
cdef struct Segment:
    int64_t parked              # its driver sleeps: who has put a post has to wake it
    int64_t apart[7]
    Ring rings[1]               # by the sender's local rank; as many as there are processes


cdef inline bint ring_put(Ring *r, const Post *post) noexcept nogil:
    """False when the ring is full."""
    cdef int64_t at = r.put
    if at - atomic_load(&r.taken) == RING_POSTS:
        return False
    r.posts[at % RING_POSTS] = post[0]
    atomic_store(&r.put, at + 1)
    return True


cdef inline bint ring_take(Ring *r, Post *post) noexcept nogil:
    """False when there is nothing."""
    cdef int64_t at = r.taken
    if at == atomic_load(&r.put):
        return False
    post[0] = r.posts[at % RING_POSTS]
    atomic_store(&r.taken, at + 1)
    return True


cdef inline bint ring_empty(Ring *r) noexcept nogil:
    return r.taken == atomic_load(&r.put)
