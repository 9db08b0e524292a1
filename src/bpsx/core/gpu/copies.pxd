# A partition's stages on a GPU: queues their work and polls for its completion. Only the driver
# calls these functions; see docs/internals/gpus.md.
#
# Nothing here blocks on the GPU. Work queued on one stream completes in order, so only the oldest
# event of each stream is queried.
from libc.stdint cimport int32_t, int64_t, uint8_t, uint32_t, uint64_t
from libc.stdlib cimport calloc, free
from libc.string cimport memcpy

from bpsx.core.gpu.device cimport BETWEEN, DOWN, N_STREAMS, UP, Device, item_bytes
from bpsx.core.local.neighbour cimport Machine
from bpsx.core.local.posts cimport post_results, tell_root
from bpsx.core.codec.low_rank cimport take_share
from bpsx.core.codec.packed cimport SLACK
from bpsx.core.codec.state cimport adopt_counter, correction, head_of, most_bytes
from bpsx.core.partition cimport (
    COMPRESS, COPYD2H, COPYH2D, DECOMPRESS, END, EVERYBODY, IDLE, RESTORING, Matrix, OnGpu,
    Partition, Task,
)
from bpsx.core.gpu.pinned_pool cimport free_places, take_place
from bpsx.core.local.ring cimport IS_COPIED, IS_LOADED, Post
from bpsx.core.codec.pool cimport pool_free, pool_give, pool_take
from bpsx.core.queue cimport heap_pop
from bpsx.core.stage cimport (
    advance, begin, fail_partition, fail_core, take_hand, watch_no_more,
)
from bpsx.core.state cimport USER_STREAMS, Core, Gpu
from bpsx.core.status cimport E_DEVICE, E_MEMORY, E_PROTOCOL

cdef enum:
    WORDS = 16                  # bytes of `OnGpu.words`


cdef inline bint awaited(Core *c) noexcept nogil:
    """Whether an event of the GPU is awaited."""
    cdef int i
    for i in range(N_STREAMS):
        if c.gpu.awaited[i].first != NULL:
            return True
    for i in range(USER_STREAMS):
        if c.gpu.unseen[i].first != NULL:
            return True
    return False


cdef inline bint under_way(Core *c, Partition *p) noexcept nogil:
    return p.stage != END and not c.failed


cdef inline int mark(Core *c, Partition *p, int which) noexcept nogil:
    """Record the partition's event on a stream, after the work that it has queued there.

    Returns 0, or an error.
    """
    return c.gpu.device.record(c.gpu.device.self, p.gpu.queued[which], c.gpu.device.streams[which])


cdef inline void await_end(Core *c, Partition *p, int which) noexcept nogil:
    """Have `arrived` called once the partition's event on that stream has fired."""
    p.gpu.next = NULL
    if c.gpu.awaited[which].first == NULL:
        c.gpu.awaited[which].first = p
    else:
        c.gpu.awaited[which].last.gpu.next = p
    c.gpu.awaited[which].last = p


cdef inline void land(Partition *p) noexcept nogil:
    """Continue with the partition's copy in host memory."""
    p.target = p.gpu.host
    if p.source != NULL:
        p.source = p.gpu.host


cdef inline void own_slice(Machine *m, OnGpu *g, uint64_t nbytes, uint64_t item) noexcept nogil:
    """Set the bytes of a partition that this process's GPU reduces and copies, by `g.owner`."""
    cdef uint32_t me = m.me % m.gpus.group_size
    if g.owner == EVERYBODY:
        g.length = nbytes // item // m.gpus.group_size * item
        g.begin = me * g.length
        if me == m.gpus.group_size - 1:
            g.length = nbytes - g.begin
    else:
        g.begin = 0
        g.length = nbytes if g.owner == me else 0


cdef inline uint64_t words_at(Partition *p) noexcept nogil:
    """Offset within the pinned place of the copies of `OnGpu.words`."""
    return (most_bytes(p.packed) + SLACK + 63) & ~(<uint64_t>63)


