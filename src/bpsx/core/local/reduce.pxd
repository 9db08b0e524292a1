# Reduction on the host among the processes of one machine. The processes copy their shares into
# shared memory, the root adds them, and all copy the result out. See
# docs/internals/one-machine.md.
#
# The sum is made in the share of the lowest local rank and is pushed from there. The root's own
# input is added last; without servers the same pass divides the sum. So the root copies nothing
# before the push.
#
# A process that has called join() gives no share. A root that has joined goes on working for the
# others with stand-ins: tasks without input, output and handle.
from libc.stdint cimport int64_t, uint8_t, uint32_t, uint64_t
from libc.stdlib cimport calloc, free, malloc
from libc.string cimport memcpy, memset

from bpsx.core.gpu.device cimport MEAN
from bpsx.core.local.neighbour cimport Machine
from bpsx.core.local.posts cimport (
    agree, all_shares_in, serves_others, memory_at, next_post, partition_of, post_results,
    queue_post, ring_bells, send_post, shift,
)
from bpsx.core.partition cimport (
    AWAITS_INPUT, BROADCAST, COORDINATE_BROADCAST, COORDINATE_PUSH, COORDINATE_REDUCE, END, REDUCE,
    SUBMITTED, SUMMING_Q, Partition, Task, Tensor, output_of,
)
from bpsx.core.local.ring cimport (
    HAS_BODY, IS_BROADCAST, IS_COPIED, IS_LOADED, IS_LAUNCH, IS_RESULT, IS_SHARE, ON_GPU, Post,
)
from bpsx.core.queue cimport heap_pop
from bpsx.core.stage cimport (
    advance, find_missing_process, fail_partition, fail_tensor, fail_core, start,
)
from bpsx.core.state cimport Core
from bpsx.core.status cimport DONE, E_JOINED, E_KERNELS, E_LEFT, E_MEMORY, E_MISMATCH, E_PROTOCOL
from bpsx.core.transitions cimport move_task
from bpsx.system.sync cimport atomic_load, atomic_store, lock, now_ns, unlock
from bpsx.core.gpu.choice cimport pump_launches
from bpsx.core.gpu.collectives cimport count_copy, take_gpu_result, take_launch
from bpsx.kernels.abi cimport Kernels, accumulate, wants_wide

cdef enum:
    WORK_AT_ONCE = 1 << 19      # bytes to copy or add before the network gets a turn again


# ---- processes other than the root

cdef inline void give_share(Core *c, Partition *p) noexcept nogil:
    """Copy this process's share to where the root can add it, and post it to the root."""
    cdef Machine *m = c.machine
    cdef Task *task = p.tensor.current
    cdef Post post
    memset(&post, 0, sizeof(Post))
    post.key = p.key
    post.owner = m.me
    post.offset = p.tensor.share.offset + p.local.side * p.tensor.share.span + p.offset
    post.round = p.round
    post.flags = IS_SHARE | (IS_BROADCAST if task.broadcast else 0)
    post.divisor = task.divisor
    if p.source != NULL:
        post.flags |= HAS_BODY
        memcpy(<char *>m.all[m.me].segment + post.offset, p.source, p.length)
    if send_post(m, m.root, &post) != 0:
        fail_core(c, E_MEMORY)
    else:
        advance(c, p)


cdef inline int take_result(Core *c, const Post *post) noexcept nogil:
    """Handle the root's post about a round. Returns 0, or -1 if it is invalid."""
    cdef Partition *p = partition_of(c.machine, post.key)
    if p == NULL:
        return -1
    if p.tensor.outcome.status != DONE or p.tensor.current == NULL:
        return 0                            # the task has failed meanwhile
    if p.round == post.round and p.on_gpu:
        return take_gpu_result(c, p, post)
    if p.round != post.round or p.stage != COORDINATE_BROADCAST:
        return -1
    if post.status < 0:
        fail_partition(c, p, post.status, post.detail_a, post.detail_b)
        return 0
    p.source = memory_at(c.machine, post.owner, post.offset, p.length)
    if p.source == NULL:
        return -1
    if post.owner == c.machine.me:
        # The result is in this process's share, and others may still copy it out when the next
        # round begins. So the next share goes to the other place.
        p.local.side ^= 1
    advance(c, p)
    return 0


# ---- the root

