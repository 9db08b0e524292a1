# Collectives of a machine's GPUs, as each of its processes queues them. Only the driver calls these
# functions; see docs/internals/gpus.md.
#
# The machine's root chooses them (gpu/choice.pxd). A process that reads a LAUNCH queues exactly
# that collective, whatever has become of its tensor. Without the tensor it sends zeros and discards
# what it receives.
from libc.stdint cimport uint32_t, uint64_t

from bpsx.core.gpu.device cimport (
    ALL_GATHER, ALL_REDUCE, BETWEEN, BROADCAST_FROM, REDUCE_SCATTER, REDUCE_TO, SUM, Device,
    item_bytes,
)
from bpsx.core.gpu.copies cimport await_end, mark, own_slice, under_way
from bpsx.core.local.neighbour cimport Machine
from bpsx.core.local.posts cimport memory_at, partition_of
from bpsx.core.partition cimport (
    BROADCAST, COORDINATE_BROADCAST, COORDINATE_PUSH, COORDINATE_REDUCE, EVERYBODY, RECORDED,
    REDUCE, OnGpu, Partition, Task,
)
from bpsx.core.gpu.pinned_pool cimport SLAB
from bpsx.core.local.ring cimport GATHERS, IS_BROADCAST, IS_COPIED, MORE, STANDS_IN, Post
from bpsx.core.stage cimport advance, fail_partition, fail_core
from bpsx.core.state cimport Core
from bpsx.core.status cimport E_DEVICE, E_PROTOCOL
from bpsx.system.sync cimport atomic_load

cdef enum:
    NOBODY = 0xFFFFFFFE         # no rank of this machine: the data's owner is elsewhere, or none is


cdef inline bint means_this(Core *c, Partition *p, const Post *launch) noexcept nogil:
    """Whether the round that a LAUNCH names is under way in this process."""
    cdef int wanted
    if (
        p == NULL
        or launch.flags & STANDS_IN
        or not under_way(c, p)
        or not p.on_gpu
        or p.round != launch.round
        or p.gpu.span != launch.nbytes
    ):
        return False
    if c.machine.me == c.machine.root:
        wanted = BROADCAST if launch.flags & GATHERS else REDUCE
    else:
        wanted = COORDINATE_BROADCAST if launch.flags & GATHERS else COORDINATE_REDUCE
    return p.stage == wanted


cdef inline int end_group(Device *d, int rc) noexcept nogil:
    """Close the group that begin_group opened, even after an error in it.

    NCCL's group depth belongs to the thread, which may be the user's. Returns the first error, or
    0.
    """
    cdef int end = d.end_group(d.self)
    return rc if rc != 0 else end


cdef inline int queue_reduction(Core *c, const Post *launch, char *give, char *get) noexcept nogil:
    """Queue the collective that reduces shares. Returns 0, or an error."""
    cdef Machine *m = c.machine
    cdef Device *d = c.gpu.device
    cdef void *stream = d.streams[BETWEEN]
    cdef uint64_t item = item_bytes(launch.dtype), n = launch.nbytes // item
    cdef uint64_t each = n // m.gpus.group_size, rest = n - each * m.gpus.group_size
    cdef int rc = 0
    if m.alone and launch.flags & IS_BROADCAST:
        return d.collect(
            d.self, BROADCAST_FROM, give, get, launch.nbytes, 5, 0, launch.owner, stream
        )
    if launch.flags & IS_BROADCAST:
        return 0                                # the owner copies it down; nothing else is needed
    if m.alone:
        return d.collect(
            d.self, ALL_REDUCE, give, get, n, launch.dtype, launch.reduction, 0, stream
        )
    if launch.group_owner != EVERYBODY:
        return d.collect(
            d.self, REDUCE_TO, give, get, n, launch.dtype, launch.reduction, launch.group_owner,
            stream
        )
    rc = d.begin_group(d.self)
    if rc != 0:
        return rc
    rc = d.collect(
        d.self, REDUCE_SCATTER, give, get + (m.me % m.gpus.group_size) * each * item, each,
        launch.dtype, launch.reduction, 0, stream
    )
    if rc == 0 and rest:
        rc = d.collect(
            d.self, REDUCE_TO, give + (n - rest) * item, get + (n - rest) * item, rest,
            launch.dtype, launch.reduction, m.gpus.group_size - 1, stream
        )
    return end_group(d, rc)