cdef inline bint find_place(Core *c, Partition *p) noexcept nogil:
    """Take pinned memory for this round. Returns False, and fails the core, if there is none."""
    cdef OnGpu *g = p.gpu
    cdef uint64_t nbytes = p.length * (c.machine.gpus.n_groups if c.machine != NULL else 1)
    if g.coder != NULL:
        nbytes = max(nbytes, words_at(p) + WORDS)
    g.place = take_place(&c.gpu.places, c.endpoint, c.gpu.device, c.machine, nbytes)
    if g.place == NULL:
        fail_core(c, E_DEVICE if c.gpu.device.broken(c.gpu.device.self) else E_MEMORY)
        return False
    g.host = g.place.host
    return True


cdef inline void arrived(Core *c, Partition *p) noexcept nogil:
    """Continue after the GPU work of the partition's stage has completed."""
    cdef int stage = p.stage, rc = 0
    cdef bint posts = c.machine != NULL and c.machine.me != c.machine.root
    if p.gpu.doom.status:
        fail_partition(c, p, p.gpu.doom.status, p.gpu.doom.a, p.gpu.doom.b)
        return
    if stage == COMPRESS:
        p.packed.size = head_of(p.packed) + (<uint64_t *>(p.gpu.host + words_at(p)))[0]
    elif stage == DECOMPRESS and (<int32_t *>(p.gpu.host + words_at(p) + 8))[0] != 0:
        fail_partition(c, p, E_PROTOCOL, c.settings.rank, 0)
        return
    if stage == COPYD2H:
        land(p)
        if posts:
            rc = tell_root(c.machine, p, IS_COPIED, 0)
    elif stage == COPYH2D and posts:
        rc = tell_root(c.machine, p, IS_LOADED, 0)
    if rc != 0:
        fail_core(c, E_MEMORY)
    else:
        advance(c, p)


cdef inline int await_input(Core *c, Partition *p) noexcept nogil:
    """Make the device-to-host stream wait until the data to copy or encode is ready.

    Returns 0, or an error. The user's own work has completed. With several processes the stream
    waits for the group's sum. With one process it waits for the tensor's previous round, which ends
    when its copy up is queued: a script that did not wait for that round asks for a sum of its
    result.
    """
    cdef Device *d = c.gpu.device
    cdef int which = UP if c.machine == NULL else BETWEEN
    return d.wait(d.self, d.streams[DOWN], p.gpu.queued[which])


cdef inline void copy_down(Core *c, Partition *p) noexcept nogil:
    """COPYD2H: copy this process's part into the pinned place."""
    cdef Device *d = c.gpu.device
    cdef OnGpu *g = p.gpu
    cdef char *to
    cdef int rc
    if c.machine == NULL:
        if g.place == NULL and not find_place(c, p):
            return
        g.begin = 0
        g.length = p.length if p.source != NULL else 0      # a broadcast's receivers push nothing
        g.data = p.source
    rc = await_input(c, p)
    if rc == 0 and g.length and g.coder != NULL:
        rc = copy_coded_down(c, p)
    elif rc == 0 and g.length:
        to = g.host + g.begin
        if c.machine != NULL and not p.tensor.current.broadcast:
            to += c.machine.me // c.machine.gpus.group_size * p.length
        rc = d.copy(d.self, to, g.data + g.begin, g.length, d.streams[DOWN])
    if rc == 0 and g.length:
        rc = mark(c, p, DOWN)
    # A root that has joined receives into `waste`: it must not be overwritten before this copy.
    if rc == 0 and g.length and g.data == d.waste:
        rc = d.wait(d.self, d.streams[BETWEEN], g.queued[DOWN])
    if rc != 0:
        fail_core(c, E_DEVICE)
    elif g.length:
        await_end(c, p, DOWN)
    else:
        arrived(c, p)


cdef inline int copy_coded_down(Core *c, Partition *p) noexcept nogil:
    """Copy the encoded bytes down, behind the learning rate if that is sent.

    Returns 0, or an error.
    """
    cdef Device *d = c.gpu.device
    cdef OnGpu *g = p.gpu
    cdef uint64_t head = head_of(p.packed)
    if p.packed.size > most_bytes(p.packed):
        return -1
    if head:
        memcpy(g.host, &p.tensor.current.rate, sizeof(double))
    return d.copy(d.self, g.host + head, g.wire, p.packed.size - head, d.streams[DOWN])


