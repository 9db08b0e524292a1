# Allocates and frees a tensor's partitions.
from libc.stdint cimport uint64_t, uintptr_t
from libc.stdlib cimport calloc, free

from bpsx.core.codec.state cimport packed_free, packed_new
from bpsx.core.gpu.device cimport DOWN, N_STREAMS, UP, Device
from bpsx.core.partition cimport OnGpu, Partition, Task, Tensor
from bpsx.core.state cimport Core


cdef inline uint64_t make_parts(Tensor *tensor, list parts, list made) except? 0:
    """Allocate the partitions from (key, lane, slot, offset, length) of each and, if they are
    compressed, a bpsx.compression.spec.Made each.

    Returns their total bytes. Raises MemoryError.
    """
    cdef size_t i
    cdef Partition *p
    cdef uint64_t nbytes = 0
    tensor.n_parts = len(parts)
    tensor.parts = <Partition *>calloc(len(parts), sizeof(Partition))
    if tensor.parts == NULL:
        raise MemoryError(f"no memory for {len(parts)} partitions")
    for i in range(len(parts)):
        p = &tensor.parts[i]
        p.key, p.lane, p.slot, p.offset, p.length = parts[i]
        p.tensor = tensor
        if made:
            p.packed = packed_new(made[i])
        nbytes += p.length
    return nbytes


cdef inline int give_gpu(Tensor *tensor, Device *d) except -1:
    """Allocate the GPU state of a tensor's partitions, before its first task on the GPU.

    The caller is in the GPU's context. Raises MemoryError.
    """
    cdef size_t i
    cdef int which
    cdef OnGpu *g
    for i in range(tensor.n_parts):
        g = <OnGpu *>calloc(1, sizeof(OnGpu))
        if g == NULL:
            raise MemoryError("no memory for a partition on a GPU")
        tensor.parts[i].gpu = g
        for which in range(N_STREAMS):
            g.queued[which] = d.new_event(d.self)
            if g.queued[which] == NULL:
                raise MemoryError("no more CUDA events")
    return 0


cdef inline void take_gpu(Tensor *tensor, Device *d) noexcept:
    """Release the partitions' CUDA events. The caller is in the GPU's context."""
    cdef size_t i
    cdef int which
    for i in range(tensor.n_parts if tensor.parts != NULL else 0):
        for which in range(N_STREAMS if tensor.parts[i].gpu != NULL else 0):
            if tensor.parts[i].gpu.queued[which] != NULL:
                d.drop_event(d.self, tensor.parts[i].gpu.queued[which])


cdef inline void free_parts(Tensor *tensor) noexcept:
    cdef size_t i
    if tensor.parts != NULL:
        for i in range(tensor.n_parts):
            free(tensor.parts[i].shares)
            free(tensor.parts[i].gpu)
            packed_free(tensor.parts[i].packed)
    free(tensor.parts)


cdef inline int take_coders(Tensor *tensor, list coders) except -1:
    """Let each partition be compressed on the GPU by its bpsx.compression.gpu.Coder.

    The caller keeps the coders alive.
    """
    cdef size_t i
    cdef OnGpu *g
    for i in range(tensor.n_parts):
        g = tensor.parts[i].gpu
        g.wire = <char *><uintptr_t>coders[i].wire
        g.words = <char *><uintptr_t>coders[i].words
        g.size = -1 if coders[i].size is None else coders[i].size
        g.coder = <void *>coders[i]
    return 0


cdef inline int queue_kernels(Core *c, Partition *p) except -1:
    """Call the partition's coder to queue the kernels that encode or decode it."""
    cdef OnGpu *g = p.gpu
    cdef Task *task = p.tensor.current
    coder = <object>g.coder
    if p.encodes:
        coder.encode(<uintptr_t>g.data, g.counter, g.factor, <uintptr_t>c.device.streams[DOWN])
    else:
        coder.decode(
            <uintptr_t>(task.output + p.offset if task.output != NULL else c.device.waste),
            p.packed.size, <uintptr_t>c.device.streams[UP]
        )
    return 0