cdef inline int queue_gather(Core *c, const Post *launch, char *at) noexcept nogil:
    """Queue the collective that distributes the result's parts in place. Returns 0, or an error."""
    cdef Machine *m = c.machine
    cdef Device *d = c.gpu.device
    cdef void *stream = d.streams[BETWEEN]
    cdef uint64_t item = item_bytes(launch.dtype), n = launch.nbytes // item
    cdef uint64_t each = n // m.gpus.group_size, rest = n - each * m.gpus.group_size
    cdef uint64_t own = (m.me % m.gpus.group_size) * each * item
    cdef int rc
    if launch.group_owner != EVERYBODY:
        return d.collect(
            d.self, BROADCAST_FROM, at, at, launch.nbytes, 5, 0, launch.group_owner, stream
        )
    rc = d.begin_group(d.self)
    if rc != 0:
        return rc
    rc = d.collect(d.self, ALL_GATHER, at + own, at, each * item, 5, 0, 0, stream)
    if rc == 0 and rest:
        rc = d.collect(
            d.self, BROADCAST_FROM, at + (n - rest) * item, at + (n - rest) * item, rest * item, 5,
            0, m.gpus.group_size - 1, stream
        )
    return end_group(d, rc)


cdef inline int queue_collective(Core *c, Partition *p, const Post *launch) noexcept nogil:
    """Queue a LAUNCH's collective; without a partition use `zeros` and `waste`. 0, or an error."""
    cdef Device *d = c.gpu.device
    cdef Task *task = p.tensor.current if p != NULL else NULL
    cdef char *give = d.zeros
    cdef char *get = d.waste
    cdef int rc = 0
    if launch.nbytes == 0:
        return 0
    if task != NULL and task.output != NULL:
        get = task.output + p.offset
        give = task.input + p.offset if task.input != NULL else get
    elif launch.nbytes > d.most:
        rc = d.room(d, launch.nbytes)
        give = d.zeros
        get = d.waste
    if (
        rc == 0
        and task != NULL
        and not c.gpu.watches
        and task.gpu.input_event != NULL
        and task.gpu.input_number != c.gpu.followed
    ):
        c.gpu.followed = task.gpu.input_number
        rc = d.wait(d.self, d.streams[BETWEEN], task.gpu.input_event)
    if launch.flags & GATHERS and rc == 0:
        return queue_gather(c, launch, get)
    return queue_reduction(c, launch, give, get) if rc == 0 else rc


cdef inline int divide_sum(Core *c, Partition *p, const Post *launch) noexcept nogil:
    """Divide NCCL's sum of integers to get the average.

    Queued after the collective's group, since NCCL queues a group's work when the group ends.
    Returns 0, or an error.
    """
    cdef Device *d = c.gpu.device
    cdef Task *task = p.tensor.current
    if (
        not c.machine.alone
        or launch.reduction != SUM
        or task.broadcast
        or task.divisor <= 1
        or launch.nbytes == 0
    ):
        return 0
    return d.divide(
        d.self, task.output + p.offset, launch.nbytes // item_bytes(launch.dtype), launch.dtype,
        task.divisor, d.streams[BETWEEN]
    )


cdef inline void advance_after_launch(Core *c, Partition *p, const Post *launch) noexcept nogil:
    """Move a partition on after its collective has been queued."""
    cdef Machine *m = c.machine
    cdef OnGpu *g = p.gpu
    cdef Task *task = p.tensor.current
    cdef int status
    if m.me != m.root:
        advance(c, p)                           # leave the COORDINATE_ stage
    if not launch.flags & GATHERS and not m.alone:
        g.owner = launch.group_owner
        g.data = task.output + p.offset if task.output != NULL else c.gpu.device.waste
        own_slice(m, g, g.span, item_bytes(launch.dtype))
        if launch.flags & IS_BROADCAST:
            g.begin = 0
            g.length = g.span if launch.owner == m.me else 0
            g.data = task.input + p.offset
        if m.me != m.root:
            status = map_place(c, p, launch)
            if status != 0:
                fail_core(c, status)
                return
        if m.me == m.root and (launch.owner != NOBODY or not launch.flags & IS_BROADCAST):
            p.source = g.host                   # there will be data, whichever process copies it
    # Without servers no work of the core's own follows the collective.
    if (not m.alone or p.tensor.trace.recorded) and mark(c, p, BETWEEN) != 0:
        fail_core(c, E_DEVICE)
    elif p.tensor.trace.recorded:
        await_end(c, p, BETWEEN)
    else:
        advance(c, p)


