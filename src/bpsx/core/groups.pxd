# Groups of push_pulls that are committed together, such as the gradients of an optimizer's step.
# docs/internals/elastic-workers.md has the rule; commit.pxd uses these functions.
#
# Only the driver calls them. The thread that submits a task numbers it, and seals the group: tasks
# up to the latest seal are committed once all of them have their answers or have failed.
from libc.stdint cimport int64_t

from bpsx.core.partition cimport CommitGroup, Task, Tensor
from bpsx.system.sync cimport atomic_load


cdef inline void count_ready(Tensor *tensor, int by) noexcept nogil:
    if tensor.current.number <= tensor.current.group.seen:
        tensor.current.group.due += by


cdef inline void mark_ready(Tensor *tensor) noexcept nogil:
    """All answers of the current task of a tensor are there."""
    cdef CommitGroup *group = tensor.current.group
    if tensor.ready:
        return
    tensor.ready = True
    if not tensor.linked:
        tensor.linked = True
        tensor.next_ready = group.first
        group.first = tensor
    count_ready(tensor, 1)


cdef inline void unmark_ready(Tensor *tensor) noexcept nogil:
    """The answers are not valid any more, or the task ends; the tensor stays in the list."""
    if tensor.ready:
        tensor.ready = False
        count_ready(tensor, -1)


cdef inline void look_at_seal(CommitGroup *group) noexcept nogil:
    cdef Tensor *tensor = group.first
    cdef int64_t sealed = atomic_load(&group.sealed)
    if sealed == group.seen:
        return
    group.seen = sealed
    group.due = 0
    while tensor != NULL:
        if tensor.ready:
            count_ready(tensor, 1)
        tensor = tensor.next_ready


cdef inline bint is_complete(CommitGroup *group) noexcept nogil:
    """Whether the group is sealed, and all of its tasks have their answers or have failed."""
    look_at_seal(group)
    return group.due > 0 and atomic_load(&group.ended) + group.due >= group.seen


cdef inline Tensor *take_ready(CommitGroup *group) noexcept nogil:
    """Remove the tensors whose sealed tasks are ready; return them linked by `next_ready`."""
    cdef Tensor *tensor = group.first
    cdef Tensor *following
    cdef Tensor *found = NULL
    group.first = NULL
    group.due = 0
    while tensor != NULL:
        following = tensor.next_ready
        if tensor.ready and tensor.current.number <= group.seen:
            tensor.ready = tensor.linked = False
            tensor.next_ready = found
            found = tensor
        elif tensor.ready:
            tensor.next_ready = group.first
            group.first = tensor
        else:
            tensor.linked = False
        tensor = following
    return found
