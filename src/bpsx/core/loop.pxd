# The driver's loop, and how threads hand over its role. One thread at a time drives: see
# docs/internals/driver-and-queue.md. Deadlines are in ns of the monotonic clock; INT64_MAX: none.
from libc.stdint cimport INT64_MAX, int64_t, uint32_t, uint64_t
from libc.stdlib cimport free

from bpsx.core.moves cimport begin_term, end_moving, forget_rounds
from bpsx.core.busy cimport count_work
from bpsx.core.commit cimport commit_groups
from bpsx.core.keep cimport acknowledge_all
from bpsx.core.partition cimport ENDED, SUBMITTED, EndCallback, Partition, Task, Tensor, Term
from bpsx.core.gpu.copies cimport awaited, pump_gpu
from bpsx.core.local.posts cimport fall_asleep, serves_others, ring_bells, stay_awake
from bpsx.core.receive cimport pump_in
from bpsx.core.local.reduce cimport take_departures, pump_machine, take_early
from bpsx.core.send cimport pump_out
from bpsx.core.codec.state cimport grow_scratch
from bpsx.core.state cimport Core, Pool
from bpsx.core.codec.pool cimport pool_finish, pool_next, scratch_of, work_on
from bpsx.core.stage cimport (
    adopt, fail_tensor, finish, fail_core, pump_pool, run_callbacks, start,
    take_callbacks,
)
from bpsx.core.status cimport E_DEVICE, E_MEMORY, E_SHUTDOWN, PENDING
from bpsx.core.transitions cimport move_task
from bpsx.core.values cimport keeps_values
from bpsx.system.sync cimport (
    atomic_add, atomic_load, atomic_store, lock, notify_all, now_ns, unlock, wait, wait_until,
    yield_cpu,
)

cdef extern from "<unistd.h>" nogil:
    int usleep(unsigned int microseconds)

cdef enum:
    # A parked driver rechecks after this time, should a wake-up be lost. With nothing outstanding
    # no thread drives (except for a joined root), so an idle process makes no system calls,
    PARK_MS = 1000
    LOOK_NS = 250_000_000       # ... unless it keeps values: time between two looks for new ones
    NAP_US = 50                 # between two queries of awaited events of the GPU
    PAUSE_NS = 10_000_000       # between two looks for a driver that has returned unnoticed
    # between two attempts to post to a full ring: its reader does not signal that it has room
    CROWDED_MS = 1


cdef inline bint has_work(Core *c) noexcept nogil:
    """Whether a thread has to drive although none waits for a push_pull."""
    return (
        atomic_load(&c.busy.outstanding) != 0
        or atomic_load(&c.inbox.news) != 0
        or serves_others(c.machine)
    )


cdef inline void kick(Core *c) noexcept nogil:
    """Make sure that a driver sees the news. The caller holds the monitor."""
    if c.role.driving:
        if c.role.parked:
            c.endpoint.wake(c.endpoint.self)
    elif c.role.background_idle:
        notify_all(&c.monitor)


cdef inline void tell_news(Core *c) noexcept nogil:
    """Notify the driver of a change that it cannot see by itself. Any thread."""
    lock(&c.monitor)
    atomic_store(&c.inbox.news, 1)
    kick(c)
    unlock(&c.monitor)


cdef inline void submit(
    Core *c, Task *first, Task *last, uint32_t n, bint will_wait
) noexcept nogil:
    """Hand n tasks, linked by `next`, to the driver. Any thread.

    With `will_wait` the caller is about to drive them itself, so no thread is woken.
    """
    cdef int64_t now = now_ns()
    cdef Task *task = first
    cdef EndCallback *callbacks = NULL
    last.next = NULL
    while task != NULL:
        task.submitted_ns = now
        move_task(task, SUBMITTED)
        task = task.next
    lock(&c.monitor)
    if c.role.stopping:
        # No driver will come: end the tasks here, on this thread.
        last.next = c.ended.on_host
        c.ended.on_host = first
        while n:
            callbacks = take_callbacks(first, callbacks)
            move_task(first, ENDED)
            atomic_store(&first.status, E_SHUTDOWN)
            first = first.next
            n -= 1
        unlock(&c.monitor)
        run_callbacks(callbacks, E_SHUTDOWN)
        return
    if c.inbox.first == NULL:
        c.inbox.first = first
    else:
        c.inbox.last.next = first
    c.inbox.last = last
    if c.busy.outstanding == 0:
        c.busy.since = now
    c.busy.outstanding += n
    atomic_store(&c.inbox.news, 1)
    if not will_wait or c.role.driving:
        kick(c)
    unlock(&c.monitor)


cdef inline void fail_all_tensors(Core *c) noexcept nogil:
    """End every task, because the whole core has failed."""
    cdef Tensor *tensor = c.tensors
    cdef uint32_t i
    c.swept = True
    end_moving(c)
    if c.machine != NULL:
        for i in range(c.machine.size):
            c.machine.all[i].overflow.size = 0
    while tensor != NULL:
        fail_tensor(c, tensor, <int>c.failed)
        tensor = tensor.next


