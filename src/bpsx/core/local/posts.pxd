# Messages of one process of a machine to the others: posts, sleep, and shares of new tensors. Only
# the driver calls these functions.
from libc.stdint cimport int64_t, uint8_t, uint32_t, uint64_t
from libc.stdlib cimport calloc
from libc.string cimport memset

from bpsx.core.local.neighbour cimport MOST_TENSORS, PAGE, PART_BITS, Machine, Neighbour, Posts
from bpsx.core.partition cimport LocalRound, Partition, Task, Tensor
from bpsx.core.local.ring cimport (
    IS_BROADCAST, IS_RESULT, ON_GPU, Post, Segment, ring_empty, ring_put, ring_take,
)
from bpsx.system.arrays cimport make_room
from bpsx.system.sync cimport atomic_load, atomic_store

cdef extern from "<unistd.h>" nogil:
    ssize_t write(int fd, const void *buf, size_t count)


cdef inline int queue_post(Posts *q, const Post *post) noexcept nogil:
    """Append a post. Returns 0, or -1 when out of memory."""
    if not make_room(&q.items, &q.capacity, q.size + 1, sizeof(Post)):
        return -1
    q.items[q.size] = post[0]
    q.size += 1
    return 0


cdef inline int send_post(Machine *m, uint32_t to, const Post *post) noexcept nogil:
    """Post to a neighbour, in order; `ring_bells` wakes it. Returns 0, or -1 when out of memory."""
    cdef Neighbour *n = &m.all[to]
    if atomic_load(&n.gone):
        return 0                            # it no longer reads
    n.dirty = True
    if n.overflow.size == 0 and ring_put(&n.segment.rings[m.me], post):
        return 0
    return queue_post(&n.overflow, post)


cdef inline bint ring_bells(Machine *m) noexcept nogil:
    """Write queued posts, and wake sleeping processes that have posts to read.

    Returns True if some posts still find no room.
    """
    cdef uint32_t i, sent
    cdef uint64_t one = 1
    cdef bint left = False
    cdef Neighbour *n
    for i in range(m.size):
        n = &m.all[i]
        if not n.dirty:
            continue
        sent = 0
        if atomic_load(&n.gone):
            n.overflow.size = 0
        while sent < n.overflow.size and ring_put(&n.segment.rings[m.me], &n.overflow.items[sent]):
            sent += 1
        shift(&n.overflow, sent)
        n.dirty = n.overflow.size > 0
        left = left or n.dirty
        if atomic_load(&n.segment.parked):
            write(n.wake_fd, &one, sizeof(one))
    return left


cdef inline void shift(Posts *q, uint32_t n) noexcept nogil:
    """Drop the first n posts."""
    cdef uint32_t i
    if n == 0:
        return
    for i in range(q.size - n):
        q.items[i] = q.items[i + n]
    q.size -= n


cdef inline bint next_post(Machine *m, Post *post, uint32_t *sender) noexcept nogil:
    """Take the next post from any neighbour. False if there is none."""
    cdef uint32_t i
    for i in range(m.size):
        if i != m.me and ring_take(&m.all[m.me].segment.rings[i], post):
            sender[0] = i
            return True
    return False


cdef inline bint fall_asleep(Machine *m) noexcept nogil:
    """Announce that this process's driver goes to sleep.

    Returns False, with the announcement withdrawn, if there are unread posts.
    """
    cdef uint32_t i
    cdef Segment *own = m.all[m.me].segment
    atomic_store(&own.parked, 1)
    for i in range(m.size):
        if not ring_empty(&own.rings[i]):
            atomic_store(&own.parked, 0)
            return False
    return True


cdef inline void stay_awake(Machine *m) noexcept nogil:
    atomic_store(&m.all[m.me].segment.parked, 0)


cdef inline char *memory_at(
    Machine *m, uint32_t owner, uint64_t offset, uint64_t length
) noexcept nogil:
    """Address of a neighbour's bytes in this process, or NULL if they exceed its segment."""
    if owner >= m.size or offset > m.all[owner].nbytes or length > m.all[owner].nbytes - offset:
        return NULL
    return <char *>m.all[owner].segment + offset


cdef inline Partition *partition_of(Machine *m, uint64_t key) noexcept nogil:
    """Return the partition with this key, or NULL if this process has none (yet)."""
    cdef uint64_t number = key >> PART_BITS
    cdef uint64_t part = key & ((<uint64_t>1 << PART_BITS) - 1)
    if number >= m.n_tensors or m.tensors[number] == NULL or part >= m.tensors[number].n_parts:
        return NULL
    return &m.tensors[number].parts[part]


