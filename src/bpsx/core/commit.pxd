# Commits of push_pulls: in a job that goes on without workers that it loses, a result is used only
# once all results that are decided together are there. docs/internals/elastic-workers.md has the
# reasons.
#
# Until then the answers are only kept, the partitions stay in PULL, and what was pushed is intact.
# Only the driver calls these functions.
from libc.stdint cimport uint32_t, uint64_t
from libc.string cimport memcpy

from bpsx.core.groups cimport is_complete, mark_ready, take_ready, unmark_ready
from bpsx.core.keep cimport forget_kept, note_arrival, pool_copies
from bpsx.core.logs cimport note_no_sum, note_sum
from bpsx.core.partition cimport (
    SUMMING_P, CommitGroup, Kept, Partition, SumNumbers, Task, Tensor, wire_of,
)
from bpsx.core.stage cimport advance, fail_core, fail_partition
from bpsx.core.state cimport Core
from bpsx.core.status cimport DONE, E_JOINED, E_MEMORY, E_PEER_LOST
from bpsx.core.stream_copy cimport copy_nontemporal
from bpsx.core.wire cimport LEAST_ACKNOWLEDGED
from bpsx.system.sync cimport atomic_store, lock, unlock


cdef inline void use_packed(
    Core *c, Partition *p, SumNumbers *numbers, const char *body, uint64_t length
) noexcept nogil:
    """Log the push of a compressed partition, then let the answer's bytes take its place.

    The lane has received the push when it replies, so the transport does not read it any more.
    """
    if not note_sum(c, p, numbers):
        fail_core(c, E_MEMORY)
    p.packed.size = length
    if length and body != <char *>wire_of(p):
        memcpy(wire_of(p), body, length)


cdef inline void deliver(Core *c, Partition *p) noexcept nogil:
    """Use the kept answer of a partition, and acknowledge it."""
    cdef Kept *kept = p.kept
    cdef int status = kept.outcome.status
    p.answered = False
    if status != DONE:
        note_no_sum(p)
        fail_partition(
            c, p, status,
            # The server may know only the machine of a broadcast's root.
            p.tensor.current.divisor if status == E_JOINED or status == E_PEER_LOST
            else kept.outcome.a, kept.outcome.b
        )
        return
    if p.packed != NULL:
        use_packed(c, p, &kept.numbers, kept.body, kept.length)
    elif kept.in_message and pool_copies(c, p, &kept.message, kept.body):
        kept.uncopied = True
    elif kept.length and kept.body != p.target:
        copy_nontemporal(p.target, kept.body, kept.length)
    if (
        kept.length > LEAST_ACKNOWLEDGED and not kept.uncopied
        and not note_arrival(&c.lanes.at[p.lane], p)
    ):
        fail_core(c, E_MEMORY)
    advance(c, p)


cdef inline void commit(Core *c, Tensor *tensor) noexcept nogil:
    """Commit the current task of a tensor if all its answers are there, unless it has a group.

    The first factor of a matrix is committed by itself: see docs/internals/powersgd.md.
    """
    cdef Task *task = tensor.current
    if task == NULL or tensor.answered == 0 or tensor.answered < task.remaining:
        return
    if task.group == NULL or tensor.matrix != NULL and tensor.matrix.state == SUMMING_P:
        use_answers(c, tensor)
    else:
        mark_ready(tensor)
        atomic_store(&c.inbox.group_news, 1)


cdef inline void commit_groups(Core *c) noexcept nogil:
    """Commit the groups that are complete, each in one go."""
    cdef CommitGroup *group
    cdef Tensor *tensor
    cdef Tensor *following
    atomic_store(&c.inbox.group_news, 0)
    lock(&c.monitor)
    group = c.inbox.groups
    unlock(&c.monitor)
    while group != NULL:
        tensor = take_ready(group) if is_complete(group) else NULL
        while tensor != NULL:
            following = tensor.next_ready
            use_answers(c, tensor)
            tensor = following
        group = group.next


cdef inline void use_answers(Core *c, Tensor *tensor) noexcept nogil:
    """Use the answers of a tensor's current task."""
    cdef uint32_t i
    tensor.answered = 0
    # The last one may end the task and start the tensor's next, which has no answers.
    for i in range(tensor.n_parts):
        if tensor.parts[i].answered:
            deliver(c, &tensor.parts[i])


cdef inline void hold_answer(Core *c, Partition *p) noexcept nogil:
    """Note that the answer of a partition, which is kept, has arrived."""
    p.answered = True
    p.tensor.answered += 1
    commit(c, p.tensor)


cdef inline void withdraw(Core *c, Partition *p) noexcept nogil:
    """Forget the answer of a partition, if it has not been committed."""
    if p.answered:
        p.answered = False
        p.tensor.answered -= 1
        unmark_ready(p.tensor)
        forget_kept(c, p)