cdef inline void code(Core *c, Partition *p) noexcept nogil:
    """COMPRESS and DECOMPRESS on the GPU: queue what precedes the kernels, and let the coder
    thread queue the kernels.
    """
    cdef Device *d = c.gpu.device
    cdef OnGpu *g = p.gpu
    cdef int rc = 0
    if not p.encodes:
        adopt_counter(p.packed, <uint8_t *>g.host, p.packed.size)
        rc = d.fill(d.self, g.words + 8, 0, 4, d.streams[UP])
    else:
        if c.machine == NULL:
            if not find_place(c, p):
                return
            g.data = p.source
        rc = await_input(c, p)
        p.packed.counter += 1
        g.counter = p.packed.counter
        g.factor = correction(p.packed, p.tensor.current.rate)
    if rc != 0:
        fail_core(c, E_DEVICE)
    elif pool_give(c.gpu.coders, p) != 0:
        fail_core(c, E_MEMORY)


cdef inline void coded(Core *c, Partition *p) noexcept nogil:
    """Copy the result of the queued kernels to the host: the number of encoded bytes, or whether
    decoding found invalid bytes.
    """
    cdef Device *d = c.gpu.device
    cdef OnGpu *g = p.gpu
    cdef int which = DOWN if p.encodes else UP
    cdef uint64_t at = 0 if p.encodes else 8
    cdef int rc
    if p.encodes and g.size >= 0 and not p.tensor.trace.recorded:
        p.packed.size = head_of(p.packed) + g.size
        advance(c, p)
        return
    if p.encodes and g.size >= 0:
        (<int64_t *>(g.host + words_at(p)))[0] = g.size
        rc = 0
    else:
        rc = d.copy(d.self, g.host + words_at(p) + at, g.words + at, 8 - at // 2, d.streams[which])
    if rc == 0:
        rc = mark(c, p, which)
    if rc != 0:
        fail_core(c, E_DEVICE)
    else:
        await_end(c, p, which)


cdef inline void step_queued(Core *c, Partition *hand) noexcept nogil:
    """Wait for a factor whose computation was queued on the GPU.

    A result needs no wait here, as the task's event marks its end.
    """
    cdef Matrix *m = hand.tensor.matrix
    if m.state == IDLE or c.failed:
        return                              # its task has failed, or is about to
    if m.state == RESTORING and not hand.tensor.trace.recorded:
        take_hand(c, hand.tensor, 0)
    elif mark(c, hand, DOWN) != 0:
        fail_core(c, E_DEVICE)
    else:
        await_end(c, hand, DOWN)


cdef inline void step_over(Core *c, Partition *hand) noexcept nogil:
    """The GPU has done a matrix's work."""
    take_share(hand.tensor.matrix)
    take_hand(c, hand.tensor, 0)


cdef inline int pump_coders(Core *c) noexcept nogil:
    """Take partitions back from the thread that queues kernels. Returns their number."""
    cdef Partition *p = pool_take(c.gpu.coders)
    cdef Partition *following
    cdef int n = 0
    while p != NULL:
        following = p.coding.next
        if p.tensor.matrix != NULL:
            step_queued(c, p)
        elif under_way(c, p):
            coded(c, p)
        p = following
        n += 1
    return n


cdef inline void copy_up(Core *c, Partition *p) noexcept nogil:
    """COPYH2D: copy this process's part from the pinned place into the output."""
    cdef Device *d = c.gpu.device
    cdef OnGpu *g = p.gpu
    cdef Task *task = p.tensor.current
    cdef int rc = 0
    if c.machine == NULL:
        g.length = p.length
    else:
        own_slice(c.machine, g, p.length, item_bytes(p.tensor.dtype))
        if c.machine.me == c.machine.root:
            g.loaded = 0
            p.local.result_owner = c.machine.me
            p.local.result_offset = g.place.offset
            rc = -post_results(c.machine, p, 0, 0, 0)
    if rc == 0 and g.coder != NULL and g.length:
        rc = d.copy(d.self, g.wire, g.host, p.packed.size, d.streams[UP])
    elif rc == 0 and g.length and task.output != NULL:
        rc = d.copy(
            d.self, task.output + p.offset + g.begin, g.host + g.begin, g.length, d.streams[UP]
        )
    if rc == 0 and c.machine == NULL:
        rc = d.record(d.self, g.place.up, d.streams[UP])
        g.place.used = True
    if rc == 0:
        rc = mark(c, p, UP)
    if rc != 0:
        fail_core(c, E_DEVICE)
    elif p.tensor.trace.recorded or c.machine != NULL and g.length:
        await_end(c, p, UP)
    else:
        arrived(c, p)


cdef inline int start_ready_tasks(Core *c) noexcept nogil:
    """Begin tasks whose input the GPU has produced.

    Queries only the oldest event of each stream, once. Returns the number of tasks.
    """
    cdef Task *task
    cdef Task *following
    cdef Task *waits                        # the last task whose input is not ready
    cdef uint64_t come = 0                  # the last input that was ready
    cdef int i, rc, n = 0
    for i in range(USER_STREAMS):
        task = c.gpu.unseen[i].first
        waits = NULL
        while task != NULL and not c.failed:
            following = task.gpu.next_unseen
            rc = 0
            if task.gpu.input_number == come:
                rc = 1
            elif waits == NULL or waits.gpu.stream != task.gpu.stream:
                rc = c.gpu.device.query(c.gpu.device.self, task.gpu.input_event)
            if rc == 0:
                waits = task
            elif rc < 0:
                fail_core(c, E_DEVICE)
            else:
                n += 1
                come = task.gpu.input_number
                watch_no_more(c, task)
                begin(c, task)
                # `begin` may have started other tasks
                following = c.gpu.unseen[i].first if waits == NULL else waits.gpu.next_unseen
            task = following
    return n


cdef inline int pump_gpu(Core *c) noexcept nogil:
    """Queue due work, most urgent first, and handle events that have fired.

    Returns the number of partitions.
    """
    cdef Partition *p
    cdef int i, rc, n = start_ready_tasks(c)
    if c.gpu.coders != NULL:
        n += pump_coders(c)
    while c.gpu.work.size:
        p = heap_pop(&c.gpu.work)
        n += 1
        if not under_way(c, p):
            continue
        if p.stage == COPYD2H:
            copy_down(c, p)
        elif p.stage == COPYH2D:
            copy_up(c, p)
        else:
            code(c, p)
    for i in range(N_STREAMS):
        while c.gpu.awaited[i].first != NULL and not c.failed:
            p = c.gpu.awaited[i].first
            rc = c.gpu.device.query(c.gpu.device.self, p.gpu.queued[i])
            if rc == 0:
                break
            n += 1
            c.gpu.awaited[i].first = p.gpu.next
            if rc < 0:
                fail_core(c, E_DEVICE)
            elif p.tensor.matrix != NULL:
                step_over(c, p)
            elif under_way(c, p):
                arrived(c, p)
    return n


cdef inline bint prepare_gpu(Core *c, Device *d, uint32_t group) noexcept nogil:
    """Prepare the core for a GPU, before the first task on it. False when out of memory."""
    cdef Gpu *gpu = <Gpu *>calloc(1, sizeof(Gpu))
    if gpu == NULL:
        return False
    gpu.device = d
    gpu.group = group
    gpu.watches = c.machine == NULL or not c.machine.alone
    gpu.entered = -1
    gpu.launches = <Post *>calloc(group, sizeof(Post))
    if gpu.launches == NULL:
        free(gpu)
        return False
    c.gpu = gpu                     # last: the driver may be at work, and looks at it
    return True


cdef inline void forget_gpu(Core *c) noexcept nogil:
    """Free the GPU state when no thread drives any more.

    The GPU's context may be gone, and its events with it.
    """
    if c.gpu == NULL:
        return
    free_places(&c.gpu.places, NULL)
    free(c.gpu.work.items)
    free(c.gpu.unchecked.items)
    free(c.gpu.gathers.items)
    free(c.gpu.reductions.items)
    free(c.gpu.launches)
    pool_free(c.gpu.coders)
    free(c.gpu)
    c.gpu = NULL