cdef inline int know_tensor(Machine *m, Tensor *tensor) noexcept nogil:
    """Prepare a new tensor for this machine's processes. Returns 0, or -1 when out of memory."""
    cdef uint32_t i
    cdef uint64_t number = tensor.parts[0].key >> PART_BITS, nbytes = 0
    cdef LocalRound *local
    if (
        number >= MOST_TENSORS
        or not make_room(&m.tensors, &m.n_tensors, <uint32_t>number + 1, sizeof(Tensor *))
    ):
        return -1
    for i in range(tensor.n_parts):
        nbytes = max(nbytes, tensor.parts[i].offset + tensor.parts[i].length)
        local = <LocalRound *>calloc(1, sizeof(LocalRound))
        tensor.parts[i].local = local
        if local == NULL:
            return -1
        if m.me == m.root:
            local.shares = <Post *>calloc(m.size, sizeof(Post))
            if local.shares == NULL:
                return -1
    if m.me != m.root:
        nbytes = (nbytes + PAGE - 1) // PAGE * PAGE
        # Address space for two places: see `LocalRound.side`. Memory is committed as it is written.
        tensor.share.span = nbytes
        if nbytes + tensor.share.span > m.all[m.me].nbytes - m.used:
            return -1
        tensor.share.offset = m.used
        m.used += nbytes + tensor.share.span
    m.tensors[number] = tensor
    return 0


cdef inline int post_results(
    Machine *m, Partition *p, int status, uint32_t a, uint32_t b
) noexcept nogil:
    """Post how a round ended to all processes that have given their share (root).

    Returns 0, or -1 when out of memory.
    """
    cdef Post post
    cdef uint32_t i
    cdef int failed = 0
    memset(&post, 0, sizeof(Post))
    post.key = p.key
    post.flags = IS_RESULT
    post.owner = p.local.result_owner
    post.offset = p.local.result_offset
    post.status = status
    post.detail_a = a
    post.detail_b = b
    if p.on_gpu:
        post.group_owner = p.gpu.owner
        if p.gpu.place != NULL:
            post.slab = p.gpu.place.slab
            post.slab_bytes = p.gpu.place.slab_bytes
    for i in range(m.size):
        if p.local.shares[i].flags:
            post.round = p.local.shares[i].round
            failed |= send_post(m, i, &post)
            p.local.shares[i].flags = 0
    p.local.n_shares = 0
    return failed


cdef inline bint same_divisor(Task *task, uint32_t other, bint shrinks) noexcept nogil:
    """Whether two processes divide alike.

    If the job shrinks, one may have heard earlier than the other of a lost machine: then both must
    want an average, and the root chooses the divisor.
    """
    if shrinks and not task.broadcast:
        return (task.divisor > 1) == (other > 1)
    return task.divisor == other


cdef inline bint agree(Machine *m, Partition *p, bint shrinks, uint32_t *who) noexcept nogil:
    """Whether all shares ask for the root's operation, in the same kind of memory (root).

    If not, `who` is the rank of a worker that disagrees.
    """
    cdef Task *task = p.tensor.current
    cdef uint32_t i, flags
    for i in range(m.size):
        flags = p.local.shares[i].flags
        if (
            flags
            and (
                not same_divisor(task, p.local.shares[i].divisor, shrinks)
                or ((flags & IS_BROADCAST) != 0) != task.broadcast
                or ((flags & ON_GPU) != 0) != p.on_gpu
            )
        ):
            who[0] = m.first_rank + i
            return False
    return True


cdef inline bint all_shares_in(Machine *m, Partition *p) noexcept nogil:
    """Whether all processes that will give a share of this round have done so (root)."""
    cdef uint32_t i
    if p.local.n_shares + 1 == m.size:
        return True
    for i in range(m.size):
        if i != m.me and not p.local.shares[i].flags and not atomic_load(&m.all[i].joined):
            return False
    return True


cdef inline bint serves_others(Machine *m) noexcept nogil:
    """Whether this process must work although none of its own operations is under way: it has
    joined, and it is the root or has a GPU that the others need.
    """
    return m != NULL and (m.me == m.root or m.gpus.collects) and atomic_load(&m.all[m.me].joined)


cdef inline int tell_root(Machine *m, Partition *p, uint32_t kind, uint32_t divisor) noexcept nogil:
    """Post to the root about a partition on a GPU. Returns 0, or -1 when out of memory."""
    cdef Post post
    memset(&post, 0, sizeof(Post))
    post.key = p.key
    post.owner = m.me
    post.round = p.round
    post.flags = kind
    post.divisor = divisor
    return send_post(m, m.root, &post)
