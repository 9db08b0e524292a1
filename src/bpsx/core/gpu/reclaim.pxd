# Tasks that have ended: which streams wait for their end, and when their memory is free again. Call
# with the GIL: one thread at a time.
from libc.stdint cimport uint64_t

from bpsx.core.gpu.device cimport N_STREAMS
from bpsx.core.partition cimport FIRED, Task
from bpsx.core.state cimport Core
from bpsx.system.sync cimport atomic_load, lock, unlock


cdef inline Task *take_reaped(Core *c) noexcept nogil:
    """Return the finished tasks whose memory is no longer in use: a list by `next`."""
    cdef Task *task
    cdef Task *following
    cdef Task *kept = NULL
    cdef Task *found = NULL
    lock(&c.monitor)
    task = c.ended.on_host
    c.ended.on_host = NULL
    while task != NULL:
        following = task.next
        if atomic_load(&task.bodies_in_flight):
            task.next = kept
            kept = task
        else:
            task.next = found
            found = task
        task = following
    c.ended.on_host = kept
    unlock(&c.monitor)
    return take_reaped_of_gpu(c, found) if c.ended.on_gpu != NULL else found


cdef inline Task *take_reaped_of_gpu(Core *c, Task *found) noexcept nogil:
    """Add the finished tasks on a GPU to `found`.

    The GPU completes them in order, so only the oldest event is queried, and once per group.
    """
    cdef Task *task = c.ended.on_gpu
    cdef void *come = NULL
    cdef int token = c.gpu.device.enter(c.gpu.device.self)
    while (
        task != NULL and not atomic_load(&task.bodies_in_flight)
        and (
            token < 0 or task.gpu.end_event == come
            or c.gpu.device.query(c.gpu.device.self, task.gpu.end_event) != 0
        )
    ):
        come = task.gpu.end_event
        task.gpu.end_state = FIRED
        lock(&c.monitor)
        c.ended.on_gpu = task.next
        unlock(&c.monitor)
        task.next = found
        found = task
        task = c.ended.on_gpu
    if token >= 0:
        c.gpu.device.leave(c.gpu.device.self, token)
    return found


cdef inline int unreaped(Core *c) noexcept nogil:
    """Number of finished tasks whose memory may still be in use."""
    cdef Task *task
    cdef int n = 0
    lock(&c.monitor)
    task = c.ended.on_host
    while task != NULL:
        n += 1
        task = task.next
    task = c.ended.on_gpu
    while task != NULL:
        n += 1
        task = task.next
    unlock(&c.monitor)
    return n


cdef inline bint waits_for_end(Core *c, Task *task, uint64_t by) noexcept nogil:
    """Whether a user's stream already waits for the end of a task on a GPU, or for a later end
    on the same stream of the core.

    ``by``: the stream's unique number, or 0 if it has none.
    """
    return (
        by != 0
        and task.gpu.end_number != 0        # then there is c.gpu
        and c.gpu.met_by == by
        and task.gpu.end_number <= c.gpu.met[task.tensor.last_stream]
    )


cdef inline void note_wait(Core *c, Task *task, uint64_t by) noexcept nogil:
    """Note that the stream waits for the task's end from now on."""
    cdef int i
    if by == 0 or task.gpu.end_number == 0:
        return
    if c.gpu.met_by != by:
        c.gpu.met_by = by
        for i in range(N_STREAMS):
            c.gpu.met[i] = 0
    c.gpu.met[task.tensor.last_stream] = max(
        c.gpu.met[task.tensor.last_stream], task.gpu.end_number
    )