cdef inline void stand_in(Core *c, Tensor *tensor, const Post *post) noexcept nogil:
    """Begin the round of `post` without a share of this root.

    The root has joined and pushes nothing itself, but the other processes need it.
    """
    cdef Task *task = <Task *>calloc(1, sizeof(Task))
    if task == NULL:
        fail_core(c, E_MEMORY)
        return
    task.tensor = tensor
    task.divisor = post.divisor
    task.broadcast = (post.flags & IS_BROADCAST) != 0
    task.on_gpu = post.flags & ON_GPU and c.gpu != NULL and tensor.parts[0].gpu != NULL
    task.submitted_ns = now_ns()
    move_task(task, SUBMITTED)
    lock(&c.monitor)
    if c.busy.outstanding == 0:
        c.busy.since = task.submitted_ns
    c.busy.outstanding += 1
    unlock(&c.monitor)
    start(c, task)


cdef inline void consider(Core *c, Partition *p) noexcept nogil:
    """Move a partition on if its shares are complete: a share has arrived, or will not arrive."""
    cdef Machine *m = c.machine
    cdef uint32_t i
    if p.tensor.outcome.status != DONE or p.local.n_shares == 0 and p.tensor.current == NULL:
        return
    if p.tensor.current == NULL and serves_others(m):
        for i in range(m.size):
            if p.local.shares[i].flags:
                stand_in(c, p.tensor, &p.local.shares[i])
                return
    if p.stage == COORDINATE_REDUCE and all_shares_in(m, p):
        advance(c, p)


cdef inline void consider_all(Core *c) noexcept nogil:
    """Check all partitions after a process of this machine has joined."""
    cdef Tensor *tensor = c.tensors
    cdef uint32_t i
    atomic_store(&c.machine.joined_news, 0)
    while tensor != NULL:
        for i in range(tensor.n_parts):
            consider(c, &tensor.parts[i])
        tensor = tensor.next


cdef inline int accept_share(Core *c, Partition *p, const Post *post) noexcept nogil:
    """Note a share, and move the partition on after the last. Returns 0, or -1 if invalid."""
    cdef Machine *m = c.machine
    cdef Post *noted = &p.local.shares[post.owner]
    cdef uint32_t who = 0, count = noted.count
    if p.tensor.outcome.status != DONE and p.tensor.outcome.status != E_LEFT:
        # The sender's task fails as well: the scheduler reports the failure to all processes.
        return 0
    if (
        noted.flags
        or post.round != count
        or not post.flags & ON_GPU and memory_at(m, post.owner, post.offset, p.length) == NULL
    ):
        return -1
    noted[0] = post[0]
    noted.count = count + 1
    p.local.n_shares += 1
    if find_missing_process(m, &who, True):
        return post_results(m, p, E_LEFT, who, 0)
    consider(c, p)
    return 0


cdef inline int take_share(Core *c, const Post *post) noexcept nogil:
    cdef Partition *p = partition_of(c.machine, post.key)
    if p == NULL:
        return queue_post(&c.machine.early, post)
    return accept_share(c, p, post)


cdef inline void take_early(Core *c) noexcept nogil:
    """Handle shares that arrived before this process knew their tensor."""
    cdef Machine *m = c.machine
    cdef uint32_t i, n = m.early.size
    cdef Post post
    for i in range(n):
        post = m.early.items[i]
        if take_share(c, &post) != 0:
            fail_core(c, E_PROTOCOL)
    shift(&m.early, n)


cdef inline char *share_of(Machine *m, Partition *p, uint32_t i) noexcept nogil:
    return memory_at(m, i, p.local.shares[i].offset, p.length)


cdef inline uint32_t gather_parts(Machine *m, Partition *p) noexcept nogil:
    """Collect the addresses to add in `m.parts`: the shares by local rank, then the root's own.

    Returns their number.
    """
    cdef uint32_t i, n = 0
    for i in range(m.size):
        if p.local.shares[i].flags:
            m.parts[n] = share_of(m, p, i)
            n += 1
    if p.source != NULL:
        m.parts[n] = p.source
        n += 1
    return n


cdef inline int64_t divisor_here(Machine *m, Partition *p, Kernels *k) noexcept nogil:
    """Divisor for this machine's sum; `p.divisor` keeps the part for the servers."""
    if m.alone:
        return p.divisor
    if k.wide_itemsize == k.itemsize or p.divisor % m.size:
        return 1
    # Average of half types: the machine's sum could overflow where the average does not, so its
    # mean is sent.
    p.divisor //= m.size
    return m.size


cdef inline int add_parts(
    Machine *m, Kernels *k, char *target, uint32_t parts, int64_t n, int64_t divisor
) noexcept nogil:
    """Add the first `parts` of `m.parts` into `target`, which is the first of them or none.

    Returns 0, or a status.
    """
    cdef char *wide = NULL
    cdef uint32_t i
    if wants_wide(k, parts):
        wide = <char *>malloc(n * k.wide_itemsize)
        if wide == NULL:
            return E_MEMORY
    for i in range(1, parts):
        accumulate(k, target, wide, m.parts[i], i, parts, n, divisor)
    free(wide)
    return 0


