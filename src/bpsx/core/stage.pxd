# State machine of partitions and of the tasks that they belong to: `enter` begins a stage, and
# `enter_on_gpu` does so for stages of GPUs and of the machine's other processes.
#
# Only the driver calls these functions, except `take_callbacks` and `run_callbacks`, which
# the thread that ends a task calls. The stages' codes are in partition.pxd.
from libc.stdint cimport int64_t, uint8_t, uint32_t, uint64_t
from libc.stdlib cimport free

from bpsx.core.gpu.device cimport mark_end
from bpsx.core.local.neighbour cimport Machine
from bpsx.core.local.posts cimport all_shares_in, know_tensor, post_results, tell_root
from bpsx.core.codec.low_rank cimport is_on_factors, pieces_of
from bpsx.core.codec.state cimport server_state_bytes
from bpsx.core.partition cimport (
    AWAITS_INPUT, BROADCAST, COMPRESS, COORDINATE_BROADCAST, COORDINATE_PUSH, COORDINATE_REDUCE,
    COPY, COPYD2H, COPYH2D, DECOMPRESS, END, ENDED, IDLE, ORTHOGONALISING, PCIE_REDUCE, PROJECTING,
    PROJECTING_BACK, PUSH, RECORDED, REDUCE, REFRESHING, RESTORING, RUNNING, SUMMING_P, SUMMING_Q,
    WAITING, EndCallback, Heap, Matrix, Partition, Task, Tasks, Tensor, input_of, output_of,
)
from bpsx.core.gpu.pinned_pool cimport give_place
from bpsx.core.state cimport USER_STREAMS, Core, Pool
from bpsx.core.codec.pool cimport pool_forget, pool_give, pool_take
from bpsx.core.local.ring cimport HAS_BODY, IS_BROADCAST, IS_SHARE, ON_GPU
from bpsx.core.groups cimport unmark_ready
from bpsx.core.keep cimport end_copy, is_uncopied
from bpsx.core.queue cimport heap_push
from bpsx.core.status cimport DONE, E_DEVICE, E_LEFT, E_MEMORY, E_PROTOCOL
from bpsx.core.targets cimport resolve
from bpsx.core.transitions cimport move_matrix, move_partition, move_task
from bpsx.system.arrays cimport make_room
from bpsx.system.sync cimport atomic_add, atomic_store, lock, notify_all, now_ns, unlock
from bpsx.core.trace.recorder cimport watched
from bpsx.core.trace.worker cimport record_start, record_end, record_stage, record_work

cdef inline bint beside_copies(Partition *p) noexcept nogil:
    """Whether a compression stage of a tensor on a GPU works on elements in GPU memory: before
    COPYD2H or after COPYH2D.
    """
    cdef uint8_t *stages = p.tensor.stages
    cdef int i = p.stage_index, wanted = COPYD2H if p.stage == COMPRESS else COPYH2D
    if wanted == COPYH2D:
        while i >= 0 and stages[i] != wanted:
            i -= 1
        return i >= 0
    while stages[i] != END and stages[i] != wanted:
        i += 1
    return stages[i] == wanted


cdef inline void fail_core(Core *c, int status) noexcept nogil:
    """Fail the whole core: this process cannot take part any more.

    The server will never count this worker's round, so nothing after it can be right.
    """
    lock(&c.monitor)
    if not c.failed:
        atomic_store(&c.failed, status)
        atomic_store(&c.inbox.news, 1)
    unlock(&c.monitor)


