# On a machine's root: which collectives its GPUs queue next. Only the driver calls these functions;
# see docs/internals/gpus.md.
#
# NCCL needs the same order of collectives everywhere, or GPUs wait for each other for ever. The
# root decides it and sends each LAUNCH to all processes, in the same sequence.
from libc.stdint cimport uint32_t, uint64_t
from libc.string cimport memset

from bpsx.core.gpu.device cimport MEAN, SUM
from bpsx.core.gpu.collectives cimport NOBODY, queue_group
from bpsx.core.gpu.copies cimport find_place, under_way
from bpsx.core.local.neighbour cimport PART_BITS, Machine
from bpsx.core.local.posts cimport agree, send_post
from bpsx.core.partition cimport BROADCAST, EVERYBODY, PUSH, OnGpu, Partition, Task
from bpsx.core.local.ring cimport GATHERS, IS_BROADCAST, IS_LAUNCH, MORE, ON_GPU, STANDS_IN, Post
from bpsx.core.queue cimport heap_pop, heap_push
from bpsx.core.stage cimport enter, fail_partition, fail_core
from bpsx.core.state cimport Core
from bpsx.core.status cimport E_JOINED, E_MEMORY, E_MISMATCH
from bpsx.system.sync cimport atomic_load

cdef enum:
    SMALL_SLICE = 1 << 16       # bytes: smaller slices are not worth a copy each


cdef inline bint present(Machine *m, Partition *p, uint32_t i) noexcept nogil:
    """Whether a process contributes a share in this round."""
    if i == m.me:
        return p.tensor.current.handle != NULL
    return p.local.shares[i].flags != 0


cdef inline uint32_t first_owner(Machine *m, Partition *p) noexcept nogil:
    """A rank within the groups that contributes a share in every group; NOBODY: there is none.

    The root's rank is preferred.
    """
    cdef uint32_t candidate, i, k
    cdef bint there
    for k in range(m.gpus.group_size):
        candidate = (m.root - k) % m.gpus.group_size
        there = True
        for i in range(m.gpus.n_groups):
            there = there and present(m, p, i * m.gpus.group_size + candidate)
        if there:
            return candidate
    return NOBODY


cdef inline uint32_t choose_owner(Machine *m, Partition *p) noexcept nogil:
    """Choose the rank that copies the partition: see OnGpu.owner."""
    cdef uint32_t i
    for i in range(m.size):
        if not present(m, p, i):                # it has joined
            return first_owner(m, p)
    if p.packed != NULL:
        return m.root % m.gpus.group_size
    if m.gpus.n_roots:
        return m.gpus.roots[((p.key >> PART_BITS) + p.key) % m.gpus.n_roots] % m.gpus.group_size
    if p.gpu.span < <uint64_t>SMALL_SLICE * m.gpus.group_size:
        return m.root % m.gpus.group_size
    return EVERYBODY


cdef inline uint32_t reduction_of(Machine *m, Partition *p) noexcept nogil:
    """Choose how a group's GPUs add; `p.divisor` keeps what remains to divide by."""
    cdef bint halves = p.tensor.dtype == 1 or p.tensor.dtype == 2
    cdef bint floats = halves or p.tensor.dtype == 3 or p.tensor.dtype == 4
    if m.alone:
        return MEAN if floats and p.divisor == m.size else SUM
    if halves and p.divisor % m.size == 0:
        # The machine's sum could overflow where the average does not, so its mean is sent.
        p.divisor //= m.size
        return MEAN
    return SUM


cdef inline void fill_launch(Core *c, Partition *p, bint gathers, Post *launch) noexcept nogil:
    """Fill in the LAUNCH for a partition."""
    cdef Machine *m = c.machine
    cdef Task *task = p.tensor.current
    memset(launch, 0, sizeof(Post))
    launch.key = p.key
    launch.flags = IS_LAUNCH | ON_GPU | (GATHERS if gathers else 0) | (
        IS_BROADCAST if task.broadcast else 0
    )
    launch.nbytes = p.gpu.span
    launch.dtype = p.tensor.dtype
    launch.round = p.round
    launch.group_owner = p.gpu.owner
    launch.owner = NOBODY
    if task.broadcast and task.divisor - m.first_rank < m.size:
        launch.owner = task.divisor - m.first_rank
    launch.reduction = p.gpu.reduction
    if p.gpu.place != NULL:
        launch.offset = p.gpu.place.offset
        launch.slab = p.gpu.place.slab
        launch.slab_bytes = p.gpu.place.slab_bytes