cdef inline int add_up(Core *c, Partition *p) noexcept nogil:
    """Make the machine's sum at `p.target`. Returns 0, or a status."""
    cdef Machine *m = c.machine
    cdef Kernels *k = &m.kernels[p.tensor.dtype]
    cdef int64_t n, divisor
    cdef uint32_t parts = gather_parts(m, p)
    if k.add == NULL and not m.load(m.owner, p.tensor.dtype):
        return E_KERNELS
    n = p.length // k.itemsize
    divisor = divisor_here(m, p, k)
    if parts == 1:
        # only the root's own input: the sum may as well be made in its output
        if m.parts[0] != p.target:
            memcpy(p.target, m.parts[0], p.length)
        if divisor > 1:
            k.divide(p.target, n, divisor)
        return 0
    return add_parts(m, k, p.target, parts, n, divisor)


cdef inline int choose_broadcast(Core *c, Partition *p) noexcept nogil:
    """Choose the data that a broadcast sends. Returns 0, or a status."""
    cdef Machine *m = c.machine
    # local rank of the broadcast's root; wraps if it is on another machine
    cdef uint32_t owner = p.tensor.current.divisor - m.first_rank
    if owner >= m.size:
        return 0
    if owner != m.me:
        if not p.local.shares[owner].flags:
            return E_JOINED
        p.source = share_of(m, p, owner)
        p.local.result_owner = owner
        p.local.result_offset = p.local.shares[owner].offset
        p.target = p.source
    # A stand-in has no handle. Its input cannot tell: that of an empty tensor may be NULL, too.
    elif p.tensor.current.handle == NULL:
        return E_JOINED
    elif m.alone and p.length and p.source != p.target:
        memcpy(p.target, p.source, p.length)
    return 0


cdef inline void choose_place(Machine *m, Partition *p) noexcept nogil:
    """Choose the place of the sum and the result: the first share, or without one the root's own
    output.
    """
    cdef uint32_t i
    for i in range(m.size):
        if p.local.shares[i].flags:
            p.local.result_owner = i
            p.local.result_offset = p.local.shares[i].offset
            p.target = share_of(m, p, i)
            return