cdef inline int map_place(Core *c, Partition *p, const Post *post) noexcept nogil:
    """Make a place in the root's segment accessible to this process's copy engines.

    Returns 0; E_PROTOCOL if there can be no such place; E_DEVICE if pinning fails.
    """
    cdef Machine *m = c.machine
    cdef char *slab = memory_at(m, m.root, post.slab, post.slab_bytes)
    if (
        slab == NULL
        or post.slab % SLAB
        or post.offset < post.slab
        or post.offset - post.slab + p.gpu.span * m.gpus.n_groups > post.slab_bytes
    ):
        return E_PROTOCOL
    if not m.gpus.pinned[post.slab // SLAB]:
        if c.gpu.device.pin(c.gpu.device.self, slab, post.slab_bytes) != 0:
            return E_DEVICE
        m.gpus.pinned[post.slab // SLAB] = 1
    p.gpu.host = slab + (post.offset - post.slab)
    return 0


cdef inline int mark_group(Core *c, uint32_t n) noexcept nogil:
    """Record one completion event for all tasks that end with this group: the last one's.

    An event for each would hold the NVIDIA driver's lock while the user's thread queues the next
    layer. The last task is reaped last, so its event stays valid as long as it is queried. Returns
    0, or an error.
    """
    cdef Task *task
    cdef void *over = NULL
    cdef uint32_t i
    cdef int rc
    if not c.machine.alone:                     # more stages follow
        return 0
    for i in range(n):
        task = ends_with(c, &c.gpu.launches[i])
        if task != NULL:
            over = task.gpu.end_event
    rc = (
        c.gpu.device.record(c.gpu.device.self, over, c.gpu.device.streams[BETWEEN])
        if over != NULL
        else 0
    )
    for i in range(n if rc == 0 else 0):
        task = ends_with(c, &c.gpu.launches[i])
        if task != NULL:
            task.gpu.end_event = over
            task.gpu.end_state = RECORDED
    return rc


cdef inline Task *ends_with(Core *c, const Post *launch) noexcept nogil:
    """Return the task that ends with a LAUNCH's collective, if it is under way here.

    A traced task completes only after its event has fired, so it is not returned.
    """
    cdef Task *task = (
        partition_of(c.machine, launch.key).tensor.current
        if launch.participates
        else NULL
    )
    return task if task != NULL and task.handle != NULL and not task.tensor.trace.recorded else NULL


cdef inline void queue_group(Core *c, uint32_t n) noexcept nogil:
    """Queue the first n orders as one group, in their sequence."""
    cdef Device *d = c.gpu.device
    cdef Post *launches = c.gpu.launches
    cdef Partition *p
    cdef uint32_t i
    cdef int rc = d.begin_group(d.self) if n > 1 else 0
    cdef bint grouped = n > 1 and rc == 0
    for i in range(n):
        p = partition_of(c.machine, launches[i].key)
        launches[i].participates = means_this(c, p, &launches[i])
        if rc == 0:
            rc = queue_collective(c, p if launches[i].participates else NULL, &launches[i])
    if grouped:
        rc = end_group(d, rc)
    for i in range(n):
        if rc == 0 and launches[i].participates:
            rc = divide_sum(c, partition_of(c.machine, launches[i].key), &launches[i])
    if rc == 0:
        rc = mark_group(c, n)
    if rc != 0:
        fail_core(c, E_DEVICE)
        return
    for i in range(n):
        if launches[i].participates:
            advance_after_launch(c, partition_of(c.machine, launches[i].key), &launches[i])


# ---- posts from other processes

cdef inline int take_launch(Core *c, const Post *launch) noexcept nogil:
    """Handle a LAUNCH. Returns 0, or -1 if it is invalid."""
    cdef uint32_t n = c.gpu.n_launches
    if (
        c.gpu == NULL
        or c.gpu.launches == NULL
        or n == c.gpu.group
        or not atomic_load(&c.gpu.device.ready)
    ):
        return -1
    c.gpu.launches[n] = launch[0]
    c.gpu.n_launches += 1
    if not launch.flags & MORE:
        c.gpu.n_launches = 0
        if not c.failed:
            queue_group(c, n + 1)
    return 0


cdef inline int count_copy(Core *c, const Post *post) noexcept nogil:
    """Handle COPIED or LOADED of another process (root). Returns 0, or -1 if it is invalid."""
    cdef Partition *p = partition_of(c.machine, post.key)
    if p == NULL or p.gpu == NULL:
        return -1
    if not under_way(c, p) or not p.on_gpu or p.local.shares[post.owner].round != post.round:
        return 0                                # the task has failed meanwhile
    if post.flags & IS_COPIED:
        p.gpu.copied += 1
        if p.stage == COORDINATE_PUSH and p.gpu.copied >= p.gpu.others:
            advance(c, p)
    else:
        p.gpu.loaded += 1
        if p.stage == COORDINATE_BROADCAST and p.gpu.loaded >= p.gpu.others:
            advance(c, p)
    return 0


cdef inline int take_gpu_result(Core *c, Partition *p, const Post *post) noexcept nogil:
    """Handle the root's post that the result is on the host, or that the round has failed.

    Returns 0, or -1 if the post is invalid.
    """
    cdef int stage = p.stage, status
    if post.status < 0:
        if stage == COORDINATE_REDUCE or stage == COORDINATE_PUSH or stage == COORDINATE_BROADCAST:
            fail_partition(c, p, post.status, post.detail_a, post.detail_b)
        else:                                   # an event is awaited: fail when it fires
            p.gpu.doom.status = post.status
            p.gpu.doom.a = post.detail_a
            p.gpu.doom.b = post.detail_b
        return 0
    if stage == COORDINATE_REDUCE:
        return -1
    status = map_place(c, p, post)
    if status == E_PROTOCOL:
        return -1
    if status != 0:
        fail_core(c, status)
        return 0
    p.gpu.owner = post.group_owner
    p.gpu.answered = True
    if stage == COORDINATE_PUSH:
        advance(c, p)
    return 0
