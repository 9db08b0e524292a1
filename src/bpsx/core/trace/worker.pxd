# Writes a worker core's records into its Watch. The driver calls these only if `watched` holds.
from libc.stdint cimport int64_t, uint8_t, uint32_t, uint64_t

from bpsx.core.keep cimport is_uncopied
from bpsx.core.wire cimport Header
from bpsx.core.partition cimport (
    COMPRESS, COORDINATE_BROADCAST, DECOMPRESS, PROJECTING, PULL, PUSH, REFRESHING, Partition, Task,
    Tensor,
)
from bpsx.core.state cimport Core
from bpsx.system.sync cimport now_ns
from bpsx.core.trace.watch cimport STAGE_NAMES, TOTAL
from bpsx.core.trace.recorder cimport put, recording, say, say_values, wants_values


cdef inline void record_start(Core *c, Tensor *tensor) noexcept nogil:
    """Begin the records of a task whose partitions are about to enter their first stage."""
    cdef int64_t now = now_ns()
    cdef uint32_t i
    tensor.trace.step = tensor.parts[0].round + 1
    tensor.trace.recorded = recording(c.watch, tensor.trace.step)
    for i in range(tensor.n_parts):
        tensor.parts[i].entered_ns = now


cdef inline uint64_t bytes_of(Partition *p, bint wire) noexcept nogil:
    """Bytes that a stage has moved."""
    if wire:
        return p.packed.size
    return p.gpu.span if p.on_gpu else p.length


cdef inline void record_stage(Core *c, Partition *p) noexcept nogil:
    """Record the end of a partition's present stage."""
    cdef Tensor *tensor = p.tensor
    cdef uint32_t stage = p.stage
    cdef char *values
    cdef int64_t now
    cdef bint wire
    if tensor.trace.recorded:
        now = now_ns()
        wire = p.packed != NULL and (stage == PUSH or stage == PULL)
        put(
            c.watch, <unsigned char>stage, tensor.trace.recorded, p.key, tensor.trace.step,
            p.entered_ns, now, bytes_of(p, wire), 0, 0
        )
        p.entered_ns = now
    if (
        wants_values(c.watch, p.key)
        and tensor.current != NULL
        and (not p.on_gpu or stage == PUSH or stage == PULL)
    ):
        # Up to PUSH the values are this worker's, or its machine's, input; afterwards the result,
        # which COORDINATE_BROADCAST has yet to copy out of shared memory, or COPY out of a message.
        if stage == PULL and is_uncopied(p):
            values = p.kept.body
        else:
            values = p.source if stage <= PUSH or stage == COORDINATE_BROADCAST else p.target
        say_values(
            c.watch.who, c.watch.show_time, c.watch.stages[stage % STAGE_NAMES], p.key,
            tensor.trace.step, tensor.dtype, values, p.length
        )


cdef inline void record_work(Core *c, Tensor *tensor) noexcept nogil:
    """Record the end of threads' work on a matrix, at the first partition of the factor it is for.
    """
    cdef uint8_t state = tensor.matrix.state
    put(
        c.watch, COMPRESS if state < REFRESHING else DECOMPRESS, tensor.trace.recorded,
        tensor.parts[0 if state == PROJECTING else tensor.matrix.n_first].key, tensor.trace.step,
        tensor.matrix.began_ns, now_ns(), tensor.matrix.nbytes, 0, 0
    )


cdef inline void record_end(Core *c, Task *task, int status) noexcept nogil:
    """Record the end of a task that was under way, whether it succeeded or not."""
    cdef Tensor *tensor = task.tensor
    cdef uint64_t nbytes = 0
    cdef uint32_t i
    if not tensor.trace.recorded:
        return
    for i in range(tensor.n_parts if tensor.matrix == NULL else 0):
        nbytes += tensor.parts[i].length
    if tensor.matrix != NULL:
        nbytes = tensor.matrix.nbytes
    put(
        c.watch, TOTAL, tensor.trace.recorded, tensor.parts[0].key, tensor.trace.step,
        task.submitted_ns, now_ns(), nbytes, 0, status
    )
    tensor.trace.recorded = 0


cdef inline void print_message(Core *c, const char *what, Header *h, uint32_t lane) noexcept nogil:
    """Print a record that has been sent or received, with PS_VERBOSE=2."""
    if c.watch.messages:
        say(
            c.watch.who, c.watch.show_time, b"%s key %llu round %u %llu bytes, connection %u", what,
            <unsigned long long>h.key, h.round, <unsigned long long>h.length, lane
        )