cdef inline void enter(Core *c, Partition *p) noexcept nogil:
    """Start the stage at `stage_index`; at the list's end, end the partition's round."""
    cdef int stage = p.tensor.stages[p.stage_index]
    if stage == END:
        end_partition(c, p)
        return
    if stage == COPY and not is_uncopied(p):
        p.stage_index += 1
        enter(c, p)
        return
    move_partition(p, stage)
    if stage == PUSH:
        p.priority = p.tensor.current.priority
        p.order = c.queued.next_order
        c.queued.next_order += 1
        c.queued.longest = max(c.queued.longest, <int64_t>p.length)
        if heap_push(&c.lanes.at[p.lane].queue, p) != 0:
            fail_core(c, E_MEMORY)
    elif stage == COPY:
        give_to_pool(c, p)
    elif p.on_gpu and stage != COMPRESS and stage != DECOMPRESS:
        enter_on_gpu(c, p, stage)
    elif stage == REDUCE or stage == BROADCAST:
        p.priority = p.tensor.current.priority
        p.order = c.queued.next_order
        c.queued.next_order += 1
        if heap_push(&c.machine.work, p) != 0:
            fail_core(c, E_MEMORY)
    elif stage == COMPRESS or stage == DECOMPRESS:
        if p.on_gpu and beside_copies(p) != (p.gpu.coder != NULL):
            # The list has this stage for the host and for the GPU; it runs only once.
            p.stage_index += 1
            enter(c, p)
            return
        # The machine's processes disagree: the push has no body, so there is nothing to encode.
        if p.source == NULL and stage == COMPRESS:
            p.packed.size = 0
            advance(c, p)
            return
        p.encodes = stage == COMPRESS
        give_to_pool(c, p)
    elif stage == COORDINATE_REDUCE:
        if all_shares_in(c.machine, p):
            advance(c, p)
    # PULL and COORDINATE_BROADCAST end when a message or a post arrives.


cdef inline void give_to_pool(Core *c, Partition *p) noexcept nogil:
    """Let a thread encode, decode or copy a partition, or the GPU encode or decode it."""
    cdef bint coded_on_gpu = p.stage != COPY and p.on_gpu and p.gpu.coder != NULL
    p.priority = p.tensor.current.priority
    p.order = c.queued.next_order
    c.queued.next_order += 1
    if (heap_push(&c.gpu.work, p) if coded_on_gpu else pool_give(c.pool, p)) != 0:
        fail_core(c, E_MEMORY)


cdef inline void enter_on_gpu(Core *c, Partition *p, int stage) noexcept nogil:
    """As `enter`, for the stages of NCCL, the copy engines and the machine's other processes."""
    cdef Machine *m = c.machine
    cdef Task *task = p.tensor.current
    cdef bint root = m != NULL and m.me == m.root
    cdef Heap *queue = NULL
    if stage == COPYD2H or stage == COPYH2D:
        queue = &c.gpu.work
    elif stage == REDUCE and root:
        queue = &c.gpu.unchecked
    elif stage == BROADCAST and root:
        queue = &c.gpu.gathers
    elif stage == PCIE_REDUCE and m.gpus.n_groups > 1:
        queue = &m.work
    elif stage == PCIE_REDUCE:
        p.stage_index += 1
        enter(c, p)
    elif stage == COORDINATE_REDUCE and not root:
        p.gpu.answered = False
        p.gpu.doom.status = 0
        if tell_root(
            m, p, IS_SHARE | ON_GPU | (HAS_BODY if p.source != NULL else 0)
            | (IS_BROADCAST if task.broadcast else 0), task.divisor
        ) != 0:
            fail_core(c, E_MEMORY)
    elif (
        stage == COORDINATE_REDUCE and all_shares_in(m, p)
        or stage == COORDINATE_BROADCAST and root and p.gpu.loaded >= p.gpu.others
    ):
        advance(c, p)
    elif stage == COORDINATE_PUSH and not root and p.gpu.doom.status:
        fail_partition(c, p, p.gpu.doom.status, p.gpu.doom.a, p.gpu.doom.b)
    elif stage == COORDINATE_PUSH and (p.gpu.copied >= p.gpu.others if root else p.gpu.answered):
        advance(c, p)
    if queue != NULL:
        # Without servers NCCL's collectives run in the script's order: no other would be faster.
        p.priority = task.priority if c.gpu.watches else 0
        p.order = c.queued.next_order
        c.queued.next_order += 1
        if heap_push(queue, p) != 0:
            fail_core(c, E_MEMORY)


cdef inline void advance(Core *c, Partition *p) noexcept nogil:
    if watched(c.watch) and not p.is_codec_state:
        record_stage(c, p)
    p.stage_index += 1
    enter(c, p)