cdef inline void add_groups(Core *c, Partition *p) noexcept nogil:
    """PCIE_REDUCE (root): add the sums of the PCIe switches, which lie one behind the other, into
    the first.
    """
    cdef Machine *m = c.machine
    cdef Kernels *k = &m.kernels[p.tensor.dtype]
    cdef int64_t divisor = 1
    cdef uint32_t i
    cdef int status = 0
    if k.add == NULL and not m.load(m.owner, p.tensor.dtype):
        fail_core(c, E_KERNELS)
        return
    if p.gpu.reduction == MEAN:
        divisor = m.gpus.n_groups
    for i in range(m.gpus.n_groups):
        m.parts[i] = p.gpu.host + i * p.length
    if not p.tensor.current.broadcast and p.length:
        status = add_parts(m, k, p.gpu.host, m.gpus.n_groups, p.length // k.itemsize, divisor)
    if status:
        fail_core(c, status)
    else:
        advance(c, p)


cdef inline void make_sum(Core *c, Partition *p) noexcept nogil:
    """REDUCE (root): make the sum, or choose a broadcast's data, once all shares are there."""
    cdef Machine *m = c.machine
    cdef uint32_t one = m.first_rank + m.me, other = 0
    cdef int status = 0
    p.local.disagreement.status = 0
    choose_place(m, p)
    if not agree(m, p, c.settings.shrinks, &other):
        status = E_MISMATCH
    elif p.tensor.current.broadcast:
        one = other = p.tensor.current.divisor
        status = choose_broadcast(c, p)
    else:
        if p.length:
            status = add_up(c, p)
        p.source = p.target
    if (status == E_MISMATCH or status == E_JOINED) and not m.alone:
        # The other machines wait for this push: it is sent without a body and reports that the
        # round has failed.
        p.local.disagreement.status = status
        p.local.disagreement.a = one
        p.local.disagreement.b = other
        p.source = NULL
        status = 0
    if status == E_MEMORY or status == E_KERNELS:
        fail_core(c, status)                  # the servers will wait in vain for a push
    elif status:
        fail_partition(c, p, status, one, other)
    else:
        advance(c, p)


cdef inline void spread(Core *c, Partition *p) noexcept nogil:
    """BROADCAST: post the result to the other processes (root), and copy it to the output."""
    cdef char *result = p.target if c.machine.me == c.machine.root else p.source
    cdef char *output = output_of(p)
    if c.machine.me == c.machine.root and post_results(c.machine, p, 0, 0, 0) != 0:
        fail_core(c, E_MEMORY)
        return
    if p.length and output != NULL and result != output:
        memcpy(output, result, p.length)
    advance(c, p)


# ---- all processes

cdef inline bint still_waits(Machine *m, Tensor *tensor) noexcept nogil:
    """Whether a partition of the tensor's current task needs a process that has left."""
    cdef uint32_t i
    cdef uint8_t stage
    if tensor.current.state == AWAITS_INPUT:
        return True                         # it needs all processes once it begins
    if tensor.matrix != NULL and tensor.matrix.state < SUMMING_Q:
        return True                         # its second factor needs them
    for i in range(tensor.n_parts):
        stage = tensor.parts[i].stage
        if (
            stage == COORDINATE_REDUCE
            or m.me != m.root and (
                stage == COORDINATE_BROADCAST or stage == COORDINATE_PUSH or stage == REDUCE
            )
        ):
            return True
    return False


cdef inline void notice_deserters(Core *c) noexcept nogil:
    """Fail rounds that can never close because a process of this machine has left."""
    cdef Machine *m = c.machine
    cdef Tensor *tensor = c.tensors
    cdef uint32_t i, who = 0
    m.somebody_gone = True
    if not find_missing_process(m, &who, True):
        return
    while tensor != NULL:
        if tensor.outcome.status == DONE and (tensor.current == NULL or still_waits(m, tensor)):
            for i in range(tensor.n_parts):
                if (
                    tensor.parts[i].local.n_shares
                    and post_results(m, &tensor.parts[i], E_LEFT, who, 0) != 0
                ):
                    fail_core(c, E_MEMORY)
            if tensor.current != NULL:
                tensor.outcome.a = tensor.current.error.a = who
                fail_tensor(c, tensor, E_LEFT)
        tensor = tensor.next


cdef inline bint take_departures(Machine *m) noexcept nogil:
    cdef uint32_t i
    for i in range(m.size):
        if atomic_load(&m.all[i].gone) and not m.all[i].noticed:
            return True
    return False


cdef inline void work(Core *c, Partition *p) noexcept nogil:
    if p.on_gpu:
        add_groups(c, p)
    elif p.stage == BROADCAST:
        spread(c, p)
    elif c.machine.me == c.machine.root:
        make_sum(c, p)
    else:
        give_share(c, p)


cdef inline int take_posts(Core *c) noexcept nogil:
    cdef Post post
    cdef uint32_t sender = 0
    cdef int n = 0, rc
    while next_post(c.machine, &post, &sender):
        n += 1
        if post.flags & IS_LAUNCH:
            rc = (
                take_launch(c, &post)
                if c.machine.me != c.machine.root and sender == c.machine.root
                else -1
            )
        elif post.flags & (IS_COPIED | IS_LOADED):
            rc = (
                count_copy(c, &post)
                if c.machine.me == c.machine.root and post.owner == sender
                else -1
            )
        elif post.flags & IS_RESULT:
            rc = take_result(c, &post) if c.machine.me != c.machine.root else -1
        else:
            rc = (
                take_share(c, &post)
                if c.machine.me == c.machine.root and post.owner == sender
                else -1
            )
        if rc != 0:
            c.counters.malformed += 1
            fail_core(c, E_PROTOCOL)
    return n


cdef inline int pump_machine(Core *c) noexcept nogil:
    """Handle posts, copy and add what is due, and wake other processes.

    Returns the number of posts and partitions handled.
    """
    cdef Machine *m = c.machine
    cdef Partition *p
    cdef uint64_t done = 0
    cdef uint32_t i
    cdef int n
    # Checked before the posts are read: what a process posted before it left counts.
    cdef bint gone = take_departures(m)
    n = take_posts(c)
    while m.work.size and done < WORK_AT_ONCE:
        p = heap_pop(&m.work)
        n += 1
        if p.stage != END and not c.failed:
            done += p.length
            work(c, p)
    if c.gpu != NULL and m.me == m.root:
        n += pump_launches(c)
    if atomic_load(&m.joined_news):
        consider_all(c)
        n += 1
    if gone:
        for i in range(m.size):
            m.all[i].noticed = m.all[i].noticed or atomic_load(&m.all[i].gone)
        notice_deserters(c)
    ring_bells(m)
    return n