cdef inline void post_launch(
    Machine *m, Partition *p, const Post *launch, bint more, int *failed
) noexcept nogil:
    cdef Post post
    cdef uint32_t i
    for i in range(m.size):
        if i == m.me:
            continue
        post = launch[0]
        post.round = p.local.shares[i].round
        if not p.local.shares[i].participates:
            post.flags |= STANDS_IN
        if more:
            post.flags |= MORE
        failed[0] |= send_post(m, i, &post)


cdef inline void refuse(Core *c, Partition *p, int status, uint32_t a, uint32_t b) noexcept nogil:
    """End a round that cannot happen; a push without a body reports it to other machines."""
    if c.machine.alone:
        fail_partition(c, p, status, a, b)
        return
    p.local.disagreement.status = status
    p.local.disagreement.a = a
    p.local.disagreement.b = b
    p.source = NULL
    if p.packed != NULL:
        p.packed.size = 0
    while p.tensor.stages[p.stage_index] != PUSH:
        p.stage_index += 1
    enter(c, p)


cdef inline void check_shares(Core *c, Partition *p) noexcept nogil:
    """Compare the shares' operations, now that all shares have been posted."""
    cdef Machine *m = c.machine
    cdef Task *task = p.tensor.current
    cdef uint32_t other = 0
    p.local.disagreement.status = 0
    if not agree(m, p, c.settings.shrinks, &other):
        refuse(c, p, E_MISMATCH, m.first_rank + m.me, other)
    elif (
        task.broadcast
        and task.divisor - m.first_rank < m.size
        and not present(m, p, task.divisor - m.first_rank)
    ):
        refuse(c, p, E_JOINED, task.divisor, task.divisor)
    else:
        p.order = c.queued.next_order
        c.queued.next_order += 1
        if heap_push(&c.gpu.reductions, p) != 0:
            fail_core(c, E_MEMORY)


cdef inline bint plan_copies(Core *c, Partition *p) noexcept nogil:
    """Decide which process adds and copies what. False if none can, which ends the round."""
    cdef Machine *m = c.machine
    cdef Task *task = p.tensor.current
    # rank of a broadcast's root; wraps if it is on another machine
    cdef uint32_t i, sender = task.divisor - m.first_rank
    p.gpu.owner = choose_owner(m, p)
    if p.gpu.owner == NOBODY:
        refuse(c, p, E_JOINED, m.first_rank, m.first_rank)
        return False
    if m.gpus.n_groups > 1:
        # the CPU adds the groups' sums, so it compresses, too
        p.gpu.coder = NULL
    p.gpu.reduction = SUM if task.broadcast else reduction_of(m, p)
    p.gpu.copied = 0
    if task.broadcast and sender >= m.size:
        p.source = NULL
    p.gpu.others = 0
    for i in range(m.size):
        p.local.shares[i].participates = p.local.shares[i].flags != 0
        p.gpu.others += p.local.shares[i].participates
        # No more posts about this round will come, but those of the next one may.
        if m.alone:
            p.local.shares[i].flags = 0
    if m.alone:
        p.local.n_shares = 0
        return True
    return find_place(c, p)


cdef inline Partition *next_due(Core *c) noexcept nogil:
    cdef Partition *p
    while c.gpu.gathers.size or c.gpu.reductions.size:
        p = heap_pop(&c.gpu.gathers if c.gpu.gathers.size else &c.gpu.reductions)
        if under_way(c, p) and (p.stage == BROADCAST or plan_copies(c, p)):
            return p
    return NULL


cdef inline int launch_next_group(Core *c) noexcept nogil:
    """Order and queue the next group of due collectives, results first.

    Returns the number of partitions.
    """
    cdef Machine *m = c.machine
    cdef Partition *p
    cdef Partition *following
    cdef uint32_t n = 0
    cdef int failed = 0
    p = next_due(c)
    while p != NULL:
        fill_launch(c, p, p.stage == BROADCAST, &c.gpu.launches[n])
        n += 1
        following = next_due(c) if n < c.gpu.group else NULL
        post_launch(m, p, &c.gpu.launches[n - 1], following != NULL, &failed)
        p = following
    if failed:
        fail_core(c, E_MEMORY)
    elif n:
        queue_group(c, n)
    return n


cdef inline int pump_launches(Core *c) noexcept nogil:
    """Order due collectives (root). Returns the number of partitions that advanced."""
    cdef Partition *p
    cdef int n = 0
    while c.gpu.unchecked.size:
        p = heap_pop(&c.gpu.unchecked)
        n += 1
        if under_way(c, p):
            check_shares(c, p)
    if atomic_load(&c.gpu.device.ready):
        while (c.gpu.gathers.size or c.gpu.reductions.size) and not c.failed:
            n += launch_next_group(c)
    return n