cdef inline void begin_outside_gpu(Core *c) noexcept nogil:
    """Note that the thread that begins to drive has not entered the GPU's context."""
    if c.gpu != NULL:
        c.gpu.entered = -1


cdef inline void enter_gpu(Core *c) noexcept nogil:
    """Enter the GPU's context, if there is a GPU and this driver is not in it."""
    if c.gpu == NULL or c.gpu.entered >= 0:
        return
    c.gpu.entered = c.gpu.device.enter(c.gpu.device.self)
    if c.gpu.entered < 0:
        fail_core(c, E_DEVICE)


cdef inline void leave_gpu(Core *c) noexcept nogil:
    """Leave the GPU's context, if this driver has entered it."""
    if c.gpu != NULL and c.gpu.entered >= 0:
        c.gpu.device.leave(c.gpu.device.self, c.gpu.entered)


cdef inline void carry_out(Core *c, Term *term) noexcept nogil:
    """Begin terms, the oldest first."""
    cdef Term *following
    while term != NULL:
        following = term.next
        begin_term(c, term)
        term = following


cdef inline int take_news(Core *c) noexcept nogil:
    """Fail the tensors that are marked as failing, begin terms, adopt known tensors, and start
    submitted tasks.
    """
    cdef Task *task
    cdef Task *following
    cdef Tensor *tensor
    cdef Tensor *next_failing
    cdef Tensor *known
    cdef Term *term
    cdef uint32_t joins
    if not atomic_load(&c.inbox.news):
        return 0
    enter_gpu(c)
    lock(&c.monitor)
    task = c.inbox.first
    tensor = c.inbox.failing
    known = c.inbox.known
    term = c.inbox.terms
    joins = c.inbox.joins
    c.inbox.known, c.inbox.terms = NULL, NULL
    c.inbox.first = c.inbox.last = NULL
    c.inbox.failing = NULL
    atomic_store(&c.inbox.news, 0)
    unlock(&c.monitor)
    while tensor != NULL:
        next_failing = tensor.next_failing
        fail_tensor(c, tensor, tensor.failing_status)
        tensor = next_failing
    if c.moving.joins != joins:
        c.moving.joins = joins
        forget_rounds(c)
    # A term drops the messages of lost lanes: first read the values among them.
    while term != NULL and keeps_values(c) and pump_in(c):
        pass
    carry_out(c, term)
    if c.machine != NULL and take_departures(c.machine):
        # First note the neighbours that have left: tasks that need them must fail when they start.
        c.machine.somebody_gone = True
    while known != NULL:
        if adopt(c, known) != 0:
            fail_core(c, E_MEMORY)
        known = known.next_known
    while task != NULL:
        following = task.next
        if adopt(c, task.tensor) != 0:
            finish(c, task, E_MEMORY)
            fail_core(c, E_MEMORY)            # the other workers will wait for this share
        else:
            start(c, task)
        task = following
    if c.machine != NULL and c.machine.early.size:
        take_early(c)
    if c.failed and not c.swept:
        fail_all_tensors(c)
    return 1


cdef inline void end_all(Core *c) noexcept nogil:
    """End every task. The core must have failed, and no thread may drive any more.

    take_news() ends all tasks of a failed core.
    """
    begin_outside_gpu(c)
    atomic_store(&c.inbox.news, 1)
    take_news(c)
    leave_gpu(c)


cdef inline void tell_neighbours(Core *c) noexcept nogil:
    """Wake the machine's other processes that have posts to read.

    Posts that do not fit into a ring count as work under way, so that a thread drives until they
    are written.
    """
    cdef bint unsent = ring_bells(c.machine)
    if unsent == c.machine.unsent:
        return
    c.machine.unsent = unsent
    lock(&c.monitor)
    count_work(c, unsent)
    unlock(&c.monitor)