cdef inline void fail_partition(
    Core *c, Partition *p, int status, uint32_t a, uint32_t b
) noexcept nogil:
    """End the partition's round with an error.

    The task keeps the first error and ends with it after its last partition.
    """
    cdef Task *task = p.tensor.current
    if task.error.status == 0:
        task.error.status = status
        task.error.a = a
        task.error.b = b
    if (
        p.local != NULL
        and p.local.shares != NULL
        and not p.is_codec_state
        and post_results(c.machine, p, status, a, b) != 0
    ):
        fail_core(c, E_MEMORY)
    end_partition(c, p)


cdef inline void end_partition(Core *c, Partition *p) noexcept nogil:
    cdef Tensor *tensor = p.tensor
    cdef Task *task = tensor.current
    move_partition(p, END)
    if not p.is_codec_state:
        p.round += 1
    if p.on_gpu and p.gpu.place != NULL:
        give_place(&c.gpu.places, p.gpu.place)
        p.gpu.place = NULL
    task.remaining -= 1
    if task.remaining == 0 and not (tensor.matrix != NULL and goes_on(c, tensor)):
        end_task(c, tensor)


cdef inline void end_task(Core *c, Tensor *tensor) noexcept nogil:
    """End the current task of a tensor, and start the next."""
    cdef Task *task = tensor.current
    tensor.current = NULL
    finish(c, task, task.error.status if task.error.status else DONE)
    # A task that cannot be started ends at once.
    while tensor.current == NULL and tensor.waiting.first != NULL:
        task = tensor.waiting.first
        tensor.waiting.first = task.next
        start(c, task)


# ---- matrices: docs/internals/powersgd.md

cdef inline void begin_work(Core *c, Tensor *tensor, int state) noexcept nogil:
    """Let threads of the pool or the GPU work on a matrix; take_hand() goes on afterwards."""
    cdef Matrix *m = tensor.matrix
    cdef bint on_gpu = tensor.current.on_gpu and not is_on_factors(state)
    cdef uint32_t i
    move_matrix(m, state)
    m.pieces, m.next_piece = 1 if on_gpu else pieces_of(m, state), 0
    m.working = <uint32_t>min(<int64_t>m.n_hands, m.pieces)
    m.began_ns = now_ns() if tensor.trace.recorded else 0
    for i in range(m.working):
        m.hands[i].priority = tensor.current.priority
        m.hands[i].order = c.queued.next_order
        c.queued.next_order += 1
        if pool_give(c.gpu.coders if on_gpu else c.pool, &m.hands[i]) != 0:
            fail_core(c, E_MEMORY)


cdef inline void sum_factor(Core *c, Tensor *tensor, int state) noexcept nogil:
    """Let the partitions of P or Q enter their stages."""
    cdef uint32_t first = 0 if state == SUMMING_P else tensor.matrix.n_first
    cdef uint32_t i, end = tensor.matrix.n_first if state == SUMMING_P else tensor.n_parts
    move_matrix(tensor.matrix, state)
    tensor.current.remaining = end - first
    for i in range(first, end):
        tensor.parts[i].entered_ns = now_ns() if tensor.trace.recorded else 0
        enter(c, &tensor.parts[i])


cdef inline bint goes_on(Core *c, Tensor *tensor) noexcept nogil:
    """Continue a step after the rounds of all partitions of P, or of Q. False: it has ended.

    A machine's root that stands in for itself has no matrix to read: it only sums for the others.
    """
    cdef Task *task = tensor.current
    cdef bint stands_in = task.handle == NULL, has_p = tensor.matrix.state == SUMMING_P
    if task.error.status or stands_in and not has_p:
        move_matrix(tensor.matrix, IDLE)
        return False
    if stands_in:
        sum_factor(c, tensor, SUMMING_Q)
    else:
        begin_work(c, tensor, ORTHOGONALISING if has_p else REFRESHING)
    return True


cdef inline void take_hand(Core *c, Tensor *tensor, int status) noexcept nogil:
    """A thread has come back from a matrix. The last one moves it on."""
    cdef Matrix *m = tensor.matrix
    if m.state == IDLE:
        return                              # its task has failed meanwhile
    if status:
        fail_core(c, status)
        return
    m.working -= 1
    if m.working:
        return
    if tensor.trace.recorded:
        record_work(c, tensor)
    if m.state == PROJECTING:
        sum_factor(c, tensor, SUMMING_P)
    elif m.state == ORTHOGONALISING:
        begin_work(c, tensor, PROJECTING_BACK)
    elif m.state == PROJECTING_BACK:
        sum_factor(c, tensor, SUMMING_Q)
    elif m.state == REFRESHING:
        begin_work(c, tensor, RESTORING)
    else:
        move_matrix(m, IDLE)
        end_task(c, tensor)


# ---- ends of tasks

cdef inline void keep_for_reaping(Core *c, Task *task) noexcept nogil:
    """Add a finished task to the list that Python reaps. The caller holds the monitor."""
    if task.gpu.end_event == NULL:
        task.next = c.ended.on_host
        c.ended.on_host = task
        return
    task.next = NULL
    if c.ended.on_gpu == NULL:
        c.ended.on_gpu = task
    else:
        c.ended.last_on_gpu.next = task
    c.ended.last_on_gpu = task


cdef inline EndCallback *take_callbacks(Task *task, EndCallback *others) noexcept nogil:
    """Detach a task's callbacks; return them in front of `others`. The caller holds the monitor."""
    cdef EndCallback *first = task.callbacks
    cdef EndCallback *last = first
    task.callbacks = NULL
    if first == NULL:
        return others
    while last.next != NULL:
        last = last.next
    last.next = others
    return first


cdef inline void run_callbacks(EndCallback *one, int64_t status) noexcept nogil:
    """Run callbacks. Without the monitor, because they may submit tasks."""
    cdef EndCallback *following
    while one != NULL:
        following = one.next
        one.run(one, status)
        one = following


cdef inline void finish(Core *c, Task *task, int status) noexcept nogil:
    """Publish a task's end.

    From here on its waiter may continue, and bpsx no longer writes to the output.
    """
    cdef uint32_t i
    # Read now: the waiter may free the task as soon as its status is published.
    cdef bint stands_in = task.handle == NULL
    cdef EndCallback *callbacks
    if task.tensor.trace.recorded and not task.is_codec_state:
        record_end(c, task, status)
    if task.group != NULL:
        atomic_add(&task.group.ended, 1)
        atomic_store(&c.inbox.group_news, 1)
    if (
        task.gpu.end_event != NULL
        and not (task.gpu.end_state == RECORDED and status == DONE)
        and mark_end(c.gpu.device, task.gpu.end_event, status == DONE, task.tensor.last_stream) != 0
        and status == DONE
    ):
        status = E_DEVICE
    if status == DONE and task.gpu.end_event != NULL:
        c.gpu.ends += 1
        task.gpu.end_number = c.gpu.ends
        task.gpu.end_state = RECORDED
    if status == DONE and not task.is_codec_state:
        c.counters.tasks += 1
        if c.settings.telemetry and task.tensor.matrix != NULL:
            c.counters.bytes += task.tensor.matrix.nbytes
        for i in range(
            task.tensor.n_parts if c.settings.telemetry and task.tensor.matrix == NULL else 0
        ):
            c.counters.bytes += task.tensor.parts[i].length
    lock(&c.monitor)
    c.busy.outstanding -= 1
    if c.busy.outstanding == 0:
        c.busy.total += now_ns() - c.busy.since
    if not stands_in:
        keep_for_reaping(c, task)
    callbacks = take_callbacks(task, NULL)
    move_task(task, ENDED)
    atomic_store(&task.status, status)
    if c.role.waiters:
        notify_all(&c.monitor)
    unlock(&c.monitor)
    if stands_in:
        free(task)
    run_callbacks(callbacks, status)


cdef inline int pump_pool(Core *c, Pool *pool) noexcept nogil:
    """Take back the partitions that a pool has worked on. Returns their number."""
    cdef Partition *p = pool_take(pool)
    cdef Partition *following
    cdef int n = 0
    while p != NULL:
        following = p.coding.next
        if p.stage == COPY:
            if not end_copy(c, p):
                fail_core(c, E_MEMORY)
            advance(c, p)
        elif p.tensor.matrix != NULL:
            take_hand(c, p.tensor, p.coding.status)
        elif p.stage != END:
            if p.coding.status == 0:
                advance(c, p)
            else:
                fail_partition(c, p, E_PROTOCOL, c.settings.rank, 0)
        p = following
        n += 1
    return n