cdef inline void park(Core *c, int64_t deadline_ns) noexcept nogil:
    """Sleep in endpoint.wait until woken, at most PARK_MS; return at once if there is news."""
    cdef int64_t left_ms = min(<int64_t>PARK_MS, (deadline_ns - now_ns()) // 1000000 + 1)
    if c.machine != NULL and c.machine.unsent:
        left_ms = min(left_ms, CROWDED_MS)
    lock(&c.monitor)
    c.role.parked = not (c.inbox.news or c.role.stopping or c.role.wanted)
    unlock(&c.monitor)
    if not c.role.parked:
        return
    if c.machine != NULL and not fall_asleep(c.machine):
        left_ms = 0
    c.endpoint.wait(c.endpoint.self, <int>max(left_ms, 0))
    if c.machine != NULL:
        stay_awake(c.machine)
    lock(&c.monitor)
    c.role.parked = False
    unlock(&c.monitor)


cdef inline void drive(Core *c, Task *until, int64_t deadline_ns) noexcept nogil:
    """Run the loop until `until` has ended or the deadline has passed; with NULL, until nothing
    is outstanding.
    """
    begin_outside_gpu(c)
    enter_gpu(c)
    run_loop(c, until, deadline_ns)
    leave_gpu(c)


cdef inline void run_loop(Core *c, Task *until, int64_t deadline_ns) noexcept nogil:
    cdef int64_t idle_since = 0, now
    cdef int progress
    while not atomic_load(&c.role.stopping) and not atomic_load(&c.role.wanted):
        progress = take_news(c)
        if c.machine != NULL:
            progress += pump_machine(c)
        if c.pool != NULL:
            progress += pump_pool(c, c.pool)
        if c.gpu != NULL:
            progress += pump_gpu(c)
        progress += pump_out(c)
        progress += pump_in(c)
        if atomic_load(&c.inbox.group_news):
            commit_groups(c)
            acknowledge_all(c)
            progress += 1
        if c.machine != NULL:
            tell_neighbours(c)
        if until != NULL:
            if atomic_load(&until.status) != PENDING:
                return
        elif not has_work(c) and not (progress and keeps_values(c)):
            return
        if progress:
            idle_since = 0
            continue
        now = now_ns()
        if now >= deadline_ns:
            return
        if idle_since == 0:
            idle_since = now
        if now - idle_since < c.settings.spin_ns:
            yield_cpu()
            continue
        if c.gpu != NULL and awaited(c):
            usleep(NAP_US)                  # there is no notification that the GPU has finished
            continue
        park(c, deadline_ns)
        idle_since = 0


cdef inline void codec_thread(Core *c, uint32_t me) noexcept nogil:
    """Encode and decode partitions until the pool stops: the body of a pool's thread."""
    cdef Partition *p
    cdef char *scratch = NULL
    cdef uint64_t capacity = 0
    while True:
        p = pool_next(c.pool, me)
        if p == NULL:
            break
        if grow_scratch(&scratch, &capacity, scratch_of(p)):
            work_on(p, scratch)
        else:
            p.coding.status = E_MEMORY
        return_coded(c, c.pool, me, p)
    free(scratch)


cdef inline void return_coded(Core *c, Pool *pool, uint32_t me, Partition *p) noexcept nogil:
    """Return a partition to the pool's finished list, and notify the driver."""
    pool_finish(pool, me, p)
    tell_news(c)


cdef inline bint wait_for(Core *c, Task *task, int64_t deadline_ns) noexcept nogil:
    """Wait for a task, driving if no other thread does. Returns whether the task has ended.

    False also means that the deadline has passed, or that the core is stopping.
    """
    lock(&c.monitor)
    while task.status == PENDING and not c.role.stopping:
        if now_ns() >= deadline_ns:
            break
        if c.role.driving or c.role.wanted:
            c.role.waiters += 1
            wait_until(&c.monitor, deadline_ns)
            c.role.waiters -= 1
            continue
        c.role.driving = True
        unlock(&c.monitor)
        drive(c, task, deadline_ns)
        lock(&c.monitor)
        c.role.driving = False
        # Wake others even if `task` is not done: wait_for is called in slices of 200 ms, and this
        # thread may need long to get the GIL back in between. News may have come when `task` had
        # ended already: kick() has left them to this thread.
        if (has_work(c) or c.role.wanted) and (c.role.waiters or c.role.background_idle):
            notify_all(&c.monitor)
    unlock(&c.monitor)
    return task.status != PENDING


cdef inline void pause(Core *c) noexcept nogil:
    """Take the driver's role for a moment, when all news so far has been handled.

    The caller may then change what the driver owns, and use the endpoint. It gives the role back
    with `resume`. Any thread; blocks while a driver is in the middle of its loop.
    """
    lock(&c.monitor)
    atomic_store(&c.role.wanted, c.role.wanted + 1)
    while c.role.driving:
        if c.role.parked:
            c.endpoint.wake(c.endpoint.self)
        c.role.waiters += 1
        wait_until(&c.monitor, now_ns() + PAUSE_NS)
        c.role.waiters -= 1
    c.role.driving = True
    atomic_store(&c.role.wanted, c.role.wanted - 1)
    unlock(&c.monitor)
    begin_outside_gpu(c)
    take_news(c)
    leave_gpu(c)


cdef inline void background(Core *c) noexcept nogil:
    """Drive whenever there is work and no other thread does: the body of the core's own thread.

    A worker that keeps values also looks from time to time whether a lane has sent any.
    """
    lock(&c.monitor)
    while not c.role.stopping:
        if c.role.driving or c.role.wanted or not has_work(c):
            c.role.background_idle = True
            if keeps_values(c):
                wait_until(&c.monitor, now_ns() + LOOK_NS)
            else:
                wait(&c.monitor)
            c.role.background_idle = False
            if not keeps_values(c) or c.role.driving or c.role.wanted or c.role.stopping:
                continue
        c.role.driving = True
        unlock(&c.monitor)
        drive(c, NULL, INT64_MAX)
        lock(&c.monitor)
        c.role.driving = False
        if c.role.waiters:
            notify_all(&c.monitor)
    unlock(&c.monitor)