cdef inline bint find_missing_process(Machine *m, uint32_t *who, bint under_way) noexcept nogil:
    """Whether a round lacks a process of this machine that has left the job.

    A round that begins lacks it if any process has left, because that process took part only in
    earlier rounds. A round `under_way` lacks it on the root. Other processes know this only if the
    root itself has left, or when the root posts the error.
    """
    cdef uint32_t i
    if m == NULL or not m.somebody_gone:
        return False
    for i in range(m.size):
        if m.all[i].gone and (not under_way or m.me == m.root or i == m.root):
            who[0] = m.first_rank + i
            return True
    return False


cdef inline void begin_state_transfer(Tensor *tensor, Task *task) noexcept nogil:
    """Begin a task that reads or sets the servers' compression state.

    Each partition sends its part of the task's memory as it is, and completes with the reply.
    """
    cdef uint64_t offset = 0
    cdef uint32_t i
    cdef Partition *p
    for i in range(tensor.n_parts):
        p = &tensor.parts[i]
        while tensor.stages[p.stage_index] != PUSH:
            p.stage_index += 1
        p.source = task.input + offset if task.input != NULL else NULL
        p.target = task.output + offset
        if p.local != NULL:
            p.local.disagreement.status = 0
        offset += server_state_bytes(p.packed)


cdef inline void start(Core *c, Task *task) noexcept nogil:
    """Start a task's partitions, or queue the task behind an earlier round of the same tensor."""
    cdef Tensor *tensor = task.tensor
    cdef uint32_t i
    task.next = NULL
    if (
        tensor.outcome.status == DONE
        and not task.is_codec_state
        and find_missing_process(c.machine, &task.error.a, False)
    ):
        finish(c, task, E_LEFT)
        return
    if c.failed or tensor.outcome.status < 0:
        if tensor.outcome.status < 0:
            task.error.a = tensor.outcome.a
            task.error.b = tensor.outcome.b
        finish(c, task, <int>c.failed if c.failed else tensor.outcome.status)
        return
    if tensor.current != NULL:
        move_task(task, WAITING)
        if tensor.waiting.first == NULL:
            tensor.waiting.first = task
        else:
            tensor.waiting.last.next = task
        tensor.waiting.last = task
        return
    tensor.current = task
    tensor.started_ns = task.submitted_ns
    # The factors are on the host wherever the tensor is.
    tensor.stages = (
        &tensor.on_gpu[0] if task.on_gpu and tensor.matrix == NULL else &tensor.on_host[0]
    )
    tensor.waits_for_others = not task.is_codec_state and (task.broadcast or not task.asynchronous)
    task.remaining = tensor.n_parts
    for i in range(tensor.n_parts):
        tensor.parts[i].stage_index = 0
        tensor.parts[i].source = input_of(&tensor.parts[i])
        tensor.parts[i].target = output_of(&tensor.parts[i])
        tensor.parts[i].divisor = (
            task.divisor // c.settings.processes if task.broadcast else task.divisor
        )
        tensor.parts[i].is_codec_state = task.is_codec_state
        tensor.parts[i].on_gpu = task.on_gpu and tensor.matrix == NULL
    if task.on_gpu and c.gpu.watches and task.gpu.input_event != NULL:
        watch_for(c, task)
    else:
        begin(c, task)


cdef inline void begin(Core *c, Task *task) noexcept nogil:
    """Enter the first stages: the task's input is ready."""
    cdef Tensor *tensor = task.tensor
    cdef uint32_t i, n = tensor.n_parts
    move_task(task, RUNNING)
    if task.is_codec_state:
        begin_state_transfer(tensor, task)
    elif watched(c.watch):
        record_start(c, tensor)
    if tensor.matrix != NULL and task.handle != NULL:
        begin_work(c, tensor, PROJECTING)
        return
    if tensor.matrix != NULL:
        sum_factor(c, tensor, SUMMING_P)
        return
    if task.on_gpu:
        n = span_parts(c, tensor)
    for i in range(n):
        enter(c, &tensor.parts[i])


cdef inline uint32_t span_parts(Core *c, Tensor *tensor) noexcept nogil:
    """Set the bytes that each partition's GPU stages cover. Returns how many partitions have some.

    Without servers nothing is gained by cutting a tensor: its first partition stands for all, and
    the rounds of the others are over at once.
    """
    cdef uint32_t i
    for i in range(tensor.n_parts):
        tensor.parts[i].gpu.span = tensor.parts[i].length
    if c.machine == NULL or not c.machine.alone:
        return tensor.n_parts
    for i in range(1, tensor.n_parts):
        tensor.parts[0].gpu.span += tensor.parts[i].length
        tensor.parts[i].round += 1
    tensor.current.remaining = 1
    return 1


cdef inline void watch_for(Core *c, Task *task) noexcept nogil:
    """Queue a task until the GPU has produced its input.

    The line is ordered by input_number, since a later round of a tensor may start late.
    """
    cdef Tasks *line = &c.gpu.unseen[task.gpu.stream // 64 % USER_STREAMS]
    cdef Task **at = &line.first
    move_task(task, AWAITS_INPUT)
    if line.first != NULL and line.last.gpu.input_number <= task.gpu.input_number:
        at = &line.last.gpu.next_unseen
    while at[0] != NULL and at[0].gpu.input_number <= task.gpu.input_number:
        at = &at[0].gpu.next_unseen
    task.gpu.next_unseen = at[0]
    at[0] = task
    if task.gpu.next_unseen == NULL:
        line.last = task


cdef inline void watch_no_more(Core *c, Task *task) noexcept nogil:
    """Remove a task from its line: it is about to end, and may be freed then."""
    cdef Tasks *line = &c.gpu.unseen[task.gpu.stream // 64 % USER_STREAMS]
    cdef Task *before = NULL
    cdef Task *found = line.first
    while found != NULL and found != task:
        before = found
        found = found.gpu.next_unseen
    if found == NULL:
        return
    if before == NULL:
        line.first = task.gpu.next_unseen
    else:
        before.gpu.next_unseen = task.gpu.next_unseen
    if line.last == task:
        line.last = before


cdef inline int adopt(Core *c, Tensor *tensor) noexcept nogil:
    """Give a new tensor's partitions their index, and the place of lost lanes' slots.

    Returns 0, or -1 when out of memory.
    """
    cdef uint32_t i
    if tensor.adopted:
        return 0
    if not make_room(
        &c.table.at, &c.table.capacity, c.table.n + tensor.n_parts, sizeof(Partition *)
    ):
        return -1
    for i in range(tensor.n_parts):
        resolve(c, &tensor.parts[i])
        # Lanes ignore keys with an earlier term than that of their latest lost worker.
        tensor.parts[i].term = max(tensor.parts[i].term, c.moving.era)
        tensor.parts[i].index = c.table.n
        c.table.at[c.table.n] = &tensor.parts[i]
        c.table.n += 1
    if c.machine != NULL and know_tensor(c.machine, tensor) != 0:
        return -1
    tensor.next = c.tensors
    c.tensors = tensor
    tensor.adopted = True
    return 0


cdef inline void fail_tensor(Core *c, Tensor *tensor, int status) noexcept nogil:
    """End every task of a tensor now.

    Its partitions may stay in queues, whose readers skip partitions without a round.
    """
    cdef Task *task = tensor.current
    cdef Task *following
    cdef uint32_t i
    tensor.outcome.status = status
    if c.pool != NULL:
        pool_forget(c.pool, tensor)
    if c.gpu != NULL and c.gpu.coders != NULL:
        pool_forget(c.gpu.coders, tensor)
    unmark_ready(tensor)
    tensor.current = NULL
    for i in range(tensor.n_parts):
        if tensor.parts[i].stage == COPY and not end_copy(c, &tensor.parts[i]):
            fail_core(c, E_MEMORY)
        if tensor.parts[i].stage != END:
            move_partition(&tensor.parts[i], END)
    if tensor.matrix != NULL and tensor.matrix.state != IDLE:
        move_matrix(tensor.matrix, IDLE)
    if task != NULL and task.state == AWAITS_INPUT:
        watch_no_more(c, task)
    if task != NULL:
        finish(c, task, status)
    task = tensor.waiting.first
    tensor.waiting.first = NULL
    while task != NULL:
        following = task.next
        finish(c, task, status)
        task = following
